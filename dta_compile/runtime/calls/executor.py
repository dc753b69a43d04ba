"""Interpret a schedule: one loop over its ops (paper Algorithms 2 and 3, and packed chunks).

The transparent mode runs the ops up to the `attach` op in the forward and the rest in the backward of autograd; the
streaming mode runs all ops at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dta_compile.executable.chunk import Part
from dta_compile.executable.executable import FrontierValue
from dta_compile.executable.pieces import NO_CODES, Codes, running
from dta_compile.plan import Segment, Work, segments
from dta_compile.plan.interpret import KeptSpines, attention_pairs
from dta_compile.plan.schedule import Anchor, Attach, Backward, Forward, Op, Pop, Restore
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.prefix_tree import PrefixTree
from dta_compile.runtime.calls.schedule_buffers import ScheduleBuffers
from dta_compile.runtime.cuda_graphs.arenas import Lease
from dta_compile.runtime.measure.profiler import named
from dta_compile.runtime.measure.stopwatch import Stopwatch
from dta_compile.runtime.path.chunk_shape import ChunkShape
from dta_compile.runtime.path.mixer_runtime import Tensors
from dta_compile.runtime.path.stack import PathStack, SpineStates
from dta_compile.runtime.rows.batch_rows import BatchRows
from dta_compile.runtime.rows.buffers import Gathered, Rows, padded
from dta_compile.runtime.rows.upload import upload

HEAD_SHARE = 0.75  # if more of a kept graph's head rows have a gradient, dropping the others does not pay


@dataclasses.dataclass
class ChunkData:
    """Inputs of a part's graphs except the path stack and the values received from other parts.

    Attributes:
        whole: parameters, then constants.
        trunk: inputs by tree row.
        reads_heads: the part reads the chunk token of each head row.
        head: inputs by head row.
    """

    whole: list[torch.Tensor]
    trunk: list[Gathered]
    reads_heads: bool
    head: list[Gathered]


@dataclasses.dataclass
class BatchChunk:
    """Chunk of this batch, padded at the end if it may be replayed; nothing reads the padding, and it has no gradient.

    Attributes:
        shape: where the chunk hangs on the stack, and which of its tokens read which.
        rows, heads: its tree rows and head rows.
        readers: `[h]` chunk token of each head row, padding included.
        work: amount of work of one run, for the cost model.
        replayable: the chunk is padded to a size that a CUDA graph may serve.
    """

    shape: ChunkShape
    rows: Rows
    heads: Rows
    readers: npt.NDArray[np.int64]
    work: Work
    replayable: bool

    @functools.cached_property
    def readers_on_device(self) -> torch.Tensor:
        """`readers` on the device."""
        return upload(self.readers, self.rows.device)


@dataclasses.dataclass
class HeadChoice:
    """Subset of a chunk's head rows: positions among them, padded with the first, and their number without padding."""

    index: torch.Tensor
    count: int


@dataclasses.dataclass
class Graph:
    """Inputs and saved values that a `forward` op keeps for its `backward` op, in the order of the backward graph.

    Attributes:
        active: head rows that the forward ran for; None: all.
        written: values sent to other parts; their gradients have the same shapes, strides and dtypes.
    """

    chunk: BatchChunk
    values: list[torch.Tensor]
    active: HeadChoice | None
    written: list[torch.Tensor]


class PendingOps:
    """Stack of anchors (without outputs) and restores, by depth, deferred until a chunk with a gradient needs them."""

    def __init__(self) -> None:
        self._ops: list[Anchor | Restore] = []

    def add(self, op: Anchor | Restore) -> None:
        """Defer an op; deferred ops at its depth or below are dropped."""
        self.cut(_spine(op).start)
        self._ops.append(op)

    def cut(self, depth: int) -> None:
        """Drop the deferred ops at `depth` or below, because the path is cut there."""
        while self._ops and _spine(self._ops[-1]).start >= depth:
            self._ops.pop()

    def taken(self) -> list[Anchor | Restore]:
        """Return and forget all deferred ops, in order; the caller runs them."""
        ops, self._ops = self._ops, []
        return ops


def _spine(op: Anchor | Restore) -> Slice:
    part = op.part if isinstance(op, Restore) else op.chunk.spine
    assert part is not None
    return part


class Executor:
    """Interpreter of a schedule over one batch, for one part of a chunk's stages or all of them.

    `run` may stop at an `attach` op and be resumed there. Anchors and restores of the backward half are deferred until
    a chunk with a gradient needs them. Chunks without an incoming gradient are skipped, and head rows without one are
    left out.

    Attributes:
        buffers: buffers of the half of the schedule that is running.
        stopwatch: times every run of a graph.
        lease: replays CUDA graphs of small chunks, on its own `path`; None: no replay.
        codes: generated code that all graphs run, fixed when the executor is made.
        chunks: chunks on this batch, and whether with their head rows; parts of a call without `lease` share them.
    """

    def __init__(
        self,
        part: Part,
        frontier: Sequence[FrontierValue],
        data: ChunkData,
        rows: BatchRows,
        path: PathStack,
        stopwatch: Stopwatch,
        lease: Lease | None = None,
        codes: Codes = NO_CODES,
        chunks: dict[tuple[Chunk, bool], BatchChunk] | None = None,
    ) -> None:
        """`frontier`: the frontier values that the part computes."""
        self.part, self.joint, self.frontier = part, part.graphs, list(frontier)
        self.data, self.rows, self.path = data, rows, path
        self.stopwatch, self.lease, self.codes = stopwatch, lease, codes
        self.chunks = {} if chunks is None else chunks
        with torch.no_grad():
            self.transposes = self.joint.transposes(data.whole)
        self.head_rows = rows.position_rows[rows.head_positions]  # [H] tree row of every head row
        self.graphs: dict[Chunk, Graph | None] = {}  # None: skipped
        self.kept = KeptSpines[SpineStates](rows.tree)
        self.results: dict[Chunk, dict[int, Tensors]] = {}  # results of attention, by layer
        self.pending = PendingOps()
        self.buffers = ScheduleBuffers()

    @property
    def keeps(self) -> bool:
        """Whether graphs, spine states or results of attention are kept from the ops that have run."""
        return bool(self.graphs or self.kept.values or self.results)

    def leave_path(self) -> None:
        """Release the memory of the (empty) stack; the backward is given a new one."""
        self.path = PathStack((), (), 0, self.path.device)

    def enter_path(self, path: PathStack) -> None:
        """Take a new (empty) stack, for the backward."""
        self.path = path

    def run(
        self, ops: Sequence[Op], buffers: ScheduleBuffers, on_attach: Callable[[tuple[int, ...]], bool]
    ) -> Sequence[Op]:
        """Run ops until they end or `on_attach`, called with the sequences of an `attach` op, returns False.

        Returns the remaining ops.
        """
        self.buffers = buffers
        try:
            return ops[self._run(ops, on_attach) :]
        finally:
            self.buffers = ScheduleBuffers()  # the caller decides how long the buffers live

    def _run(self, ops: Sequence[Op], on_attach: Callable[[tuple[int, ...]], bool]) -> int:
        for position, op in enumerate(ops):
            with named(op):
                match op:
                    case Anchor(_, True):
                        self._anchor(op)
                    case Anchor() | Restore():
                        self.pending.add(op)
                    case Forward(chunk, out):
                        goes_backward = position + 1 < len(ops) and ops[position + 1] == Backward(chunk)
                        self._forward(op, only_for_backward=goes_backward and not out)
                    case Backward():
                        self._backward(op)
                    case Pop(part):
                        self.pending.cut(part.start)
                        self.path.cut(part.start)
                    case Attach(sequences):
                        if not on_attach(sequences):
                            return position + 1
        return len(ops)

    def _complete_stack(self) -> None:
        for op in self.pending.taken():
            with named(op):
                match op:
                    case Anchor():
                        self._anchor(op)
                    case Restore(part):
                        states = self.kept.of(part)
                        assert states is not None, part
                        self.path.put(states, part.start, part.stop)

    def _anchor(self, op: Anchor) -> None:
        chunk = op.chunk
        self._complete_stack()
        batch_chunk = self._on_batch(chunk, heads=op.out)
        graph = self.joint.run_forward_only if op.out else self.joint.run_cache_only
        self.path.depths = op.states
        arguments = [self.path, *self._inputs(chunk, batch_chunk, None), *self.transposes]
        if op.results:
            self.path.recorded = self.results[chunk] = {}
        results = self._launch(op, "forward", graph, batch_chunk, arguments)
        self.path.recorded = None
        if op.out:
            self._write(chunk, batch_chunk, results)
        if op.kv and chunk.spine is not None:
            self.kept.keep(chunk.spine, self.path.copy(chunk.spine.start, chunk.spine.stop))

    def _forward(self, op: Forward, only_for_backward: bool) -> None:
        chunk, out = op.chunk, op.out
        batch_chunk = self._on_batch(chunk)
        known_results = self.results.pop(chunk, {})
        if only_for_backward and not self._has_gradient(chunk, batch_chunk):
            self.graphs[chunk] = None
            return
        self._complete_stack()
        active = None if out else self._active_rows(batch_chunk)
        inputs = self._inputs(chunk, batch_chunk, active)
        self.path.depths = op.states
        arguments = [self.path, *inputs, *self.transposes]
        self.path.results = known_results
        run, attends = self.joint.run_forward, not known_results
        results = self._launch(op, "forward", run, batch_chunk, arguments, active, attends)
        if out:
            self._write(chunk, batch_chunk, results)
        written = len(self.part.writes)
        values = [*(inputs[i] for i in self.joint.backward_inputs), *results[written + len(self.frontier) :]]
        self.graphs[chunk] = Graph(batch_chunk, values, active, list(results[:written]))
        if chunk.spine is not None:
            states = [tuple(values[i] for i in positions) for positions in self.joint.saved_states]
            running = self.path.snapshots(chunk.spine.start, chunk.spine.stop)
            self.kept.keep(chunk.spine, SpineStates(chunk.spine.start, states, running))

    def _backward(self, op: Backward) -> None:
        chunk = op.chunk
        graph = self.graphs.pop(chunk)
        if chunk.spine is not None:
            self.pending.cut(chunk.start)  # ops that restore its own spine
            self.kept.forget(chunk.spine)
        if graph is None or not self._has_gradient(chunk, graph.chunk):
            return
        self._complete_stack()
        batch_chunk, active = graph.chunk, graph.active
        values, graph.values = graph.values, []
        if active is None:
            active = self._enough_idle(batch_chunk)
            values = values if active is None else self.joint.of_head_rows(values, active.index)
        tangents = self._tangents(chunk, graph, active)
        arguments = [self.path, *values, *tangents, *self.buffers.accumulators]
        del values, tangents  # the backward frees the entries of its list as it runs
        gradients = self._launch(op, "backward", self.joint.run_backward, batch_chunk, arguments, active)
        self.path.finish()
        self.buffers.backpropagated(chunk, batch_chunk.heads, gradients)

    def _enough_idle(self, batch_chunk: BatchChunk) -> HeadChoice | None:
        """Return the head rows with a gradient, if dropping the others from a kept graph pays; else None."""
        active = self._active_rows(batch_chunk)
        return None if active is None or active.count > HEAD_SHARE * batch_chunk.heads.count else active

    def _write(self, chunk: Chunk, batch_chunk: BatchChunk, results: Sequence[torch.Tensor]) -> None:
        """Write a graph's results to the buffers: values for other parts, then frontier values."""
        written = len(self.part.writes)
        self.buffers.write(chunk, batch_chunk.heads, results[:written], results[written:][: len(self.frontier)])

    def _has_gradient(self, chunk: Chunk, batch_chunk: BatchChunk) -> bool:
        if batch_chunk.shape.spine and self.path.waits_for(batch_chunk.shape.start):
            return True
        if any(gradient is not None for gradient in self.buffers.gradients_of_sent.get(chunk, ())):
            return True
        if not self.frontier:
            return False
        active = self.buffers.active
        return batch_chunk.heads.count > 0 and (active is None or bool(active[batch_chunk.heads.numpy].any()))

    def _active_rows(self, batch_chunk: BatchChunk) -> HeadChoice | None:
        """Return the head rows of a chunk that have a gradient; None: all, or not known."""
        if self.buffers.active is None or not self.joint.head_rows_separable:
            return None
        active = self.buffers.active[batch_chunk.heads.numpy]
        if active.all():
            return None
        index = np.flatnonzero(active)
        size = self.lease.size(len(index)) if self.lease and batch_chunk.replayable and len(index) else len(index)
        return HeadChoice(upload(padded(index, size), self.path.device), len(index))

    def _tangents(self, chunk: Chunk, graph: Graph, active: HeadChoice | None) -> list[torch.Tensor]:
        """Return the gradients of the differentiated results of a chunk's graph, in the order of `differentiated`."""
        of_sent, written = self.buffers.gradients_of_sent.get(chunk, ()), len(self.part.writes)
        tangents: list[torch.Tensor] = []
        for index in self.joint.differentiated:
            if index >= written:
                tangents.append(self._tangent(index - written, graph.chunk, active))
                continue
            gradient = of_sent[index] if of_sent else None
            tangents.append(torch.zeros_like(graph.written[index]) if gradient is None else gradient)
        return tangents

    def _tangent(self, index: int, batch_chunk: BatchChunk, active: HeadChoice | None) -> torch.Tensor:
        """Return the gradient of a frontier value at a chunk's (active) head rows, in its dtype; 0 at padding."""
        value, buffer = self.frontier[index], self.buffers.gradients[index]
        rows, count = (
            (batch_chunk.heads.size, batch_chunk.heads.count) if active is None else (len(active.index), active.count)
        )
        if buffer is None:
            return torch.zeros((), dtype=value.dtype, device=self.path.device).expand(rows, *value.features)
        gradient = buffer.read(batch_chunk.heads)
        if active is not None:
            gradient = gradient.index_select(0, active.index)
        if count < rows:
            gradient[count:] = 0
        return gradient.to(value.dtype)

    def _on_batch(self, chunk: Chunk, heads: bool = True) -> BatchChunk:
        """Return a chunk on this batch, made once: with every layer, each upload would keep a GPU waiting."""
        known = self.chunks.get((chunk, heads))
        if known is None:
            known = self._made(chunk, heads)
            if self.path.device.type != "cpu":  # where nothing is uploaded, and shapes hold masks of their attention
                self.chunks[chunk, heads] = known
        return known

    def _made(self, chunk: Chunk, heads: bool) -> BatchChunk:
        tree, starts, device = self.rows.tree, self.rows.head_starts, self.path.device
        ranges = tree.chunk_ranges(chunk)
        head_ranges = [(int(starts[start]), int(starts[stop])) for start, stop in ranges] if heads else []
        readers, offset = [np.zeros(0, np.int64)], 0
        for (start, stop), (first, last) in zip(ranges, head_ranges, strict=False):
            readers.append(self.head_rows[first:last] - (start - offset))
            offset += stop - start
        readers_of_all = np.concatenate(readers)
        parts, real, heads_real = segments(tree, chunk), offset, len(readers_of_all)
        size, heads_size = (self.lease.size(count) if self.lease else count for count in (real, heads_real))
        if size > real:  # padding is one more branch that hangs from the stack
            parts = [*parts, Segment(real, size, size, chunk.start, -1)]
        spine = chunk.spine.tokens if chunk.spine is not None else 0
        shape = ChunkShape.of(chunk.start, spine, parts, unit_tokens(tree, chunk))
        pairs = sum(attention_pairs(part) for part in chunk.slices)
        return BatchChunk(
            shape,
            rows=Rows(merged(ranges), device, size),
            heads=Rows(merged(head_ranges), device, heads_size),
            readers=padded(readers_of_all, heads_size),
            work=Work(1, len(chunk.slices), real, pairs, heads_real),
            replayable=self.lease is not None and self.lease.replays(size, heads_size),
        )

    def _inputs(self, chunk: Chunk, batch_chunk: BatchChunk, active: HeadChoice | None) -> list[torch.Tensor]:
        data = self.data
        head = [batch_chunk.readers_on_device] if data.reads_heads else []
        head += [item.read(batch_chunk.heads) for item in data.head]
        if active is not None:
            head = [value.index_select(0, active.index) for value in head]
        trunk = (item.read(batch_chunk.rows) for item in data.trunk)
        return [*data.whole, *trunk, *head, *self.buffers.received.get(chunk, ())]

    def _launch(
        self,
        op: Op,
        kind: str,
        graph: Callable[..., Sequence[torch.Tensor]],
        batch_chunk: BatchChunk,
        arguments: list[Any],
        active: HeadChoice | None = None,
        attends: bool = True,
    ) -> Sequence[torch.Tensor]:
        """Run or replay a graph, timed. A backward graph takes its arguments as one list and empties it.

        `attends`: attention is run; False if its results are known.
        """
        self.path.chunk = batch_chunk.shape
        work = batch_chunk.work if active is None else batch_chunk.work._replace(heads=active.count)
        work = work if attends else work._replace(pairs=0)
        run = graph if kind == "backward" else lambda inputs: graph(*inputs)
        with self.stopwatch.measure(kind, work, op), running(self.codes):
            if self.lease and batch_chunk.replayable:
                return self.lease.run(graph, run, arguments)
            return run(arguments)


def unit_tokens(tree: PrefixTree, chunk: Chunk) -> list[tuple[int, int]]:
    """Return the units of a chunk, in token numbers of the chunk."""
    units, first = [], 0
    for part in chunk.slices:
        units += [(a + first - part.start, b + first - part.start) for a, b in tree.units_in(part).tolist()]
        first += part.tokens
    return units


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent ranges of rows."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return merged
