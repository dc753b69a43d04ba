"""Decompose attention inside a chunk into causal squares and full rectangles, so that no mask is needed.

A slice attends causally to itself (a square). The descendants of a slice attend fully to the part of the slice above
them (a rectangle), and all tokens attend fully to the stack. Together these are exactly the pairs of the tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.prefix_tree import PrefixTree


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Slice of a chunk, in token numbers of the chunk (counted through its slices in order).

    Attributes:
        first, last: tokens `[first, last)` of the slice.
        end: end of its descendants, which are the tokens `[last, end)`.
        depth: depth of the first token.
        parent: index of the slice that it continues, -1 for the stack.
    """

    first: int
    last: int
    end: int
    depth: int
    parent: int


@dataclasses.dataclass(frozen=True, slots=True)
class Rectangle:
    """Queries `[query_first, query_last)` attend to all keys `[key_first, key_last)`, in token numbers of the chunk."""

    query_first: int
    query_last: int
    key_first: int
    key_last: int


def segments(tree: PrefixTree, chunk: Chunk) -> list[Segment]:
    """Return one segment per slice of a legal chunk (see `verify`), in order."""
    slices, parents, firsts, offset = chunk.slices, [], [], 0
    path: list[int] = []  # slices that the next one may continue: the last one and its ancestors
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
    """Return the rectangles between segments and their descendants; adjacent children of one token share one."""
    merged: dict[tuple[int, int, int], Rectangle] = {}  # by first key, last key and end of the queries
    for part in parts:
        if part.parent >= 0:
            parent = parts[part.parent]
            first, last = parent.first, parent.first + part.depth - parent.depth
            before = merged.pop((first, last, part.first), None)
            query_first = before.query_first if before else part.first
            merged[first, last, part.end] = Rectangle(query_first, part.end, first, last)
    return list(merged.values())


def _continues(tree: PrefixTree, slices: Sequence[Slice], parent: int, child: int) -> bool:
    """Return whether slice `child` continues a token of slice `parent`."""
    above, below = slices[parent], slices[child]
    inside = above.start < below.start <= above.stop
    return inside and tree.same_path(above.sequence, below.sequence, below.start)
