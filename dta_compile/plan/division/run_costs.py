"""Tree cost of runs of the lexicographic order, as integers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

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
