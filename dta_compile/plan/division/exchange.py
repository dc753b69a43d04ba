"""Local search: the most expensive group gives a subtree away, or exchanges one, as long as that makes it cheaper."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dta_compile.plan.division.items import Items
from dta_compile.plan.tree.lexicographic import IntArray

__all__ = ["Groups", "exchange"]

_PARTNERS = 8  # groups that the most expensive one may exchange with in a round: the cheapest, and those that share most
_BLOCKS = 256  # subtrees of a group that are tried in exchange for those of another: all pairs are
_TRIES = 4  # exchanges of a round that are priced exactly: what two groups share is estimated before


@dataclasses.dataclass(frozen=True)
class _Group:
    """Items of a group, ascending, what each shares with the one before it, and the cost of their tree."""

    members: IntArray
    links: IntArray
    cost: int


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Subtrees of a group: its members from `first` to `last`, what each costs, and what the group is spared by it."""

    first: IntArray
    last: IntArray
    cost: IntArray
    gain: IntArray


@dataclasses.dataclass(frozen=True)
class _Trade:
    """Members that a group gives away and gets back, and what the more expensive of the two would then cost."""

    partner: int
    given: tuple[int, int]
    taken: tuple[int, int] | None
    cost: int


class Groups:
    """A division of items into groups, whose costs are exact after every change."""

    def __init__(self, items: Items, members: Sequence[IntArray]) -> None:
        self.items = items
        self._groups = [self._priced(np.sort(np.asarray(one, np.int64))) for one in members]
        self._group_of = np.empty(len(items), np.int64)
        for number, group in enumerate(self._groups):
            self._group_of[group.members] = number
        self.costs: IntArray = np.array([group.cost for group in self._groups], np.int64)

    def members(self) -> list[IntArray]:
        """Items of every group, ascending."""
        return [group.members for group in self._groups]

    @property
    def has_empty(self) -> bool:
        """Whether a group has no items."""
        return any(len(group.members) == 0 for group in self._groups)

    def rank(self) -> tuple[int, int]:
        """By what divisions compare: the cost of the most expensive group, then that of all."""
        return int(self.costs.max()), sum(self.costs.tolist())

    def improve(self) -> bool:
        """Make the most expensive group cheaper without making another as expensive; False if no exchange does."""
        heavy = int(np.argmax(self.costs))
        blocks = self._blocks(self._groups[heavy], whole=False)
        trades = [trade for partner in self._partners(heavy) for trade in self._trades(heavy, blocks, partner)]
        for trade in sorted(trades, key=lambda trade: trade.cost)[:_TRIES]:
            if self._accept(heavy, trade):
                return True
        return False

    def _priced(self, members: IntArray) -> _Group:
        links = np.zeros(len(members), np.int64)
        links[1:] = self.items.shared(members[:-1], members[1:])
        return _Group(members, links, int((self.items.cost[members] - links).sum()))

    def _partners(self, heavy: int) -> list[int]:
        """The cheapest groups, and those of the items beside the ones of the group."""
        cheapest = np.argsort(self.costs, kind="stable")[:_PARTNERS]
        members = self._groups[heavy].members
        beside = np.concatenate([members - 1, members + 1])
        beside = beside[(beside >= 0) & (beside < len(self.items))]
        near = self._group_of[beside]
        shared = np.bincount(near, self.items.links[np.maximum(beside, 1)].astype(float), len(self._groups))
        nearest = np.argsort(-shared, kind="stable")[:_PARTNERS]
        found = dict.fromkeys([*cheapest.tolist(), *(one for one in nearest.tolist() if shared[one] > 0)])
        return [one for one in found if one != heavy]

    def _blocks(self, group: _Group, whole: bool) -> _Blocks:
        """All subtrees of a group, with the `whole` one or without it."""
        first, last = _subtrees(group.links.tolist(), whole)
        total = np.cumsum(self.items.cost[group.members] - group.links)
        cost = self.items.cost[group.members[first]] + total[last] - total[first]
        after = np.append(group.links, 0)[last + 1]
        return _Blocks(first, last, cost, cost - np.maximum(group.links[first], after))

    def _inserted(self, giver: _Group, blocks: _Blocks, taker: _Group) -> IntArray:
        """What a group would cost more with each of the blocks of another, if none of its items lies inside of it."""
        begin, end = giver.members[blocks.first], giver.members[blocks.last]
        at, past = np.searchsorted(taker.members, begin), np.searchsorted(taker.members, end)
        shared = np.zeros(len(begin), np.int64)
        before, after = np.flatnonzero(at > 0), np.flatnonzero(past < len(taker.members))
        shared[before] = self.items.shared(taker.members[at[before] - 1], begin[before])
        follows = self.items.shared(end[after], taker.members[past[after]])
        shared[after] = np.maximum(shared[after], follows)
        return blocks.cost - shared

    def _trades(self, heavy: int, blocks: _Blocks, partner: int) -> list[_Trade]:
        """The best block to give to a group, and the best pair of blocks to exchange with it, as estimated."""
        giver, taker = self._groups[heavy], self._groups[partner]
        if not len(blocks.first):
            return []
        added = self._inserted(giver, blocks, taker)
        after = np.maximum(giver.cost - blocks.gain, taker.cost + added)
        best = int(np.argmin(after))
        found = [_Trade(partner, (int(blocks.first[best]), int(blocks.last[best])), None, int(after[best]))]
        others = self._blocks(taker, whole=True)
        if len(others.first):
            back = self._inserted(taker, others, giver)
            mine, theirs = _cheapest_to_part(added - blocks.gain), _cheapest_to_part(back - others.gain)
            heavier = giver.cost - blocks.gain[mine, None] + back[None, theirs]
            lighter = taker.cost + added[mine, None] - others.gain[None, theirs]
            after = np.maximum(heavier, lighter)
            i, j = np.unravel_index(int(np.argmin(after)), after.shape)
            x, y = int(mine[i]), int(theirs[j])
            given, taken = (int(blocks.first[x]), int(blocks.last[x])), (int(others.first[y]), int(others.last[y]))
            found.append(_Trade(partner, given, taken, int(after[i, j])))
        return found

    def _accept(self, heavy: int, trade: _Trade) -> bool:
        """Make a trade if, priced exactly, both groups are then cheaper than the first one was."""
        giver, taker = self._groups[heavy], self._groups[trade.partner]
        leave, left = _split(giver.members, trade.given)
        come, stay = _split(taker.members, trade.taken) if trade.taken else (taker.members[:0], taker.members)
        mine = self._priced(np.sort(np.concatenate([left, come])))
        theirs = self._priced(np.sort(np.concatenate([stay, leave])))
        if max(mine.cost, theirs.cost) >= giver.cost:
            return False
        for number, group in ((heavy, mine), (trade.partner, theirs)):
            self._groups[number], self.costs[number] = group, group.cost
            self._group_of[group.members] = number
        return True


def exchange(groups: Groups, bound: int, rounds: int) -> None:
    """Improve a division until no exchange helps, its largest cost is at most `bound`, or `rounds` are over."""
    for _ in range(rounds):
        if groups.costs.max() <= bound or not groups.improve():
            return


def _split(members: IntArray, block: tuple[int, int]) -> tuple[IntArray, IntArray]:
    first, last = block
    return members[first : last + 1], np.concatenate([members[:first], members[last + 1 :]])


def _cheapest_to_part(loss: IntArray) -> IntArray:
    """Blocks that repeat least when they change groups, `_BLOCKS` at most."""
    return np.argsort(loss, kind="stable")[:_BLOCKS]


def _subtrees(links: list[int], whole: bool) -> tuple[IntArray, IntArray]:
    """First and last member of every subtree (a Cartesian tree); `links[k]` is what `k` shares with `k - 1`."""
    count = len(links)
    found: dict[tuple[int, int], None] = {(k, k): None for k in range(count)}
    open_at: list[tuple[int, int]] = []  # first member of a subtree that may go on, and what its members share
    for k in range(1, count + 1):
        link = links[k] if k < count else -1
        first = k - 1
        while open_at and open_at[-1][1] > link:
            first, _ = open_at.pop()
            found[first, k - 1] = None
        if k < count and (not open_at or open_at[-1][1] < link):
            open_at.append((first, link))
    found[0, count - 1] = None
    if not whole:
        del found[0, count - 1]
    first, last = (np.fromiter((pair[side] for pair in found), np.int64, len(found)) for side in (0, 1))
    return first, last
