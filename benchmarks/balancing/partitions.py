"""Methods of dividing a batch's rollouts among ranks: ours, and those of balancers without a tree."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from dta_compile.plan import CostModel, LexicographicOrder, balance

IntArray = npt.NDArray[np.int64]
Partition = list[IntArray]  # sequence indices of each group

DIFFERENCING_LIMIT = 5 * 10**6  # sequences x groups; differencing does this much work per merge of two partitions


class TooLarge(Exception):
    """The batch is too large for the method."""


class Batch:
    """Sequences in lexicographic order, with O(1) queries for common prefixes.

    Attributes:
        sorted: their lexicographic order.
        lengths: `[N]` tokens per sequence.
        rank: `[N]` position of each sequence in the order.
    """

    def __init__(self, order: LexicographicOrder) -> None:
        self.sorted, self.lengths = order, order.lengths
        self.rank = np.empty_like(order.order)
        self.rank[order.order] = np.arange(len(order.order))

    @cached_property
    def _least(self) -> list[npt.NDArray[np.int32]]:
        """Sparse table for range minima: level l holds the minima of `common[k : k + 2**l]`."""
        levels = [self.sorted.common.astype(np.int32)]
        while 2 ** len(levels) <= len(levels[0]):
            level, half = levels[-1], 2 ** (len(levels) - 1)
            levels.append(np.minimum(level[:-half], level[half:]))
        return levels

    def shared(self, first: int, second: int) -> int:
        """Return the number of tokens shared by the sequences at ranks `first < second`."""
        level = (second - first).bit_length() - 1
        table = self._least[level]
        return min(int(table[first + 1]), int(table[second + 1 - 2**level]))

    def tree_size(self, group: IntArray) -> tuple[int, int]:
        """Return tokens and attention pairs of the prefix tree of a group of sequences."""
        ranks = np.sort(self.rank[group])
        lengths, first, second = self.lengths[self.sorted.order[ranks]], ranks[:-1], ranks[1:]
        levels, shared = np.frexp(second - first)[1] - 1, np.zeros(len(first), np.int64)
        for level in np.unique(levels):
            at, table = levels == level, self._least[level]
            shared[at] = np.minimum(table[first[at] + 1], table[second[at] + 1 - 2**level])
        return int(lengths.sum() - shared.sum()), int(_triangles(lengths).sum() - _triangles(shared).sum())

    def least_repeated(self, groups: int) -> int:
        """Return the least number of tree tokens that a division into `groups` groups must repeat.

        A tree has the tokens of its sequences minus the weight of a maximum spanning tree over them, where an edge
        weighs the common prefix of its ends; neighbours in lexicographic order form such a spanning tree. The trees of
        K groups together lack at least K - 1 edges, and repeat least if those are the lightest, however uneven the
        groups become.
        """
        return int(np.sort(self.sorted.common[1:])[: groups - 1].sum())


def _triangles(depths: IntArray) -> IntArray:
    return depths * (depths + 1) // 2


def balanced(cost: str | CostModel, contiguous: bool, batch: Batch, groups: int) -> Partition:
    """Divide with `balance`: contiguous groups of the lexicographic order only, or the cheapest division."""
    division = balance(batch.sorted, groups, cost, contiguous=contiguous)
    return [np.array(group, np.int64) for group in division]


def round_robin(batch: Batch, groups: int) -> Partition:
    """Deal the sequences out in order of arrival."""
    return [np.arange(rank, len(batch.lengths), groups) for rank in range(groups)]


def greedy_tokens(batch: Batch, groups: int) -> Partition:
    """Assign each arrival to the group with the fewest tokens."""
    loads, chosen = [(0, group) for group in range(groups)], []
    for length in batch.lengths.tolist():
        load, group = loads[0]
        heapq.heapreplace(loads, (load + length, group))
        chosen.append(group)
    return _members(np.array(chosen, np.int64), groups)


def greedy_tree(batch: Batch, groups: int) -> Partition:
    """Assign each arrival to the group with the fewest tree tokens; its own cost depends on the group's members."""
    loads, chosen = [(0, group) for group in range(groups)], []
    present: list[list[int]] = [[] for _ in range(groups)]  # ranks
    for length, rank in zip(batch.lengths.tolist(), batch.rank.tolist(), strict=True):
        load, group = loads[0]
        members = present[group]
        at = bisect_left(members, rank)
        before = batch.shared(members[at - 1], rank) if at else 0
        after = batch.shared(rank, members[at]) if at < len(members) else 0
        insort(members, rank)
        heapq.heapreplace(loads, (load + length - max(before, after), group))
        chosen.append(group)
    return _members(np.array(chosen, np.int64), groups)


def first_fit_decreasing(batch: Batch, groups: int) -> Partition:
    """Place the longest first, each in the first group with room for its tokens, at the least room that fits all."""
    lengths = np.sort(batch.lengths)[::-1]
    low, high = max(int(lengths[0]), -(-int(lengths.sum()) // groups)), int(lengths.sum())
    fits = bisect_left(range(low, high), True, key=lambda room: _first_fit(lengths, groups, room) is not None)
    chosen = np.empty(len(lengths), np.int64)
    chosen[np.argsort(-batch.lengths, kind="stable")] = _first_fit(lengths, groups, low + fits)
    return _members(chosen, groups)


def _first_fit(lengths: IntArray, groups: int, room: int) -> IntArray | None:
    """Return the group of every sequence, or None if they do not fit; `lengths` descend, equal ones go at once."""
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
    """Run largest differencing by tokens: merge the two most uneven partial partitions, heavy groups with light ones.

    Raises:
        TooLarge: the batch exceeds `DIFFERENCING_LIMIT`.
    """
    if len(batch.lengths) * groups > DIFFERENCING_LIMIT:
        raise TooLarge
    return _members(differencing(batch.lengths.tolist(), groups), groups)


def differencing(costs: list[int], num_groups: int) -> list[int]:
    """Assign sequences to groups by largest differencing (Karmarkar and Karp, 1982).

    Repeatedly merges the two partial divisions with the largest spread, heavy groups with light ones.
    """
    # Entries: negative spread, number (breaks ties), (sum, members) of every group by descending sum.
    heap = [(-cost, index, [(cost, [index]), *([(0, [])] * (num_groups - 1))]) for index, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, left), (_, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, m + n) for (a, m), (b, n) in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    group_of = [0] * len(costs)
    for group, (_, members) in enumerate(heap[0][2]):
        for index in members:
            group_of[index] = group
    return group_of


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
