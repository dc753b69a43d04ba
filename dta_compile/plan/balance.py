"""Load balancing over ranks: contiguous groups of the lexicographic order (paper Algorithm 4)."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any

import numpy as np

from dta_compile.errors import PlanError
from dta_compile.plan.prefix_tree import PrefixTree

__all__ = ["balance"]


def balance(sequences: Iterable[Any] | PrefixTree, num_groups: int) -> list[list[int]]:
    """Groups of sequence indices whose largest number of tree tokens is the least, over contiguous groups.

    Contiguous in lexicographic order, which keeps shared prefixes together (paper Algorithm 4). Takes
    O(K log N log tokens) after the sort.

    Args:
        sequences: 1-D integer sequences (see `PrefixTree.build`), or their tree.
        num_groups: K >= 1. Exactly K groups come back, none of them empty if there are at least K sequences; else
            the surplus groups at the end are empty.

    Raises:
        PlanError: K < 1, or a sequence that is not a run of integers.
    """
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1:
        raise PlanError("cannot balance over this number of groups", expected="an integer >= 1", got=repr(num_groups))
    tree = sequences if isinstance(sequences, PrefixTree) else PrefixTree.build(sequences)
    count = len(tree.lengths)
    groups = _contiguous_groups(_Costs(tree), min(num_groups, count)) if count else []
    order: list[int] = tree.order.tolist()
    return [order[a:b] for a, b in groups] + [[] for _ in range(num_groups - len(groups))]


class _Costs:
    """Tree tokens of the sequences at positions `[a, b)` of the lexicographic order, in O(1)."""

    def __init__(self, tree: PrefixTree) -> None:
        lengths = tree.lengths[tree.order]
        self.lengths: list[int] = lengths.tolist()
        self.total: list[int] = np.cumsum(lengths - tree.common).tolist()

    def __call__(self, a: int, b: int) -> int:
        return self.lengths[a] + self.total[b - 1] - self.total[a]

    def furthest(self, a: int, limit: int) -> int:
        """Largest `b` with cost of `[a, b)` at most `limit`."""
        return bisect_right(self.total, limit - self.lengths[a] + self.total[a])


def _contiguous_groups(costs: _Costs, num_groups: int) -> list[tuple[int, int]]:
    """Exactly `num_groups` groups `[a, b)` of least largest cost, by bisection over the limit that a group may cost."""
    low, high = max(costs.lengths), costs(0, len(costs.lengths))
    feasible = bisect_left(range(low, high), True, key=lambda limit: _fill(costs, limit, num_groups) is not None)
    groups = _fill(costs, low + feasible, num_groups)
    assert groups is not None
    return _split(costs, groups, num_groups)


def _fill(costs: _Costs, limit: int, num_groups: int) -> list[tuple[int, int]] | None:
    """Groups filled up to `limit` one after the other; None if that takes more than `num_groups`."""
    groups: list[tuple[int, int]] = []
    a = 0
    while a < len(costs.lengths):
        if len(groups) == num_groups:
            return None
        b = costs.furthest(a, limit)
        groups.append((a, b))
        a = b
    return groups


def _split(costs: _Costs, groups: list[tuple[int, int]], num_groups: int) -> list[tuple[int, int]]:
    """Halve the most expensive group that has two sequences until there are `num_groups`."""
    single = [group for group in groups if group[1] - group[0] == 1]
    heap = [(-costs(a, b), a - b, a, b) for a, b in groups if b - a > 1]  # of equal cost, the longest group first
    heapq.heapify(heap)
    while len(single) + len(heap) < num_groups:
        _, _, a, b = heapq.heappop(heap)
        middle = _best_cut(costs, a, b)
        for x, y in ((a, middle), (middle, b)):
            if y - x == 1:
                single.append((x, y))
            else:
                heapq.heappush(heap, (-costs(x, y), x - y, x, y))
    return sorted(single + [(a, b) for _, _, a, b in heap])


def _best_cut(costs: _Costs, a: int, b: int) -> int:
    """Where to cut `[a, b)` so that the larger half costs least; of equal cuts the one nearest to the middle."""
    # With the cut moving right, the cost of the left half never falls and that of the right half never rises.
    cuts = range(a + 1, b)
    crossing = min(bisect_left(cuts, True, key=lambda m: costs(a, m) >= costs(m, b)), len(cuts) - 1)
    least = min(max(costs(a, m), costs(m, b)) for m in cuts[max(crossing - 1, 0) : crossing + 1])
    first = cuts[bisect_left(cuts, True, key=lambda m: costs(m, b) <= least)]
    last = cuts[bisect_right(cuts, False, key=lambda m: costs(a, m) > least) - 1]
    return min(max((a + b) // 2, first), last)
