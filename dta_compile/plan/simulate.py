"""Simulate a schedule without tensors: count its work, and the tokens and states that it holds."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dta_compile.plan.schedule import Anchor, Backward, Forward, Op, Pop, Restore, Schedule
from dta_compile.plan.states import LiveStates
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.prefix_tree import IntArray, PrefixTree


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
        held: tokens held after the op.
        states, state_gradients: most running states, and gradients waiting for states, that exist while it runs.
    """

    op: Op
    work: Work
    held: Held
    states: int
    state_gradients: int


def interpret(tree: PrefixTree, schedule: Schedule, head_starts: IntArray | None = None) -> Iterator[Event]:
    """Run a legal schedule without tensors, op by op; all counts, bytes and times are folds over its events."""
    states = LiveStates(tree, schedule)
    work_of = functools.cache(lambda chunk, head=True: chunk_work(tree, chunk, head_starts, head))
    stored: dict[Chunk, int] = {}
    with_results: set[Chunk] = set()
    depth = live = kept = 0
    for op in schedule.ops:
        work = Work()
        match op:
            case Anchor(chunk, out):
                work = work_of(chunk, out)
                if op.kv and chunk.spine is not None:
                    stored[chunk] = chunk.spine.tokens
                    kept += chunk.spine.tokens
                if op.results:
                    with_results.add(chunk)
            case Forward(chunk):
                work, live = work_of(chunk), live + chunk.tokens
                if chunk in with_results:
                    with_results.remove(chunk)
                    work = work._replace(pairs=0)
            case Backward(chunk):
                work, live = work_of(chunk), live - chunk.tokens
                kept -= stored.pop(chunk, 0)
            case Restore(part):
                depth = part.stop
            case Pop(part):
                depth = part.start
        if isinstance(op, (Anchor, Forward)) and op.chunk.spine is not None:
            depth = op.chunk.spine.stop
        yield Event(op, work, Held(depth, live, kept), *states.step(op))


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
    restored, peak, states, gradients = 0, Held(0, 0, 0), 0, 0
    for event in interpret(tree, schedule, head_starts):
        peak = Held(*map(max, peak, event.held))
        states, gradients = max(states, event.states), max(gradients, event.state_gradients)
        if event.op.graph == "backward":
            backward = backward.plus(event.work)
        elif event.op.graph == "cache_only" and schedule.sweep == "stages":
            rebuilt = rebuilt.plus(event.work)
        else:
            forward = forward.plus(event.work)
        restored += event.op.part.tokens if isinstance(event.op, Restore) else 0
    return Simulation(
        ops=len(schedule.ops),
        forward=forward,
        backward=backward,
        rebuilt=rebuilt,
        recomputed_tokens=forward.tokens - tree.num_rows,
        restored_tokens=restored,
        peak_stack_tokens=peak.stack,
        peak_live_tokens=peak.live,
        peak_stored_tokens=peak.stored,
        peak_states=states,
        peak_state_gradients=gradients,
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


def causal_pairs(lengths: IntArray) -> int:
    """Return the query-key pairs of causal attention over whole paths of these lengths."""
    return int((lengths * (lengths + 1)).sum()) // 2


def attention_pairs(part: Slice) -> int:
    """Return the query-key pairs of a slice: each token reads itself and all above it."""
    return (part.stop * (part.stop + 1) - part.start * (part.start + 1)) // 2
