"""Running states of recurrent mixers: at which depths a schedule keeps them, and how many are alive as it runs.

Unlike KV a running state cannot be sliced by depth: it is there at the depths where a chunk put a snapshot of it.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

from dta_compile.plan.schedule import Anchor, Backward, Forward, Op, Pop, Restore, Schedule
from dta_compile.plan.tree.chunk import Slice
from dta_compile.plan.tree.prefix_tree import PrefixTree

Kept = TypeVar("Kept")
State = tuple[int, int]
"""Its depth, and the number of the run that it is of."""


def with_states(tree: PrefixTree, schedule: Schedule) -> Schedule:
    """A legal schedule whose chunks keep running states where later ops need them, and nowhere else.

    Backwards from the end, with the depths of the path at which later ops read the state: whatever put a depth on the
    stack must have kept the state there, and a restore hands this on to the run that it copies from.
    """
    sources = _sources(tree, schedule.ops)
    restored: dict[int, set[int]] = {}  # by position of the source: the depths that restores need of it
    needed: list[int] = []  # ascending
    ops = list(schedule.ops)
    for position in reversed(range(len(ops))):
        op = ops[position]
        match op:
            case Restore(part):
                restored.setdefault(sources[position], set()).update(_taken(needed, part.start))
            case Anchor(chunk) | Forward(chunk):
                if chunk.spine is not None:
                    depths = restored.pop(position, set()).union(_taken(needed, chunk.start))
                    ops[position] = dataclasses.replace(op, states=tuple(sorted(depths)))
                _include(needed, chunk.start)
            case Backward(chunk):
                _include(needed, chunk.start)
    return dataclasses.replace(schedule, ops=tuple(ops))


def _sources(tree: PrefixTree, ops: Sequence[Op]) -> dict[int, int]:
    """By position of a restore, that of the anchor or forward whose spine it copies from; -1 if nothing is kept."""
    kept, sources = _KeptSpines[int](tree), {}
    for position, op in enumerate(ops):
        match op:
            case Restore(part):
                source = kept.of(part)
                sources[position] = -1 if source is None else source
            case Anchor() | Forward() if (spine := _kept_spine(op)) is not None:
                kept.keep(spine, position)
            case Backward(chunk) if chunk.spine is not None:
                kept.forget(chunk.spine)
    return sources


def _taken(depths: list[int], start: int) -> list[int]:
    """Take what is below `start` off the end of ascending depths."""
    at = bisect_right(depths, start)
    taken = depths[at:]
    del depths[at:]
    return taken


def _include(depths: list[int], depth: int) -> None:
    """Add a depth to ascending ones if it is not there; the state at depth 0 is zero and nobody's to keep."""
    at = bisect_left(depths, depth)
    if depth and depths[at : at + 1] != [depth]:
        depths.insert(at, depth)


def _kept_spine(op: Anchor | Forward) -> Slice | None:
    """The spine that is kept for restores, if one is."""
    return op.chunk.spine if isinstance(op, Forward) or op.kv else None


class _KeptSpines(Generic[Kept]):
    """What is kept of spines, to be found by any part of theirs. A spine replaces one with the same first token."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.first_row = np.full(tree.num_rows, -1)  # of the spine that covers the row
        self.kept: dict[int, Kept] = {}  # by the first row

    def keep(self, spine: Slice, what: Kept) -> None:
        ranges = self.tree.row_ranges(spine.sequence, spine.start, spine.stop)
        for start, stop in ranges:
            self.first_row[start:stop] = ranges[0][0]
        self.kept[ranges[0][0]] = what

    def forget(self, spine: Slice) -> Kept | None:
        return self.kept.pop(self.tree.row_at(spine.sequence, spine.start), None)

    def of(self, part: Slice) -> Kept | None:
        return self.kept.get(int(self.first_row[self.tree.row_at(part.sequence, part.start)]))


class LiveStates:
    """Counts the running states that are alive as a legal schedule runs, and the gradients that wait for them.

    Attributes:
        peak: most states at one time; one that is on the stack and kept counts once, since nothing is copied.
        peak_gradients: most gradients at one time; a backward leaves its own before it takes those of its spine.
    """

    def __init__(self, tree: PrefixTree, schedule: Schedule) -> None:
        self.peak = self.peak_gradients = 0
        self._in_use = any(isinstance(op, (Anchor, Forward)) and op.states for op in schedule.ops)
        self._path: list[State] = []  # on the stack, ascending
        self._kept = _KeptSpines[list[State]](tree)
        self._holders: Counter[State] = Counter()  # the stack and a kept chunk
        self._waiting: list[int] = []  # ascending depths
        self._runs = 0

    def step(self, op: Op) -> int:
        """Go on by one op; the most states and gradients that there are as it runs."""
        if not self._in_use:
            return 0
        before, dropped = len(self._holders), None
        match op:
            case Pop(part):
                self._cut(part.start)
            case Restore(part):
                self._cut(part.start)
                kept = self._kept.of(part) or []
                self._put(kept[bisect_right(kept, _after(part.start)) : bisect_right(kept, _after(part.stop))])
            case Anchor(chunk) | Forward(chunk) if chunk.spine is not None:
                self._cut(chunk.start)
                self._runs += 1
                states = [(depth, self._runs) for depth in op.states]
                self._put(states)
                if (spine := _kept_spine(op)) is not None:
                    dropped = self._kept.forget(spine)
                    self._kept.keep(spine, states)
                    self._holders.update(states)
            case Backward(chunk):
                _include(self._waiting, chunk.start)
                dropped = self._kept.forget(chunk.spine) if chunk.spine is not None else None
        alive, waiting = max(before, len(self._holders)), len(self._waiting)
        self.peak, self.peak_gradients = max(self.peak, alive), max(self.peak_gradients, waiting)
        self._release(dropped or [])
        if isinstance(op, Backward) and op.chunk.spine is not None:
            _taken(self._waiting, op.chunk.start)
        return alive + waiting

    def _put(self, states: list[State]) -> None:
        self._path += states
        self._holders.update(states)

    def _cut(self, depth: int) -> None:
        at = bisect_right(self._path, _after(depth))
        self._release(self._path[at:])
        del self._path[at:]

    def _release(self, states: Iterable[State]) -> None:
        for state in states:
            self._holders[state] -= 1
            if not self._holders[state]:
                del self._holders[state]


def _after(depth: int) -> tuple[int, float]:
    """Sorts after all states at a depth."""
    return depth, float("inf")
