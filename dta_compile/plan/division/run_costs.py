"""Tree cost of runs of the lexicographic order, as integers."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from dta_compile.plan.tree.lexicographic import IntArray, LexicographicOrder

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


MOST_ITEMS = 2**14  # of more sequences, those that share most stay together: it bounds time and memory
_NEVER = np.iinfo(np.int64).max


class Items:
    """`M` runs of the lexicographic order that stay together, and what any two of them share in O(1).

    A sequence that is a prefix of the next one, or equal to it, stays with it: apart, the two cost more.

    Attributes:
        starts: `[M + 1]` positions of the order at which the items begin, and where the last one ends.
        cost: `[M]` of the tree of every item.
        links: `[M]` cost of the tokens that an item shares with the one before it; `links[0] = 0`.
    """

    def __init__(self, costs: RunCosts, boundaries: Iterable[int] = ()) -> None:
        """Items of all sequences.

        Args:
            costs: of the sequences.
            boundaries: positions at which an item has to begin.
        """
        self.starts = _starts(costs, list(boundaries))
        begin, end = self.starts[:-1], self.starts[1:]
        alone, total, repeated = (np.array(x, np.int64) for x in (costs.alone, costs.total, costs.repeated))
        self.cost: IntArray = alone[begin] + total[end - 1] - total[begin]
        self.links: IntArray = repeated[begin]
        inside = repeated[:-1].copy()
        inside[begin] = _NEVER
        least_inside = np.minimum.reduceat(inside, begin)
        self._least = _least_table(np.minimum(self.links, np.concatenate([[_NEVER], least_inside[:-1]])))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def positions(self, members: IntArray) -> IntArray:
        """Positions of the lexicographic order of some items."""
        return np.concatenate([np.arange(self.starts[one], self.starts[one + 1]) for one in members.tolist()])

    def shared(self, first: IntArray, second: IntArray) -> IntArray:
        """Cost of the tokens that the last sequence of an item shares with the first of a later one, elementwise."""
        out = self.links[first + 1]
        apart = np.flatnonzero(second - first > 1)
        if not len(apart):
            return out
        low, high = first[apart] + 2, second[apart] + 1
        levels = np.frexp(high - low)[1] - 1
        least = np.minimum(self._least[levels, low], self._least[levels, high - (1 << levels)])
        out[apart] = np.minimum(out[apart], least)
        return out

    def run_costs(self, first: IntArray, last: IntArray) -> IntArray:
        """Tree cost of the items from `first` to `last`, both included, elementwise."""
        total = np.cumsum(self.cost - self.links)
        return self.cost[first] + total[last] - total[first]


def _least_table(values: IntArray) -> IntArray:
    """Row l holds in column k the least of `values[k : k + 2**l]` (a sparse table)."""
    rows = [values]
    while 2 ** len(rows) <= len(values):
        half = 2 ** (len(rows) - 1)
        row = rows[-1].copy()
        row[:-half] = np.minimum(row[:-half], row[half:])
        rows.append(row)
    return np.stack(rows)


def _starts(costs: RunCosts, boundaries: list[int]) -> IntArray:
    alone, repeated = np.array(costs.alone, np.int64), np.array(costs.repeated[:-1], np.int64)
    parts = np.ones(len(costs), bool)
    parts[1:] = repeated[1:] < alone[:-1]
    chosen = np.flatnonzero(parts)
    if len(chosen) > MOST_ITEMS:
        chosen = chosen[np.sort(np.argsort(repeated[chosen], kind="stable")[:MOST_ITEMS])]
    return np.union1d(chosen, [0, *boundaries, len(costs)]).astype(np.int64)
