"""Ways to divide the rollouts of a batch among ranks: ours, and those that balancers without a tree use."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from dta_compile.plan import CostModel, LexicographicOrder, balance
from dta_compile.plan.division.exchange import differencing

IntArray = npt.NDArray[np.int64]
Partition = list[IntArray]  # indices of the sequences of every group

DIFFERENCING_LIMIT = 5 * 10**6  # sequences x groups; the method takes as much work for every two sums it adds


class TooLarge(Exception):
    """The method takes too long for this batch."""


class Batch:
    """Sequences in lexicographic order, with what any two of them share in O(1).

    Attributes:
        sorted: their order.
        lengths: `[N]` tokens of every sequence.
        rank: `[N]` position of every sequence in the order.
    """

    def __init__(self, order: LexicographicOrder) -> None:
        self.sorted, self.lengths = order, order.lengths
        self.rank = np.empty_like(order.order)
        self.rank[order.order] = np.arange(len(order.order))

    @cached_property
    def _least(self) -> list[npt.NDArray[np.int32]]:
        """Level l holds the least of `common[k : k + 2**l]` (a sparse table)."""
        levels = [self.sorted.common.astype(np.int32)]
        while 2 ** len(levels) <= len(levels[0]):
            level, half = levels[-1], 2 ** (len(levels) - 1)
            levels.append(np.minimum(level[:-half], level[half:]))
        return levels

    def shared(self, first: int, second: int) -> int:
        """Tokens that the sequences at ranks `first < second` share."""
        level = (second - first).bit_length() - 1
        table = self._least[level]
        return min(int(table[first + 1]), int(table[second + 1 - 2**level]))

    def tree_size(self, group: IntArray) -> tuple[int, int]:
        """Tokens, and attention pairs, of the prefix tree of a group of sequences."""
        ranks = np.sort(self.rank[group])
        lengths, first, second = self.lengths[self.sorted.order[ranks]], ranks[:-1], ranks[1:]
        levels, shared = np.frexp(second - first)[1] - 1, np.zeros(len(first), np.int64)
        for level in np.unique(levels):
            at, table = levels == level, self._least[level]
            shared[at] = np.minimum(table[first[at] + 1], table[second[at] + 1 - 2**level])
        return int(lengths.sum() - shared.sum()), int(_triangles(lengths).sum() - _triangles(shared).sum())

    def least_repeated(self, groups: int) -> int:
        """The least number of tree tokens that dividing the sequences among so many groups can add.

        A tree has the tokens of its sequences less the weight of a heaviest spanning tree of them, an edge weighing
        what its ends share; neighbours in lexicographic order make such a spanning tree. Those of K groups together
        lack at least K - 1 edges, and are heaviest where these are the lightest, however uneven that makes the groups.
        """
        return int(np.sort(self.sorted.common[1:])[: groups - 1].sum())


def _triangles(depths: IntArray) -> IntArray:
    return depths * (depths + 1) // 2


def balanced(cost: str | CostModel, contiguous: bool, batch: Batch, groups: int) -> Partition:
    """Ours: contiguous groups of the lexicographic order alone, or whatever division is cheapest."""
    made = balance(batch.sorted, groups, cost, contiguous=contiguous)
    return [np.array(group, np.int64) for group in made]


def round_robin(batch: Batch, groups: int) -> Partition:
    """Dealt out as they arrive."""
    return [np.arange(rank, len(batch.lengths), groups) for rank in range(groups)]


def greedy_tokens(batch: Batch, groups: int) -> Partition:
    """Each on arrival to the group with the fewest tokens."""
    loads, chosen = [(0, group) for group in range(groups)], []
    for length in batch.lengths.tolist():
        load, group = loads[0]
        heapq.heapreplace(loads, (load + length, group))
        chosen.append(group)
    return _members(np.array(chosen, np.int64), groups)


def greedy_tree(batch: Batch, groups: int) -> Partition:
    """Each on arrival to the group with the fewest tree tokens; what it adds depends on who is there already."""
    loads, chosen = [(0, group) for group in range(groups)], []
    present: list[list[int]] = [[] for _ in range(groups)]  # ranks
    for length, rank in zip(batch.lengths.tolist(), batch.rank.tolist(), strict=True):
        load, group = loads[0]
        there = present[group]
        at = bisect_left(there, rank)
        before = batch.shared(there[at - 1], rank) if at else 0
        after = batch.shared(rank, there[at]) if at < len(there) else 0
        insort(there, rank)
        heapq.heapreplace(loads, (load + length - max(before, after), group))
        chosen.append(group)
    return _members(np.array(chosen, np.int64), groups)


def first_fit_decreasing(batch: Batch, groups: int) -> Partition:
    """The longest first, each to the first group with room for its tokens; the least room that all fit in."""
    lengths = np.sort(batch.lengths)[::-1]
    low, high = max(int(lengths[0]), -(-int(lengths.sum()) // groups)), int(lengths.sum())
    fits = bisect_left(range(low, high), True, key=lambda room: _first_fit(lengths, groups, room) is not None)
    chosen = np.empty(len(lengths), np.int64)
    chosen[np.argsort(-batch.lengths, kind="stable")] = _first_fit(lengths, groups, low + fits)
    return _members(chosen, groups)


def _first_fit(lengths: IntArray, groups: int, room: int) -> IntArray | None:
    """Group of every sequence, or None if they do not fit; `lengths` fall. Equal lengths are placed together."""
    left, chosen = np.full(groups, room), []
    values, counts = np.unique(-lengths, return_counts=True)
    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        takes = left // length if length else np.full(groups, count)
        takes = np.diff(np.minimum(np.cumsum(takes), count), prepend=0)
        if takes.sum() < count:
            return None
        left -= takes * length
        chosen.append(np.repeat(np.arange(groups), takes))
    return np.concatenate(chosen)


def karmarkar_karp(batch: Batch, groups: int) -> Partition:
    """Largest differencing by tokens: the two most uneven partial partitions are merged, heavy groups with light ones.

    Raises:
        TooLarge: see `DIFFERENCING_LIMIT`.
    """
    if len(batch.lengths) * groups > DIFFERENCING_LIMIT:
        raise TooLarge
    return _members(differencing(batch.lengths.tolist(), groups), groups)


def _members(chosen: Sequence[int] | IntArray, groups: int) -> Partition:
    order = np.argsort(chosen, kind="stable")
    return np.split(order, np.searchsorted(np.asarray(chosen)[order], np.arange(1, groups)))


METHODS: dict[str, Callable[[Batch, int], Partition]] = {
    "dta": partial(balanced, "tree_tokens", False),
    "dta, cost model": partial(balanced, CostModel(), False),
    "Algorithm 4": partial(balanced, "tree_tokens", True),
    "greedy, tree tokens": greedy_tree,
    "greedy, tokens": greedy_tokens,
    "first fit decreasing": first_fit_decreasing,
    "Karmarkar-Karp": karmarkar_karp,
    "round robin": round_robin,
}
