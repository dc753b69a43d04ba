"""The tree of chunks: a partition of a prefix tree into chunks, and the order in which they go backward.

Every chunk continues the spine of its parent chunk. Chunks are listed in the order of their backwards: what continues a
chunk comes before it, what continues it further up first. So KV gradients only ever wait on a prefix of the stack.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from dta_compile.options import Options
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.order import branch_depths, leaf_order
from dta_compile.plan.tree.packing import pack
from dta_compile.plan.tree.prefix_tree import PrefixTree

__all__ = ["ChunkTree", "chunk_tree", "cut"]

_RECURRENCE_BLOCK = 64  # tokens; recurrent kernels compute in blocks of so many


@dataclasses.dataclass(frozen=True)
class ChunkTree:
    """Chunks in the order of their backwards.

    Attributes:
        chunks: they partition the tokens of the prefix tree.
        parent: for every chunk the later one whose spine it continues, -1 where it starts at the root.
        block: what is cut into chunks is cut at multiples of so many tokens where that costs nothing (see `cut`).
    """

    chunks: list[Chunk]
    parent: list[int]
    block: int = 1

    def starts_below(self) -> list[int]:
        """For every chunk the number of depths of its spine at which chunks start that continue it."""
        starts: list[set[int]] = [set() for _ in self.chunks]
        for chunk, above in zip(self.chunks, self.parent, strict=True):
            if above >= 0:
                starts[above].add(chunk.start)
        return list(map(len, starts))


def chunk_tree(tree: PrefixTree, options: Options, states: bool = False) -> ChunkTree:
    """The chunks of a strategy: single slices along a leaf order, or packed ones.

    `states`: for a model with running states, so slices are cut at multiples of what recurrences compute in one go.
    """
    block = _RECURRENCE_BLOCK if states else 1
    if options.strategy == "packed":
        return ChunkTree(*pack(tree, options.chunk_tokens, options.order), block)
    return _along_leaves(tree, options, block)


def cut(sequence: int, start: int, stop: int, chunk_size: int, block: int = 1) -> Iterator[Slice]:
    """As few slices of at most `chunk_size` tokens as possible, sizes as even as possible; nothing if empty.

    Cuts are moved to multiples of `block` tokens from `start` where the slices stay as few and as small as that.
    """
    size = stop - start
    count = -(-size // chunk_size)
    above = 0
    for left in reversed(range(count)):  # slices after this one
        even = size * (count - left) // count
        low, high = max(size - left * chunk_size, above + 1), min(above + chunk_size, size - left)
        below = min(max((even + block // 2) // block, -(-low // block)), high // block) * block
        if not low <= below <= high:
            below = min(max(even, low), high)
        yield Slice(sequence, start + above, start + below)
        above = below


def _along_leaves(tree: PrefixTree, options: Options, block: int) -> ChunkTree:
    """The paper's chunks. Leaf `i` owns the part of its path that no later leaf shares; it goes backward from its end.

    The parts are cut evenly into chunks (Algorithm 3), or at every node as well (Algorithm 2, "vanilla").
    """
    leaves = leaf_order(tree, options.order)
    low = branch_depths(tree, leaves)
    stops: list[int] = tree.stop[leaves].tolist()
    bounds = _node_bounds(tree, leaves, low) if options.strategy == "vanilla" else zip(low, stops, strict=True)
    pieces = [
        [
            piece
            for a, b in pairwise(depths)
            for piece in cut(int(tree.sequence[leaf]), a, b, options.chunk_tokens, block)
        ]
        for leaf, depths in zip(leaves, bounds, strict=True)
    ]
    first = [0]  # index of every leaf's last piece, which goes backward first
    for part in pieces:
        first.append(first[-1] + len(part))
    parent: list[int] = []
    for i, (part, owner) in enumerate(zip(pieces, _owners_above(low), strict=True)):
        parent += range(first[i] + 1, first[i + 1])
        number = bisect_right([piece.start for piece in pieces[owner]], low[i] - 1) if owner >= 0 else 0
        parent += [first[owner + 1] - number if owner >= 0 else -1] if part else []
    return ChunkTree([Chunk(piece) for part in pieces for piece in reversed(part)], parent, block)


def _node_bounds(tree: PrefixTree, leaves: Sequence[int], low: Sequence[int]) -> Iterator[list[int]]:
    """Depths of the nodes that every leaf owns."""
    start, stop, parent = tree.start.tolist(), tree.stop.tolist(), tree.parent.tolist()
    for leaf, lowest in zip(leaves, low, strict=True):
        depths, node = [stop[leaf]], leaf
        while depths[-1] > lowest:
            depths.append(start[node])
            node = parent[node]
        yield depths[::-1]


def _owners_above(low: Sequence[int]) -> list[int]:
    """For every leaf the next later leaf that owns the token just above its own part; -1 at the root."""
    above = [-1] * len(low)
    path: list[int] = []
    for i in reversed(range(len(low))):
        while path and low[path[-1]] >= low[i]:
            path.pop()
        above[i] = path[-1] if path else -1
        path.append(i)
    return above
