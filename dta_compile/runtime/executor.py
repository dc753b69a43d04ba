"""The executor: one loop over the operations of a schedule (paper Algorithms 2 and 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from dta_compile.passes.joint import JointGraphs
from dta_compile.passes.program import FrontierValue
from dta_compile.plan.schedule import Anchor, Attach, Backward, Chunk, Forward, Op, Pop, Restore, Slice
from dta_compile.runtime.row_buffer import RowBuffer
from dta_compile.runtime.rows import BatchRows
from dta_compile.runtime.stack import PathStack


@dataclasses.dataclass
class Gathered:
    """A dense value that chunks read row by row: `values [N, *features]` and, for every row, which entry it reads."""

    values: torch.Tensor
    index: torch.Tensor

    def rows(self, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """`[c, *features]` for the given ranges of rows."""
        index = [self.index[start:stop] for start, stop in ranges]
        return self.values.index_select(0, index[0] if len(index) == 1 else torch.cat(index))


@dataclasses.dataclass
class ChunkData:
    """Everything that a chunk graph reads besides the path."""

    parameters: list[torch.Tensor]
    constants: list[torch.Tensor]
    trunk: list[Gathered]
    head: list[Gathered]


@dataclasses.dataclass
class Graph:
    """The graph that a `forward` op leaves for its `backward` op."""

    part: Slice
    rows: list[tuple[int, int]]
    head_ranges: list[tuple[int, int]]
    inputs: list[torch.Tensor]
    saved: Sequence[torch.Tensor]


class Executor:
    """Runs the operations of a schedule over one batch; `run` may stop at an `attach` op and go on from there.

    Attributes:
        outputs: rows of every frontier value, written by operations with `out`.
        gradients: rows of every differentiable frontier value's gradient (None: nothing uses the value, its gradient is
            zero), to be filled before a backward op reads them.
        accumulators: per parameter that receives a gradient.
    """

    def __init__(
        self,
        joint: JointGraphs,
        frontier: Sequence[FrontierValue],
        data: ChunkData,
        rows: BatchRows,
        path: PathStack,
    ) -> None:
        self.joint, self.frontier, self.data, self.rows, self.path = joint, list(frontier), data, rows, path
        self.graphs: dict[Chunk, Graph] = {}
        self.graph_of_row = np.zeros(rows.tree.num_rows, dtype=object)
        self.outputs: list[RowBuffer] = []
        self.gradients: list[RowBuffer | None] = [None] * len(self.frontier)
        self.accumulators: list[torch.Tensor] = []

    def row_buffer(self, index: int, kind: type[RowBuffer], dtype: torch.dtype) -> RowBuffer:
        """An empty buffer for the rows of a frontier value."""
        return kind(len(self.rows.head_positions), self.frontier[index].features, dtype, self.path.device)

    def run(self, ops: Iterator[Op], on_attach: Callable[[tuple[int, ...]], bool]) -> None:
        """Run operations until they end or `on_attach` (called with the sequences that became due) returns False."""
        for op in ops:
            match op:
                case Anchor(chunk, out):
                    self._anchor(chunk[0], out)
                case Forward(chunk, out):
                    self._forward(chunk, out)
                case Backward(chunk):
                    self._backward(chunk)
                case Restore(chunk):
                    self._restore(chunk[0])
                case Pop():
                    pass  # the stack is as deep as the next chunk says; popped entries are overwritten
                case Attach(sequences):
                    if not on_attach(sequences):
                        return

    def _anchor(self, part: Slice, out: bool) -> None:
        ranges = self.rows.tree.row_ranges(part.sequence, part.start, part.stop)
        head_ranges = self._head_ranges(ranges) if out else []
        self.path.start = part.start
        graph = self.joint.forward_only if out else self.joint.cache_only
        results = graph(self.path, *self._inputs(ranges, head_ranges))
        if out:
            self._write(head_ranges, results)

    def _forward(self, chunk: Chunk, out: bool) -> None:
        part = chunk[0]
        ranges = self.rows.tree.row_ranges(part.sequence, part.start, part.stop)
        head_ranges = self._head_ranges(ranges)
        inputs = self._inputs(ranges, head_ranges)
        self.path.start = part.start
        results = self.joint.forward(self.path, *inputs)
        if out:
            self._write(head_ranges, results[: len(self.frontier)])
        backward_inputs = [inputs[i] for i in self.joint.backward_inputs]
        graph = Graph(part, ranges, head_ranges, backward_inputs, results[len(self.frontier) :])
        self.graphs[chunk] = graph
        for start, stop in ranges:
            self.graph_of_row[start:stop] = graph

    def _backward(self, chunk: Chunk) -> None:
        graph = self.graphs.pop(chunk)
        for start, stop in graph.rows:
            self.graph_of_row[start:stop] = 0
        tangents = [self._tangent(index, graph) for index in self.joint.differentiated]
        self.path.start = graph.part.start
        assert self.joint.backward is not None
        self.joint.backward(self.path, *graph.inputs, *graph.saved, *tangents, *self.accumulators)
        for buffer in (*self.outputs, *self.gradients):
            if buffer is not None:
                buffer.release(graph.head_ranges)

    def _tangent(self, index: int, graph: Graph) -> torch.Tensor:
        """The gradient of a frontier value at the chunk's head rows, in the value's dtype."""
        value, buffer = self.frontier[index], self.gradients[index]
        if buffer is None:
            count = sum(stop - start for start, stop in graph.head_ranges)
            return torch.zeros((), dtype=value.dtype, device=self.path.device).expand(count, *value.features)
        return buffer.read(graph.head_ranges).to(value.dtype)

    def _restore(self, part: Slice) -> None:
        graph: Graph = self.graph_of_row[self.rows.tree.row_ranges(part.sequence, part.start, part.stop)[0][0]]
        first = part.start - graph.part.start
        self.path.start = part.start
        for layer, (key, value) in enumerate(self.joint.saved_kv):
            window = slice(first, first + part.tokens)
            self.path.write(graph.saved[key][:, :, window], graph.saved[value][:, :, window], layer)

    def _head_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        starts = self.rows.head_starts
        return [(int(starts[start]), int(starts[stop])) for start, stop in ranges]

    def _inputs(self, ranges: Sequence[tuple[int, int]], head_ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        data = self.data
        return [
            *data.parameters,
            *data.constants,
            *(item.rows(ranges) for item in data.trunk),
            self._head_index(ranges, head_ranges),
            *(item.rows(head_ranges or [(0, 0)]) for item in data.head),
        ]

    def _head_index(self, ranges: Sequence[tuple[int, int]], head_ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Which chunk token each of the chunk's head rows reads."""
        parts, offset = [np.zeros(0, np.int64)], 0
        for (start, stop), (first, last) in zip(ranges, head_ranges, strict=False):
            rows = self.rows.position_rows[self.rows.head_positions[first:last]]
            parts.append(rows - start + offset)
            offset += stop - start
        return torch.from_numpy(np.concatenate(parts)).to(self.path.device)

    def _write(self, head_ranges: Sequence[tuple[int, int]], results: Sequence[torch.Tensor]) -> None:
        for output, gradient, result in zip(self.outputs, self.gradients, results, strict=True):
            output.acquire(head_ranges)
            output.write(head_ranges, result)
            if gradient is not None:
                gradient.acquire(head_ranges)
