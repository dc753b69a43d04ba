"""Tree cost of runs of the lexicographic order in O(1), as integers, and the best contiguous groups by it."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from dta_compile.plan.tree.lexicographic import IntArray, LexicographicOrder

_COST_BITS = 61  # of the cost of the whole tree: the finest resolution whose sums fit in int64


class RunCosts:
    """Tree cost, as an integer, of the sequences at positions `[a, b)` of the lexicographic order, in O(1).

    Attributes (lists are indexed by position):
        alone: cost of the sequence on its own.
        total: cost of the tree of all sequences up to and including this one.
        repeated: cost that a cut before this position adds to the sum over groups: the tokens shared across it.
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
        """Return the largest `b` such that `[a, b)` costs at most `limit`."""
        return bisect_right(self.total, limit - self.alone[a] + self.total[a])

    def nearest(self, b: int, limit: int) -> int:
        """Return the smallest `a` such that `[a, b)` costs at most `limit`."""
        return bisect_left(range(b), True, key=lambda a: self(a, b) <= limit)

    def bound(self, num_groups: int) -> int:
        """Return a lower bound of the largest cost over all divisions into `num_groups` non-empty groups.

        The cost of a tree is the sum over its sequences minus the weight of a maximum spanning tree over them, where an
        edge weighs the tokens that its ends share. Neighbours in lexicographic order form such a spanning tree, and K
        groups lack K - 1 of its edges.
        """
        fewest = sum(sorted(self.repeated[1:-1])[: num_groups - 1])
        return max(max(self.alone), -(-(self.total[-1] + fewest) // num_groups))


def _weighted(depths: IntArray, token: int, pair: int) -> IntArray:
    """Return the cost of a single path for every length in `depths`."""
    return token * depths + pair * (depths * (depths + 1) // 2)


def _integer_weights(lengths: IntArray, token: float, pair: float) -> tuple[int, int]:
    """Scale both rates to integers, so that sums are exact and bisection ends at the optimum."""
    if not pair:
        return 1, 0
    everything = token * float(lengths.sum()) + pair * float((lengths * (lengths + 1)).sum()) / 2
    scale = 2.0**_COST_BITS / max(everything, token, pair)
    return round(token * scale), round(pair * scale)


Run = tuple[int, int]  # positions of the lexicographic order, or items, `[a, b)`


def contiguous_groups(costs: RunCosts, num_groups: int) -> list[Run]:
    """Return exactly `num_groups` groups `[a, b)` of least largest cost, by bisection over the limit per group."""
    low, high = max(costs.alone), costs(0, len(costs))
    limit = low + bisect_left(range(low, high), True, key=lambda limit: _fill(costs, limit, num_groups) is not None)
    groups = _fill(costs, limit, num_groups)
    assert groups is not None
    return _split(costs, _repeat_least(costs, limit, groups), num_groups)


def _fill(costs: RunCosts, limit: int, num_groups: int) -> list[Run] | None:
    """Fill groups up to `limit` from left to right; return None if that takes more than `num_groups`."""
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
    """Move the cuts of `groups` within `limit`, minimising the cost of tokens shared across cuts, in O(N).

    `groups` were filled greedily, so no fewer groups suffice. Each cut can therefore lie between its positions under
    filling from the right and from the left, and these windows of consecutive cuts do not overlap.
    """
    windows = [range(len(costs), len(costs) + 1)]
    for _, latest in reversed(groups[:-1]):
        windows.append(range(costs.nearest(windows[-1].start, limit), latest + 1))
    # By position of a cut: least sum of all cuts up to it, over this and later positions of its window, and where.
    best = {0: (0, 0)}
    start_of: dict[int, int] = {}  # by end of a group, its start
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
    """Split the most expensive group of at least two sequences until there are `num_groups`."""
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
    """Return the cut of `[a, b)` whose costlier half is cheapest; among equal cuts the one nearest to the middle."""
    # As the cut moves right, the cost of the left half never falls and that of the right half never rises.
    cuts = range(a + 1, b)
    crossing = min(bisect_left(cuts, True, key=lambda m: costs(a, m) >= costs(m, b)), len(cuts) - 1)
    least = min(max(costs(a, m), costs(m, b)) for m in cuts[max(crossing - 1, 0) : crossing + 1])
    first = cuts[bisect_left(cuts, True, key=lambda m: costs(m, b) <= least)]
    last = cuts[bisect_right(cuts, False, key=lambda m: costs(a, m) > least) - 1]
    return min(max((a + b) // 2, first), last)


MOST_ITEMS = 2**14  # beyond that, the sequences that share most are merged into items: bounds time and memory
_NEVER = np.iinfo(np.int64).max


class Items:
    """`M` indivisible runs of the lexicographic order, with the shared cost of any two of them in O(1).

    A sequence that is a prefix of the next one, or equal to it, is in the same item: apart, the two cost more.

    Attributes:
        starts: `[M + 1]` positions of the order at which items begin; the last entry is the end of the last item.
        cost: `[M]` cost of the tree of every item.
        links: `[M]` cost of the tokens that an item shares with the item before it; `links[0] = 0`.
        total: `[M]` cost of the tree of all items up to and including this one.
    """

    def __init__(self, costs: RunCosts, boundaries: Iterable[int] = ()) -> None:
        """Group all sequences of `costs` into items; an item begins at each of the positions `boundaries`."""
        self.starts = _starts(costs, list(boundaries))
        begin, end = self.starts[:-1], self.starts[1:]
        alone, total, repeated = (np.array(x, np.int64) for x in (costs.alone, costs.total, costs.repeated))
        self.cost: IntArray = alone[begin] + total[end - 1] - total[begin]
        self.links: IntArray = repeated[begin]
        self.total = np.cumsum(self.cost - self.links)
        inside = repeated[:-1].copy()
        inside[begin] = _NEVER
        least_inside = np.minimum.reduceat(inside, begin)
        self._least = _least_table(np.minimum(self.links, np.concatenate([[_NEVER], least_inside[:-1]])))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def positions(self, members: IntArray) -> IntArray:
        """Return the positions of the lexicographic order that the items `members` hold."""
        return np.concatenate([np.arange(self.starts[item], self.starts[item + 1]) for item in members.tolist()])

    def shared(self, first: IntArray, second: IntArray) -> IntArray:
        """Return elementwise the cost of tokens shared by the last sequence of item `first` and the first of `second`.

        Requires `first < second`.
        """
        out = self.links[first + 1]
        apart = np.flatnonzero(second - first > 1)
        if not len(apart):
            return out
        low, high = first[apart] + 2, second[apart] + 1
        levels = np.frexp(high - low)[1] - 1
        least = np.minimum(self._least[levels, low], self._least[levels, high - (1 << levels)])
        out[apart] = np.minimum(out[apart], least)
        return out

    def run_costs(self, first: IntArray | int, last: IntArray | int) -> IntArray:
        """Return elementwise the tree cost of the items from `first` to `last`, inclusive."""
        return self.cost[first] + self.total[last] - self.total[first]


def _least_table(values: IntArray) -> IntArray:
    """Build a sparse table for range minima: row l, column k holds the least of `values[k : k + 2**l]`."""
    rows = [values]
    while 2 ** len(rows) <= len(values):
        half = 2 ** (len(rows) - 1)
        row = rows[-1].copy()
        row[:-half] = np.minimum(row[:-half], row[half:])
        rows.append(row)
    return np.stack(rows)


def _starts(costs: RunCosts, boundaries: list[int]) -> IntArray:
    alone, repeated = np.array(costs.alone, np.int64), np.array(costs.repeated[:-1], np.int64)
    begins = np.ones(len(costs), bool)
    begins[1:] = repeated[1:] < alone[:-1]
    starts = np.flatnonzero(begins)
    if len(starts) > MOST_ITEMS:
        starts = starts[np.sort(np.argsort(repeated[starts], kind="stable")[:MOST_ITEMS])]
    return np.union1d(starts, [0, *boundaries, len(costs)]).astype(np.int64)
