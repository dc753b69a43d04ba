"""Where a group runs few chunks, they count as such: a last chunk costs a launch, however few tokens are in it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dta_compile.plan.division.exchange import Group, Groups
from dta_compile.plan.tree.lexicographic import IntArray, LexicographicOrder
from dta_compile.plan.tree.prefix_tree import PrefixTree

__all__ = ["TreeSeconds", "exchange_whole_chunks"]

TreeSeconds = Callable[[PrefixTree], float]

_WORK = 2**14  # sequences that are planned, those of groups that are tried again; it bounds the time
_TRIES = 16  # exchanges of a round, those first that look best by tokens and pairs


def exchange_whole_chunks(order: LexicographicOrder, groups: Groups, seconds: TreeSeconds) -> None:
    """Exchange subtrees as long as that makes the slowest group faster, `seconds` being asked for whole trees."""
    work = _WORK - len(order.order)
    if work < 0:
        return

    def of(group: Group) -> float:
        return seconds(_tree(order, groups.items.positions(group.members)))

    each = [of(group) for group in groups.groups]
    while work > 0:
        slowest = int(np.argmax(each))
        for trade in groups.trades(slowest, each=_TRIES)[:_TRIES]:
            both = groups.after(slowest, trade)
            work -= sum(len(group.members) for group in both)
            mine, theirs = map(of, both)
            if max(mine, theirs) < each[slowest]:
                for number, group, new in zip((slowest, trade.partner), both, (mine, theirs), strict=True):
                    groups.take(number, group)
                    each[number] = new
                break
        else:
            return


def _tree(order: LexicographicOrder, positions: IntArray) -> PrefixTree:
    """Tree of the sequences at some positions of the order, ascending, numbered from 0 on; `forks` are left out."""
    count = len(positions)
    common = np.zeros(count, np.int64)
    if count > 1:
        common[1:] = np.minimum.reduceat(order.common[: positions[-1] + 1], positions[:-1] + 1)
    lengths = order.lengths[order.order[positions]]
    return PrefixTree(LexicographicOrder(lengths, np.arange(count), common, np.zeros((count, 2), np.int64)))
