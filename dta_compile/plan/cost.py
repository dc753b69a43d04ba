"""What schedules cost by a linear model, and the choices made by it: what to keep, and the strategy `auto`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from dta_compile.options import CHUNK_TOKENS, Options
from dta_compile.plan.peak_memory import Footprint, PartBytes, bytes_of_halves
from dta_compile.plan.planner import KEEP_ALL, KEEP_NOTHING, Keep, build_schedule, rebuilt_slices
from dta_compile.plan.schedule import SWEEPS, Schedule
from dta_compile.plan.simulate import Simulation, Work, chunk_work, simulate
from dta_compile.plan.states import with_states
from dta_compile.plan.tree.chunk import Chunk
from dta_compile.plan.tree.chunk_tree import ChunkTree, chunk_tree
from dta_compile.plan.tree.prefix_tree import IntArray, PrefixTree

__all__ = ["CostModel", "Limits", "Rates", "choose", "choose_keep", "chunk_sizes"]

CANDIDATES = ("packed", "dfs", "vanilla", "dense")  # the first of equal cost is taken
_PACKED = Options(strategy="packed")
STATES_SHARE = 0.1  # of a layer's forward: what makes its states, a norm and products with weights of keys and values
BUDGET_SHARE = 0.5  # of the memory that is free when a call starts
CHUNK_SIZES, CHUNK_SHARE = (CHUNK_TOKENS, *(2**n for n in range(12, 17))), 0.4  # tokens; of the budget
BY_CHUNKS, BY_STAGES = 8192, 2**16  # most tokens of a chunk, whose activations are those of all layers, or of one
LEAST_GAIN = 0.03  # of the estimated seconds, for which larger chunks are taken, which need more memory


class Rates(NamedTuple):
    """Seconds per unit of each entry of `Work`."""

    launch: float
    slice: float
    token: float
    pair: float
    head: float

    def seconds(self, work: Work) -> float:
        """Seconds that so much work takes."""
        return sum(rate * amount for rate, amount in zip(self, work, strict=True))


_FORWARD = Rates(2e-3, 2e-5, 8e-6, 8e-10, 2e-6)
_BACKWARD = Rates(4e-3, 4e-5, 1.6e-5, 1.6e-9, 4e-6)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds as a linear function of a schedule's work.

    The defaults are ratios for a model of about 2B parameters on a current datacentre GPU, worked out from its
    arithmetic: 4 GFLOP a token, 0.2 MFLOP a query-key pair. A launch is what a host adds that computes by itself.

    Attributes:
        forward, backward: rates of chunk runs.
        restore: seconds per token whose KV is copied back.
        source: where the rates come from.
    """

    forward: Rates = _FORWARD
    backward: Rates = _BACKWARD
    restore: float = 1e-7
    source: str = "not calibrated"

    @classmethod
    def of_gpu(cls) -> CostModel:
        """The defaults where a host launches a thousand kernels for a chunk, which keep the GPU waiting.

        As measured on an H100 with a model of 28 layers: a step with 16, 8 and 4 chunks took 2.1, 1.5 and 1.3 seconds.
        """
        return cls(_FORWARD._replace(launch=2e-2), _BACKWARD._replace(launch=3.5e-2))

    def forward_seconds(self, work: Work) -> float:
        """Seconds of a chunk run without its backward."""
        return self.forward.seconds(work)

    def tree_rates(self) -> tuple[float, float]:
        """Seconds of forward and backward per token of a tree, with its head row, and per query-key pair.

        What `balance` goes by. The schedule is made after the groups, so launches are those of full chunks.
        """
        token = sum(rates.token + rates.head + rates.launch / CHUNK_TOKENS for rates in (self.forward, self.backward))
        return token, self.forward.pair + self.backward.pair

    def tree_seconds(self, tree: PrefixTree) -> float:
        """Seconds of forward and backward of a tree in packed chunks that are all kept, of as many tokens as usual."""
        chunks = chunk_tree(tree, _PACKED).chunks
        work = reduce(Work.plus, (chunk_work(tree, chunk) for chunk in chunks), Work())
        return self.forward.seconds(work) + self.backward.seconds(work)

    def estimate(self, simulation: Simulation) -> float:
        """Seconds that a schedule with these counts takes."""
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
    """What to keep from the first to the second phase: the most seconds saved per byte first, within `budget` bytes.

    A chunk may keep the KV of its spine, which saves running it again for what continues it, or its graph, which saves
    its second forward too; either with the running states at which its spine is continued. None keeps all, 0 nothing.
    The chunk that goes backward first keeps its graph in any case and is not counted, unless other parts run between
    its forward and its backward.
    """
    if budget is None:
        return KEEP_ALL
    if budget <= 0:
        return KEEP_NOTHING
    rebuilt = dict.fromkeys(range(len(chunks.chunks)), 0.0)  # seconds to put spines on the stack again
    share = STATES_SHARE if options.sweep == "stages" else 1.0
    if options.strategy != "vanilla":  # which rebuilds with graphs that stay
        for index, part in rebuilt_slices(tree, options, chunks):
            work = chunk_work(tree, Chunk(part), head=False)._replace(launches=1)
            rebuilt[index] += share * cost.forward_seconds(work) - cost.restore * part.tokens
    states = [footprint.state * depths for depths in chunks.starts_below()]
    upgrades: list[tuple[float, int, float, bool]] = []  # seconds saved per byte, chunk, bytes, graph rather than KV
    for index, chunk in enumerate(chunks.chunks):
        if index == 0 and options.sweep != "stages":
            continue
        work = chunk_work(tree, chunk, head_starts)
        graph, kv = footprint.graph(work) + states[index], footprint.kv(chunk) + states[index]
        again, below = cost.forward_seconds(work), max(rebuilt[index], 0.0)
        if below > 0 and kv > 0 and below * graph > (again + below) * kv:  # KV alone saves more per byte
            upgrades.append((below / kv, index, kv, False))
            upgrades.append((again / max(graph - kv, 1.0), index, graph, True))
        else:
            upgrades.append(((again + below) / max(graph, 1.0), index, graph, True))
    graphs, left = set(), float(budget)
    stored: dict[int, float] = {}  # bytes of the KV that is kept on its own
    for _, index, size, is_graph in sorted(upgrades, key=lambda entry: (-entry[0], entry[1])):
        more = size - stored.get(index, 0.0)
        if more > left:
            continue
        left -= more
        if is_graph:
            graphs.add(index)
            stored.pop(index, None)
        else:
            stored[index] = size
    return Keep(frozenset(graphs), frozenset(stored))


def chunk_sizes(budget: float, bytes_per_token: float, most: int = BY_CHUNKS) -> tuple[int, ...]:
    """The sizes of chunks to choose from where the user names none, for activations of so many bytes a token.

    To launch the kernels of a layer a host takes as long for few tokens as for many: a step of a model of 1.7B
    parameters took 2.1 s on an H100 with chunks of 2,048 tokens, 1.5 s with 4,096 and 1.3 s with 8,192.
    """
    least, *larger = CHUNK_SIZES
    return least, *(size for size in larger if size <= most and size * bytes_per_token <= CHUNK_SHARE * budget)


class OfMachine(NamedTuple):
    """Of `Limits`, what ranks that run a call together have to agree on."""

    budget: int | None
    cost: CostModel
    chunk_sizes: tuple[int, ...]
    by_stages: tuple[int, tuple[int, ...]] | None = None


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the planner knows of the model and the machine.

    Attributes:
        budget: bytes that may be kept from the first to the second phase; None keeps all.
        footprint: bytes per token and chunk, and of running states if the model has any.
        cost: seconds per amount of work.
        head_starts: of the shared tree, see `simulate`; None: one head row per token.
        chunk_sizes: for users who name none, the sizes of chunks to choose from, ascending. Multiples of the 64 tokens
            that recurrences compute in one go.
        sums: bytes that gradients of all parameters are summed in.
        parts: bytes of each part that a sweep of stages runs; none: not known.
        is_asked_for: the budget is the user's own, not a share of what is free.
        by_stages: budget and chunk sizes of a sweep of stages, where they are others.
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

    def parts_of(self, sweep: str) -> Sequence[PartBytes]:
        """The parts that a sweep goes through: all layers are one where chunks are swept."""
        return self.parts if sweep == "stages" else (PartBytes(self.footprint, self.sums),)

    def of_sweep(self, sweep: str) -> Limits:
        """The same with the budget and the sizes of chunks of a sweep."""
        if sweep != "stages" or self.by_stages is None:
            return self
        budget, sizes = self.by_stages
        return dataclasses.replace(self, budget=budget, chunk_sizes=sizes)

    @property
    def of_machine(self) -> OfMachine:
        """What depends on the machine and on what it has run, not on the model."""
        return OfMachine(self.budget, self.cost, self.chunk_sizes, self.by_stages)

    def agreed(self, others: Sequence[OfMachine]) -> Limits:
        """The same for several machines: the least memory, and the first one's rates."""
        budget = min((one.budget for one in others if one.budget is not None), default=None)
        sizes = min((one.chunk_sizes for one in others), key=len)
        by_stages = min((one.by_stages for one in others if one.by_stages is not None), default=None)
        return dataclasses.replace(self, budget=budget, cost=others[0].cost, chunk_sizes=sizes, by_stages=by_stages)

    def unshared(self, shared: PrefixTree, unshared: PrefixTree) -> Limits:
        """The same for the tree without sharing, whose tokens have as many head rows on average."""
        if self.head_starts is None:
            return self
        per_token = float(self.head_starts[-1]) / max(shared.num_rows, 1)
        return dataclasses.replace(self, head_starts=(np.arange(unshared.num_rows + 1) * per_token).astype(np.int64))


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A schedule, the tree that it is for, what is known of that, and the estimated seconds."""

    tree: PrefixTree
    limits: Limits
    schedule: Schedule
    simulation: Simulation

    @classmethod
    def of(cls, tree: PrefixTree, options: Options, mode: str, limits: Limits) -> _Choice:
        schedule = _planned(tree, options, mode, limits)
        return cls(tree, limits, schedule, simulate(tree, schedule, limits.head_starts))

    @property
    def seconds(self) -> float:
        return self.limits.cost.estimate(self.simulation)

    @property
    def peak(self) -> float:
        """Bytes, besides outputs."""
        parts, stack_tokens = self.limits.parts_of(self.schedule.sweep), self.simulation.peak_stack_tokens
        return max(bytes_of_halves(self.tree, self.schedule, parts, stack_tokens, self.limits.head_starts))


def choose(
    tree: PrefixTree, options: Options, mode: str, limits: Limits | None = None
) -> tuple[PrefixTree, Schedule, str]:
    """Tree to run on, schedule, and why: what was asked for, or else the cheapest strategy and size of chunks.

    A strategy that must hold graphs of more bytes than the budget (and one chunk) is no candidate. Dense is planned
    only if a lower bound of its cost does not rule it out, since its schedule is as long as the batch without sharing.
    The strategy is chosen with the least size of chunks; larger ones are taken where they are cheaper by 3%.

    Stages are swept where that is cheaper in the memory that is free; where the user says how much may be kept, in the
    same memory: that of the leaner sweep that keeps nothing, and the budget. Where all fits into what is free, there is
    nothing to choose.
    """
    limits = limits or Limits()
    if options.sweep != "auto":
        best, reason = _chosen(tree, options, mode, limits.of_sweep(options.sweep))
    else:
        best, reason = _chosen(tree, dataclasses.replace(options, sweep="chunks"), mode, limits)
        if mode == "transparent" and _may_sweep_stages(best, limits):
            of_strategy = dataclasses.replace(options, strategy=best.schedule.strategy)
            best, why = _best_sweep(tree, of_strategy, mode, limits)
            reason += why
    return best.tree, best.schedule, reason


def _may_sweep_stages(by_chunks: _Choice, limits: Limits) -> bool:
    if len(limits.parts) < 2 or limits.budget is None or not by_chunks.tree.num_rows:
        return False
    return limits.is_asked_for or by_chunks.simulation.recomputed_tokens > 0


def _best_sweep(tree: PrefixTree, options: Options, mode: str, limits: Limits) -> tuple[_Choice, str]:
    """The cheaper sweep by a strategy, and the least bytes that each of them needs."""
    assert limits.budget is not None

    def chosen(sweep: str, budget: int) -> _Choice:
        known = dataclasses.replace(limits.of_sweep(sweep), budget=budget)
        return _chosen(tree, dataclasses.replace(options, sweep=sweep), mode, known)[0]

    nothing = {sweep: chosen(sweep, 0) for sweep in SWEEPS}
    least = {sweep: one.peak for sweep, one in nothing.items()}
    left = {sweep: int(min(least.values()) + limits.budget - least[sweep]) for sweep in SWEEPS}
    free = {sweep: limits.of_sweep(sweep).budget or 0 for sweep in SWEEPS}
    if not limits.is_asked_for and any(free.values()):  # where nothing is free, what is in any case may not fit
        left = {sweep: budget or -1 for sweep, budget in free.items()}
    found = [chosen(sweep, left[sweep]) if left[sweep] else nothing[sweep] for sweep in SWEEPS if left[sweep] >= 0]
    best = min(found, key=lambda one: one.seconds)
    bytes_of_both = ", ".join(f"{sweep} {size / 2**20:,.0f} MiB" for sweep, size in least.items())
    return best, f"; sweeps {best.schedule.sweep}: at least {bytes_of_both}"


def _chosen(tree: PrefixTree, options: Options, mode: str, limits: Limits) -> tuple[_Choice, str]:
    """As `choose`, for one sweep."""
    sizes = limits.chunk_sizes if options.chunk_size is None else (options.chunk_size,)
    options = dataclasses.replace(options, chunk_size=sizes[0])
    if options.strategy == "auto":
        best, reason = _cheapest_strategy(tree, options, mode, limits)
    else:
        run = tree.unshared() if options.strategy == "dense" else tree
        known = limits if run is tree else limits.unshared(tree, run)
        best, reason = _Choice.of(run, options, mode, known), "asked for"
    strategy = best.schedule.strategy
    for size in sizes[1:] if strategy != "dense" else ():
        if best.tree.num_rows <= best.schedule.chunk_size:
            break
        larger = dataclasses.replace(options, strategy=strategy, chunk_size=size)
        found = _Choice.of(best.tree, larger, mode, best.limits)
        if found.seconds < (1 - LEAST_GAIN) * best.seconds:
            reason += f"; chunks of {size:,} {found.seconds / best.seconds:.2f} of {best.schedule.chunk_size:,}"
            best = found
    return best, reason


def _cheapest_strategy(tree: PrefixTree, options: Options, mode: str, limits: Limits) -> tuple[_Choice, str]:
    found: list[_Choice] = []
    costs: dict[str, float] = {}
    refused = ""
    for strategy in CANDIDATES:
        run, known = tree, limits
        if strategy == "dense":
            bound = limits.cost.estimate(_dense_at_least(tree, options, mode))
            if bound > min(choice.seconds for choice in found):
                costs["dense >="] = bound
                continue
            run = tree.unshared()
            known = limits.unshared(tree, run)
        choice = _Choice.of(run, dataclasses.replace(options, strategy=strategy), mode, known)
        if strategy == "vanilla" and (excess := _excess(choice.simulation, options, limits)):  # others keep to it
            refused += f"; {strategy} holds graphs of {excess}"
            continue
        costs[strategy] = choice.seconds
        found.append(choice)
    best = min(found, key=lambda choice: choice.seconds)
    least = best.seconds
    relative = ", ".join(f"{name} {cost / least if least else 1:.2f}" for name, cost in costs.items())
    return best, f"auto, by estimated cost ({limits.cost.source}): {relative}{refused}"


def _planned(tree: PrefixTree, options: Options, mode: str, limits: Limits) -> Schedule:
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
    if mode != "transparent" or options.sweep != "stages" or limits.budget is None or not limits.parts:
        return usual
    layers, of_last = _with_what_is_left(tree, chunks, keep, limits)
    others = len(limits.parts) - 1 - layers
    return usual.with_parts([(others, usual), (layers, built(KEEP_ALL) if layers else usual), (1, built(of_last))])


def _with_what_is_left(tree: PrefixTree, chunks: ChunkTree, keep: Keep, limits: Limits) -> tuple[int, Keep]:
    """How many parts before the last one keep everything by what `keep` leaves of the budget, and what the last keeps.

    That part's first backward comes right after its last forward, whose graph stays and is not counted.
    """
    assert limits.budget is not None
    if keep.graphs is None:
        return 0, keep
    *before, last = limits.parts
    depths, whole, left = chunks.starts_below(), limits.footprint, float(limits.budget)
    more: list[tuple[Work, int, int]] = []  # of chunks whose graphs are not kept: work, states, tokens of kept KV
    for index, chunk in enumerate(chunks.chunks):
        work = chunk_work(tree, chunk, limits.head_starts)
        if index in keep.graphs:
            not_counted = last.footprint.graph(work) if index == 0 else 0.0
            left -= whole.graph(work) - not_counted + whole.state * depths[index]
        elif index in keep.kv:
            left -= whole.kv(chunk) + whole.state * depths[index]
            more.append((work, 0, chunk.spine.tokens if chunk.spine else 0))
        else:
            more.append((work, depths[index], 0))

    def costs(part: PartBytes, amounts: Sequence[tuple[Work, int, int]]) -> float:
        one = part.footprint
        return sum(one.graph(work) + one.state * states - one.kv_token * kv for work, states, kv in amounts)

    layers = 0
    for part in reversed(before):
        if (left := left - costs(part, more)) < 0:
            break
        layers += 1
    else:
        if costs(last, more[0 not in keep.graphs :]) <= left:
            return layers, KEEP_ALL
    return layers, Keep(keep.graphs | {0}, keep.kv - {0})


def _excess(simulation: Simulation, options: Options, limits: Limits) -> str:
    """Says by how much live graphs exceed the budget; empty if they do not."""
    if limits.budget is None:
        return ""
    per_token = limits.footprint.graph_token + limits.footprint.graph_head
    left = limits.budget - limits.footprint.state * simulation.peak_states
    allowed = max(int(left / per_token), options.chunk_tokens)
    held = simulation.peak_live_tokens
    return f"{held:,} > {allowed:,} tokens" if held > allowed + options.chunk_tokens else ""


def _dense_at_least(tree: PrefixTree, options: Options, mode: str) -> Simulation:
    """Counts that no dense schedule of these sequences can be below."""
    lengths = tree.lengths
    launches = int((-(-lengths // options.chunk_tokens)).sum())
    tokens, pairs = int(lengths.sum()), int((lengths * (lengths + 1)).sum()) // 2
    once = Work(launches, launches, tokens, pairs, 0)
    return Simulation(
        ops=launches,
        forward=once,
        backward=Work() if mode == "score" else once,
        recomputed_tokens=0,
        restored_tokens=0,
        peak_stack_tokens=int(lengths.max(initial=0)),
        peak_live_tokens=0,
        peak_stored_tokens=0,
    )
