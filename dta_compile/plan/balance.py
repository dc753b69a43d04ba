"""Load balancing over ranks: contiguous groups of the lexicographic order (paper Algorithm 4)."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from dta_compile.errors import PlanError
from dta_compile.options import as_integer
from dta_compile.plan.tree.lexicographic import IntArray, LexicographicOrder, lexicographic_order
from dta_compile.plan.tree.prefix_tree import PrefixTree

__all__ = ["TreeCost", "balance"]

_Group = tuple[int, int]  # positions `[a, b)` of the lexicographic order

_COST_BITS = 61  # of everything's cost: as fine as sums of int64 allow


class TreeCost(Protocol):
    """A model that prices the tokens of a tree, as `CostModel` does."""

    def tree_rates(self) -> tuple[float, float]:
        """Seconds per token of the tree and per attention pair; a token at depth d takes part in d + 1 pairs."""


def balance(
    sequences: Iterable[Any] | LexicographicOrder | PrefixTree,
    num_groups: int,
    cost: Literal["tree_tokens"] | TreeCost = "tree_tokens",
) -> list[list[int]]:
    """Groups of sequence indices whose largest tree cost is the least, over contiguous groups.

    Contiguous in lexicographic order, which keeps shared prefixes together (paper Algorithm 4). Of the cuts with the
    same largest cost, those are taken at which the groups share least, so that least is computed twice. Takes
    O(N + K log N log C) after the sort, C being the cost of everything.

    Args:
        sequences: 1-D integer sequences (see `PrefixTree.build`), their order, or their tree.
        num_groups: K >= 1. Exactly K groups come back, none of them empty if there are at least K sequences; else
            the surplus groups at the end are empty.
        cost: of a group's tree. "tree_tokens" counts its tokens, as the paper does; a cost model, such as the
            calibrated `CostModel`, prices tokens and attention pairs.

    Raises:
        PlanError: K < 1, a sequence that is not a run of integers, or an unusable cost.
    """
    groups_wanted = as_integer(num_groups)
    if groups_wanted is None or groups_wanted < 1:
        raise PlanError("cannot balance over this number of groups", expected="an integer >= 1", got=repr(num_groups))
    rates = _rates(cost)
    if isinstance(sequences, PrefixTree):
        sequences = sequences.sorted
    elif not isinstance(sequences, LexicographicOrder):
        sequences = lexicographic_order(sequences)
    count = len(sequences.order)
    groups = _contiguous_groups(_Costs(sequences, *rates), min(groups_wanted, count)) if count else []
    order: list[int] = sequences.order.tolist()
    return [order[a:b] for a, b in groups] + [[] for _ in range(groups_wanted - len(groups))]


def _rates(cost: Literal["tree_tokens"] | TreeCost) -> tuple[float, float]:
    if cost == "tree_tokens":
        return 1.0, 0.0
    if isinstance(cost, str) or not hasattr(cost, "tree_rates"):
        raise PlanError("unknown cost of a group", expected="'tree_tokens' or a CostModel", got=repr(cost))
    token, pair = cost.tree_rates()
    if not (0 <= token < math.inf and 0 <= pair < math.inf and token + pair > 0):
        raise PlanError(
            "the cost model has unusable rates",
            expected="finite seconds per token and per pair, none negative, not both 0",
            got=f"{token} s per token, {pair} s per pair",
        )
    return token, pair


class _Costs:
    """Tree cost, as an integer, of the sequences at positions `[a, b)` of the lexicographic order, in O(1).

    Attributes:
        alone: of every sequence on its own.
        total: of the tree of all sequences up to and including each.
        repeated: what a cut before each adds to the cost of all groups: that of the tokens shared across it.
    """

    def __init__(self, order: LexicographicOrder, token: float, pair: float) -> None:
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


def _contiguous_groups(costs: _Costs, num_groups: int) -> list[_Group]:
    """Exactly `num_groups` groups `[a, b)` of least largest cost, by bisection over the limit that a group may cost."""
    low, high = max(costs.alone), costs(0, len(costs))
    limit = low + bisect_left(range(low, high), True, key=lambda limit: _fill(costs, limit, num_groups) is not None)
    groups = _fill(costs, limit, num_groups)
    assert groups is not None
    return _split(costs, _repeat_least(costs, limit, groups), num_groups)


def _fill(costs: _Costs, limit: int, num_groups: int) -> list[_Group] | None:
    """Groups filled up to `limit` one after the other; None if that takes more than `num_groups`."""
    groups: list[_Group] = []
    a = 0
    while a < len(costs):
        if len(groups) == num_groups:
            return None
        b = costs.furthest(a, limit)
        groups.append((a, b))
        a = b
    return groups


def _repeat_least(costs: _Costs, limit: int, groups: list[_Group]) -> list[_Group]:
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


def _split(costs: _Costs, groups: list[_Group], num_groups: int) -> list[_Group]:
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
