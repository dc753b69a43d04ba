"""Shape of a piece: its tokens, and the depths of the path above at which they hang."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from dta_compile.plan.tree.segments import Segment
from dta_compile.runtime.path.chunk_shape import ChunkShape


class Part(NamedTuple):
    """Consecutive tokens of a piece that hang from one depth of the path.

    Attributes:
        first: number of the first of them in the piece.
        shape: them as a chunk of their own.
    """

    first: int
    shape: ChunkShape

    def of(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the view of these tokens of a value of the piece."""
        return value.narrow(dim, self.first, self.shape.tokens)


@dataclasses.dataclass(frozen=True)
class PieceShape(ChunkShape):
    """Shape of a piece: segments without parent hang from several depths of the path above.

    Attributes:
        number: round of the piece.
        parts: the piece cut where the depth changes.
    """

    number: int = 0
    parts: tuple[Part, ...] = ()

    @classmethod
    def of_piece(cls, number: int, segments: Sequence[Segment], units: Sequence[tuple[int, int]]) -> PieceShape:
        """Return the shape of the piece of a round, given its segments and units in token numbers of the piece."""
        begins: list[int] = []
        for index, segment in enumerate(segments):
            if segment.parent < 0 and not (begins and segments[begins[-1]].depth == segment.depth):
                begins.append(index)
        parts = [_part(segments, units, *bounds) for bounds in pairwise([*begins, len(segments)])]
        return cls(segments[0].depth, 0, tuple(segments), (), tuple(units), number=number, parts=tuple(parts))


def _part(segments: Sequence[Segment], units: Sequence[tuple[int, int]], begin: int, end: int) -> Part:
    """Return the segments `[begin, end)` as a chunk of their own."""
    first, last = segments[begin].first, segments[end - 1].last
    own = [
        Segment(s.first - first, s.last - first, s.end - first, s.depth, s.parent - begin if s.parent >= 0 else -1)
        for s in segments[begin:end]
    ]
    of_part = [(a - first, b - first) for a, b in units if first <= a < last]
    return Part(first, ChunkShape.of(segments[begin].depth, 0, own, of_part))
