"""Bytes: what chunks that are kept take, and the peak of a whole schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dta_compile.plan.schedule import Anchor, Attach, Backward, Forward, Schedule
from dta_compile.plan.simulate import Work, chunk_work
from dta_compile.plan.states import LiveStates
from dta_compile.plan.tree.chunk import Chunk
from dta_compile.plan.tree.prefix_tree import IntArray, PrefixTree

__all__ = ["Footprint", "LiveBytes", "PartBytes", "bytes_by_op", "bytes_of_halves", "peak_bytes"]

Linear = tuple[float, float, float]
"""Bytes as `a + b * tokens + c * head rows`."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes that a model's chunks take.

    Attributes:
        graph_token, graph_head: what a kept graph holds per token and per head row.
        kv_token: keys and values of one token, all layers.
        working: what lives while a graph runs, as the largest of several linear functions; by the name of the graph:
            "cache_only", "forward_only", "forward", "backward" (whose graph is freed as it runs, and counts).
        state: the running states of all recurrent layers at one depth; 0 says that the model has none. Gradients of
            them are taken for as large, so where these are wider (float32 at least), theirs is the size to give.
    """

    graph_token: float = 1.0
    graph_head: float = 0.0
    kv_token: float = 0.0
    working: Mapping[str, tuple[Linear, ...]] = dataclasses.field(default_factory=dict)
    state: float = 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether no bytes are known: what a graph keeps of a token counts as one."""
        return self.graph_token == Footprint.graph_token

    @property
    def has_states(self) -> bool:
        """Whether the model has running states."""
        return self.state > 0

    def graph(self, work: Work) -> float:
        """Bytes of a kept graph."""
        return self.graph_token * work.tokens + self.graph_head * work.heads

    def kv(self, chunk: Chunk) -> float:
        """Bytes of the KV of a chunk's spine."""
        return self.kv_token * chunk.spine.tokens if chunk.spine is not None else 0.0

    def while_running(self, graph: str, work: Work) -> float:
        """Bytes that live at the peak of a graph's run, its results included."""
        return max((a + b * work.tokens + c * work.heads for a, b, c in self.working.get(graph, ())), default=0.0)


def peak_bytes(
    tree: PrefixTree, schedule: Schedule, footprint: Footprint, head_starts: IntArray | None = None
) -> tuple[float, float]:
    """Most bytes that live while a schedule runs, in its first phase and after its (first) attach.

    Counts kept graphs and KV, running states wherever they are, gradients of these, and what works while a graph runs;
    not the KV on the stack, accumulators, outputs.
    """
    return _halves(tree, schedule, footprint, head_starts)[:2]


class PartBytes(NamedTuple):
    """Bytes that a part of the layers takes, or all of them, in a step.

    Attributes:
        footprint: of its chunks.
        sums: that gradients of its parameters are summed in.
        sent: that it hands to parts after it, per token.
        returned: gradients of what it returns from the call, as they come and as they are summed onto rows.
    """

    footprint: Footprint
    sums: float = 0.0
    sent: float = 0.0
    returned: float = 0.0


def bytes_of_halves(
    tree: PrefixTree,
    schedule: Schedule,
    parts: Sequence[PartBytes],
    stack_tokens: int,
    head_starts: IntArray | None = None,
) -> tuple[float, float]:
    """Most bytes that live in the first half of a schedule, and in the second: as `peak_bytes`, with the stack and its
    gradients, sums of gradients of parameters, what parts hand to one another, and gradients of what they return.

    Args:
        parts: all layers as one for a sweep of chunks.
        stack_tokens: most tokens on the stack.
    """
    # By footprint and ops: the peaks, and what is left between the halves.
    known: dict[tuple[int, int], tuple[float, float, float]] = {}
    first = second = held = 0.0
    for number, part in enumerate(parts):
        footprint, sent = part.footprint, part.sent * tree.num_rows
        run = schedule.of_part(number)
        key = id(footprint), id(run.ops)
        if key not in known:
            known[key] = _halves(tree, run, footprint, head_starts)
        forward, backward, left = known[key]
        stack = footprint.kv_token * stack_tokens
        first = max(first, held + stack + forward + sent)
        # Of the later parts everything is gone by then; of what it sent there are gradients now.
        second = max(second, held + 2 * stack + part.sums + backward + 2 * sent + part.returned)
        held += sent + (left if len(parts) > 1 else 0.0)
    return first, second


def _halves(
    tree: PrefixTree, schedule: Schedule, footprint: Footprint, head_starts: IntArray | None
) -> tuple[float, float, float]:
    first = second = left = 0.0
    is_second = False
    for op, live in zip(schedule.ops, bytes_by_op(tree, schedule, footprint, head_starts), strict=True):
        if is_second or isinstance(op, Attach):
            left = left if is_second else live.kept
            is_second, second = True, max(second, live.peak)
        else:
            first = max(first, live.peak)
    return first, second, left


class LiveBytes(NamedTuple):
    """Bytes that an op leaves in kept graphs and KV, and the most that live as it runs (see `peak_bytes`)."""

    kept: float
    peak: float


def bytes_by_op(
    tree: PrefixTree, schedule: Schedule, footprint: Footprint, head_starts: IntArray | None = None
) -> Iterator[LiveBytes]:
    """What lives during and after every op of a legal schedule."""
    graphs: dict[Chunk, float] = {}
    stored: dict[Chunk, float] = {}
    total = 0.0
    states = LiveStates(tree, schedule)
    for op in schedule.ops:
        before, in_states, running = total, footprint.state * states.step(op), 0.0
        match op:
            case Anchor(chunk, out, kv):
                work = chunk_work(tree, chunk, head_starts, out)
                running = footprint.while_running("forward_only" if out else "cache_only", work)
                if kv:
                    stored[chunk] = footprint.kv(chunk)
                    total += stored[chunk]
            case Forward(chunk):
                work = chunk_work(tree, chunk, head_starts)
                running = footprint.while_running("forward", work)
                graphs[chunk] = footprint.graph(work)
                total += graphs[chunk] - stored.pop(chunk, 0.0)
            case Backward(chunk):
                work = chunk_work(tree, chunk, head_starts)
                total -= graphs.pop(chunk, 0.0)
                before, running = total, footprint.while_running("backward", work)
        yield LiveBytes(total, max(before + running, total) + in_states)
