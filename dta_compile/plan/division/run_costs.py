"""Tree cost of runs of the lexicographic order, as integers."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from itertools import pairwise

import numpy as np

from dta_compile.plan.tree.lexicographic import IntArray, LexicographicOrder

__all__ = ["RunCosts"]

_COST_BITS = 61  # of everything's cost: as fine as sums of int64 allow


class RunCosts:
    """Tree cost, as an integer, of the sequences at positions `[a, b)` of the lexicographic order, in O(1).

    Attributes:
        order: of the sequences.
        alone: of every sequence on its own.
        total: of the tree of all sequences up to and including each.
        repeated: what a cut before each adds to the cost of all groups: that of the tokens shared across it.
    """

    def __init__(self, order: LexicographicOrder, token: float, pair: float) -> None:
        self.order = order
        lengths, common = order.lengths[order.order], order.common
        weights = _integer_weights(lengths, token, pair)
        alone, repeated = (_weighted(depths, *weights) for depths in (lengths, common))
        self.alone: list[int] = alone.tolist()
        self.repeated: list[int] = [*repeated.tolist(), 0]
        self.total: list[int] = np.cumsum(alone - repeated).tolist()

    def __len__(self) -> int:
        return len(self.alone)

    def __call__(self, a: int, b: int) -> int:
        return self.alone[a] + self.total[b - 1] - self.total[a]

    def furthest(self, a: int, limit: int) -> int:
        """Largest `b` with cost of `[a, b)` at most `limit`."""
        return bisect_right(self.total, limit - self.alone[a] + self.total[a])

    def nearest(self, b: int, limit: int) -> int:
        """Smallest `a` with cost of `[a, b)` at most `limit`."""
        return bisect_left(range(b), True, key=lambda a: self(a, b) <= limit)

    def bound(self, num_groups: int) -> int:
        """What the most expensive of so many groups, none of them empty, costs at least, however they are made.

        A tree costs what its sequences do less the weight of a heaviest spanning tree of them, an edge weighing what
        its ends share; neighbours in lexicographic order make such a spanning tree, and K groups lack K - 1 edges.
        """
        fewest = sum(sorted(self.repeated[1:-1])[: num_groups - 1])
        return max(max(self.alone), -(-(self.total[-1] + fewest) // num_groups))


def _weighted(depths: IntArray, token: int, pair: int) -> IntArray:
    """Cost of one path of each of these numbers of tokens."""
    return token * depths + pair * (depths * (depths + 1) // 2)


def _integer_weights(lengths: IntArray, token: float, pair: float) -> tuple[int, int]:
    """Integers in the ratio of the rates, so that sums are exact and bisection ends at the optimum."""
    if not pair:
        return 1, 0
    everything = token * float(lengths.sum()) + pair * float((lengths * (lengths + 1)).sum()) / 2
    scale = 2.0**_COST_BITS / max(everything, token, pair)
    return round(token * scale), round(pair * scale)


Run = tuple[int, int]  # positions `[a, b)` of the lexicographic order


def contiguous_groups(costs: RunCosts, num_groups: int) -> list[Run]:
    """Exactly `num_groups` groups `[a, b)` of least largest cost, by bisection over the limit that a group may cost."""
    low, high = max(costs.alone), costs(0, len(costs))
    limit = low + bisect_left(range(low, high), True, key=lambda limit: _fill(costs, limit, num_groups) is not None)
    groups = _fill(costs, limit, num_groups)
    assert groups is not None
    return _split(costs, _repeat_least(costs, limit, groups), num_groups)


def _fill(costs: RunCosts, limit: int, num_groups: int) -> list[Run] | None:
    """Groups filled up to `limit` one after the other; None if that takes more than `num_groups`."""
    groups: list[Run] = []
    a = 0
    while a < len(costs):
        if len(groups) == num_groups:
            return None
        b = costs.furthest(a, limit)
        groups.append((a, b))
        a = b
    return groups


def _repeat_least(costs: RunCosts, limit: int, groups: list[Run]) -> list[Run]:
    """As many groups within `limit`, cut where the tokens shared across the cuts cost least in sum.

    No fewer groups will do, `groups` being filled up. So the positions that one cut can take, from filling groups up
    from the end to filling them up from the start, lie before those of the next cut, and this takes O(N).
    """
    windows = [range(len(costs), len(costs) + 1)]
    for _, latest in reversed(groups[:-1]):
        windows.append(range(costs.nearest(windows[-1].start, limit), latest + 1))
    best = {0: (0, 0)}  # of this and later cuts of its window: the least sum of all cuts up to it, and its position
    start_of: dict[int, int] = {}  # the group that ends there
    a = 0
    for window in reversed(windows):
        for b in window:
            while costs(a, b) > limit:
                a += 1
            repeated, start_of[b] = best[a]
            best[b] = repeated + costs.repeated[b], b
        for b in reversed(window[:-1]):
            best[b] = min(best[b], best[b + 1])
        a = window.start
    cuts = [len(costs)]
    while cuts[-1]:
        cuts.append(start_of[cuts[-1]])
    return list(pairwise(reversed(cuts)))


def _split(costs: RunCosts, groups: list[Run], num_groups: int) -> list[Run]:
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


def _best_cut(costs: RunCosts, a: int, b: int) -> int:
    """Where to cut `[a, b)` so that the larger half costs least; of equal cuts the one nearest to the middle."""
    # With the cut moving right, the cost of the left half never falls and that of the right half never rises.
    cuts = range(a + 1, b)
    crossing = min(bisect_left(cuts, True, key=lambda m: costs(a, m) >= costs(m, b)), len(cuts) - 1)
    least = min(max(costs(a, m), costs(m, b)) for m in cuts[max(crossing - 1, 0) : crossing + 1])
    first = cuts[bisect_left(cuts, True, key=lambda m: costs(m, b) <= least)]
    last = cuts[bisect_right(cuts, False, key=lambda m: costs(a, m) > least) - 1]
    return min(max((a + b) // 2, first), last)
