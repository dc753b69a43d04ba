"""Simulate a schedule without tensors: count its work, and the tokens and states that it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dta_compile.plan.interpret import Work, interpret
from dta_compile.plan.schedule import Schedule
from dta_compile.plan.tree.prefix_tree import IntArray, PrefixTree


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Counts of a legal schedule.

    Attributes:
        ops: number of ops.
        forward, backward: work of the anchor and forward ops, and of the backward ops.
        recomputed_tokens: tokens forwarded again: forward tokens minus the tokens of the tree.
        restored_tokens: tokens whose KV is copied back.
        peak_stack_tokens: most tokens on the stack.
        peak_live_tokens: most tokens whose graphs are live at one time.
        peak_stored_tokens: most tokens whose KV alone is kept at one time.
        peak_states: most running states at one time, on the stack or kept (counted once if both); one state covers all
            layers at one depth.
        peak_state_gradients: most depths of the stack whose running state has a gradient waiting.
        rebuilt: in a sweep of stages, work of the anchors that compute states only.
    """

    ops: int
    forward: Work
    backward: Work
    recomputed_tokens: int
    restored_tokens: int
    peak_stack_tokens: int
    peak_live_tokens: int
    peak_stored_tokens: int
    peak_states: int = 0
    peak_state_gradients: int = 0
    rebuilt: Work = dataclasses.field(default_factory=Work)

    @property
    def launches(self) -> int:
        """Chunk runs of both directions."""
        return self.forward.launches + self.backward.launches + self.rebuilt.launches

    @property
    def peaks(self) -> dict[str, int]:
        """All peaks, by name."""
        return {name: getattr(self, name) for name in _PEAKS}


_FIELDS = tuple(field.name for field in dataclasses.fields(Simulation))
_PEAKS = tuple(name for name in _FIELDS if name.startswith("peak"))


def simulate(tree: PrefixTree, schedule: Schedule, head_starts: IntArray | None = None) -> Simulation:
    """Count a schedule that is known to be legal, in O(ops); `verify` checks and counts any other.

    Where parts run different ops, the counts are averages over the parts, rounded, but for the peak of the stack.

    Args:
        head_starts: as in `interpret`.
    """
    if schedule.groups:
        return _of_all_groups(tree, schedule, head_starts)
    if schedule.stride > 1:
        return _of_stretches(tree, schedule, head_starts)
    if schedule.others:
        shares = [share for share, _ in schedule.kinds]
        counts = [simulate(tree, kind, head_starts) for _, kind in schedule.kinds]
        return _merged(counts, lambda name, values: max(values) if name == _PEAKS[0] else _mean(shares, values))
    forward, backward, rebuilt = [Work()], [Work()], [Work()]
    levels, restored = [(0, 0, 0, 0, 0)], 0
    by_graph = {"backward": backward} | ({"cache_only": rebuilt} if schedule.sweep == "stages" else {})
    for event in interpret(tree, schedule, head_starts):
        by_graph.get(event.op.graph, forward).append(event.work)
        levels.append((*event.held, event.states, event.state_gradients))
        restored += event.restored
    first, second, again = (Work(*map(sum, zip(*amounts, strict=True))) for amounts in (forward, backward, rebuilt))
    peaks = dict(zip(_PEAKS, map(max, zip(*levels, strict=True)), strict=True))
    return Simulation(len(schedule.ops), first, second, first.tokens - tree.num_rows, restored, **peaks, rebuilt=again)


def by_group(
    tree: PrefixTree, schedule: Schedule, head_starts: IntArray | None = None
) -> Iterator[tuple[PrefixTree, Schedule, IntArray | None]]:
    """Yield tree, schedule and head starts of every group; head rows of shared tokens count in each."""
    for number, group in enumerate(schedule.groups):
        part, starts = tree.of(group.sequences), None
        if head_starts is not None:
            heads = np.diff(head_starts)[part.rows_in(tree)]
            starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(heads)])
        yield part, schedule.of_group(number), starts


def _of_all_groups(tree: PrefixTree, schedule: Schedule, head_starts: IntArray | None) -> Simulation:
    """Count all groups. The first half of each but the last runs twice: for its outputs, and for its hidden states."""
    counts: list[Simulation] = []
    for number, (part, of_group, starts) in enumerate(by_group(tree, schedule, head_starts), 1):
        counts.append(simulate(part, of_group, starts))
        if number < len(schedule.groups):
            first = simulate(part, dataclasses.replace(of_group, ops=of_group.halves[0]), starts).forward
            counts[-1] = dataclasses.replace(counts[-1], forward=counts[-1].forward.plus(first))

    total = _merged(counts, lambda name, values: max(values) if name in _PEAKS else sum(values))
    return dataclasses.replace(total, recomputed_tokens=total.forward.tokens - tree.num_rows)


def _of_stretches(tree: PrefixTree, schedule: Schedule, head_starts: IntArray | None) -> Simulation:
    """Count a schedule with a stride: a share of the parts, none of which has head rows, runs the first half again."""
    whole = simulate(tree, dataclasses.replace(schedule, stride=1), head_starts)
    half = dataclasses.replace(schedule.kinds[0][1], ops=schedule.halves[0], stride=1)
    first = simulate(tree, half, head_starts).forward._replace(heads=0)
    forward = whole.forward.plus(Work(*(round(schedule.share_again * amount) for amount in first)))
    return dataclasses.replace(whole, forward=forward, recomputed_tokens=forward.tokens - tree.num_rows)


def _merged(counts: Sequence[Simulation], merge: Callable[[str, Sequence[int]], int]) -> Simulation:
    """Merge counts field by field; `merge` gets the name of a field and its values, or those of an entry of a work."""

    def merged(name: str) -> Any:
        values = [getattr(of_run, name) for of_run in counts]
        if isinstance(values[0], Work):
            return Work(*(merge(name, amounts) for amounts in zip(*values, strict=True)))
        return merge(name, values)

    return Simulation(**{name: merged(name) for name in _FIELDS})


def _mean(shares: Sequence[float], values: Sequence[int]) -> int:
    return round(sum(share * value for share, value in zip(shares, values, strict=True)))


def causal_pairs(lengths: IntArray) -> int:
    """Return the query-key pairs of causal attention over whole paths of these lengths."""
    return int((lengths * (lengths + 1)).sum()) // 2
