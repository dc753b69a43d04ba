"""Choose strategy, chunk size and sweep for a batch, by the cost model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

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
from dta_compile.plan.tree.chunk_tree import ChunkTree, chunk_size_of, chunk_tree
from dta_compile.plan.tree.prefix_tree import PrefixTree

STRATEGIES = ("packed", "dfs", "vanilla", "dense")  # the first one wins a tie
LEAST_GAIN = 0.03  # share of the estimated seconds that larger chunks, which need more memory, must save
WEIGHT_OF_TIME = 1.5  # exponent of seconds beside peak bytes: 10% more time must save 13% of the memory
LEAST_PARTS = 4  # for a stride above 1: with fewer, the hidden states of most parts are alive together anyway


class _Way(NamedTuple):
    """Way to hold the values that pass between parts: all (the schedule is None), with a stride, or group by group."""

    schedule: Schedule | None
    seconds: float
    peak: float = 0.0


@dataclasses.dataclass(frozen=True)
class Choice:
    """Candidate schedule with its tree, the limits for that tree, and its counts."""

    tree: PrefixTree
    limits: Limits
    schedule: Schedule
    simulation: Simulation

    @property
    def seconds(self) -> float:
        return self.limits.cost.estimate(self.simulation)

    @functools.cached_property
    def peak(self) -> float:
        """Peak bytes, without outputs."""
        parts, stack_tokens = self.limits.parts_of(self.schedule.sweep), self.simulation.peak_stack_tokens
        return max(bytes_of_halves(self.tree, self.schedule, parts, stack_tokens, self.limits.head_starts))


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The schedules of a tree that options and limits leave to choose from.

    A strategy that must hold graphs of more bytes than the budget plus one chunk is no candidate ("vanilla" alone can).
    Strategies are planned only if a lower bound of their cost does not rule them out; the reason, which names all
    costs, is computed when it is called. The strategy is chosen with the smallest chunk size; a larger size is taken if
    it is cheaper by 3%.

    Stages are swept where that is cheaper. Each sweep is given the memory that is free for it; sweeps are not compared
    if a sweep of chunks recomputes nothing within the free memory. If the user set the budget, all sizes and sweeps
    compete in the same memory: the peak of what is chosen with a budget of zero, which competes as well, plus the
    budget.
    """

    tree: PrefixTree
    options: Options
    mode: str
    limits: Limits = dataclasses.field(default_factory=Limits)

    def asked(self, **options: Any) -> Candidates:
        """Return the candidates that other options leave."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **options))

    def limited(self, **limits: Any) -> Candidates:
        """Return the candidates that other limits leave."""
        return dataclasses.replace(self, limits=dataclasses.replace(self.limits, **limits))

    def of_sweep(self, sweep: str) -> Candidates:
        """Return the candidates of one sweep, with its own budget and chunk sizes."""
        return dataclasses.replace(self.asked(sweep=sweep), limits=self.limits.of_sweep(sweep))

    def choose(self) -> tuple[Choice, Callable[[], str]]:
        """Choose strategy, chunk size and sweep, as asked for or else the cheapest, and say why."""
        limits = self.limits
        if limits.is_asked_for and limits.budget:
            return self.best_within_budget()
        if self.options.sweep != "auto":
            return self.of_sweep(self.options.sweep).best_of_sweep()
        best, reason = self.asked(sweep="chunks").best_of_sweep()
        is_known = limits.budget is not None and self.may_sweep_stages
        if not is_known or not (limits.is_asked_for or best.simulation.recomputed_tokens):
            return best, reason
        best, why = self.asked(strategy=best.schedule.strategy).best_sweep()
        return best, lambda: reason() + why

    @property
    def may_sweep_stages(self) -> bool:
        return self.mode == "transparent" and len(self.limits.parts) > 1 and self.tree.num_rows > 0

    def best_within_budget(self) -> tuple[Choice, Callable[[], str]]:
        """Choose in the memory of what is chosen with a budget of zero, plus the budget that the user set.

        Strategies are those that are cheapest with nothing and with everything kept; chunks are as small as with a
        budget of zero, or larger.
        """
        tree, options, limits = self.tree, self.options, self.limits
        assert limits.budget is not None
        best, _ = dataclasses.replace(self, limits=limits.with_nothing_kept()).choose()
        most, smallest, before = best.peak + limits.budget, best.schedule.chunk_size, best.schedule.strategy
        sweeps: tuple[str, ...] = (options.sweep,)
        if options.sweep == "auto":
            sweeps = SWEEPS if self.may_sweep_stages else SWEEPS[:1]
        usual = self.asked(sweep=sweeps[0], chunk_size=smallest)
        cheapest, reason = usual.limited(budget=None).best_strategy()
        for strategy, sweep in product(dict.fromkeys((cheapest.schedule.strategy, before)), sweeps):
            size, largest = smallest, min(tree.num_rows, BY_STAGES if sweep == "stages" else BY_CHUNKS)
            has_sizes = options.chunk_size is None and (strategy != "dense" or not tree.shared)
            while size == smallest or (has_sizes and size < 2 * largest):
                choice = self.asked(strategy=strategy, chunk_size=size).of_sweep(sweep).choice_within(most)
                best = choice if choice is not None and choice.seconds < best.seconds else best
                size *= 2
        ops = f"{best.schedule.strategy}, {best.schedule.sweep}, chunks of {best.schedule.chunk_size:,}"
        return best, lambda: f"{reason()}; within {most / 2**20:,.0f} MiB {ops}"

    def choice_within(self, most: float) -> Choice | None:
        """Return the schedule that keeps as much as fits into a peak of `most` bytes; None: with nothing it is more."""
        best = self.limited(budget=0).choice
        budget, step = most - best.peak, 1
        while budget > 0:
            choice = self.limited(budget=int(budget)).choice
            if choice.peak <= most:
                return choice
            budget -= step * (choice.peak - most)
            step *= 2  # chunks and layers are kept as a whole
        return best if best.peak <= most else None

    def best_sweep(self) -> tuple[Choice, str]:
        """Return the cheaper sweep of one strategy, and a reason that names the least bytes that each sweep needs."""
        of = {sweep: self.of_sweep(sweep) for sweep in SWEEPS}
        smallest = {sweep: own.limits.chunk_sizes[:1] for sweep, own in of.items()}
        nothing = {sweep: of[sweep].limited(budget=0, chunk_sizes=smallest[sweep]).best_of_sweep()[0] for sweep in of}
        least = {sweep: choice.peak for sweep, choice in nothing.items()}
        free = {sweep: own.limits.budget for sweep, own in of.items() if own.limits.budget}
        if not free:
            free = {sweep: 0 for sweep in SWEEPS if least[sweep] == min(least.values())}
        elif nothing["stages"].schedule.groups or nothing["stages"].schedule.stride > 1:  # the fewest that fit
            free["stages"] = 0
        # A sweep for which nothing is free is out, as even its least may not fit.
        choices = [of[sweep].limited(budget=budget).best_of_sweep()[0] for sweep, budget in free.items()]
        best = min(choices, key=lambda choice: choice.seconds)
        bytes_of_both = ", ".join(f"{sweep} {size / 2**20:,.0f} MiB" for sweep, size in least.items())
        return best, f"; sweeps {best.schedule.sweep}: at least {bytes_of_both}"

    def best_of_sweep(self) -> tuple[Choice, Callable[[], str]]:
        """Choose strategy and chunk size for one sweep (see the class)."""
        asked = self.options.chunk_size
        sizes = self.limits.chunk_sizes if asked is None else (asked,)
        best, reason = self.asked(chunk_size=sizes[0]).best_strategy()
        larger_sizes = ""
        for size in sizes[1:] if best.tree is self.tree else ():
            if self.tree.num_rows <= best.schedule.chunk_size:
                break
            choice = self.asked(chunk_size=size, strategy=best.schedule.strategy).choice
            if choice.seconds < (1 - LEAST_GAIN) * best.seconds:
                before, relative = best.schedule.chunk_size, choice.seconds / best.seconds
                larger_sizes += f"; chunks of {size:,} {relative:.2f} of {before:,}"
                best = choice
        return best, lambda: reason() + larger_sizes

    def best_strategy(self) -> tuple[Choice, Callable[[], str]]:
        """Choose the strategy for one sweep and chunk size."""
        if self.options.strategy != "auto":
            return self.choice, lambda: "asked for"
        bounds = self.lower_bounds()

        def priced(strategy: str) -> tuple[Choice, str]:
            """Return a candidate, and by how much it exceeds the budget: only vanilla does not keep to it."""
            choice = self.asked(strategy=strategy).choice
            return choice, self.excess(choice.simulation) if strategy == "vanilla" else ""

        best, _ = priced(STRATEGIES[0])
        for strategy in STRATEGIES[1:]:
            if bounds[strategy] < best.seconds:
                choice, excess = priced(strategy)
                best = choice if choice.seconds < best.seconds and not excess else best

        def reason() -> str:
            costs, refused = {}, ""
            for strategy in STRATEGIES:
                if strategy == "dense" and bounds[strategy] > best.seconds:  # as long as the unshared batch to plan
                    costs["dense >="] = bounds[strategy]
                    continue
                choice, excess = priced(strategy)
                if excess:
                    refused += f"; {strategy} holds graphs of {excess}"
                else:
                    costs[strategy] = choice.seconds
            relative = (f"{name} {cost / best.seconds if best.seconds else 1:.2f}" for name, cost in costs.items())
            return f"auto, by estimated cost ({self.limits.cost.source}): {', '.join(relative)}{refused}"

        return best, reason

    def lower_bounds(self) -> dict[str, float]:
        """Return for each strategy seconds that none of its schedules falls below.

        Without packing a chunk is one slice, so that each leaf needs one.
        """
        tree, limits = self.tree, self.limits
        slices = max(len(tree.leaves), -(-tree.num_rows // chunk_size_of(tree, self.options)))
        heads = tree.num_rows if limits.head_starts is None else int(limits.head_starts[-1])
        pairs = causal_pairs(tree.stop) - causal_pairs(tree.start)
        launches, tokens = int((-(-tree.lengths // self.options.chunk_tokens)).sum()), int(tree.lengths.sum())

        def seconds(once: Work) -> float:
            backward = 0.0 if self.mode == "score" else limits.cost.backward.seconds(once)
            return limits.cost.forward.seconds(once) + backward

        single = seconds(Work(slices, slices, tree.num_rows, pairs, heads))
        dense = seconds(Work(launches, launches, tokens, causal_pairs(tree.lengths), 0))
        return {"packed": 0.0, "dfs": single, "vanilla": single, "dense": dense}

    def excess(self, simulation: Simulation) -> str:
        """Say by how much live graphs exceed the budget; return an empty string if they do not."""
        if self.limits.budget is None:
            return ""
        footprint, tokens = self.limits.footprint, self.options.chunk_tokens
        left = self.limits.budget - footprint.state * simulation.peak_states
        allowed = max(int(left / (footprint.graph_token + footprint.graph_head)), tokens)
        held = simulation.peak_live_tokens
        return f"{held:,} > {allowed:,} tokens" if held > allowed + tokens else ""

    @property
    def choice(self) -> Choice:
        """The schedule of a strategy over the shared tree, or over the unshared one if it is dense."""
        if self.options.strategy == "dense" and self.tree.shared:
            unshared = self.tree.unshared()
            limits = self.limits.unshared(self.tree, unshared)
            return dataclasses.replace(self, tree=unshared, limits=limits).choice
        schedule = self.schedule()
        return Choice(self.tree, self.limits, schedule, simulate(self.tree, schedule, self.limits.head_starts))

    @functools.cached_property
    def chunks(self) -> ChunkTree:
        return chunk_tree(self.tree, self.options, self.limits.footprint.has_states)

    def keeping(self, keep: Keep) -> Schedule:
        """Return the schedule of all chunks that keeps the graphs, KV and results that `keep` says."""
        schedule = build_schedule(self.tree, self.options, self.mode, keep, self.chunks)
        return with_states(self.tree, schedule) if self.limits.footprint.has_states else schedule

    def schedule(self) -> Schedule:
        """Return the schedule that keeps what is worth most within the budget."""
        tree, options, limits, budget = self.tree, self.options, self.limits, self.limits.budget
        by_stages = self.mode == "transparent" and options.sweep == "stages"
        if by_stages:
            fewer, paid = self.between_parts()
            if fewer is not None:
                return fewer
            budget = None if budget is None else int(budget - paid)
        keep = KEEP_ALL
        if self.mode == "transparent":
            keep = choose_keep(tree, options, self.chunks, budget, limits.footprint, limits.cost, limits.head_starts)
        usual = self.keeping(keep)
        if not by_stages or budget is None or not limits.parts:
            return usual
        layers, of_last = spend_rest(tree, self.chunks, keep, dataclasses.replace(limits, budget=budget))
        others, all_kept = len(limits.parts) - 1 - layers, self.keeping(KEEP_ALL) if layers else usual
        return usual.with_parts([(others, usual), (layers, all_kept), (1, self.keeping(of_last))])

    def between_parts(self) -> tuple[Schedule | None, float]:
        """Return a schedule that keeps fewer of the values that pass between parts, or None and the bytes of the budget
        that all of them take.

        It is the one that is asked for, or that ranks agreed on, or the fastest that fits into `room`. Only if the user
        set the budget and parameters are gathered from other ranks, values are given up for memory as well: with a
        budget of zero it is the stride with the least product of predicted peak and seconds to the power of
        `WEIGHT_OF_TIME`, since a larger stride costs time and hardly lowers a peak that weights or activations make.
        The budget then pays for a smaller stride first, and for kept graphs after that. Groups gather parameters more
        often, and are the last resort.
        """
        tree, options, limits, parts = self.tree, self.options, self.limits, self.limits.parts
        sent = sum(part.sent for part in parts)
        asked, filled = max(options.stride or 1, limits.stride), max(int(np.count_nonzero(tree.lengths)), 1)
        least = max(min(options.groups or 1, filled), limits.groups)
        is_gathered, ways = any(part.gathered[0] for part in parts), list[_Way]()
        may_stride = len(parts) >= LEAST_PARTS and tree.num_rows > 0 and not options.stride
        is_weighed = may_stride and is_gathered and limits.is_asked_for
        if least == 1:
            if asked == 1 and not is_weighed and tree.num_rows * sent <= limits.room:
                return None, 0.0
            nothing = self.keeping(KEEP_NOTHING)
            if len(parts) > 1:  # the graph of the last part is needed first
                first_kept = self.keeping(Keep(frozenset({0})))
                nothing = nothing.with_parts([(len(parts) - 1, nothing), (1, first_kept)])
            if asked > 1:
                return dataclasses.replace(nothing, stride=min(asked, max(len(parts), 1))), 0.0
            ways += self.strides(nothing) if may_stride else ()
        if not ways or not is_gathered:
            groups = self.groups(sent, least)
            if not ways or max(tree.of(group).num_rows for group in groups) * sent <= limits.room:
                run = self.keeping(KEEP_NOTHING).in_groups(map(self.group_ops, groups))
                seconds = limits.cost.estimate(simulate(tree, run, limits.head_starts)) if ways else 0.0
                ways.append(_Way(run if len(groups) > 1 else None, seconds))
        if not is_weighed or not any(way.peak for way in ways):
            return min(ways, key=lambda way: way.seconds).schedule, 0.0
        best = min(ways, key=lambda way: way.peak * way.seconds**WEIGHT_OF_TIME)
        paid = [(way, max(way.peak - best.peak, 0.0)) for way in ways]
        way, size = min((way for way in paid if way[1] <= (limits.budget or 0)), key=lambda way: way[0].seconds)
        return way.schedule, size

    def strides(self, nothing: Schedule) -> Iterator[_Way]:
        """Yield the strides of a schedule that keeps nothing else, of which values between parts fit into `room`.

        Beyond about the root of the number of parts, what a stretch computes again takes more.
        """
        tree, parts, cost, heads = self.tree, self.limits.parts, self.limits.cost, self.limits.head_starts
        simulation, known = simulate(tree, nothing, heads), dict[tuple[object, ...], tuple[float, float, float]]()
        first = simulate(tree, dataclasses.replace(nothing.kinds[0][1], ops=nothing.halves[0]), heads).forward
        again, once, before = cost.forward.seconds(first._replace(heads=0)), cost.estimate(simulation), math.inf
        for stride in range(1, len(parts)):
            run = dataclasses.replace(nothing, stride=stride)
            held = tree.num_rows * Crossing(parts, run.stretches(len(parts))).most
            if held > before and stride**2 > len(parts):
                return
            if (before := held) <= self.limits.room:
                peak = max(bytes_of_halves(tree, run, parts, simulation.peak_stack_tokens, heads, known))
                yield _Way(run if stride > 1 else None, once + again * run.share_again, peak)

    def groups(self, sent: float, least: int) -> list[list[int]]:
        """Divide the sequences into the fewest groups of which each passes few enough bytes (`sent` a token) to fit.

        If ranks agreed on a number, it is that number: with another, they would wait for each other's collectives
        forever.
        """
        tree, limits = self.tree, self.limits
        if limits.groups > 1:
            return balance(tree, limits.groups, contiguous=True)
        most = max(int(np.count_nonzero(tree.lengths)), least)
        room = max(limits.room, int(tree.lengths.max(initial=0)) * sent, 1.0)
        number = min(max(math.ceil(tree.num_rows * sent / room), least), most)
        while True:
            groups = balance(tree, number, contiguous=True)
            largest = max(tree.of(group).num_rows for group in groups) * sent
            if largest <= room or number == most:
                return groups
            number = min(max(number + 1, int(number * largest / room)), most)

    def group_ops(self, group: Sequence[int]) -> GroupOps:
        of_group = dataclasses.replace(self, tree=self.tree.of(group), mode="transparent")
        return GroupOps(tuple(group), of_group.keeping(KEEP_NOTHING).ops)
