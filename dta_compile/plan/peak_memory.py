"""Predict bytes: graphs, KV and running states that chunks keep, and the peak memory of a schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dta_compile.plan.interpret import Held, Work, interpret
from dta_compile.plan.schedule import Attach, Schedule
from dta_compile.plan.simulate import by_group
from dta_compile.plan.tree.chunk import Chunk
from dta_compile.plan.tree.prefix_tree import IntArray, PrefixTree

Linear = tuple[float, float, float]
"""Bytes as `a + b * tokens + c * head rows`."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes per token, head row and depth of a model's chunks.

    Attributes:
        graph_token, graph_head: activations of a kept graph per token and per head row.
        kv_token: keys and values of one token, all layers.
        result_token: results of attention (output and log-sum-exps) of one token, all layers; 0: not known.
        working: bytes live while a graph runs, as the largest of several linear functions, by graph: "cache_only",
            "forward_only", "forward" or "backward" (which includes its own graph, freed as it runs); "first_backward":
            the same, and sums of parameter gradients as their first summands arrive.
        state: running states of all recurrent layers at one depth; 0: the model has none. Gradients of states count
            the same, so give their size where they are wider (at least float32).
    """

    graph_token: float = 1.0
    graph_head: float = 0.0
    kv_token: float = 0.0
    result_token: float = 0.0
    working: Mapping[str, tuple[Linear, ...]] = dataclasses.field(default_factory=dict)
    state: float = 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether no bytes are known, and the activations of one token count as 1."""
        return self.graph_token == Footprint.graph_token

    @property
    def has_states(self) -> bool:
        """Whether the model has running states."""
        return self.state > 0

    def graph(self, work: Work) -> float:
        """Return the bytes of a kept graph."""
        return self.graph_token * work.tokens + self.graph_head * work.heads

    def kv(self, chunk: Chunk) -> float:
        """Return the bytes of the KV of a chunk's spine."""
        return self.kv_token * chunk.spine.tokens if chunk.spine is not None else 0.0

    def results(self, chunk: Chunk) -> float:
        """Return the bytes of the results of attention of a chunk."""
        return self.result_token * chunk.tokens

    def while_running(self, graph: str, work: Work) -> float:
        """Return the bytes live at the peak of a graph's run, its results included."""
        return max((a + b * work.tokens + c * work.heads for a, b, c in self.working.get(graph, ())), default=0.0)


class PartBytes(NamedTuple):
    """Bytes that a part of the model (or all of it) takes in a step.

    Attributes:
        footprint: footprint of its chunks.
        sums: buffers in which gradients of its parameters are summed.
        sent: values that it passes to later parts, per token.
        returned: gradients of its outputs of the call, both as they arrive and summed onto rows.
        reduced: share of `sums` that is reduced over ranks after every group of subtrees, instead of after all.
        gathered: parameters gathered from other ranks, and whole gradients not yet reduced, as it goes forward and
            backward, and as its gradients are reduced.
    """

    footprint: Footprint
    sums: float = 0.0
    sent: float = 0.0
    returned: float = 0.0
    reduced: float = 0.0
    gathered: tuple[float, float, float] = (0.0, 0.0, 0.0)


def bytes_of_halves(
    tree: PrefixTree,
    schedule: Schedule,
    parts: Sequence[PartBytes],
    stack_tokens: int,
    head_starts: IntArray | None = None,
    known: dict[tuple[int, int, float], tuple[float, float, float]] | None = None,
) -> tuple[float, float]:
    """Return the peak bytes of the first and the second half of a schedule, all parts included.

    Counts kept graphs and KV, all running states and their gradients, the working memory of running graphs, the stack
    and its gradients, sums of parameter gradients, values passed between parts, and gradients of outputs.

    Args:
        parts: the parts of a sweep of stages; one part with all layers for a sweep of chunks.
        stack_tokens: most tokens on the stack.
        known: bytes of parts alone, by footprint and ops, for further calls with the same tree.
    """
    if schedule.groups:
        carried = sum(part.sums - part.reduced + part.returned for part in parts)
        alone = [part._replace(sums=part.reduced, returned=0.0) for part in parts]
        peaks = [
            bytes_of_halves(tree_of_group, run, alone, stack_tokens, starts)
            for tree_of_group, run, starts in by_group(tree, schedule, head_starts)
        ]
        return max(first for first, _ in peaks), carried + max(map(max, peaks))
    # By footprint and ops: peaks of both halves, and bytes kept between them.
    known = {} if known is None else known
    first = second = held = 0.0
    for stretch in schedule.stretches(len(parts)):
        # What its parts send is kept by the last of them, and computed again for the others. Before the backward of the
        # last part there are gradients of what it sends.
        between, of_last = 0.0, parts[stretch[-1]].sent * tree.num_rows
        for number in stretch:
            part, run = parts[number], schedule.of_part(number)
            footprint, sent = part.footprint, part.sent * tree.num_rows
            key = id(footprint), id(run.ops), part.sums
            if key not in known:
                known[key] = _halves(tree, run, footprint, head_starts, part.sums)
            forward, backward, left = known[key]
            stack = footprint.kv_token * stack_tokens
            received = parts[number - 1].sent * tree.num_rows if number > stretch[0] else 0.0
            first = max(first, held + received + stack + forward + sent + part.gathered[0])
            # The second half runs the parts in reverse: later parts are freed, and gradients of sent values are here.
            here = 2 * stack + part.returned + part.gathered[1]
            so_far = held + between
            second = max(second, so_far + here + backward + 2 * sent, so_far + part.gathered[2])
            between += sent
            if number < stretch[-1]:  # again
                second = max(second, so_far + stack + forward + sent + of_last + part.gathered[1])
            else:
                held += sent + (left if len(parts) > 1 else 0.0)
    return first, second


def _halves(
    tree: PrefixTree, schedule: Schedule, footprint: Footprint, head_starts: IntArray | None, sums: float
) -> tuple[float, float, float]:
    """Return the peak bytes of one part in the first half and from the first attach on, and those kept between."""
    live = list(bytes_by_op(tree, schedule, footprint, head_starts, sums))
    middle = next((n for n, op in enumerate(schedule.ops) if isinstance(op, Attach)), len(live))
    first, second = (max((of_op.peak for of_op in half), default=sums) for half in (live[:middle], live[middle:]))
    return first, second, live[middle].kept if middle < len(live) else 0.0


class LiveBytes(NamedTuple):
    """Bytes of kept graphs and KV after an op; the peak while it runs, with running states and working memory.

    Attributes:
        held: tokens held after the op.
    """

    kept: float
    peak: float
    held: Held


def bytes_by_op(
    tree: PrefixTree,
    schedule: Schedule,
    footprint: Footprint,
    head_starts: IntArray | None = None,
    sums: float = 0.0,
) -> Iterator[LiveBytes]:
    """Yield the live bytes during and after every op of a legal schedule.

    Args:
        sums: sums of parameter gradients: from the first backward on, or if it is not known how they begin in it, from
            the second half on.
    """
    kept = begun = 0.0
    for event in interpret(tree, schedule, head_starts):
        graph, before, in_sums = event.op.graph, kept, begun
        kept = footprint.graph_token * event.held.live + footprint.graph_head * event.heads
        kept += footprint.kv_token * event.held.stored + footprint.result_token * event.results
        if graph == "backward":  # its working memory includes its graph
            before, begun = kept, sums
            if "first_backward" in footprint.working and in_sums < sums:
                graph = "first_backward"
        elif isinstance(event.op, Attach) and "first_backward" not in footprint.working:
            in_sums = begun = sums
        running = footprint.while_running(graph, event.work)
        in_states = footprint.state * (event.states + event.state_gradients)
        yield LiveBytes(kept, max(before + running, kept) + in_sums + in_states, event.held)
