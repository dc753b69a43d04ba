"""Predict a step of several ranks: a tree of its own on each (`balance`), against one tree over all of them.

Both are planned with the same memory and priced at the same rates. What ranks of one tree exchange is added to its
time, as if none of it was hidden behind computation; gathering and reducing parameters takes both equally long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dta_compile.data import Recorded
from dta_compile.estimate.devices import Device
from dta_compile.estimate.predict import (
    BYTES_16BIT,
    BYTES_FP32,
    ModelShape,
    Ranks,
    cost_of,
    footprint_of,
    head_starts_of,
    parts_of,
    tree_of,
)
from dta_compile.options import Options
from dta_compile.plan import Limits, Plan, PrefixTree, Schedule, balance, bytes_of_halves, make_plan, simulate
from dta_compile.plan.cost import BUDGET_SHARE, BY_STAGES, chunk_sizes
from dta_compile.plan.division.pieces import Dealing
from dta_compile.plan.one_tree import blocks, deal_out, exchange_seconds, schedule_of
from dta_compile.plan.plan import plan_one_tree


@dataclasses.dataclass(frozen=True)
class RanksStep:
    """Predicted step of several ranks.

    Attributes:
        tokens: tokens that all ranks run, each counted once for a forward and a backward.
        imbalance: seconds of the slowest rank over the mean.
        seconds: seconds of the slowest rank, `exchange` included.
        exchange: seconds of it that ranks wait for states of others.
        received: most tokens whose states a rank receives in a forward of a layer.
        peak_bytes: peak bytes of the rank that needs most, with its share of the model; 0: the model is not known.
    """

    tokens: int
    imbalance: float
    seconds: float
    exchange: float = 0.0
    received: int = 0
    peak_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class OverRanks:
    """Model, device and options of a step over ranks.

    Attributes:
        shape, device: None: rates and sizes are those of `known`.
        known: limits of a model that is not known.
        link: bytes a second that a rank receives from others.
    """

    ranks: Ranks
    options: Options
    link: float
    shape: ModelShape | None = None
    device: Device | None = None
    known: Limits = dataclasses.field(default_factory=Limits)

    def own_trees(self, sequences: Sequence[Recorded], mode: str = "transparent") -> RanksStep:
        """Divide the sequences by `balance` (Algorithm 4, or better), and plan each rank's tree."""
        # Without a model there are no layers to choose a sweep by, and one tree is swept by stages.
        sweep = "stages" if self.shape is None else "auto"
        options = dataclasses.replace(self.options, mesh=None, strategy="auto", sweep=sweep)
        groups = balance(tree_of(sequences), self.ranks.count, self._limits(PrefixTree.build([]), []).cost)
        seconds, tokens, peak = [], 0, 0.0
        for group in groups:
            own = [sequences[i] for i in group]
            tree = tree_of(own)
            limits = self._limits(tree, own)
            plan = make_plan(tree, options, mode=mode, limits=limits)
            seconds.append(plan.estimates.seconds)
            tokens += tree.num_rows
            sweep = plan.schedule.sweep
            parts, held = limits.parts_of(sweep), plan.simulation.peak_stack_tokens
            halves = bytes_of_halves(plan.prefix_tree, plan.schedule, parts, held, plan.limits.head_starts)
            peak = max(peak, max(halves) + self._held(sweep))
        return RanksStep(tokens, _imbalance(seconds), max(seconds), peak_bytes=peak * (self.shape is not None))

    def one_tree(self, sequences: Sequence[Recorded], rank: int, mode: str = "transparent") -> tuple[RanksStep, Plan]:
        """Deal one tree out; return its step and the plan of a rank."""
        tree, count = tree_of(sequences), self.ranks.count
        limits = self._limits(tree, sequences).of_sweep("stages")
        plan = plan_one_tree(tree, self.options, limits, mode, rank, count, self.link)
        return self._step(tree, limits, count, mode), plan

    def in_parts(self, sequences: Sequence[Recorded], size: int, mode: str = "transparent") -> RanksStep:
        """Divide the sequences over parts of `size` ranks by `balance`; each part runs one tree of its own."""
        steps = []
        cost = self._limits(PrefixTree.build([]), []).cost
        for group in balance(tree_of(sequences), self.ranks.count // size, cost):
            own = [sequences[i] for i in group]
            tree = tree_of(own)
            steps.append(self._step(tree, self._limits(tree, own).of_sweep("stages"), size, mode))
        slowest, imbalance = max(steps, key=lambda step: step.seconds), _imbalance([step.seconds for step in steps])
        tokens, received = sum(step.tokens for step in steps), max(step.received for step in steps)
        peak = max(step.peak_bytes for step in steps)
        imbalance = max(imbalance, slowest.imbalance)
        return RanksStep(tokens, imbalance, slowest.seconds, slowest.exchange, received, peak)

    def _step(self, tree: PrefixTree, limits: Limits, count: int, mode: str) -> RanksStep:
        """Return the step of `count` ranks with one tree."""
        dealing, kept = deal_out(tree, self.options, limits, mode, count)
        seconds, peak = [], 0.0
        slowest = max(range(dealing.ranks), key=lambda number: dealing.costs[number])
        for number in range(dealing.ranks):
            schedule = schedule_of(dealing, number, self.options, mode, len(limits.parts), kept)
            seconds.append(limits.cost.estimate(simulate(tree, schedule, limits.head_starts)))
            peak = max(peak, bytes_of_rank(dealing, number, schedule, limits) + self._held("stages"))
        of_slowest = schedule_of(dealing, slowest, self.options, mode, len(limits.parts), kept)
        exchange = exchange_seconds(dealing, of_slowest, limits, self.link)
        figures = sum(dealing.tokens), _imbalance(seconds), max(seconds) + exchange, exchange, max(dealing.received)
        return RanksStep(*figures, peak * (self.shape is not None))

    def _held(self, sweep: str) -> float:
        return 0.0 if self.shape is None else self.ranks.held(self.shape) + self.ranks.gathered(self.shape, sweep)

    def _limits(self, tree: PrefixTree, sequences: Sequence[Recorded]) -> Limits:
        """Return the limits for a tree, with half of the device's free memory as budget if the user set none."""
        if self.shape is None or self.device is None:
            return self.known
        parts, sums = parts_of(self.shape, self.ranks), self.shape.parameters * float(BYTES_FP32)
        footprint, asked = footprint_of(self.shape), self.options.memory_budget

        def budget_of(sweep: str, taken: float) -> int:
            assert self.device is not None
            free = int(max(self.device.memory - self._held(sweep) - taken, 0) * BUDGET_SHARE)
            return free if asked is None else asked

        budget, of_layers = budget_of("chunks", sums), budget_of("stages", max(part.sums for part in parts))
        boundaries = tree.num_rows * sum(part.sent for part in parts)
        sizes = chunk_sizes(budget, footprint.graph_token)
        widest = parts[0].footprint.graph_token
        of_stages, at_zero = (
            chunk_sizes(size, widest, BY_STAGES, boundaries, tree.num_rows) for size in (of_layers, 0)
        )
        cost, heads = cost_of(self.shape, self.device), head_starts_of(tree, sequences)
        by_stages, is_asked_for = (of_layers, of_stages), asked is not None
        return Limits(budget, footprint, cost, heads, sizes, sums, parts, is_asked_for, by_stages, at_zero=at_zero)


def bytes_of_rank(dealing: Dealing, rank: int, schedule: Schedule, limits: Limits) -> float:
    """Return the peak bytes of a rank of one tree, besides its share of the model."""
    held, parts = dealing.held[rank], limits.parts
    first, second = bytes_of_halves(dealing.tree, schedule, parts, held, limits.head_starts)
    # Gradients of states are there of own tokens alone, not of all on the stack as `bytes_of_halves` counts them; and
    # those above the piece with the messages that they travel in, of some heads at a time.
    width = max(part.footprint.kv_token for part in parts)
    above, own = dealing.most_above[rank], dealing.exported[rank]
    at_once = 2 * above / blocks(int(above * width))
    return max(first, second + width * (own + at_once - held) * BYTES_FP32 / BYTES_16BIT)


def _imbalance(seconds: Sequence[float]) -> float:
    return max(seconds) * len(seconds) / sum(seconds) if any(seconds) else 1.0
