"""Simulate a schedule without tensors: count its work, and the tokens and states that it holds."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dta_compile.plan.schedule import Anchor, Backward, Forward, Pop, Restore, Schedule
from dta_compile.plan.states import LiveStates
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.prefix_tree import IntArray, PrefixTree

__all__ = [
    "Held",
    "Simulation",
    "Work",
    "attention_pairs",
    "by_group",
    "causal_pairs",
    "chunk_work",
    "held_tokens",
    "simulate",
    "work_by_op",
]


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


def chunk_work(tree: PrefixTree, chunk: Chunk, head_starts: IntArray | None = None, head: bool = True) -> Work:
    """Count the work of running a chunk once; `head_starts` as in `simulate`, `head=False`: a run without outputs."""
    slices = chunk.slices
    tokens = chunk.tokens
    heads = tokens if head else 0
    if head and head_starts is not None:
        heads = sum(int(head_starts[stop] - head_starts[start]) for start, stop in tree.chunk_ranges(chunk))
    return Work(1, len(slices), tokens, sum(map(attention_pairs, slices)), heads)


def work_by_op(tree: PrefixTree, schedule: Schedule, head_starts: IntArray | None = None) -> Iterator[Work]:
    """Yield the work of every op; a forward that reads kept results of attention has no query-key pairs."""
    with_results: set[Chunk] = set()
    for op in schedule.ops:
        match op:
            case Anchor(chunk, out):
                if op.results:
                    with_results.add(chunk)
                yield chunk_work(tree, chunk, head_starts, out)
            case Forward(chunk) if chunk in with_results:
                with_results.remove(chunk)
                yield chunk_work(tree, chunk, head_starts)._replace(pairs=0)
            case Forward(chunk) | Backward(chunk):
                yield chunk_work(tree, chunk, head_starts)
            case _:
                yield Work()


def simulate(tree: PrefixTree, schedule: Schedule, head_starts: IntArray | None = None) -> Simulation:
    """Count a schedule that is known to be legal, in O(ops); `verify` checks and counts any other.

    Where parts run different ops, the counts are averages over the parts, rounded.

    Args:
        head_starts: `[R + 1]` tree row r has the head rows `[head_starts[r], head_starts[r + 1])`; None: one each.
    """
    if schedule.groups:
        return _of_all_groups(tree, schedule, head_starts)
    if schedule.others:
        return _average([(share, simulate(tree, kind, head_starts)) for share, kind in schedule.kinds])
    forward, backward, rebuilt = Work(), Work(), Work()
    restored, peak = 0, Held(0, 0, 0)
    states = LiveStates(tree, schedule)
    works = work_by_op(tree, schedule, head_starts)
    for op, work, held in zip(schedule.ops, works, held_tokens(schedule), strict=True):
        states.step(op)
        peak = Held(*map(max, peak, held))
        match op:
            case Anchor(_, False) if schedule.sweep == "stages":
                rebuilt = rebuilt.plus(work)
            case Anchor() | Forward():
                forward = forward.plus(work)
            case Backward():
                backward = backward.plus(work)
            case Restore(part):
                restored += part.tokens
    return Simulation(
        ops=len(schedule.ops),
        forward=forward,
        backward=backward,
        recomputed_tokens=forward.tokens - tree.num_rows,
        restored_tokens=restored,
        peak_stack_tokens=peak.stack,
        peak_live_tokens=peak.live,
        peak_stored_tokens=peak.stored,
        peak_states=states.peak,
        peak_state_gradients=states.peak_gradients,
        rebuilt=rebuilt,
    )


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
    """Count all groups. The first half of each runs twice: for its outputs, and for its hidden states."""
    counts: list[Simulation] = []
    for part, run, starts in by_group(tree, schedule, head_starts):
        first = simulate(part, dataclasses.replace(run, ops=run.halves[0]), starts)
        both = simulate(part, run, starts)
        counts.append(dataclasses.replace(both, forward=both.forward.plus(first.forward)))

    def over_groups(combine: Callable[[Any, Any], Any], name: str) -> Any:
        return functools.reduce(combine, (getattr(count, name) for count in counts))

    names = [field.name for field in dataclasses.fields(Simulation)]
    values = {name: over_groups(max if name.startswith("peak") else _plus, name) for name in names}
    return Simulation(**values | {"recomputed_tokens": values["forward"].tokens - tree.num_rows})


def _plus(one: Any, other: Any) -> Any:
    return one.plus(other) if isinstance(one, Work) else one + other


def _average(shares: Sequence[tuple[float, Simulation]]) -> Simulation:
    """Average the counts of parts that run different ops, weighted by share; the stack peak is the maximum."""

    def mean(values: Iterable[Any]) -> Any:
        by_part = list(values)
        if isinstance(by_part[0], Work):
            return Work(*(mean(amounts) for amounts in zip(*by_part, strict=True)))
        return round(sum(share * value for (share, _), value in zip(shares, by_part, strict=True)))

    names = [field.name for field in dataclasses.fields(Simulation)]
    averages = {name: mean(getattr(counts, name) for _, counts in shares) for name in names}
    return Simulation(**averages | {"peak_stack_tokens": max(counts.peak_stack_tokens for _, counts in shares)})


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


def held_tokens(schedule: Schedule) -> Iterator[Held]:
    """Yield the tokens held after every op of a legal schedule."""
    depth, live, stored = 0, _Gauge(), _Gauge()
    for op in schedule.ops:
        match op:
            case Anchor(chunk, _, kv) if kv and chunk.spine is not None:
                stored.add(chunk, chunk.spine.tokens)
            case Forward(chunk):
                live.add(chunk, chunk.tokens)
            case Backward(chunk):
                live.remove(chunk)
                stored.remove(chunk)
            case Restore(part):
                depth = part.stop
            case Pop(part):
                depth = part.start
        if isinstance(op, (Anchor, Forward)) and op.chunk.spine is not None:
            depth = op.chunk.spine.stop
        yield Held(depth, live.total, stored.total)


class _Gauge:
    """Running total of the tokens held by chunks."""

    def __init__(self) -> None:
        self.held: dict[Chunk, int] = {}
        self.total = 0

    def add(self, chunk: Chunk, tokens: int) -> None:
        self.held[chunk] = tokens
        self.total += tokens

    def remove(self, chunk: Chunk) -> None:
        self.total -= self.held.pop(chunk, 0)


def causal_pairs(lengths: IntArray) -> int:
    """Return the query-key pairs of causal attention over whole paths of these lengths."""
    return int((lengths * (lengths + 1)).sum()) // 2


def attention_pairs(part: Slice) -> int:
    """Return the query-key pairs of a slice: each token reads itself and all above it."""
    return (part.stop * (part.stop + 1) - part.start * (part.start + 1)) // 2
