"""How attention runs inside a chunk: without any mask, as causal squares and full rectangles.

Every slice of a chunk attends causally to itself (a square); everything that hangs from a slice attends fully to the
part of it above (a rectangle); and all tokens attend fully to the stack. Together these are the pairs of the tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.prefix_tree import PrefixTree


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """One slice of a chunk; tokens are numbered through the chunk, in the order of its slices.

    Attributes:
        first, last: its tokens `[first, last)`.
        end: one past the last token of what hangs from it: `[last, end)` are its descendants.
        depth: depth of its first token.
        parent: the slice that it continues, -1 for the stack.
    """

    first: int
    last: int
    end: int
    depth: int
    parent: int


@dataclasses.dataclass(frozen=True, slots=True)
class Rectangle:
    """The chunk's tokens `[query_first, query_last)` attend to all of its tokens `[key_first, key_last)`."""

    query_first: int
    query_last: int
    key_first: int
    key_last: int


def segments(tree: PrefixTree, chunk: Chunk) -> list[Segment]:
    """The slices of a legal chunk (see `verify`), in its order."""
    slices, parents, firsts, offset = chunk.slices, [], [], 0
    path: list[int] = []  # slices that the next one may continue: the last one, what it continues, and so on
    for number, part in enumerate(slices):
        while path and not _continues(tree, slices, path[-1], number):
            path.pop()
        parents.append(path[-1] if path else -1)
        firsts.append(offset)
        path.append(number)
        offset += part.tokens
    ends = [first + part.tokens for first, part in zip(firsts, slices, strict=True)]
    for number in reversed(range(len(slices))):
        if parents[number] >= 0:
            ends[parents[number]] = max(ends[parents[number]], ends[number])
    return [
        Segment(first, first + part.tokens, end, part.start, parent)
        for first, part, end, parent in zip(firsts, slices, ends, parents, strict=True)
    ]


def rectangles(parts: Sequence[Segment]) -> list[Rectangle]:
    """What hangs from each slice against the slice; neighbours that hang from the same token together."""
    found: dict[tuple[int, int, int], Rectangle] = {}  # by the keys, and by the token after the last query
    for part in parts:
        if part.parent >= 0:
            parent = parts[part.parent]
            first, last = parent.first, parent.first + part.depth - parent.depth
            before = found.pop((first, last, part.first), None)
            query_first = before.query_first if before else part.first
            found[first, last, part.end] = Rectangle(query_first, part.end, first, last)
    return list(found.values())


def _continues(tree: PrefixTree, slices: Sequence[Slice], parent: int, child: int) -> bool:
    """Whether slice `child` hangs from a token of slice `parent`."""
    above, below = slices[parent], slices[child]
    inside = above.start < below.start <= above.stop
    return inside and tree.same_path(above.sequence, below.sequence, below.start)
