"""Linear cost model of schedules, and the planner's choices by it.

`choose` picks strategy, chunk size and sweep for a batch; `choose_keep` picks the graphs and KV that stay in memory
between forward and backward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from dta_compile.options import CHUNK_TOKENS, Options
from dta_compile.plan.balance import balance
from dta_compile.plan.events import Work, chunk_work
from dta_compile.plan.peak_memory import Footprint, PartBytes, bytes_of_halves
from dta_compile.plan.planner import KEEP_ALL, KEEP_NOTHING, Keep, build_schedule, rebuilt_slices
from dta_compile.plan.schedule import SWEEPS, GroupOps, Schedule
from dta_compile.plan.simulate import Simulation, causal_pairs, simulate
from dta_compile.plan.states import with_states
from dta_compile.plan.tree.chunk import Chunk
from dta_compile.plan.tree.chunk_tree import ChunkTree, chunk_size_of, chunk_tree
from dta_compile.plan.tree.prefix_tree import IntArray, PrefixTree

CANDIDATES = ("packed", "dfs", "vanilla", "dense")  # the first one wins a tie
_PACKED = Options(strategy="packed")
STATES_SHARE = 0.1  # share of a layer's forward that computes its states: a norm and the key and value projections
BUDGET_SHARE = 0.5  # default budget, as a share of the memory that is free when a call starts
CHUNK_SIZES, CHUNK_SHARE = (CHUNK_TOKENS, *(2**n for n in range(12, 17))), 0.4  # tokens; share of the budget
BY_CHUNKS, BY_STAGES = 8192, 2**16  # most tokens of a chunk if activations of all layers, or of one layer, are held
LEAST_GAIN = 0.03  # share of the estimated seconds that larger chunks, which need more memory, must save


class Rates(NamedTuple):
    """Seconds per unit of each entry of `Work`."""

    launch: float
    slice: float
    token: float
    pair: float
    head: float

    def seconds(self, work: Work) -> float:
        """Return the seconds that `work` takes."""
        return sum(rate * amount for rate, amount in zip(self, work, strict=True))


_FORWARD = Rates(2e-3, 2e-5, 8e-6, 8e-10, 2e-6)
_BACKWARD = Rates(4e-3, 4e-5, 1.6e-5, 1.6e-9, 4e-6)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Linear cost model: seconds as a linear function of a schedule's work.

    The defaults are derived from the arithmetic of a model of about 2B parameters on a current datacentre GPU
    (4 GFLOP a token, 0.2 MFLOP a query-key pair) and are meant as ratios. Their launch cost is the overhead per chunk
    where the host computes by itself.

    Attributes:
        forward, backward: rates of chunk runs.
        restore: seconds per token whose KV is copied back.
        source: origin of the rates, for messages.
    """

    forward: Rates = _FORWARD
    backward: Rates = _BACKWARD
    restore: float = 1e-7
    source: str = "not calibrated"

    @classmethod
    def of_gpu(cls) -> CostModel:
        """Return the defaults with a GPU's launch cost: about a thousand kernels a chunk, for which the GPU waits.

        Measured on an H100 with a model of 28 layers: a step with 16, 8 and 4 chunks took 2.1, 1.5 and 1.3 seconds.
        """
        return cls(_FORWARD._replace(launch=2e-2), _BACKWARD._replace(launch=3.5e-2))

    def tree_rates(self) -> tuple[float, float]:
        """Return seconds of forward and backward per tree token (with one head row) and per query-key pair.

        `balance` uses them. Groups are made before schedules, so launches are counted as if all chunks were full.
        """
        token = sum(rates.token + rates.head + rates.launch / CHUNK_TOKENS for rates in (self.forward, self.backward))
        return token, self.forward.pair + self.backward.pair

    def tree_seconds(self, tree: PrefixTree) -> float:
        """Return seconds of forward and backward of a tree in packed chunks of default size, all graphs kept."""
        chunks = chunk_tree(tree, _PACKED).chunks
        work = reduce(Work.plus, (chunk_work(tree, chunk) for chunk in chunks), Work())
        return self.forward.seconds(work) + self.backward.seconds(work)

    def estimate(self, simulation: Simulation) -> float:
        """Return the seconds that a schedule with these counts takes."""
        s = simulation
        again = STATES_SHARE * self.forward.seconds(s.rebuilt._replace(pairs=0))
        run = self.forward.seconds(s.forward) + self.backward.seconds(s.backward)
        return run + again + self.restore * s.restored_tokens


def choose_keep(
    tree: PrefixTree,
    options: Options,
    chunks: ChunkTree,
    budget: int | None,
    footprint: Footprint,
    cost: CostModel,
    head_starts: IntArray | None = None,
) -> Keep:
    """Choose greedily, by seconds saved per byte, what to keep between the phases within `budget` bytes.

    A chunk may keep the KV of its spine, which saves rebuilding the spine for the chunks that continue it; in a sweep
    of stages the results of attention, which saves attention in its second forward; or its graph, which saves all of
    that and the second forward. KV and graph include the running states at which the spine is continued.
    A budget of None keeps all, 0 nothing. The chunk that goes backward first always keeps its graph and is not counted,
    except in a sweep of stages, where other parts run between its forward and its backward.
    """
    if budget is None:
        return KEEP_ALL
    if budget <= 0:
        return KEEP_NOTHING
    by_stages = options.sweep == "stages"
    states = [footprint.state * depths for depths in chunks.starts_below()]
    works = [chunk_work(tree, chunk, head_starts) for chunk in chunks.chunks]
    counted, most = range(0 if by_stages else 1, len(works)), 0.0
    for index in counted:
        lean = footprint.kv(chunks.chunks[index]) + footprint.results(chunks.chunks[index]) * by_stages
        most += max(footprint.graph(works[index]), lean) + states[index]
    if most <= budget:  # all graphs fit, whatever their chunks might keep before
        return Keep(frozenset(counted))
    rebuilt = dict.fromkeys(range(len(chunks.chunks)), 0.0)  # by chunk: seconds to put its spine on the stack again
    share = STATES_SHARE if by_stages else 1.0
    if options.strategy != "vanilla":  # vanilla rebuilds spines with graphs, which then stay
        for index, part in rebuilt_slices(tree, options, chunks):
            work = chunk_work(tree, Chunk(part), head=False)._replace(launches=1)
            rebuilt[index] += share * cost.forward.seconds(work) - cost.restore * part.tokens
    upgrades: list[tuple[float, int, _Kept]] = []  # seconds saved per byte, index of the chunk, what it keeps
    for index in counted:
        chunk, work, below = chunks.chunks[index], works[index], max(rebuilt[index], 0.0)
        kv = _Kept(footprint.kv(chunk) + states[index], below, kv=True)
        results = _Kept(footprint.results(chunk) * by_stages, cost.forward.pair * work.pairs, results=True)
        graph = _Kept(footprint.graph(work) + states[index], cost.forward.seconds(work) + below, graph=True)
        upgrades += ((gain, index, kept) for gain, kept in _upgrades(kv, results, graph))
    best, left = dict[int, _Kept](), float(budget)
    for _, index, kept in sorted(upgrades, key=lambda entry: (-entry[0], entry[1])):
        before = best.get(index, _NOTHING)
        is_more = kept.graph > before.graph or (kept.graph == before.graph and kept.seconds > before.seconds)
        if is_more and kept.size - before.size <= left:
            left -= kept.size - before.size
            best[index] = kept
    return Keep(
        *(frozenset(i for i, kept in best.items() if getattr(kept, name)) for name in ("graph", "kv", "results"))
    )


class _Kept(NamedTuple):
    """One way to keep tensors of a chunk, with their bytes and the seconds that they save."""

    size: float
    seconds: float
    graph: bool = False
    kv: bool = False
    results: bool = False

    def gain(self, before: _Kept) -> float:
        """Return the seconds saved per additional byte, compared with keeping `before`."""
        return (self.seconds - before.seconds) / max(self.size - before.size, 1.0)


_NOTHING = _Kept(0.0, 0.0)


def _upgrades(kv: _Kept, results: _Kept, graph: _Kept) -> Iterator[tuple[float, _Kept]]:
    """Yield the ways to keep tensors of a chunk, with the seconds saved per byte.

    First come the steps from nothing to the graph that save most per byte; then the leaner ways on their own, for
    budgets that the graph does not fit in.
    """
    both = _Kept(kv.size + results.size, kv.seconds + results.seconds, kv=True, results=True)
    lean = [kept for kept in (kv, results) if kept.size > 0 and kept.seconds > 0]
    lean += [both] if len(lean) == 2 else []
    kept = _NOTHING
    while not kept.graph:
        more = [way for way in lean if way.size > kept.size and way.kv >= kept.kv and way.results >= kept.results]
        gain, kept = max(((way.gain(kept), way) for way in (graph, *more)), key=lambda entry: entry[0])
        yield gain, kept
    yield from ((way.gain(_NOTHING), way) for way in lean)


def chunk_sizes(budget: float, bytes_per_token: float, most: int = BY_CHUNKS) -> tuple[int, ...]:
    """Return the chunk sizes to choose from if the user sets none, given a budget and activation bytes per token.

    Larger chunks amortise kernel launches, whose host time does not depend on the number of tokens: a step of a model
    of 1.7B parameters took 2.1 s on an H100 with chunks of 2,048 tokens, 1.5 s with 4,096 and 1.3 s with 8,192.
    """
    least, *larger = CHUNK_SIZES
    return least, *(size for size in larger if size <= most and size * bytes_per_token <= CHUNK_SHARE * budget)


class OfMachine(NamedTuple):
    """Fields of `Limits` that ranks running a call together have to agree on."""

    budget: int | None
    cost: CostModel
    chunk_sizes: tuple[int, ...]
    by_stages: tuple[int, tuple[int, ...]] | None = None
    room: float | None = None


@dataclasses.dataclass(frozen=True)
class Limits:
    """Properties of the model and the machine that the planner uses.

    Attributes:
        budget: bytes that may be kept from the first to the second phase; None keeps all.
        footprint: bytes per token and chunk, and of running states if the model has any.
        cost: cost model.
        head_starts: head rows of the shared tree (see `simulate`); None: one head row per token.
        chunk_sizes: ascending sizes to choose from if the user sets none; multiples of the recurrences' block of 64.
        sums: bytes of the buffers in which gradients of all parameters are summed.
        parts: bytes of each part of a sweep of stages; empty: not known.
        is_asked_for: whether the user set the budget; otherwise it is a share of the free memory.
        by_stages: budget and chunk sizes of a sweep of stages, where they differ.
        room: bytes that values passed between parts may take; above that they are swept group by group. None: any.
        groups: number of groups of subtrees that ranks which gather parameters together agreed on; 1: as few as fit.
    """

    budget: int | None = None
    footprint: Footprint = dataclasses.field(default_factory=Footprint)
    cost: CostModel = dataclasses.field(default_factory=CostModel)
    head_starts: IntArray | None = None
    chunk_sizes: tuple[int, ...] = (CHUNK_TOKENS,)
    sums: float = 0.0
    parts: tuple[PartBytes, ...] = ()
    is_asked_for: bool = False
    by_stages: tuple[int, tuple[int, ...]] | None = None
    room: float | None = None
    groups: int = 1

    def parts_of(self, sweep: str) -> Sequence[PartBytes]:
        """Return the parts that a sweep goes through; a sweep of chunks has one part with all layers."""
        return self.parts if sweep == "stages" else (PartBytes(self.footprint, self.sums),)

    def of_sweep(self, sweep: str) -> Limits:
        """Return these limits with the budget and the chunk sizes of a sweep."""
        if sweep != "stages" or self.by_stages is None:
            return self
        budget, sizes = self.by_stages
        return dataclasses.replace(self, budget=budget, chunk_sizes=sizes)

    @property
    def of_machine(self) -> OfMachine:
        """Fields that depend on the machine and its earlier runs, not on the model."""
        return OfMachine(self.budget, self.cost, self.chunk_sizes, self.by_stages, self.room)

    def agreed(self, others: Sequence[OfMachine]) -> Limits:
        """Return the limits that several ranks agree on: the least memory, and the rates of the first rank."""
        budget = min((machine.budget for machine in others if machine.budget is not None), default=None)
        sizes = min((machine.chunk_sizes for machine in others), key=len)
        by_stages = min((machine.by_stages for machine in others if machine.by_stages is not None), default=None)
        room = min((machine.room for machine in others if machine.room is not None), default=None)
        known = {"budget": budget, "cost": others[0].cost, "chunk_sizes": sizes, "by_stages": by_stages, "room": room}
        return dataclasses.replace(self, **known)  # type: ignore[arg-type]

    def unshared(self, shared: PrefixTree, unshared: PrefixTree) -> Limits:
        """Return the limits for the unshared tree, giving each token the shared tree's average number of head rows."""
        if self.head_starts is None:
            return self
        per_token = float(self.head_starts[-1]) / max(shared.num_rows, 1)
        return dataclasses.replace(self, head_starts=(np.arange(unshared.num_rows + 1) * per_token).astype(np.int64))


@dataclasses.dataclass(frozen=True)
class Choice:
    """Candidate schedule with its tree, the limits for that tree, and its counts."""

    tree: PrefixTree
    limits: Limits
    schedule: Schedule
    simulation: Simulation

    @classmethod
    def of(cls, tree: PrefixTree, options: Options, mode: str, limits: Limits) -> Choice:
        """Return the schedule of a strategy over a shared tree, or over the unshared one if it is dense."""
        if options.strategy == "dense" and tree.shared:
            unshared = tree.unshared()
            tree, limits = unshared, limits.unshared(tree, unshared)
        schedule = _build(tree, options, mode, limits)
        return cls(tree, limits, schedule, simulate(tree, schedule, limits.head_starts))

    @property
    def seconds(self) -> float:
        return self.limits.cost.estimate(self.simulation)

    @property
    def peak(self) -> float:
        """Peak bytes, without outputs."""
        parts, stack_tokens = self.limits.parts_of(self.schedule.sweep), self.simulation.peak_stack_tokens
        return max(bytes_of_halves(self.tree, self.schedule, parts, stack_tokens, self.limits.head_starts))


def choose(
    tree: PrefixTree, options: Options, mode: str, limits: Limits | None = None
) -> tuple[PrefixTree, Schedule, str]:
    """Like `choose_lazily`; return tree, schedule and reason."""
    best, reason = choose_lazily(tree, options, mode, limits)
    return best.tree, best.schedule, reason()


def choose_lazily(
    tree: PrefixTree, options: Options, mode: str, limits: Limits | None = None
) -> tuple[Choice, Callable[[], str]]:
    """Choose strategy, chunk size and sweep, as asked for or else the cheapest, and say why.

    A strategy that must hold graphs of more bytes than the budget plus one chunk is no candidate ("vanilla" alone can).
    Strategies are planned only if a lower bound of their cost does not rule them out; the reason, which names all
    costs, is computed when it is called. The strategy is chosen with the smallest chunk size; a larger size is taken if
    it is cheaper by 3%.

    Stages are swept where that is cheaper. Each sweep is given the memory that is free for it; if the user set the
    budget, both get the same memory: the peak of the leaner sweep that keeps nothing, plus the budget. Sweeps are not
    compared if a sweep of chunks recomputes nothing within the free memory.
    """
    limits = limits or Limits()
    if options.sweep != "auto":
        best, reason = _choose_for_sweep(tree, options, mode, limits.of_sweep(options.sweep))
    else:
        best, reason = _choose_for_sweep(tree, dataclasses.replace(options, sweep="chunks"), mode, limits)
        if mode == "transparent" and _may_sweep_stages(best, limits):
            of_strategy = dataclasses.replace(options, strategy=best.schedule.strategy)
            best, why = _best_sweep(tree, of_strategy, mode, limits)
            return best, lambda: reason() + why
    return best, reason


def _may_sweep_stages(by_chunks: Choice, limits: Limits) -> bool:
    if len(limits.parts) < 2 or limits.budget is None or not by_chunks.tree.num_rows:
        return False
    return limits.is_asked_for or by_chunks.simulation.recomputed_tokens > 0


def _best_sweep(tree: PrefixTree, options: Options, mode: str, limits: Limits) -> tuple[Choice, str]:
    """Return the cheaper sweep of one strategy, and a reason that names the least bytes that each sweep needs."""
    assert limits.budget is not None

    def chosen(sweep: str, budget: int) -> Choice:
        known = dataclasses.replace(limits.of_sweep(sweep), budget=budget)
        return _choose_for_sweep(tree, dataclasses.replace(options, sweep=sweep), mode, known)[0]

    nothing = {sweep: chosen(sweep, 0) for sweep in SWEEPS}
    least = {sweep: choice.peak for sweep, choice in nothing.items()}
    left = {sweep: int(min(least.values()) + limits.budget - least[sweep]) for sweep in SWEEPS}
    free = {sweep: limits.of_sweep(sweep).budget or 0 for sweep in SWEEPS}
    if not limits.is_asked_for and any(free.values()):  # a sweep with nothing free is out: its least may not fit
        left = {sweep: budget or -1 for sweep, budget in free.items()}
        if nothing["stages"].schedule.groups:  # as many groups as fit
            left["stages"] = 0
    choices = [chosen(sweep, left[sweep]) if left[sweep] else nothing[sweep] for sweep in SWEEPS if left[sweep] >= 0]
    best = min(choices, key=lambda choice: choice.seconds)
    bytes_of_both = ", ".join(f"{sweep} {size / 2**20:,.0f} MiB" for sweep, size in least.items())
    return best, f"; sweeps {best.schedule.sweep}: at least {bytes_of_both}"


def _choose_for_sweep(
    tree: PrefixTree, options: Options, mode: str, limits: Limits
) -> tuple[Choice, Callable[[], str]]:
    """Choose strategy and chunk size for one sweep (see `choose`)."""
    sizes = limits.chunk_sizes if options.chunk_size is None else (options.chunk_size,)
    options = dataclasses.replace(options, chunk_size=sizes[0])
    if options.strategy == "auto":
        best, reason = _cheapest_strategy(tree, options, mode, limits)
    else:
        best, reason = Choice.of(tree, options, mode, limits), lambda: "asked for"
    strategy, larger_sizes = best.schedule.strategy, ""
    for size in sizes[1:] if strategy != "dense" else ():
        if best.tree.num_rows <= best.schedule.chunk_size:
            break
        larger = dataclasses.replace(options, strategy=strategy, chunk_size=size)
        choice = Choice.of(tree, larger, mode, limits)
        if choice.seconds < (1 - LEAST_GAIN) * best.seconds:
            before, relative = best.schedule.chunk_size, choice.seconds / best.seconds
            larger_sizes += f"; chunks of {size:,} {relative:.2f} of {before:,}"
            best = choice
    return best, lambda: reason() + larger_sizes


def _cheapest_strategy(
    tree: PrefixTree, options: Options, mode: str, limits: Limits
) -> tuple[Choice, Callable[[], str]]:
    bounds = _lower_bounds(tree, options, mode, limits)

    def priced(strategy: str) -> tuple[Choice, str]:
        """Return a candidate, and by how much it exceeds the budget: only vanilla does not keep to it."""
        choice = Choice.of(tree, dataclasses.replace(options, strategy=strategy), mode, limits)
        return choice, _excess(choice.simulation, options, limits) if strategy == "vanilla" else ""

    best, _ = priced(CANDIDATES[0])
    for strategy in CANDIDATES[1:]:
        if bounds[strategy] < best.seconds:
            choice, excess = priced(strategy)
            best = choice if choice.seconds < best.seconds and not excess else best

    def reason() -> str:
        costs, refused = {}, ""
        for strategy in CANDIDATES:
            if strategy == "dense" and bounds[strategy] > best.seconds:  # as long as the unshared batch to plan
                costs["dense >="] = bounds[strategy]
                continue
            choice, excess = priced(strategy)
            if excess:
                refused += f"; {strategy} holds graphs of {excess}"
            else:
                costs[strategy] = choice.seconds
        relative = ", ".join(f"{name} {cost / best.seconds if best.seconds else 1:.2f}" for name, cost in costs.items())
        return f"auto, by estimated cost ({limits.cost.source}): {relative}{refused}"

    return best, reason


def _lower_bounds(tree: PrefixTree, options: Options, mode: str, limits: Limits) -> dict[str, float]:
    """Return for each candidate seconds that none of its schedules falls below.

    Without packing a chunk is one slice, so that each leaf needs one.
    """
    slices = max(len(tree.leaves), -(-tree.num_rows // chunk_size_of(tree, options)))
    heads = tree.num_rows if limits.head_starts is None else int(limits.head_starts[-1])
    pairs = causal_pairs(tree.stop) - causal_pairs(tree.start)
    launches, tokens = int((-(-tree.lengths // options.chunk_tokens)).sum()), int(tree.lengths.sum())

    def seconds(once: Work) -> float:
        return limits.cost.forward.seconds(once) + (0.0 if mode == "score" else limits.cost.backward.seconds(once))

    single = seconds(Work(slices, slices, tree.num_rows, pairs, heads))
    dense = seconds(Work(launches, launches, tokens, causal_pairs(tree.lengths), 0))
    return {"packed": 0.0, "dfs": single, "vanilla": single, "dense": dense}


def _build(tree: PrefixTree, options: Options, mode: str, limits: Limits) -> Schedule:
    has_states = limits.footprint.has_states
    chunks = chunk_tree(tree, options, has_states)
    keep = KEEP_ALL
    if mode == "transparent":
        known = (limits.budget, limits.footprint, limits.cost, limits.head_starts)
        keep = choose_keep(tree, options, chunks, *known)

    def built(keep: Keep) -> Schedule:
        schedule = build_schedule(tree, options, mode, keep, chunks)
        return with_states(tree, schedule) if has_states else schedule

    usual = built(keep)
    if mode != "transparent" or options.sweep != "stages":
        return usual
    sent = sum(part.sent for part in limits.parts)
    least = options.groups or 1
    if max(limits.groups, least) > 1 or (limits.room is not None and tree.num_rows * sent > limits.room):
        groups = _groups(tree, limits, sent, least)
        if len(groups) > 1:
            return usual.in_groups(_group_ops(group, tree.of(group), options, limits) for group in groups)
    if limits.budget is None or not limits.parts:
        return usual
    layers, of_last = _spend_rest(tree, chunks, keep, limits)
    others = len(limits.parts) - 1 - layers
    return usual.with_parts([(others, usual), (layers, built(KEEP_ALL) if layers else usual), (1, built(of_last))])


def _groups(tree: PrefixTree, limits: Limits, sent: float, least: int) -> list[list[int]]:
    """Divide the sequences into the fewest groups of which each passes few enough bytes (`sent` a token) to fit.

    If ranks agreed on a number, it is that number: with another, they would wait for each other's collectives forever.
    """
    if limits.groups > 1:
        return balance(tree, limits.groups, contiguous=True)
    most = max(int(np.count_nonzero(tree.lengths)), least)
    room = max(math.inf if limits.room is None else limits.room, int(tree.lengths.max(initial=0)) * sent, 1.0)
    number = min(max(math.ceil(tree.num_rows * sent / room), least), most)
    while True:
        groups = balance(tree, number, contiguous=True)
        largest = max(tree.of(group).num_rows for group in groups) * sent
        if largest <= room or number == most:
            return groups
        number = min(max(number + 1, int(number * largest / room)), most)


def _group_ops(group: Sequence[int], tree: PrefixTree, options: Options, limits: Limits) -> GroupOps:
    chunks = chunk_tree(tree, options, limits.footprint.has_states)
    schedule = build_schedule(tree, options, "transparent", KEEP_NOTHING, chunks)
    return GroupOps(tuple(group), (with_states(tree, schedule) if limits.footprint.has_states else schedule).ops)


def _spend_rest(tree: PrefixTree, chunks: ChunkTree, keep: Keep, limits: Limits) -> tuple[int, Keep]:
    """Spend the rest of the budget after `keep` on parts that keep everything, from the last part backwards.

    Return the number of parts before the last one that keep everything, and the `Keep` of the last part. Its first
    backward comes right after its last forward, so the graph of that forward stays and is not counted.
    """
    assert limits.budget is not None
    if keep.graphs is None:
        return 0, keep
    *before, last = limits.parts
    depths, whole, left = chunks.starts_below(), limits.footprint, float(limits.budget)
    more: list[tuple[int, Work, int]] = []  # chunks whose graphs are not kept: index, work, states not kept yet
    for index, chunk in enumerate(chunks.chunks):
        work = chunk_work(tree, chunk, limits.head_starts)
        if index in keep.graphs:
            not_counted = last.footprint.graph(work) if index == 0 else 0.0
            left -= whole.graph(work) - not_counted + whole.state * depths[index]
        else:
            has_kv, has_results = index in keep.kv, index in keep.results
            left -= (whole.kv(chunk) + whole.state * depths[index]) * has_kv + whole.results(chunk) * has_results
            more.append((index, work, 0 if has_kv else depths[index]))

    def costs(part: PartBytes, amounts: Sequence[tuple[int, Work, int]]) -> float:
        size, total = part.footprint, 0.0
        for index, work, states in amounts:
            kept = size.kv(chunks.chunks[index]) * (index in keep.kv)
            kept += size.results(chunks.chunks[index]) * (index in keep.results)
            total += size.graph(work) + size.state * states - kept
        return total

    layers = 0
    for part in reversed(before):
        if (left := left - costs(part, more)) < 0:
            break
        layers += 1
    else:
        if costs(last, more[0 not in keep.graphs :]) <= left:
            return layers, KEEP_ALL
    return layers, Keep(keep.graphs | {0}, keep.kv - {0}, keep.results - {0})


def _excess(simulation: Simulation, options: Options, limits: Limits) -> str:
    """Say by how much live graphs exceed the budget; return an empty string if they do not."""
    if limits.budget is None:
        return ""
    per_token = limits.footprint.graph_token + limits.footprint.graph_head
    left = limits.budget - limits.footprint.state * simulation.peak_states
    allowed = max(int(left / per_token), options.chunk_tokens)
    held = simulation.peak_live_tokens
    return f"{held:,} > {allowed:,} tokens" if held > allowed + options.chunk_tokens else ""
