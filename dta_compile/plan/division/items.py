"""What is dealt out to groups: sequences, those together that nothing is gained by parting."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dta_compile.plan.division.run_costs import RunCosts
from dta_compile.plan.tree.lexicographic import IntArray

__all__ = ["Items"]

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
