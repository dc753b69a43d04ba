"""Interpret a schedule without tensors: the one place that says what each op does to stack, graphs and kept spines.

Counts, bytes, running states, times and pictures are folds over its events. The verifier checks each op before it runs.
"""

from __future__ import annotations

import functools
import math
import operator
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from dta_compile.plan.schedule import Anchor, Backward, Forward, Op, Pop, Restore, Schedule
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.prefix_tree import IntArray, PrefixTree

Kept = TypeVar("Kept")
Item = TypeVar("Item")
State = tuple[int, int]
"""Running state: its depth, and the position of the op that computed it."""


class Work(NamedTuple):
    """Amount of work, in the units that the cost model prices.

    Attributes:
        launches: chunk runs.
        slices: slices of these chunks.
        tokens: tokens of these chunks.
        pairs: query-key pairs, the prefix and the query itself included.
        heads: head rows.
    """

    launches: int = 0
    slices: int = 0
    tokens: int = 0
    pairs: int = 0
    heads: int = 0

    def plus(self, other: Work) -> Work:
        """Return the sum of two amounts."""
        return Work(*map(operator.add, self, other))


def chunk_work(tree: PrefixTree, chunk: Chunk, head_starts: IntArray | None = None, head: bool = True) -> Work:
    """Count the work of running a chunk once; `head_starts` as in `interpret`, `head=False`: a run without outputs."""
    slices = chunk.slices
    tokens = chunk.tokens
    heads = tokens if head else 0
    if head and head_starts is not None:
        heads = sum(int(head_starts[stop] - head_starts[start]) for start, stop in tree.chunk_ranges(chunk))
    return Work(1, len(slices), tokens, sum(map(attention_pairs, slices)), heads)


def attention_pairs(part: Slice) -> int:
    """Return the query-key pairs of a slice: each token reads itself and all above it."""
    return (part.stop * (part.stop + 1) - part.start * (part.start + 1)) // 2


_NONE = Slice(0, 0, 0), None


class KeptSpines(Generic[Kept]):
    """Values kept per spine, looked up by any part of the spine. A spine replaces one with the same first token.

    Attributes:
        values: the spines and their values, by first row of the spine.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.values: dict[int, tuple[Slice, Kept]] = {}
        self._first_row = np.full(tree.num_rows, -1)  # by row: first row of the spine that covers it

    def keep(self, spine: Slice, value: Kept) -> Kept | None:
        """Keep a value for a spine; return the one that it replaces, if any."""
        ranges = self.tree.row_ranges(spine.sequence, spine.start, spine.stop)
        first = ranges[0][0]
        for start, stop in ranges:
            self._first_row[start:stop] = first
        replaced, self.values[first] = self.values.get(first, _NONE)[1], (spine, value)
        return replaced

    def forget(self, spine: Slice) -> Kept | None:
        """Remove and return the value of the spine with this first token, if any."""
        return self.values.pop(self.tree.row_at(spine.sequence, spine.start), _NONE)[1]

    def of(self, part: Slice) -> Kept | None:
        """Return the value of the spine that covers a part, if any."""
        row = self.tree.row_at(part.sequence, part.start)
        spine, value = self.values.get(int(self._first_row[row]), _NONE)
        covers = part.stop <= spine.stop and self.tree.same_path(part.sequence, spine.sequence, part.stop)
        return value if covers else None


class KeptSpine(NamedTuple):
    """Spine that a run keeps for restores.

    Attributes:
        position: position of the op that keeps it; -1: none does.
        alone: tokens whose KV is kept without a graph.
        states: running states, ascending.
    """

    position: int = -1
    alone: int = 0
    states: Sequence[State] = ()


class Held(NamedTuple):
    """Tokens held after an op.

    Attributes:
        stack: tokens on the stack.
        live: tokens whose graphs are live.
        stored: tokens of which only the KV is kept.
    """

    stack: int
    live: int
    stored: int


class Event(NamedTuple):
    """Effect of one op of a legal schedule.

    Attributes:
        op: the op; `op.graph` is the graph that it runs, "" if it runs none.
        work: amount of work; a forward that reads kept results of attention has no query-key pairs.
        restored: tokens whose KV is copied back.
        source: position of the op that keeps the spine that a restore copies; -1: none.
        sequence: sequence whose path is on the stack after the op; -1: none has been so far.
        held: tokens held after the op.
        heads: head rows whose graphs are live after the op.
        results: tokens of which only the results of attention are kept after the op.
        states, state_gradients: most running states, and gradients waiting for states, that exist while it runs.
    """

    op: Op
    work: Work
    restored: int
    source: int
    sequence: int
    held: Held
    heads: int
    results: int
    states: int
    state_gradients: int


_NOTHING, _NOT_KEPT = Work(), KeptSpine()


class Interpreter:
    """State of a schedule that runs without tensors, op by op.

    Attributes:
        position: position of the next op.
        sequence, depth: the stack holds the first `depth` tokens of the path of `sequence`; -1 before the first push.
        states: running states on the stack, ascending.
        live: chunks with a live graph, and the work of their backward.
        kept: spines that restores may copy.
        results: chunks whose results of attention are kept.
    """

    def __init__(
        self, tree: PrefixTree, schedule: Schedule, work_of: Callable[[Chunk, bool], Work] = lambda *_: _NOTHING
    ) -> None:
        """`work_of`: counts the work of a chunk, with outputs or without; by default no work is counted."""
        self._work_of = work_of
        self.position, self.sequence, self.depth = 0, -1, 0
        self.states: list[State] = []
        self.live: dict[Chunk, Work] = {}
        self.kept = KeptSpines[KeptSpine](tree)
        self.results: set[Chunk] = set()
        self._tokens = self._heads = self._stored = self._of_results = 0
        self._has_states = any(getattr(op, "states", ()) for op in schedule.ops)
        self._holders: Counter[State] = Counter()  # references to running states: by the stack and by kept spines
        self._waiting: list[int] = []  # ascending depths of the stack at which the gradient of a state waits

    def step(self, op: Op) -> Event:
        """Run the next op, which must be legal.

        A running state on the stack that is also kept counts once, since nothing is copied. A backward adds its own
        gradient of a state before it takes those of its spine.
        """
        work, copied, dropped, restored = _NOTHING, _NOT_KEPT, _NOT_KEPT, 0
        states, waiting = len(self._holders), len(self._waiting)
        match op:
            case Forward(chunk):
                work = self.live[chunk] = self._work_of(chunk, True)
                self._tokens, self._heads = self._tokens + work.tokens, self._heads + work.heads
                dropped = self._push_spine(op, True)
                if chunk in self.results:
                    self.results.remove(chunk)
                    self._of_results -= work.tokens
                    work = work._replace(pairs=0)
            case Backward(chunk):
                work = self.live.pop(chunk)
                self._tokens, self._heads = self._tokens - work.tokens, self._heads - work.heads
                if self._has_states:
                    include(self._waiting, chunk.start)
                    waiting = len(self._waiting)
                if chunk.spine is not None:
                    dropped = self.kept.forget(chunk.spine) or dropped
                    pop_above(self._waiting, chunk.start)
            case Anchor(chunk, out, kv):
                work = self._work_of(chunk, out)
                dropped = self._push_spine(op, kv)
                if op.results and chunk not in self.results:
                    self.results.add(chunk)
                    self._of_results += work.tokens
            case Restore(part):
                copied, restored = self.kept.of(part) or copied, part.tokens
                self._push(part, [state for state in copied.states if part.start < state[0] <= part.stop])
            case Pop(part):
                self._cut(part.start)
        states = max(states, len(self._holders))
        self._stored -= dropped.alone
        self._hold(dropped.states, -1)
        self.position += 1
        held = Held(self.depth, self._tokens, self._stored)
        rest = self._heads, self._of_results, states, waiting
        return Event(op, work, restored, copied.position, self.sequence, held, *rest)

    def _push_spine(self, op: Anchor | Forward, keep: bool) -> KeptSpine:
        """Push and keep the spine of a chunk, if it has one; return what was kept in its place."""
        if (spine := op.chunk.spine) is None:
            return _NOT_KEPT
        states = [(depth, self.position) for depth in op.states]
        self._push(spine, states)
        if not keep:
            return _NOT_KEPT
        alone = spine.tokens if isinstance(op, Anchor) else 0
        self._stored += alone
        self._hold(states, 1)
        return self.kept.keep(spine, KeptSpine(self.position, alone, states)) or _NOT_KEPT

    def _push(self, part: Slice, states: Sequence[State]) -> None:
        self._cut(part.start)
        self.sequence, self.depth = part.sequence, part.stop
        self.states += states
        self._hold(states, 1)

    def _cut(self, depth: int) -> None:
        self.depth = depth
        if self.states:
            self._hold(pop_above(self.states, (depth, math.inf)), -1)

    def _hold(self, states: Iterable[State], more: int) -> None:
        for state in states:
            self._holders[state] += more
            if not self._holders[state]:
                del self._holders[state]


def interpret(tree: PrefixTree, schedule: Schedule, head_starts: IntArray | None = None) -> Iterator[Event]:
    """Run a legal schedule without tensors, op by op.

    Args:
        head_starts: `[R + 1]` tree row r has the head rows `[head_starts[r], head_starts[r + 1])`; None: one each.
    """
    work_of = functools.cache(lambda chunk, head: chunk_work(tree, chunk, head_starts, head))
    return map(Interpreter(tree, schedule, work_of).step, schedule.ops)


def pop_above(items: list[Item], bound: Any) -> list[Item]:
    """Remove and return the items greater than `bound` from an ascending list."""
    at = bisect_right(items, bound)
    removed = items[at:]
    del items[at:]
    return removed


def include(depths: list[int], depth: int) -> None:
    """Insert a depth into an ascending list, once; depth 0 is left out, because the running state there is zero."""
    at = bisect_left(depths, depth)
    if depth and depths[at : at + 1] != [depth]:
        depths.insert(at, depth)
