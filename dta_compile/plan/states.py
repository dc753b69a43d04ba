"""Place snapshots of running states of recurrent mixers in a schedule, and count the live ones.

Unlike KV, a running state cannot be sliced by depth: it exists only at depths where a chunk took a snapshot.
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
"""Depth, and number of the run that computed it."""


def with_states(tree: PrefixTree, schedule: Schedule) -> Schedule:
    """Return a legal schedule whose chunks keep running states where later ops need them, and nowhere else.

    A liveness analysis, backwards from the last op: it tracks the depths of the path at which later ops read the state.
    The op that put a depth on the stack must keep the state there; a restore passes this on to the run that it copies.
    """
    sources = _sources(tree, schedule.ops)
    restored: dict[int, set[int]] = {}  # by position of the source: depths that restores need from it
    needed: list[int] = []  # ascending
    ops = list(schedule.ops)
    for position in reversed(range(len(ops))):
        op = ops[position]
        match op:
            case Restore(part):
                restored.setdefault(sources[position], set()).update(_pop_above(needed, part.start))
            case Anchor(chunk) | Forward(chunk):
                if chunk.spine is not None:
                    depths = restored.pop(position, set()).union(_pop_above(needed, chunk.start))
                    ops[position] = dataclasses.replace(op, states=tuple(sorted(depths)))
                _include(needed, chunk.start)
            case Backward(chunk):
                _include(needed, chunk.start)
    return dataclasses.replace(schedule, ops=tuple(ops))


def _sources(tree: PrefixTree, ops: Sequence[Op]) -> dict[int, int]:
    """Map the position of a restore to that of the anchor or forward whose spine it copies; -1 if none is kept."""
    kept, sources = KeptSpines[int](tree), {}
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


def _pop_above(depths: list[int], start: int) -> list[int]:
    """Remove and return the depths greater than `start` from an ascending list."""
    at = bisect_right(depths, start)
    removed = depths[at:]
    del depths[at:]
    return removed


def _include(depths: list[int], depth: int) -> None:
    """Insert a depth into an ascending list, once; depth 0 is left out, because the state there is zero."""
    at = bisect_left(depths, depth)
    if depth and depths[at : at + 1] != [depth]:
        depths.insert(at, depth)


def _kept_spine(op: Anchor | Forward) -> Slice | None:
    """Return the spine that the op keeps for restores, if any."""
    return op.chunk.spine if isinstance(op, Forward) or op.kv else None


class KeptSpines(Generic[Kept]):
    """Values kept per spine, looked up by any part of the spine. A spine replaces one with the same first token.

    Attributes:
        values: the kept values, by first row of the spine.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.values: dict[int, Kept] = {}
        self._first_row = np.full(tree.num_rows, -1)  # by row: first row of the spine that covers it

    def keep(self, spine: Slice, value: Kept) -> None:
        """Keep a value for a spine."""
        ranges = self.tree.row_ranges(spine.sequence, spine.start, spine.stop)
        for start, stop in ranges:
            self._first_row[start:stop] = ranges[0][0]
        self.values[ranges[0][0]] = value

    def forget(self, spine: Slice) -> Kept | None:
        """Remove and return the value of the spine with this first token, if any."""
        return self.values.pop(self.tree.row_at(spine.sequence, spine.start), None)

    def of(self, part: Slice) -> Kept | None:
        """Return the value of the spine that covers a part, if any."""
        return self.values.get(int(self._first_row[self.tree.row_at(part.sequence, part.start)]))


class LiveStates:
    """Counter of running states that are alive while a legal schedule runs, and of their waiting gradients."""

    def __init__(self, tree: PrefixTree, schedule: Schedule) -> None:
        self._in_use = any(isinstance(op, (Anchor, Forward)) and op.states for op in schedule.ops)
        self._path: list[State] = []  # on the stack, ascending
        self._kept = KeptSpines[list[State]](tree)
        self._holders: Counter[State] = Counter()  # reference counts: the stack and a kept chunk
        self._waiting: list[int] = []  # ascending depths at which a gradient waits
        self._runs = 0

    def step(self, op: Op) -> tuple[int, int]:
        """Advance by one op; return the most states, and the most gradients, that exist while it runs.

        A state on the stack that is also kept counts once, since nothing is copied. A backward adds its own gradient
        before it takes those of its spine.
        """
        if not self._in_use:
            return 0, 0
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
        self._release(dropped or [])
        if isinstance(op, Backward) and op.chunk.spine is not None:
            _pop_above(self._waiting, op.chunk.start)
        return alive, waiting

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
    """Return a key that sorts after all states at a depth."""
    return depth, float("inf")
