"""Predict bytes: graphs, KV and running states that chunks keep, and the peak memory of a schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from dta_compile.plan.interpret import Held, Work, interpret
from dta_compile.plan.schedule import Attach, Backward, Schedule, extent
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
        kv_gradient: bytes of the summed gradient of one byte of `kv_token`: 2 where float32 sums go with 16 bits.
    """

    graph_token: float = 1.0
    graph_head: float = 0.0
    kv_token: float = 0.0
    result_token: float = 0.0
    working: Mapping[str, tuple[Linear, ...]] = dataclasses.field(default_factory=dict)
    state: float = 0.0
    kv_gradient: float = 1.0

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
        readers: bytes of each of these values, and the parts that read it, ascending; none: the next part reads all.
        returned: gradients of its outputs of the call as they arrive, which is before any part goes backward.
        on_rows: these gradients, summed onto rows as it goes backward.
        reduced: share of `sums` that is reduced over ranks after every group of subtrees, instead of after all.
        gathered: parameters gathered from other ranks, and whole gradients not yet reduced, as it goes forward and
            backward, and as its gradients are reduced.
        goes_backward: it or an earlier part has parameters with a gradient. Otherwise nothing is kept for it.
    """

    footprint: Footprint
    sums: float = 0.0
    sent: float = 0.0
    readers: tuple[tuple[float, tuple[int, ...]], ...] = ()
    returned: float = 0.0
    on_rows: float = 0.0
    reduced: float = 0.0
    gathered: tuple[float, float, float] = (0.0, 0.0, 0.0)
    goes_backward: bool = True


class Crossing:
    """Bytes per token of the values between parts, by part; those of part `n` are `[n]`.

    A stretch keeps what enters it from earlier parts, and computes again what its parts pass to each other.

    Attributes:
        forward: kept, or on its way to this part or a later one, as it goes forward.
        kept: kept as it goes backward.
        again: computed again by earlier parts of its stretch.
        arrived: gradients that have come from later parts.
        returned: gradients that it returns of the values that it reads.
        most: the most that are there at one time, with those that a part sends or their gradients.
    """

    def __init__(self, parts: Sequence[PartBytes], stretches: Sequence[range], saves: bool = True) -> None:
        """`saves`: values are saved for a backward."""
        begin = {number: stretch.start for stretch in stretches for number in stretch}
        end = {number: stretch.stop for stretch in stretches for number in stretch}
        levels = [[0.0] * (len(parts) + 1) for _ in range(4)]
        self.returned = [0.0] * len(parts)

        def add(level: list[float], size: float, first: int, stop: int) -> None:
            level[first] += size
            level[stop] -= size

        forward, kept, again, arrived = levels
        for writer, part in enumerate(parts):
            for size, readers in part.readers or ((part.sent, (writer + 1,)),) * (writer + 1 < len(parts)):
                last = readers[-1]
                keep = [reader for reader in readers if parts[end[reader] - 1].goes_backward]
                enters = next((begin[reader] for reader in keep if writer < begin[reader]), None)
                is_kept = saves and enters is not None
                add(forward, size, writer + 1, len(parts) if is_kept else last + 1)
                if part.goes_backward:
                    add(arrived, size, writer, last)
                if enters is not None:
                    add(kept, size, enters, len(parts))
                if readers[0] < end[writer]:
                    add(again, size, writer + 1, end[writer])
                for reader in readers if part.goes_backward else ():
                    self.returned[reader] += size
        self.forward, self.kept, self.again, self.arrived = (list(accumulate(level)) for level in levels)
        here = zip(parts, self.forward, self.kept, self.again, strict=False)
        self.most = max(part.sent + max(out, kept + again) for part, out, kept, again in here)


def bytes_of_halves(
    tree: PrefixTree,
    schedule: Schedule,
    parts: Sequence[PartBytes],
    stack_tokens: int,
    head_starts: IntArray | None = None,
    known: dict[tuple[object, ...], tuple[float, float, float]] | None = None,
) -> tuple[float, float]:
    """Return the peak bytes of the first and the second half of a schedule, all parts included.

    Counts kept graphs and KV, all running states and their gradients, the working memory of running graphs, the stack
    and its gradients, sums of parameter gradients, values passed between parts and their gradients, and gradients of
    outputs.

    Args:
        parts: the parts of a sweep of stages; one part with all layers for a sweep of chunks.
        stack_tokens: most tokens on the stack.
        known: bytes of parts alone, by what they depend on, for further calls with the same tree.
    """
    if schedule.groups:
        carried = sum(part.sums - part.reduced + part.returned + part.on_rows for part in parts)
        alone = [part._replace(sums=part.reduced, returned=0.0, on_rows=0.0) for part in parts]
        peaks = [
            bytes_of_halves(tree_of_group, run, alone, stack_tokens, starts)
            for tree_of_group, run, starts in by_group(tree, schedule, head_starts)
        ]
        return max(first for first, _ in peaks), carried + max(map(max, peaks))
    known = {} if known is None else known
    stretches, rows = schedule.stretches(len(parts)), sum(chunk.tokens for chunk in schedule.chunks)
    crossing = Crossing(parts, stretches, schedule.mode != "score")
    first = second = held = returned = 0.0
    for stretch in stretches:
        last = stretch[-1]
        of_last = crossing.kept[last] + crossing.arrived[last]
        outputs = returned + sum(parts[number].returned for number in stretch)
        for number in stretch:
            part, run = parts[number], schedule.of_part(number)
            footprint, passed = part.footprint, (part.sent, crossing.returned[number])
            key = id(footprint), id(run.ops), part.sums, passed
            if key not in known:
                known[key] = _halves(tree, run, footprint, head_starts, part.sums, passed)
            forward, backward, left = known[key]
            stack = footprint.kv_token * stack_tokens
            first = max(first, held + rows * crossing.forward[number] + stack + forward + part.gathered[0])
            # The second half runs the parts in reverse: later parts are freed.
            returned += part.returned
            here = held + returned + rows * (crossing.kept[number] + crossing.arrived[number])
            again = rows * crossing.again[number]
            stack_and_gradients = (1 + footprint.kv_gradient) * stack
            if part.goes_backward:
                second = max(second, here + again + stack_and_gradients + part.on_rows + backward + part.gathered[1])
            if number < last:
                second = max(second, held + outputs + rows * of_last + again + stack + forward + part.gathered[1])
            if number + 1 < len(parts):  # the gradients of the part after this one are reduced
                second = max(second, here + again * (number < last) + parts[number + 1].gathered[2])
            held += left if len(parts) > 1 and part.goes_backward else 0.0
    return first, max(second, parts[0].gathered[2])


def _halves(
    tree: PrefixTree,
    schedule: Schedule,
    footprint: Footprint,
    head_starts: IntArray | None,
    sums: float,
    passed: tuple[float, float],
) -> tuple[float, float, float]:
    """Return the peak bytes of one part in the first half and from the first attach on, and those kept between.

    Args:
        passed: bytes per token of the values that it sends, and of the gradients that it returns, which grow with
            every chunk.
    """
    peaks, half, left, before = [0.0, sums], 0, 0.0, 0.0
    for op, of_op in zip(schedule.ops, bytes_by_op(tree, schedule, footprint, head_starts, sums), strict=True):
        if isinstance(op, Attach) and not half:
            half, left, before = 1, of_op.kept, 0.0
        chunk = extent(op)
        passes = isinstance(op, Backward) if half else isinstance(chunk, Chunk)
        after = before + passed[half] * chunk.tokens if passes and chunk is not None else before
        begun = sums if isinstance(op, Backward) else 0.0  # which a forward before them does not have yet
        peaks[half] = max(peaks[half], before + of_op.peak, after + of_op.kept + begun)
        before = after
    return peaks[0], peaks[1], left


class LiveBytes(NamedTuple):
    """Bytes of kept graphs and KV after an op; the peak while it runs, with running states and working memory.

    Attributes:
        held: tokens held after the op.
    """

    kept: float
    peak: float
    held: Held


def bytes_by_op(
    tree: PrefixTree, schedule: Schedule, footprint: Footprint, head_starts: IntArray | None = None, sums: float = 0.0
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
