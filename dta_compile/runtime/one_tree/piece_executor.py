"""Run the pieces of a rank: an executor whose chunks are pieces of a tree that other ranks hold the rest of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dta_compile.plan import Work, segments
from dta_compile.plan.interpret import attention_pairs
from dta_compile.plan.schedule import Anchor, Attach, Backward, Forward, Op
from dta_compile.plan.tree.chunk import Chunk
from dta_compile.runtime.calls.executor import BatchChunk, Executor, merged, unit_tokens
from dta_compile.runtime.measure.profiler import named
from dta_compile.runtime.one_tree.routes import Piece
from dta_compile.runtime.one_tree.shape import PieceShape
from dta_compile.runtime.path.stack import PathStack
from dta_compile.runtime.rows.batch_rows import Integers
from dta_compile.runtime.rows.buffers import Rows


class PieceExecutor(Executor):
    """Executor of a rank's pieces.

    Every op runs when its turn comes, also without a gradient, because other ranks wait for the states that it sends.

    Attributes:
        pieces: number and piece of each chunk.
        computed: head rows of the tree that this rank computes, ascending; buffers have one row for each.
    """

    def __init__(self, *arguments: Any, pieces: Mapping[Chunk, tuple[int, Piece]], computed: Integers) -> None:
        super().__init__(*arguments)
        self.pieces, self.computed = pieces, computed
        self.head_rows = self.head_rows[computed]

    def leave_path(self) -> None:
        """Keep the path, whose states kept graphs read again."""
        if not self.graphs:
            super().leave_path()

    def enter_path(self, path: PathStack) -> None:
        """Take a new path, unless kept graphs read the old one."""
        if not self.graphs:
            super().enter_path(path)

    def _run(self, ops: Sequence[Op], on_attach: Callable[[tuple[int, ...]], bool]) -> int:
        for position, op in enumerate(ops):
            with named(op):
                match op:
                    case Anchor():
                        self._anchor(op)
                        self.path.finish()
                    case Forward():
                        self._forward(op, only_for_backward=False)
                    case Backward():
                        self._backward(op)
                    case Attach(sequences):
                        if not on_attach(sequences):
                            return position + 1
        return len(ops)

    def _has_gradient(self, chunk: Chunk, batch_chunk: BatchChunk) -> bool:
        return True

    def _made(self, chunk: Chunk, heads: bool) -> BatchChunk:
        tree, starts, device = self.rows.tree, self.rows.head_starts, self.path.device
        number, piece = self.pieces[chunk]
        first, last = int(starts[piece.start]), int(starts[piece.stop]) if heads else int(starts[piece.start])
        readers = self.rows.position_rows[self.rows.head_positions[first:last]] - piece.start
        count, begin = piece.stop - piece.start, int(np.searchsorted(self.computed, first))
        pairs = sum(attention_pairs(part) for part in chunk.slices)
        return BatchChunk(
            PieceShape.of_piece(number, segments(tree, chunk), unit_tokens(tree, chunk)),
            rows=Rows(merged([(piece.first, piece.first + count)]), device, count),
            heads=Rows(merged([(begin, begin + last - first)]), device, last - first),
            readers=readers,
            work=Work(1, len(chunk.slices), count, pairs, last - first),
            replayable=False,
        )
