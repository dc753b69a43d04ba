"""Subtrees dealt out to groups: cut where little is shared, then placed by three rules of makespan scheduling.

Then local search: the most expensive group gives a subtree away, or exchanges one, as long as that makes it cheaper.
"""

from __future__ import annotations

import dataclasses
import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from dta_compile.plan.division.run_costs import Items
from dta_compile.plan.tree.lexicographic import IntArray

_PARTNERS = 4  # of a group in a round: so many of the cheapest groups, and of those that share most with it
_BLOCKS = 256  # subtrees of a group that are tried in exchange for those of another: all pairs are
_TRIES = 4  # exchanges of a round that are priced exactly: what two groups share is estimated before


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Subtrees of a group: its members from `first` to `last`, what each costs, and what the group is spared by it."""

    first: IntArray
    last: IntArray
    cost: IntArray
    gain: IntArray

    def __getitem__(self, which: slice) -> _Blocks:
        return _Blocks(self.first[which], self.last[which], self.cost[which], self.gain[which])

    def block(self, index: int) -> _Block:
        return int(self.first[index]), int(self.last[index])


_Block = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Group:
    """Items of a group, ascending, what each costs, and shares with the one before it."""

    members: IntArray
    costs: IntArray
    links: IntArray

    @cached_property
    def cost(self) -> int:
        """Of the tree of the group."""
        return int((self.costs - self.links).sum())

    @cached_property
    def blocks(self) -> _Blocks:
        """All subtrees, that of the whole group last."""
        first, last = _subtrees(self.links.tolist())
        total = np.cumsum(self.costs - self.links)
        cost = self.costs[first] + total[last] - total[first]
        after = np.append(self.links, 0)[last + 1]
        return _Blocks(first, last, cost, cost - np.maximum(self.links[first], after))


@dataclasses.dataclass(frozen=True)
class Trade:
    """Members that a group gives away and gets back, and what the more expensive of the two would then cost."""

    partner: int
    given: _Block
    taken: _Block | None
    cost: int


class Groups:
    """A division of items into groups.

    Attributes:
        items: all of them.
        groups: by number.
        costs: `[K]` of the groups.
    """

    def __init__(self, items: Items, members: Sequence[IntArray]) -> None:
        self.items = items
        self.groups = [self._priced(np.sort(np.asarray(one, np.int64))) for one in members]
        self._group_of = np.empty(len(items), np.int64)
        for number, group in enumerate(self.groups):
            self._group_of[group.members] = number
        self.costs: IntArray = np.array([group.cost for group in self.groups], np.int64)

    @property
    def has_empty(self) -> bool:
        """Whether a group has no items."""
        return any(len(group.members) == 0 for group in self.groups)

    def rank(self) -> tuple[int, int]:
        """By what divisions compare: the cost of the most expensive group, then that of all."""
        return int(self.costs.max()), sum(self.costs.tolist())

    def improve(self) -> bool:
        """Make the most expensive group cheaper without making another as expensive; False if no exchange does."""
        heavy = int(np.argmax(self.costs))
        for trade in self.trades(heavy)[:_TRIES]:
            mine, theirs = self.after(heavy, trade)
            if max(mine.cost, theirs.cost) < self.costs[heavy]:
                self.take(heavy, mine)
                self.take(trade.partner, theirs)
                return True
        return False

    def trades(self, heavy: int, each: int = 1) -> list[Trade]:
        """What a group may give to others, or exchange with them: `each` of either with each of them, best first."""
        found = [trade for partner in self._partners(heavy) for trade in self._trades(heavy, partner, each)]
        return sorted(found, key=lambda trade: trade.cost)

    def after(self, heavy: int, trade: Trade) -> tuple[Group, Group]:
        """A group and its partner as a trade would leave them."""
        giver, taker = self.groups[heavy].members, self.groups[trade.partner].members
        leave, left = _split(giver, trade.given)
        come, stay = _split(taker, trade.taken) if trade.taken else (taker[:0], taker)
        mine, theirs = np.concatenate([left, come]), np.concatenate([stay, leave])
        return self._priced(np.sort(mine)), self._priced(np.sort(theirs))

    def take(self, number: int, group: Group) -> None:
        """Put a group in place of the one of this number."""
        self.groups[number], self.costs[number] = group, group.cost
        self._group_of[group.members] = number

    def _priced(self, members: IntArray) -> Group:
        links = np.zeros(len(members), np.int64)
        links[1:] = self.items.shared(members[:-1], members[1:])
        return Group(members, self.items.cost[members], links)

    def _partners(self, heavy: int) -> list[int]:
        """The cheapest groups, and those that share most with the group across its borders."""
        cheapest = np.argsort(self.costs, kind="stable")[:_PARTNERS]
        inside = np.append(self._group_of == heavy, False)
        borders = np.flatnonzero(inside[1:-1] != inside[:-2]) + 1  # between an item and the one before it
        across = self._group_of[np.where(inside[borders], borders - 1, borders)]
        shared = np.bincount(across, self.items.links[borders].astype(float), len(self.groups))
        nearest = np.argsort(-shared, kind="stable")[:_PARTNERS]
        found = dict.fromkeys([*cheapest.tolist(), *nearest[shared[nearest] > 0].tolist()])
        return [one for one in found if one != heavy]

    def _inserted(self, giver: Group, blocks: _Blocks, taker: Group) -> IntArray:
        """What a group would cost more with each of the blocks of another, if none of its items lies inside of it."""
        begin, end = giver.members[blocks.first], giver.members[blocks.last]
        at, past = np.searchsorted(taker.members, begin), np.searchsorted(taker.members, end)
        shared = np.zeros(len(begin), np.int64)
        before, after = np.flatnonzero(at > 0), np.flatnonzero(past < len(taker.members))
        shared[before] = self.items.shared(taker.members[at[before] - 1], begin[before])
        follows = self.items.shared(end[after], taker.members[past[after]])
        shared[after] = np.maximum(shared[after], follows)
        return blocks.cost - shared

    def _trades(self, heavy: int, partner: int, each: int) -> list[Trade]:
        """The best blocks to give to a group, and the best pairs of blocks to exchange with it, as estimated."""
        giver, taker = self.groups[heavy], self.groups[partner]
        mine, theirs = giver.blocks[:-1], taker.blocks
        if not len(mine.first):
            return []
        added = self._inserted(giver, mine, taker)
        after = np.maximum(giver.cost - mine.gain, taker.cost + added)
        found = [Trade(partner, mine.block(at), None, int(after[at])) for at in _least(after, each)]
        if len(theirs.first):
            back = self._inserted(taker, theirs, giver)
            rows, columns = _least(added - mine.gain, _BLOCKS), _least(back - theirs.gain, _BLOCKS)
            heavier = (giver.cost - mine.gain)[rows, None] + back[columns]
            lighter = (taker.cost + added)[rows, None] - theirs.gain[columns]
            after = np.maximum(heavier, lighter)
            for at in _least(after.ravel(), each):
                i, j = divmod(at, len(columns))
                found.append(Trade(partner, mine.block(rows[i]), theirs.block(columns[j]), int(after[i, j])))
        return found


def exchange(groups: Groups, target: int, rounds: int) -> bool:
    """Improve a division until no exchange helps, or `rounds` are over; whether its largest cost came to `target`."""
    for _ in range(rounds):
        if groups.costs.max() <= target or not groups.improve():
            break
    return int(groups.costs.max()) <= target


def _split(members: IntArray, block: tuple[int, int]) -> tuple[IntArray, IntArray]:
    first, last = block
    return members[first : last + 1], np.concatenate([members[:first], members[last + 1 :]])


def _least(values: IntArray, count: int) -> list[int]:
    """Where the least values are, ascending."""
    if count == 1:
        return [int(np.argmin(values))]
    at = np.argsort(values, kind="stable")[:count] if count < len(values) else np.arange(len(values))
    found: list[int] = at.tolist()
    return found


def _subtrees(links: list[int]) -> tuple[IntArray, IntArray]:
    """First and last member of every subtree (a Cartesian tree), the whole last; `links[k]`: shared with `k - 1`."""
    count = len(links)
    first, last = list(range(count)), list(range(count))
    open_at: list[tuple[int, int]] = []  # first member of a subtree that may go on, and what its members share
    for k in range(1, count + 1):
        link = links[k] if k < count else -1
        begin = k - 1
        while open_at and open_at[-1][1] > link:
            begin, _ = open_at.pop()
            first.append(begin)
            last.append(k - 1)
        if k < count and (not open_at or open_at[-1][1] < link):
            open_at.append((begin, link))
    return np.array(first, np.int64), np.array(last, np.int64)


_Run = tuple[int, int]  # items `[a, b)`

SIZES = (1, 2, 4, 8, 16, 64)  # subtrees are at most one of these parts of what a group costs at least
NEARLY = 1.1  # links up to this many times the least of a subtree are as good to cut
MOST_PIECES = 2**12  # that are dealt out
MOST_SUMS = 2**16  # pieces x groups; largest differencing takes as much work for every two sums that it adds
_HALVINGS = 14  # of the interval that the room of first fit is sought in: to less than a thousandth of a group
_CANDIDATES = 4  # cheapest groups that a piece may go to, besides those of its neighbours


def deals(items: Items, num_groups: int, least: int) -> Iterator[list[IntArray]]:
    """Divisions of the items into groups, some perhaps empty, by subtrees of several sizes.

    Args:
        items: what to divide.
        num_groups: K.
        least: what the most expensive group costs at least; subtrees are at most this large, or single items.
    """
    tried = 0
    for size in SIZES:
        runs = _pieces(items, least // size)
        if runs is None:
            return
        if len(runs) == tried or len(runs) < num_groups:
            continue
        tried = len(runs)
        costs = _costs(items, runs)
        yield _members(runs, _longest_first(items, runs, costs, num_groups), num_groups)
        if len(runs) * num_groups <= MOST_SUMS:
            yield _members(runs, differencing(costs, num_groups), num_groups)
            yield _members(runs, _multifit(costs, num_groups), num_groups)


def _costs(items: Items, runs: list[_Run]) -> list[int]:
    first, end = np.array(runs, np.int64).T
    costs: list[int] = items.run_costs(first, end - 1).tolist()
    return costs


def _pieces(items: Items, limit: int) -> list[_Run] | None:
    """Runs of items that cost at most `limit` or are single, cut where least is shared; None if there are too many."""
    total = np.cumsum(items.cost - items.links)
    pending: list[_Run] = [(0, len(items))]
    done: list[_Run] = []
    while pending:
        a, b = pending.pop()
        if b - a == 1 or items.cost[a] + total[b - 1] - total[a] <= limit:
            done.append((a, b))
            continue
        if len(done) + len(pending) >= MOST_PIECES:
            return None
        middle = _cut(items.links[a + 1 : b], total[a : b - 1] - total[a]) + a + 1
        pending += [(middle, b), (a, middle)]
    return done


def _cut(links: IntArray, before: IntArray) -> int:
    """Of the links that are nearly the least, the one nearest to the middle by cost."""
    cheap = np.flatnonzero(links <= NEARLY * int(links.min()))
    return int(cheap[np.argmin(np.abs(2 * before[cheap] - before[-1]))])


def _longest_first(items: Items, runs: list[_Run], costs: list[int], num_groups: int) -> list[int]:
    """Group of every piece: the most expensive first, each to where the group then costs least.

    A piece adds what it costs less what it shares with its neighbours there. The cheapest groups are tried, and those
    of the pieces beside it that have been placed, with which it shares most.
    """
    loads = np.zeros(num_groups, np.int64)
    chosen = [0] * len(runs)
    placed: list[int] = []
    in_group: list[list[int]] = [[] for _ in range(num_groups)]
    for piece in sorted(range(len(runs)), key=lambda piece: (-costs[piece], piece)):
        at = bisect_left(placed, piece)
        beside = [chosen[other] for other in placed[max(at - 1, 0) : at + 1]]
        groups = list(dict.fromkeys(beside + np.argsort(loads, kind="stable")[:_CANDIDATES].tolist()))
        shared = _shared(items, runs, [in_group[group] for group in groups], piece)
        options = [(int(loads[g]) + costs[piece] - less, -less, g) for g, less in zip(groups, shared, strict=True)]
        load, _, group = min(options)
        loads[group], chosen[piece] = load, group
        insort(placed, piece)
        insort(in_group[group], piece)
    return chosen


def _shared(items: Items, runs: list[_Run], groups: list[list[int]], piece: int) -> list[int]:
    """Cost of the tokens that a piece shares with those of each of some groups."""
    (start, end), pairs = runs[piece], []
    for number, members in enumerate(groups):
        at = bisect_left(members, piece)
        pairs += [(number, runs[members[at - 1]][1] - 1, start)] if at else []
        pairs += [(number, end - 1, runs[members[at]][0])] if at < len(members) else []
    found = [0] * len(groups)
    if pairs:
        number_of, first, second = np.array(pairs, np.int64).T
        for number, less in zip(number_of.tolist(), items.shared(first, second).tolist(), strict=True):
            found[number] = max(found[number], less)
    return found


def differencing(costs: list[int], num_groups: int) -> list[int]:
    """Group of every piece, as if none shared anything: the two most uneven partial divisions merge, heavy with light.

    The largest differencing method (Karmarkar and Karp, 1982).
    """
    # Spread, number (breaks ties), and sums with their members, which fall.
    heap = [(-cost, piece, [(cost, [piece]), *([(0, [])] * (num_groups - 1))]) for piece, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, left), (_, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, m + n) for (a, m), (b, n) in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    chosen = [0] * len(costs)
    for group, (_, members) in enumerate(heap[0][2]):
        for piece in members:
            chosen[piece] = group
    return chosen


def _multifit(costs: list[int], num_groups: int) -> list[int]:
    """Group of every piece, as if none shared anything: first fit decreasing into the least room that bisection finds.

    MULTIFIT (Coffman, Garey and Johnson, 1978).
    """
    order = sorted(range(len(costs)), key=lambda piece: -costs[piece])
    least = max(max(costs), -(-sum(costs) // num_groups))
    low, high = least, 2 * least  # which is always enough
    best: list[int] = [0] * len(costs)
    for _ in range(_HALVINGS):
        room = (low + high) // 2
        found = _first_fit(costs, order, num_groups, room)
        if found is None:
            low = room + 1
        else:
            best, high = found, room
    return best


def _first_fit(costs: list[int], order: list[int], num_groups: int, room: int) -> list[int] | None:
    """Every piece in the first group with room for it; None if there is none."""
    left = np.full(num_groups, room, np.int64)
    chosen = [0] * len(costs)
    for piece in order:
        group = int(np.argmax(left >= costs[piece]))
        if left[group] < costs[piece]:
            return None
        left[group] -= costs[piece]
        chosen[piece] = group
    return chosen


def _members(runs: list[_Run], chosen: list[int], num_groups: int) -> list[IntArray]:
    """Items of every group."""
    sizes = [b - a for a, b in runs]
    group_of = np.repeat(np.array(chosen, np.int64), sizes)  # runs are in order and leave nothing out
    order = np.argsort(group_of, kind="stable")
    return np.split(order, np.searchsorted(group_of[order], np.arange(1, num_groups)))
