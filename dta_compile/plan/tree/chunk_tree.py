"""Partition a prefix tree into chunks, and order the chunks for the backward.

Every chunk continues the spine of its parent chunk. Chunks are listed in backward order: children before their parent,
and of the children those that branch off further up first. So KV gradients only ever wait on a prefix of the stack.

Packed chunks hold whole subtrees and sibling branches, to make few chunks. Nodes are visited bottom-up: the open
remainders of the subtrees below a node are packed into bins by best fit decreasing; one bin stays open, is joined by
the node itself and becomes the remainder that the node passes to its parent. Other chunks may continue at most one path
of a chunk, its spine.
"""

from __future__ import annotations

import dataclasses
import random
import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import pairwise

from dta_compile.options import Options
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.leaf_order import branch_depths, leaf_order
from dta_compile.plan.tree.prefix_tree import PrefixTree

_RECURRENCE_BLOCK = 64  # tokens of a block of the recurrent kernels


@dataclasses.dataclass(frozen=True)
class ChunkTree:
    """Chunks in backward order.

    Attributes:
        chunks: a partition of the tokens of the prefix tree.
        parent: for every chunk, index of the (later) chunk whose spine it continues; -1 if it starts at the root.
        block: preferred multiple of tokens at which slices are cut, where that costs nothing (see `cut`).
    """

    chunks: list[Chunk]
    parent: list[int]
    block: int = 1

    def starts_below(self) -> list[int]:
        """Return, for every chunk, the number of distinct depths of its spine at which other chunks continue it."""
        starts: list[set[int]] = [set() for _ in self.chunks]
        for chunk, above in zip(self.chunks, self.parent, strict=True):
            if above >= 0:
                starts[above].add(chunk.start)
        return list(map(len, starts))


_KNOWN: weakref.WeakKeyDictionary[PrefixTree, dict[tuple[str, str, int, int], ChunkTree]] = weakref.WeakKeyDictionary()


def chunk_tree(tree: PrefixTree, options: Options, states: bool = False) -> ChunkTree:
    """Cut the tree into chunks by `options.strategy`: single slices along a leaf order, or packed chunks.

    `states`: the model has running states, so slices are cut at multiples of the recurrent kernels' block.

    Plans that are compared have the same chunks, so these are known as long as the tree is there.
    """
    block, size = _RECURRENCE_BLOCK if states else 1, chunk_size_of(tree, options)
    known, key = _KNOWN.setdefault(tree, {}), (options.strategy, options.order, size, block)
    if key not in known:
        packed = options.strategy == "packed"
        known[key] = (
            ChunkTree(*pack(tree, size, options.order), block) if packed else _along_leaves(tree, options, block)
        )
    return known[key]


def chunk_size_of(tree: PrefixTree, options: Options) -> int:
    """Return the most tokens of a chunk: as asked for, or those of the longest unit if that has more."""
    return max(options.chunk_tokens, tree.longest_unit)


def cut(
    sequence: int, start: int, stop: int, chunk_size: int, block: int = 1, tree: PrefixTree | None = None
) -> Iterator[Slice]:
    """Yield the fewest slices of at most `chunk_size` tokens that cover `[start, stop)`, as even as possible.

    Cuts move to multiples of `block` tokens from `start` where that needs no further slice and exceeds no size. Those
    of a path with units move out of these, which may need more slices.
    """
    size = stop - start
    count = -(-size // chunk_size)
    if tree is not None and len(tree.units_in(Slice(sequence, start, stop))):
        while start < stop:
            even = start + -(-(stop - start) // -(-(stop - start) // chunk_size))
            above, below = tree.unit_at(sequence, even)
            below = above if above > start else below
            yield Slice(sequence, start, below)
            start = below
        return
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
    """Cut the tree as the paper does: leaf `i` owns the part of its path that no later leaf shares.

    The parts are cut evenly into chunks (Algorithm 3), or at every node as well (Algorithm 2, "vanilla"). The chunks of
    a leaf go backward from its end.
    """
    leaves = leaf_order(tree, options.order)
    low = branch_depths(tree, leaves)
    stops: list[int] = tree.stop[leaves].tolist()
    bounds = _node_bounds(tree, leaves, low) if options.strategy == "vanilla" else zip(low, stops, strict=True)
    pieces = [
        [
            piece
            for a, b in pairwise(depths)
            for piece in cut(int(tree.sequence[leaf]), a, b, chunk_size_of(tree, options), block, tree)
        ]
        for leaf, depths in zip(leaves, bounds, strict=True)
    ]
    first = [0]  # chunk index of every leaf's last piece, which goes backward first
    for part in pieces:
        first.append(first[-1] + len(part))
    parent: list[int] = []
    for i, (part, owner) in enumerate(zip(pieces, _owners_above(low), strict=True)):
        parent += range(first[i] + 1, first[i + 1])
        number = bisect_right([piece.start for piece in pieces[owner]], low[i] - 1) if owner >= 0 else 0
        parent += [first[owner + 1] - number if owner >= 0 else -1] if part else []
    return ChunkTree([Chunk(piece) for part in pieces for piece in reversed(part)], parent, block)


def _node_bounds(tree: PrefixTree, leaves: Sequence[int], low: Sequence[int]) -> Iterator[list[int]]:
    """Yield, for every leaf, the ascending node boundaries (depths) of the part of its path that it owns."""
    start, stop, parent = tree.start.tolist(), tree.stop.tolist(), tree.parent.tolist()
    for leaf, lowest in zip(leaves, low, strict=True):
        depths, node = [stop[leaf]], leaf
        while depths[-1] > lowest:
            depths.append(start[node])
            node = parent[node]
        yield depths[::-1]


def _owners_above(low: Sequence[int]) -> list[int]:
    """Return, for every leaf, the index of the later leaf that owns the token just above its part; -1 at the root."""
    above = [-1] * len(low)
    path: list[int] = []
    for i in reversed(range(len(low))):
        while path and low[path[-1]] >= low[i]:
            path.pop()
        above[i] = path[-1] if path else -1
        path.append(i)
    return above


@dataclasses.dataclass(eq=False)
class _Fragment:
    """Tokens of a node at depths `[start, stop)`, and the fragments below that share its chunk.

    Attributes:
        size: tokens, those below included.
        open: whether other chunks continue one of its tokens.
        below: fragments that continue at `stop`; the open one, if any, is among them.
    """

    node: int
    start: int
    stop: int
    size: int
    open: bool
    below: list[_Fragment]


_Bin = list[_Fragment]


def pack(tree: PrefixTree, chunk_size: int, order: str = "backward_dfs") -> tuple[list[Chunk], list[int]]:
    """Pack the tree into chunks; return them in backward order, and the parent of each (see `ChunkTree`).

    Takes O(M log M) for M nodes (linear but for sorting siblings by size). Nodes are cut only if they are longer than
    `chunk_size`. Tests compare the number of chunks with the optimum, which it equals on most small trees.

    Args:
        order: order of chunks that continue the same token: "backward_dfs" (deepest continuation first, because its
            path is still on the stack), "lexicographic" or "random".
    """
    packer = _Packer(tree, chunk_size)
    packer.run()
    return packer.listed(order)


class _Packer:
    def __init__(self, tree: PrefixTree, chunk_size: int) -> None:
        self.tree, self.chunk_size = tree, chunk_size
        self.sequence: list[int] = tree.sequence.tolist()
        self.bins: list[_Bin] = []  # finished chunks
        self.origins: list[tuple[int, int]] = []  # by bin: node whose token it continues, depth where it starts

    def run(self) -> None:
        tree = self.tree
        remainders: dict[int, _Fragment] = {}  # by node: the fragment that its parent still has to place
        start, stop = tree.start.tolist(), tree.stop.tolist()
        for node in reversed(range(len(stop))):  # preorder numbers: children before their parents
            below = [remainders.pop(child) for child in tree.children(node)]
            remainders[node] = self._join(node, start[node], stop[node], below)
        for members in self._packed([remainders[root] for root in tree.roots]):
            self._finish(members, -1, 0)

    def _join(self, node: int, start: int, stop: int, below: _Bin) -> _Fragment:
        """Return the fragment that `node` leaves to its parent; bins that it cannot join become chunks."""
        length, room = stop - start, self.chunk_size
        joined, is_open = below, any(fragment.open for fragment in below)
        if length + _size(below) > room or sum(fragment.open for fragment in below) > 1:
            bins = sorted(self._packed(below), key=_size)
            # Joining any bin saves the same one chunk; the smallest leaves most room for the parent.
            last = stop - self.tree.unit_at(self.sequence[node], stop - 1)[0]  # tokens that what is joined has to join
            saves = bool(bins) and last + _size(bins[0]) <= room and _saves_a_chunk(length, _size(bins[0]), room)
            joined = bins[0] if saves else []
            finished = bins[1:] if joined else bins
            for members in finished:
                self._finish(members, node, stop)
            is_open = bool(finished) or any(fragment.open for fragment in joined)
        fragment = _Fragment(node, start, stop, length + _size(joined), is_open, joined)
        while fragment.size > room:  # a long node is cut from its end
            fragment = self._cut(fragment)
        return fragment

    def _cut(self, fragment: _Fragment) -> _Fragment:
        """Finish a full chunk, or nearly so, with the end of a fragment; return the rest of the fragment."""
        even = fragment.start + fragment.size - self.chunk_size
        depth = self.tree.unit_at(self.sequence[fragment.node], even)[1]
        rest = depth - fragment.start
        self._finish([dataclasses.replace(fragment, start=depth, size=fragment.size - rest)], fragment.node, depth)
        return dataclasses.replace(fragment, stop=depth, size=rest, open=True, below=[])

    def _packed(self, items: _Bin) -> list[_Bin]:
        """Pack fragments into bins by best fit decreasing, with at most one open fragment a bin."""
        bins = [[item] for item in items if item.open]
        spaces = sorted((self.chunk_size - _size(members), k) for k, members in enumerate(bins))
        for item in sorted((item for item in items if not item.open), key=lambda item: -item.size):
            at = bisect_left(spaces, (item.size, -1))
            if at < len(spaces):
                space, k = spaces.pop(at)
            else:
                space, k = self.chunk_size, len(bins)
                bins.append([])
            bins[k].append(item)
            insort(spaces, (space - item.size, k))
        return bins

    def _finish(self, members: _Bin, node: int, depth: int) -> None:
        self.bins.append(members)
        self.origins.append((node, depth))

    def listed(self, order: str) -> tuple[list[Chunk], list[int]]:
        """Return the chunks in backward order, and the parent of each."""
        chunks = [self._chunk(members) for members in self.bins]
        parents = self._parents()
        postorder = self._postorder(chunks, parents, order)
        number = {index: n for n, index in enumerate(postorder)}
        number[-1] = -1
        return [chunks[index] for index in postorder], [number[parents[index]] for index in postorder]

    def _parents(self) -> list[int]:
        """Return, for every chunk, the chunk that holds the token above it."""
        pieces: dict[int, list[tuple[int, int]]] = {}  # by node: (first depth, chunk) of its parts, sorted below
        for index, members in enumerate(self.bins):
            pending = list(members)
            while pending:
                fragment = pending.pop()
                pieces.setdefault(fragment.node, []).append((fragment.start, index))
                pending += fragment.below
        for parts in pieces.values():
            parts.sort()
        return [
            pieces[node][bisect_left(pieces[node], (depth, -1)) - 1][1] if node >= 0 else -1
            for node, depth in self.origins
        ]

    def _postorder(self, chunks: Sequence[Chunk], parents: Sequence[int], order: str) -> list[int]:
        children: list[list[int]] = [[] for _ in range(len(chunks) + 1)]  # the last entry is for the root
        for index, parent in enumerate(parents):
            children[parent].append(index)
        rank = self._ranks(chunks, parents, order)
        postorder, pending = [], [len(chunks)]
        while pending:  # preorder with children in reverse, read backwards
            index = pending.pop()
            postorder.append(index)
            pending += sorted(children[index], key=lambda child: (chunks[child].start, rank[child]))
        return postorder[:0:-1]

    def _ranks(self, chunks: Sequence[Chunk], parents: Sequence[int], order: str) -> Sequence[float]:
        if order == "random":
            generator = random.Random(0)
            return [generator.random() for _ in chunks]
        if order == "lexicographic":
            return [min(fragment.node for fragment in members) for members in self.bins]
        deepest = [chunk.start if chunk.spine is None else chunk.spine.stop for chunk in chunks]
        for index, parent in enumerate(parents):  # chunks are finished before their parents
            if parent >= 0:
                deepest[parent] = max(deepest[parent], deepest[index])
        return [-depth for depth in deepest]

    def _chunk(self, members: _Bin) -> Chunk:
        spine: Slice | None = None
        branches: list[Slice] = []
        # Depth-first walk; the fragment that extends the current slice is followed at once, its siblings are pushed.
        pending = sorted(members, key=lambda fragment: (fragment.open, -fragment.node))
        while pending:
            fragment = pending.pop()
            start, on_spine = fragment.start, fragment.open
            while fragment.below:
                leading = max(fragment.below, key=lambda item: (item.open, item.size))
                if on_spine and not leading.open:
                    break
                others = (item for item in fragment.below if item is not leading)
                pending += sorted(others, key=lambda item: -item.node)
                fragment = leading
            part = Slice(self.sequence[fragment.node], start, fragment.stop)
            if on_spine:
                spine = part
                pending += sorted(fragment.below, key=lambda item: -item.node)
            else:
                branches.append(part)
        return Chunk(spine, tuple(branches))


def _size(members: _Bin) -> int:
    return sum(fragment.size for fragment in members)


def _saves_a_chunk(length: int, size: int, room: int) -> bool:
    """Return whether a node and a bin need fewer chunks together than apart; a node that fits into one is not cut."""
    if length <= room:
        return length + size <= room
    return -(-(length + size) // room) < -(-length // room) + 1
