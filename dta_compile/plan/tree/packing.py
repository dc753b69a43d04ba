"""Packed chunks: a partition of the prefix tree into few chunks of whole subtrees and sibling branches.

Bottom-up over the nodes. What is left of the subtrees below a node is packed into chunks by best fit decreasing; one of
these is not closed but joined by the node itself, and is what the node leaves to its parent. At most one path of a
chunk may be continued by other chunks: its spine.
"""

from __future__ import annotations

import dataclasses
import random
from bisect import bisect_left, insort
from collections.abc import Sequence

from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.prefix_tree import PrefixTree

__all__ = ["pack"]


@dataclasses.dataclass(eq=False)
class _Fragment:
    """Tokens of a node (at depths `[start, stop)`) and all that was joined below them.

    Attributes:
        size: tokens.
        open: other chunks continue a token of it.
        below: fragments that continue at `stop`; the open one, if any, is among them.
    """

    node: int
    start: int
    stop: int
    size: int
    open: bool
    below: list[_Fragment]


_Bin = list[_Fragment]


def pack(
    tree: PrefixTree, chunk_size: int, order: str = "backward_dfs", seed: int = 0
) -> tuple[list[Chunk], list[int]]:
    """Chunks in the order of their backwards, and the parent of each (see `ChunkTree`).

    Takes O(M log M) for M nodes (linear but for sorting siblings by size). Nodes are cut only if they are longer than
    `chunk_size`. The number of chunks is compared with the best possible in the tests: equal on most small trees.

    Args:
        order: of chunks that continue the same token: "backward_dfs" (the one with the deepest continuation first: its
            path is still on the stack), "lexicographic" or "random".
    """
    packer = _Packer(tree, chunk_size)
    packer.run()
    return packer.listed(order, seed)


class _Packer:
    def __init__(self, tree: PrefixTree, chunk_size: int) -> None:
        self.tree, self.chunk_size = tree, chunk_size
        self.sequence: list[int] = tree.sequence.tolist()
        self.bins: list[_Bin] = []  # finished chunks
        self.place: list[tuple[int, int]] = []  # node whose token they continue, and the depth where they start

    def run(self) -> None:
        tree = self.tree
        left: dict[int, _Fragment] = {}  # what the nodes so far leave to their parents
        start, stop = tree.start.tolist(), tree.stop.tolist()
        for node in reversed(range(len(stop))):  # preorder numbers: children before their parents
            below = [left.pop(child) for child in tree.children(node)]
            left[node] = self._join(node, start[node], stop[node], below)
        for members in self._packed([left[root] for root in tree.roots]):
            self._finish(members, -1, 0)

    def _join(self, node: int, start: int, stop: int, below: _Bin) -> _Fragment:
        """What `node` leaves to its parent, after finishing the chunks that it cannot take along."""
        length, room = stop - start, self.chunk_size
        taken, is_open = below, any(fragment.open for fragment in below)
        if length + _size(below) > room or sum(fragment.open for fragment in below) > 1:
            bins = sorted(self._packed(below), key=_size)
            # Whichever joins saves a chunk; the smallest leaves most room above.
            taken = bins[0] if bins and _saves_a_chunk(length, _size(bins[0]), room) else []
            finished = bins[1:] if taken else bins
            for members in finished:
                self._finish(members, node, stop)
            is_open = bool(finished) or any(fragment.open for fragment in taken)
        fragment = _Fragment(node, start, stop, length + _size(taken), is_open, taken)
        while fragment.size > room:  # a long node is cut from its end
            fragment = self._cut(fragment)
        return fragment

    def _cut(self, fragment: _Fragment) -> _Fragment:
        """Finish a full chunk with the fragment's end; what is left of it."""
        rest = fragment.size - self.chunk_size
        depth = fragment.start + rest
        self._finish([dataclasses.replace(fragment, start=depth, size=self.chunk_size)], fragment.node, depth)
        return dataclasses.replace(fragment, stop=depth, size=rest, open=True, below=[])

    def _packed(self, items: _Bin) -> list[_Bin]:
        """Best fit decreasing; at most one open fragment in a bin."""
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
        self.place.append((node, depth))

    def listed(self, order: str, seed: int) -> tuple[list[Chunk], list[int]]:
        """Chunks and parents in the order of backwards."""
        chunks = [self._chunk(members) for members in self.bins]
        parents = self._parents()
        postorder = self._postorder(chunks, parents, order, seed)
        number = {index: n for n, index in enumerate(postorder)}
        number[-1] = -1
        return [chunks[index] for index in postorder], [number[parents[index]] for index in postorder]

    def _parents(self) -> list[int]:
        """For every chunk the one that holds the token above it."""
        pieces: dict[int, list[tuple[int, int]]] = {}  # of a node: first depth and chunk, ascending once sorted
        for index, members in enumerate(self.bins):
            pending = list(members)
            while pending:
                fragment = pending.pop()
                pieces.setdefault(fragment.node, []).append((fragment.start, index))
                pending += fragment.below
        for found in pieces.values():
            found.sort()
        return [
            pieces[node][bisect_left(pieces[node], (depth, -1)) - 1][1] if node >= 0 else -1
            for node, depth in self.place
        ]

    def _postorder(self, chunks: Sequence[Chunk], parents: Sequence[int], order: str, seed: int) -> list[int]:
        children: list[list[int]] = [[] for _ in range(len(chunks) + 1)]  # the last: of the root
        for index, parent in enumerate(parents):
            children[parent].append(index)
        rank = self._ranks(chunks, parents, order, seed)
        postorder, pending = [], [len(chunks)]
        while pending:  # preorder with children in reverse, read backwards
            index = pending.pop()
            postorder.append(index)
            pending += sorted(children[index], key=lambda child: (chunks[child].start, rank[child]))
        return postorder[:0:-1]

    def _ranks(self, chunks: Sequence[Chunk], parents: Sequence[int], order: str, seed: int) -> Sequence[float]:
        if order == "random":
            generator = random.Random(seed)
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
        # Depth-first; of the fragments pushed, the one that leads on from the slice at hand is walked there and then.
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
    """Whether a node and a bin make fewer chunks together than apart; a node that fits into one is not cut."""
    if length <= room:
        return length + size <= room
    return -(-(length + size) // room) < -(-length // room) + 1
