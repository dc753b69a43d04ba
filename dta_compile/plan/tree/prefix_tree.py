"""Compressed prefix tree (radix tree) of a batch of token sequences, in numpy arrays."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dta_compile.errors import PlanError
from dta_compile.plan.tree.lexicographic import IntArray, LexicographicOrder, common_of_some, lexicographic_order

if TYPE_CHECKING:
    from dta_compile.plan.tree.chunk import Chunk, Slice

__all__ = ["IntArray", "PrefixTree"]

_CACHED_PATHS = 64  # those of the slices of a packed chunk


class PrefixTree:
    """Prefix tree of `N` sequences with `M` nodes; a node is a segment of tokens without branch or sequence end inside.

    Nodes are numbered in preorder, children in lexicographic order. Tokens of the tree ("rows") are numbered node
    after node: the token of node `n` at depth `d` is row `row[n] + d - start[n]`.

    Attributes:
        sorted: lexicographic order of the sequences; its `lengths`, `order`, `common` and `forks` are here too.
        lcp: `[N]` tokens that `order[k]` shares with `order[k - 1]` in this tree; all 0 if nothing is shared.
        parent: `[M]` parent node, -1 for a root.
        start, stop: `[M]` depths of the segment, half-open.
        sequence: `[M]` a sequence whose path runs through the node.
        row: `[M]` row of the node's first token.
        end_node: `[N]` node at whose last token the sequence ends, -1 for an empty sequence.
        num_rows: tokens of the tree.
        roots, leaves: nodes without parent, nodes without children, both ascending.
        shared: False for the forest that keeps every sequence separate (`unshared`).
        units: of every sequence `[n, 2]`, first and one past the last depth of tokens that are never cut apart, since
            each reads all of them; ascending. No sequence leaves another inside of a unit. None: there are none.
        longest_unit: most tokens of a unit.
    """

    def __init__(
        self, sequences: LexicographicOrder, shared: bool = True, units: Sequence[IntArray] | None = None
    ) -> None:
        self.sorted, self.shared, self.units = sequences, shared, units
        self.longest_unit = max((int((unit[:, 1] - unit[:, 0]).max(initial=1)) for unit in units or ()), default=1)
        self.lengths, self.order = sequences.lengths, sequences.order
        self.common, self.forks = sequences.common, sequences.forks
        self.lcp = self.common if shared else np.zeros_like(self.common)
        order = self.order
        first, stop, parent, end = _cut_into_nodes(self.lengths[order].tolist(), self.lcp.tolist())
        preorder = np.lexsort((stop, first))  # a node comes before those that begin with it and reach deeper
        number = np.empty(len(preorder) + 1, np.int64)
        number[preorder], number[-1] = np.arange(len(preorder)), -1  # so that number[-1] keeps "none" as it is
        self.stop = stop[preorder]
        self.parent = number[parent[preorder]]
        self.sequence = order[first[preorder]]
        self.end_node = np.empty(len(order), np.int64)
        self.end_node[order] = number[end]
        self.start = np.where(self.parent < 0, 0, self.stop[self.parent]) if len(stop) else self.stop.copy()
        sizes = self.stop - self.start
        self.row = np.cumsum(sizes) - sizes
        self.num_rows = int(sizes.sum())
        self.roots: list[int] = np.flatnonzero(self.parent < 0).tolist()
        self.leaves: list[int] = np.setdiff1d(np.arange(len(stop)), self.parent).tolist()
        self._children = _Groups(self.parent, len(stop))
        self._ending = _Groups(self.end_node, len(stop))
        # The rows of a first child continue those of its parent. Treating such chains as one run makes `_path` cheap.
        nodes = np.arange(len(stop))
        head = np.maximum.accumulate(np.where(self.parent == nodes - 1, 0, nodes))
        self._runs = list(zip(*(x[head].tolist() for x in (self.start, self.row, self.parent)), strict=True))
        self._paths: dict[int, tuple[list[int], list[int]]] = {}

    @classmethod
    def build(cls, sequences: Iterable[Any], share: bool = True, units: Sequence[IntArray] | None = None) -> PrefixTree:
        """Build the tree of 1-D integer sequences (arrays, lists, tensors; possibly empty).

        Takes O(total tokens) work in numpy and O(N log N) in Python. `share=False` gives every sequence its own root.

        Raises:
            PlanError: a sequence is not a 1-D run of integers that fit in 64 bits.
        """
        return cls(lexicographic_order(sequences), share, units)

    def unshared(self) -> PrefixTree:
        """Return the forest in which every sequence has a root of its own, duplicates too (dense execution)."""
        return PrefixTree(self.sorted, False, self.units)

    def of(self, sequences: Sequence[int]) -> PrefixTree:
        """Return the tree of some of the sequences. The numbers of sequences stay: the others are empty in it."""
        chosen = np.zeros(len(self.order), np.bool_)
        chosen[list(sequences)] = True
        positions = np.flatnonzero(chosen[self.order])
        others = np.flatnonzero(~chosen)
        order = np.concatenate([others, self.order[positions]])
        common = np.concatenate([np.zeros(len(others), np.int64), common_of_some(self.common, positions)])
        lengths, forks = np.where(chosen, self.lengths, 0), np.zeros((len(order), 2), np.int64)
        return PrefixTree(LexicographicOrder(lengths, order, common, forks), self.shared, self.units)

    def units_in(self, part: Slice) -> IntArray:
        """Return `[n, 2]` depths of the units in a slice that cuts none."""
        if self.units is None:
            return np.zeros((0, 2), np.int64)
        units = self.units[part.sequence]
        return units[slice(*np.searchsorted(units[:, 0], (part.start, part.stop)))]

    def unit_at(self, sequence: int, depth: int) -> tuple[int, int]:
        """Return the depths between which a sequence may not be cut around `depth`, twice `depth` if it may."""
        if self.units is None:
            return depth, depth
        units = self.units[sequence]
        number = int(np.searchsorted(units[:, 0], depth)) - 1
        first, last = units[number].tolist() if number >= 0 else (depth, depth)
        return (first, last) if depth < last else (depth, depth)

    def rows_in(self, whole: PrefixTree) -> IntArray:
        """Return `[R]` the row in `whole` of every row of this tree of some of its sequences."""
        nodes = zip(self.sequence.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)
        return np.concatenate([np.zeros(0, np.int64), *(whole.rows(*node) for node in nodes)])

    def children(self, node: int) -> list[int]:
        """Return the child nodes of a node, in lexicographic order."""
        return self._children[node]

    def sequences_ending_at(self, node: int) -> list[int]:
        """Return the sequences (ascending) whose last token is the node's last token."""
        return self._ending[node]

    def row_ranges(self, sequence: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the rows of depths `[start, stop)` of the path of `sequence`, as maximal half-open ranges."""
        if not 0 <= start <= stop <= self.lengths[sequence]:
            raise PlanError(
                f"sequence {sequence} has no tokens [{start}:{stop})", expected=f"within [0:{self.lengths[sequence]})"
            )
        depths, rows = self._path(sequence)
        ranges = []
        for run in range(max(bisect_right(depths, start) - 1, 0), len(depths)):
            low, high = max(start, depths[run]), min(stop, depths[run + 1] if run + 1 < len(depths) else stop)
            if low >= high:
                break
            ranges.append((rows[run] + low - depths[run], rows[run] + high - depths[run]))
        return ranges

    def chunk_ranges(self, chunk: Chunk) -> list[tuple[int, int]]:
        """Return the rows of a chunk, slice after slice, as half-open ranges."""
        return [r for part in chunk.slices for r in self.row_ranges(part.sequence, part.start, part.stop)]

    def rows(self, sequence: int, start: int, stop: int) -> IntArray:
        """Return the rows `[stop - start]` of depths `[start, stop)` of the path of `sequence`."""
        ranges = self.row_ranges(sequence, start, stop)
        if len(ranges) == 1:
            return np.arange(*ranges[0], dtype=np.int64)
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(*r, dtype=np.int64) for r in ranges)])

    def depths(self) -> IntArray:
        """Return `[num_rows]` the depth of the token of every row."""
        sizes = self.stop - self.start
        return np.arange(self.num_rows) + np.repeat(self.start - self.row, sizes)

    def row_at(self, sequence: int, depth: int) -> int:
        """Return the row of the token at `depth` of the path of `sequence`."""
        depths, rows = self._path(sequence)
        run = bisect_right(depths, depth) - 1
        return rows[run] + depth - depths[run]

    def same_path(self, a: int, b: int, depth: int) -> bool:
        """Return whether sequences `a` and `b` both have `depth` tokens and share the rows of all of them."""
        if depth > min(self.lengths[a], self.lengths[b]):
            return False
        return a == b or depth == 0 or self.row_at(a, depth - 1) == self.row_at(b, depth - 1)

    def token_rows(self) -> IntArray:
        """Return the row of every token, sequence after sequence in input order: `[lengths.sum()]`."""
        out = np.empty(int(self.lengths.sum()), np.int64)
        offsets, lengths = np.cumsum(self.lengths) - self.lengths, self.lengths
        row = previous = 0
        # Rows are in preorder, so in lexicographic order of the sequences every new token gets the next row.
        for sequence, shared in zip(self.order.tolist(), self.lcp.tolist(), strict=True):
            begin, size = int(offsets[sequence]), int(lengths[sequence])
            out[begin : begin + shared] = out[previous : previous + shared]
            out[begin + shared : begin + size] = np.arange(row, row + size - shared)
            row, previous = row + size - shared, begin
        return out

    def graph(self) -> Any:
        """Return a `networkx.DiGraph` of the nodes: `start`, `stop`, `sequence`, and `sequences` (ending there)."""
        import networkx  # imported late, because planning itself does not need it

        graph = networkx.DiGraph()
        columns = (self.start.tolist(), self.stop.tolist(), self.sequence.tolist(), self.parent.tolist())
        for node, (start, stop, sequence, parent) in enumerate(zip(*columns, strict=True)):
            ending = self.sequences_ending_at(node)
            graph.add_node(node, start=start, stop=stop, sequence=sequence, sequences=ending)
            if parent >= 0:
                graph.add_edge(parent, node)
        return graph

    def _path(self, sequence: int) -> tuple[list[int], list[int]]:
        """Return first depth and first row of every run of consecutive rows on the path of `sequence`."""
        path = self._paths.get(sequence)
        if path is None:
            depths, rows, node = [], [], int(self.end_node[sequence])
            while node >= 0:
                depth, row, node = self._runs[node]
                depths.append(depth)
                rows.append(row)
            path = depths[::-1], rows[::-1]
            if len(self._paths) >= _CACHED_PATHS:
                del self._paths[next(iter(self._paths))]
            self._paths[sequence] = path
        return path


class _Groups:
    """Indices `i` grouped by `values[i]` in `[0, count)`; negative values belong to no group."""

    def __init__(self, values: IntArray, count: int) -> None:
        self._members = np.argsort(values, kind="stable")
        self._bounds = np.searchsorted(values[self._members], np.arange(count + 1))

    def __getitem__(self, value: int) -> list[int]:
        members: list[int] = self._members[self._bounds[value] : self._bounds[value + 1]].tolist()
        return members


def _cut_into_nodes(lengths: Sequence[int], lcp: Sequence[int]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut sorted sequences into tree nodes, using a stack of the nodes on the current path.

    Returns, of every node in order of creation, `first` (position of the first sequence through it), `stop` and
    `parent`, and the end node of every sequence; -1 is none.
    """
    first: list[int] = []
    stop: list[int] = []
    parent: list[int] = []
    end: list[int] = []
    path: list[int] = []

    def push(position: int, depth: int) -> None:
        path.append(len(first))
        first.append(position)
        stop.append(depth)
        parent.append(path[-2] if len(path) > 1 else -1)

    for position, (length, shared) in enumerate(zip(lengths, lcp, strict=True)):
        child = -1
        while path and stop[path[-1]] > shared:
            child = path.pop()
        if child >= 0 and shared > (stop[path[-1]] if path else 0):  # the new sequence branches off inside `child`
            push(first[child], shared)
            parent[child] = path[-1]
        if length > shared:
            push(position, length)
        end.append(path[-1] if path else -1)
    return np.array(first, np.int64), np.array(stop, np.int64), np.array(parent, np.int64), np.array(end, np.int64)
