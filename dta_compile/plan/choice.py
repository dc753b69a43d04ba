"""Choose strategy, chunk size and sweep for a batch, by the cost model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from dta_compile.options import Options
from dta_compile.plan.cost import BY_CHUNKS, BY_STAGES, Limits
from dta_compile.plan.division.balance import balance
from dta_compile.plan.interpret import Work
from dta_compile.plan.keep import choose_keep, spend_rest
from dta_compile.plan.peak_memory import Crossing, bytes_of_halves
from dta_compile.plan.planner import KEEP_ALL, KEEP_NOTHING, Keep, build_schedule
from dta_compile.plan.schedule import SWEEPS, GroupOps, Schedule
from dta_compile.plan.simulate import Simulation, causal_pairs, simulate
from dta_compile.plan.states import with_states
from dta_compile.plan.tree.chunk_tree import chunk_size_of, chunk_tree
from dta_compile.plan.tree.prefix_tree import PrefixTree

CANDIDATES = ("packed", "dfs", "vanilla", "dense")  # the first one wins a tie
LEAST_GAIN = 0.03  # share of the estimated seconds that larger chunks, which need more memory, must save
WEIGHT_OF_TIME = 1.5  # exponent of seconds beside peak bytes: 10% more time must save 13% of the memory
LEAST_PARTS = 4  # for a stride above 1: with fewer, the hidden states of most parts are alive together anyway


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

    @classmethod
    def within(cls, tree: PrefixTree, options: Options, mode: str, limits: Limits, most: float) -> Choice | None:
        """Return the schedule that keeps as much as fits into a peak of `most` bytes; None: with nothing it is more."""

        def keeping(budget: float) -> Choice:
            return cls.of(tree, options, mode, dataclasses.replace(limits, budget=int(budget)))

        best = keeping(0)
        budget, step = most - best.peak, 1
        while budget > 0:
            choice = keeping(budget)
            if choice.peak <= most:
                return choice
            budget -= step * (choice.peak - most)
            step *= 2  # chunks and layers are kept as a whole
        return best if best.peak <= most else None

    @property
    def seconds(self) -> float:
        return self.limits.cost.estimate(self.simulation)

    @functools.cached_property
    def peak(self) -> float:
        """Peak bytes, without outputs."""
        parts, stack_tokens = self.limits.parts_of(self.schedule.sweep), self.simulation.peak_stack_tokens
        return max(bytes_of_halves(self.tree, self.schedule, parts, stack_tokens, self.limits.head_starts))


def choose_lazily(
    tree: PrefixTree, options: Options, mode: str, limits: Limits | None = None
) -> tuple[Choice, Callable[[], str]]:
    """Choose strategy, chunk size and sweep, as asked for or else the cheapest, and say why.

    A strategy that must hold graphs of more bytes than the budget plus one chunk is no candidate ("vanilla" alone can).
    Strategies are planned only if a lower bound of their cost does not rule them out; the reason, which names all
    costs, is computed when it is called. The strategy is chosen with the smallest chunk size; a larger size is taken if
    it is cheaper by 3%.

    Stages are swept where that is cheaper. Each sweep is given the memory that is free for it; sweeps are not compared
    if a sweep of chunks recomputes nothing within the free memory. If the user set the budget, all sizes and sweeps
    compete in the same memory: the peak of what is chosen with a budget of zero, which competes as well, plus the
    budget.
    """
    limits = limits or Limits()
    if limits.is_asked_for and limits.budget:
        return _choose_within_budget(tree, options, mode, limits)
    if options.sweep != "auto":
        return _choose_for_sweep(tree, options, mode, limits.of_sweep(options.sweep))
    best, reason = _choose_for_sweep(tree, dataclasses.replace(options, sweep="chunks"), mode, limits)
    is_known = limits.budget is not None and _may_sweep_stages(tree, mode, limits)
    if not is_known or not (limits.is_asked_for or best.simulation.recomputed_tokens):
        return best, reason
    best, why = _best_sweep(tree, dataclasses.replace(options, strategy=best.schedule.strategy), mode, limits)
    return best, lambda: reason() + why


def _may_sweep_stages(tree: PrefixTree, mode: str, limits: Limits) -> bool:
    return mode == "transparent" and len(limits.parts) > 1 and tree.num_rows > 0


def _choose_within_budget(
    tree: PrefixTree, options: Options, mode: str, limits: Limits
) -> tuple[Choice, Callable[[], str]]:
    """Choose in the memory of what is chosen with a budget of zero, plus the budget that the user set.

    Strategies are those that are cheapest with nothing and with everything kept; chunks are as small as with a budget
    of zero, or larger.
    """
    assert limits.budget is not None
    best, _ = choose_lazily(tree, options, mode, limits.with_nothing_kept())
    most, smallest, before = best.peak + limits.budget, best.schedule.chunk_size, best.schedule.strategy
    sweeps: tuple[str, ...] = (options.sweep,)
    if options.sweep == "auto":
        sweeps = SWEEPS if _may_sweep_stages(tree, mode, limits) else SWEEPS[:1]
    usual = dataclasses.replace(options, sweep=sweeps[0], chunk_size=smallest)
    cheapest, reason = _of_strategy(tree, usual, mode, dataclasses.replace(limits, budget=None))
    for strategy, sweep in product(dict.fromkeys((cheapest.schedule.strategy, before)), sweeps):
        size, largest = smallest, min(tree.num_rows, BY_STAGES if sweep == "stages" else BY_CHUNKS)
        has_sizes = options.chunk_size is None and (strategy != "dense" or not tree.shared)
        while size == smallest or (has_sizes and size < 2 * largest):
            asked = dataclasses.replace(options, strategy=strategy, sweep=sweep, chunk_size=size)
            choice = Choice.within(tree, asked, mode, limits.of_sweep(sweep), most)
            best = choice if choice is not None and choice.seconds < best.seconds else best
            size *= 2
    ops = f"{best.schedule.strategy}, {best.schedule.sweep}, chunks of {best.schedule.chunk_size:,}"
    return best, lambda: f"{reason()}; within {most / 2**20:,.0f} MiB {ops}"


def _best_sweep(tree: PrefixTree, options: Options, mode: str, limits: Limits) -> tuple[Choice, str]:
    """Return the cheaper sweep of one strategy, and a reason that names the least bytes that each sweep needs."""

    def chosen(sweep: str, budget: int, sizes: tuple[int, ...]) -> Choice:
        known = dataclasses.replace(limits.of_sweep(sweep), budget=budget, chunk_sizes=sizes)
        return _choose_for_sweep(tree, dataclasses.replace(options, sweep=sweep), mode, known)[0]

    sizes_of = {sweep: limits.of_sweep(sweep).chunk_sizes for sweep in SWEEPS}
    nothing = {sweep: chosen(sweep, 0, sizes_of[sweep][:1]) for sweep in SWEEPS}
    least = {sweep: choice.peak for sweep, choice in nothing.items()}
    free = {sweep: budget for sweep in SWEEPS if (budget := limits.of_sweep(sweep).budget)}
    if not free:
        free = {sweep: 0 for sweep in SWEEPS if least[sweep] == min(least.values())}
    elif nothing["stages"].schedule.groups or nothing["stages"].schedule.stride > 1:  # the fewest that fit
        free["stages"] = 0
    # A sweep for which nothing is free is out, as even its least may not fit.
    choices = [chosen(sweep, budget, sizes_of[sweep]) for sweep, budget in free.items()]
    best = min(choices, key=lambda choice: choice.seconds)
    bytes_of_both = ", ".join(f"{sweep} {size / 2**20:,.0f} MiB" for sweep, size in least.items())
    return best, f"; sweeps {best.schedule.sweep}: at least {bytes_of_both}"


def _of_strategy(tree: PrefixTree, options: Options, mode: str, limits: Limits) -> tuple[Choice, Callable[[], str]]:
    if options.strategy == "auto":
        return _cheapest_strategy(tree, options, mode, limits)
    return Choice.of(tree, options, mode, limits), lambda: "asked for"


def _choose_for_sweep(
    tree: PrefixTree, options: Options, mode: str, limits: Limits
) -> tuple[Choice, Callable[[], str]]:
    """Choose strategy and chunk size for one sweep (see `choose_lazily`)."""
    sizes = limits.chunk_sizes if options.chunk_size is None else (options.chunk_size,)
    options = dataclasses.replace(options, chunk_size=sizes[0])
    best, reason = _of_strategy(tree, options, mode, limits)
    options, larger_sizes = dataclasses.replace(options, strategy=best.schedule.strategy), ""
    for size in sizes[1:] if best.tree is tree else ():
        if tree.num_rows <= best.schedule.chunk_size:
            break
        choice = Choice.of(tree, dataclasses.replace(options, chunk_size=size), mode, limits)
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
    has_states, budget = limits.footprint.has_states, limits.budget
    chunks = chunk_tree(tree, options, has_states)

    def built(keep: Keep) -> Schedule:
        schedule = build_schedule(tree, options, mode, keep, chunks)
        return with_states(tree, schedule) if has_states else schedule

    by_stages = mode == "transparent" and options.sweep == "stages"
    if by_stages:
        fewer, paid = _between_parts(tree, built, options, limits)
        if fewer is not None:
            return fewer
        budget = None if budget is None else int(budget - paid)
    known = (limits.footprint, limits.cost, limits.head_starts)
    keep = choose_keep(tree, options, chunks, budget, *known) if mode == "transparent" else KEEP_ALL
    usual = built(keep)
    if not by_stages or budget is None or not limits.parts:
        return usual
    layers, of_last = spend_rest(tree, chunks, keep, dataclasses.replace(limits, budget=budget))
    others = len(limits.parts) - 1 - layers
    return usual.with_parts([(others, usual), (layers, built(KEEP_ALL) if layers else usual), (1, built(of_last))])


class _Way(NamedTuple):
    """Way to hold the values that pass between parts: all (the schedule is None), with a stride, or group by group."""

    schedule: Schedule | None
    seconds: float
    peak: float = 0.0


def _between_parts(
    tree: PrefixTree, built: Callable[[Keep], Schedule], options: Options, limits: Limits
) -> tuple[Schedule | None, float]:
    """Return a schedule that keeps fewer of the values that pass between parts, or None and the bytes of the budget
    that all of them take.

    It is the one that is asked for, or that ranks agreed on, or the fastest that fits into `room`. Only if the user set
    the budget and parameters are gathered from other ranks, values are given up for memory as well: with a budget of
    zero it is the stride with the least product of predicted peak and seconds to the power of `WEIGHT_OF_TIME`, since a
    larger stride costs time and hardly lowers a peak that weights or activations make. The budget then pays for a
    smaller stride first, and for kept graphs after that. Groups gather parameters more often, and are the last resort.
    """
    parts, sent = limits.parts, sum(part.sent for part in limits.parts)
    room = math.inf if limits.room is None else limits.room
    asked, least = max(options.stride or 1, limits.stride), max(options.groups or 1, limits.groups)
    is_gathered, ways = any(part.gathered[0] for part in parts), list[_Way]()
    may_stride = len(parts) >= LEAST_PARTS and tree.num_rows > 0 and not options.stride
    is_weighed = may_stride and is_gathered and limits.is_asked_for
    if least == 1:
        if asked == 1 and not is_weighed and tree.num_rows * sent <= room:
            return None, 0.0
        nothing = built(KEEP_NOTHING)
        if len(parts) > 1:  # the graph of the last part is needed first
            nothing = nothing.with_parts([(len(parts) - 1, nothing), (1, built(Keep(frozenset({0}))))])
        if asked > 1:
            return dataclasses.replace(nothing, stride=min(asked, max(len(parts), 1))), 0.0
        ways += _strides(tree, nothing, limits) if may_stride else ()
    if not ways or not is_gathered:
        groups = _groups(tree, limits, sent, least)
        if not ways or max(tree.of(group).num_rows for group in groups) * sent <= room:
            run = built(KEEP_NOTHING).in_groups(_group_ops(group, tree.of(group), options, limits) for group in groups)
            seconds = limits.cost.estimate(simulate(tree, run, limits.head_starts)) if ways else 0.0
            ways.append(_Way(run if len(groups) > 1 else None, seconds))
    if not is_weighed or not any(way.peak for way in ways):
        return min(ways, key=lambda way: way.seconds).schedule, 0.0
    best = min(ways, key=lambda way: way.peak * way.seconds**WEIGHT_OF_TIME)
    paid = [(way, max(way.peak - best.peak, 0.0)) for way in ways]
    way, size = min((way for way in paid if way[1] <= (limits.budget or 0)), key=lambda way: way[0].seconds)
    return way.schedule, size


def _strides(tree: PrefixTree, nothing: Schedule, limits: Limits) -> Iterator[_Way]:
    """Yield the strides of a schedule that keeps nothing else, of which values between parts fit into `room`.

    Beyond about the root of the number of parts, what a stretch computes again takes more.
    """
    parts, heads, before = limits.parts, limits.head_starts, math.inf
    simulation, known = simulate(tree, nothing, heads), dict[tuple[object, ...], tuple[float, float, float]]()
    first = simulate(tree, dataclasses.replace(nothing.kinds[0][1], ops=nothing.halves[0]), heads).forward
    again, once = limits.cost.forward.seconds(first._replace(heads=0)), limits.cost.estimate(simulation)
    for stride in range(1, len(parts)):
        run = dataclasses.replace(nothing, stride=stride)
        held = tree.num_rows * Crossing(parts, run.stretches(len(parts))).most
        if held > before and stride**2 > len(parts):
            return
        if (before := held) <= (math.inf if limits.room is None else limits.room):
            peak = max(bytes_of_halves(tree, run, parts, simulation.peak_stack_tokens, heads, known))
            yield _Way(run if stride > 1 else None, once + again * run.share_again, peak)


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


def _excess(simulation: Simulation, options: Options, limits: Limits) -> str:
    """Say by how much live graphs exceed the budget; return an empty string if they do not."""
    if limits.budget is None:
        return ""
    per_token = limits.footprint.graph_token + limits.footprint.graph_head
    left = limits.budget - limits.footprint.state * simulation.peak_states
    allowed = max(int(left / per_token), options.chunk_tokens)
    held = simulation.peak_live_tokens
    return f"{held:,} > {allowed:,} tokens" if held > allowed + options.chunk_tokens else ""
