"""Divide subtrees among groups by makespan scheduling, and improve divisions by local search.

`deals` cuts the tree into pieces where little is shared and places them by two rules. `exchange` lets the most
expensive group give a subtree away, or exchange one, while that lowers the largest cost.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dta_compile.plan.division.run_costs import Items, Run
from dta_compile.plan.tree.lexicographic import IntArray

_PARTNERS = 4  # partners of a group per round: up to 4 cheapest groups and up to 4 that share most with it
_BLOCKS = 256  # subtrees a side in an exchange between two groups, whose pairs are all evaluated
_TRIES = 4  # exchanges priced exactly per round; the ranking before it only estimates shared tokens


class _Blocks(NamedTuple):
    """Subtrees of a group, as arrays: members `first` to `last`, cost of each alone, cost saved by removing each."""

    first: IntArray
    last: IntArray
    cost: IntArray
    gain: IntArray

    def block(self, index: int) -> _Block:
        return int(self.first[index]), int(self.last[index])


_Block = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Group:
    """Items of a group, ascending; the cost of each, and the cost that each shares with the member before it."""

    members: IntArray
    costs: IntArray
    links: IntArray

    @cached_property
    def cost(self) -> int:
        """Cost of the tree of the group."""
        return int((self.costs - self.links).sum())

    @cached_property
    def blocks(self) -> _Blocks:
        """All subtrees; the last one is the whole group."""
        first, last = _subtrees(self.links.tolist())
        total = np.cumsum(self.costs - self.links)
        cost = self.costs[first] + total[last] - total[first]
        after = np.append(self.links, 0)[last + 1]
        return _Blocks(first, last, cost, cost - np.maximum(self.links[first], after))


@dataclasses.dataclass(frozen=True)
class Trade:
    """Blocks of members that a group gives away and gets back, and the larger cost of both groups afterwards."""

    partner: int
    given: _Block
    taken: _Block | None
    cost: int


class Groups:
    """Division of items into K groups.

    Attributes:
        groups: the K groups.
        costs: `[K]` cost of every group.
    """

    def __init__(self, items: Items, members: Sequence[IntArray]) -> None:
        self.items = items
        self.groups = [self._priced(np.sort(np.asarray(group, np.int64))) for group in members]
        self._group_of = np.empty(len(items), np.int64)
        for number, group in enumerate(self.groups):
            self._group_of[group.members] = number
        self.costs: IntArray = np.array([group.cost for group in self.groups], np.int64)

    @property
    def has_empty(self) -> bool:
        """Whether a group has no items."""
        return any(len(group.members) == 0 for group in self.groups)

    def rank(self) -> tuple[int, int]:
        """Return the sort key of the division: the largest cost of a group, then the sum of all costs."""
        return int(self.costs.max()), sum(self.costs.tolist())

    def improve(
        self, prices: list[float] | IntArray, price: Callable[[Group], float], each: int = 1, tries: int = _TRIES
    ) -> tuple[bool, int]:
        """Make the group of the highest price cheaper without making another as expensive, and update `prices`.

        Returns whether one of the first `tries` trades did, and the number of members of the groups that were priced.
        """
        heavy, members = int(np.argmax(prices)), 0
        for trade in self.trades(heavy, each)[:tries]:
            both = self.after(heavy, trade)
            members += sum(len(group.members) for group in both)
            new = [price(group) for group in both]
            if max(new) < prices[heavy]:
                for number, group, cost in zip((heavy, trade.partner), both, new, strict=True):
                    self.take(number, group)
                    prices[number] = cost
                return True, members
        return False, members

    def trades(self, heavy: int, each: int = 1) -> list[Trade]:
        """Return candidate trades of group `heavy`, best estimate first: `each` gifts and `each` swaps per partner."""
        trades = [trade for partner in self._partners(heavy) for trade in self._trades(heavy, partner, each)]
        return sorted(trades, key=lambda trade: trade.cost)

    def after(self, heavy: int, trade: Trade) -> tuple[Group, Group]:
        """Return group `heavy` and its partner as `trade` would leave them."""
        giver, taker = self.groups[heavy].members, self.groups[trade.partner].members
        leave, left = _split(giver, trade.given)
        come, stay = _split(taker, trade.taken) if trade.taken else (taker[:0], taker)
        mine, theirs = np.concatenate([left, come]), np.concatenate([stay, leave])
        return self._priced(np.sort(mine)), self._priced(np.sort(theirs))

    def take(self, number: int, group: Group) -> None:
        """Replace group `number`."""
        self.groups[number], self.costs[number] = group, group.cost
        self._group_of[group.members] = number

    def _priced(self, members: IntArray) -> Group:
        links = np.zeros(len(members), np.int64)
        links[1:] = self.items.shared(members[:-1], members[1:])
        return Group(members, self.items.cost[members], links)

    def _partners(self, heavy: int) -> list[int]:
        """Return the cheapest groups and those that share most with group `heavy` across its borders."""
        cheapest = np.argsort(self.costs, kind="stable")[:_PARTNERS]
        inside = np.append(self._group_of == heavy, False)
        borders = np.flatnonzero(inside[1:-1] != inside[:-2]) + 1  # between an item and the one before it
        across = self._group_of[np.where(inside[borders], borders - 1, borders)]
        shared = np.bincount(across, self.items.links[borders].astype(float), len(self.groups))
        nearest = np.argsort(-shared, kind="stable")[:_PARTNERS]
        partners = dict.fromkeys([*cheapest.tolist(), *nearest[shared[nearest] > 0].tolist()])
        return [partner for partner in partners if partner != heavy]

    def _inserted(self, giver: Group, blocks: _Blocks, taker: Group) -> IntArray:
        """Return the cost that each of the giver's blocks adds to the taker.

        An estimate: it assumes that no item of the taker lies inside the block.
        """
        begin, end = giver.members[blocks.first], giver.members[blocks.last]
        at, past = np.searchsorted(taker.members, begin), np.searchsorted(taker.members, end)
        shared = np.zeros(len(begin), np.int64)
        before, after = np.flatnonzero(at > 0), np.flatnonzero(past < len(taker.members))
        shared[before] = self.items.shared(taker.members[at[before] - 1], begin[before])
        follows = self.items.shared(end[after], taker.members[past[after]])
        shared[after] = np.maximum(shared[after], follows)
        return blocks.cost - shared

    def _trades(self, heavy: int, partner: int, each: int) -> list[Trade]:
        """Return the best blocks to give to a partner, and the best pairs of blocks to swap, by estimated cost."""
        giver, taker = self.groups[heavy], self.groups[partner]
        mine, theirs = _Blocks(*(column[:-1] for column in giver.blocks)), taker.blocks
        if not len(mine.first):
            return []
        added = self._inserted(giver, mine, taker)
        after = np.maximum(giver.cost - mine.gain, taker.cost + added)
        trades = [Trade(partner, mine.block(at), None, int(after[at])) for at in _least(after, each)]
        if len(theirs.first):
            back = self._inserted(taker, theirs, giver)
            rows, columns = _least(added - mine.gain, _BLOCKS), _least(back - theirs.gain, _BLOCKS)
            heavier = (giver.cost - mine.gain)[rows, None] + back[columns]
            lighter = (taker.cost + added)[rows, None] - theirs.gain[columns]
            after = np.maximum(heavier, lighter)
            for at in _least(after.ravel(), each):
                i, j = divmod(at, len(columns))
                trades.append(Trade(partner, mine.block(rows[i]), theirs.block(columns[j]), int(after[i, j])))
        return trades


def exchange(groups: Groups, target: int, rounds: int) -> bool:
    """Improve a division for at most `rounds` exchanges; return whether its largest cost is at most `target`."""
    for _ in range(rounds):
        if groups.costs.max() <= target or not groups.improve(groups.costs, lambda group: group.cost)[0]:
            break
    return int(groups.costs.max()) <= target


def _split(members: IntArray, block: tuple[int, int]) -> tuple[IntArray, IntArray]:
    first, last = block
    return members[first : last + 1], np.concatenate([members[:first], members[last + 1 :]])


def _least(values: IntArray, count: int) -> list[int]:
    """Return the indices of the `count` least values, ascending by value if any are left out."""
    if count == 1:
        return [int(np.argmin(values))]
    at = np.argsort(values, kind="stable")[:count] if count < len(values) else np.arange(len(values))
    indices: list[int] = at.tolist()
    return indices


def _subtrees(links: list[int]) -> tuple[IntArray, IntArray]:
    """Return first and last member of every subtree (a Cartesian tree over `links`), the whole group last.

    `links[k]` is the cost that member k shares with member k - 1.
    """
    count = len(links)
    first, last = list(range(count)), list(range(count))
    open_at: list[tuple[int, int]] = []  # subtrees that may still grow: first member, cost shared by the members
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


SIZES = (1, 2, 4, 8, 16, 64)  # pieces cost at most 1 / size of the lower bound of a group
NEARLY = 1.1  # links of up to 1.1 times the least link of a subtree count as equally cheap to cut
MOST_PIECES = 2**12  # pieces dealt out
MOST_ROOMS = 2**16  # pieces x groups: the work of MULTIFIT
_HALVINGS = 14  # bisection steps for MULTIFIT's capacity: precise to less than 1/1000 of a group
_CANDIDATES = 4  # cheapest groups tried for a piece, besides those of its neighbours


def deals(items: Items, num_groups: int, least: int) -> Iterator[list[IntArray]]:
    """Yield divisions of the items into K groups (some may be empty), made of subtrees of several sizes.

    `least` is a lower bound of the largest cost of a group; a piece costs at most that, or is a single item.
    """
    last_count = 0
    for size in SIZES:
        runs = _pieces(items, least // size)
        if runs is None:
            return
        if len(runs) == last_count or len(runs) < num_groups:
            continue
        last_count = len(runs)
        first, end = np.array(runs, np.int64).T
        costs: list[int] = items.run_costs(first, end - 1).tolist()
        yield _members(runs, _longest_first(items, runs, costs, num_groups), num_groups)
        if len(runs) * num_groups <= MOST_ROOMS:
            yield _members(runs, _multifit(costs, num_groups), num_groups)


def _pieces(items: Items, limit: int) -> list[Run] | None:
    """Cut the items, where they share least, into runs that cost at most `limit` or are single items.

    Returns None if there are more than `MOST_PIECES`.
    """
    total = items.total
    pending: list[Run] = [(0, len(items))]
    done: list[Run] = []
    while pending:
        a, b = pending.pop()
        if b - a == 1 or items.run_costs(a, b - 1) <= limit:
            done.append((a, b))
            continue
        if len(done) + len(pending) >= MOST_PIECES:
            return None
        middle = _cut(items.links[a + 1 : b], total[a : b - 1] - total[a]) + a + 1
        pending += [(middle, b), (a, middle)]
    return done


def _cut(links: IntArray, before: IntArray) -> int:
    """Return the index of the link nearest to the middle by cost, among those within `NEARLY` of the least."""
    cheap = np.flatnonzero(links <= NEARLY * int(links.min()))
    return int(cheap[np.argmin(np.abs(2 * before[cheap] - before[-1]))])


def _longest_first(items: Items, runs: list[Run], costs: list[int], num_groups: int) -> list[int]:
    """Assign pieces to groups by longest processing time: the costliest piece first, to the cheapest resulting group.

    A piece adds its cost minus the cost it shares with its neighbours in the group. Candidates are the cheapest groups
    and the groups of the nearest placed pieces, which share most with it.
    """
    loads = np.zeros(num_groups, np.int64)
    group_of = [0] * len(runs)
    placed: list[int] = []
    in_group: list[list[int]] = [[] for _ in range(num_groups)]
    for piece in sorted(range(len(runs)), key=lambda piece: (-costs[piece], piece)):
        at = bisect_left(placed, piece)
        neighbours = [group_of[other] for other in placed[max(at - 1, 0) : at + 1]]
        groups = list(dict.fromkeys(neighbours + np.argsort(loads, kind="stable")[:_CANDIDATES].tolist()))
        shared = _shared(items, runs, [in_group[group] for group in groups], piece)
        options = [(int(loads[g]) + costs[piece] - saved, -saved, g) for g, saved in zip(groups, shared, strict=True)]
        cost, _, group = min(options)
        loads[group], group_of[piece] = cost, group
        insort(placed, piece)
        insort(in_group[group], piece)
    return group_of


def _shared(items: Items, runs: list[Run], groups: list[list[int]], piece: int) -> list[int]:
    """Return, for each group of pieces, the cost of the tokens that `piece` shares with it."""
    (start, end), pairs = runs[piece], []
    for number, members in enumerate(groups):
        at = bisect_left(members, piece)
        pairs += [(number, runs[members[at - 1]][1] - 1, start)] if at else []
        pairs += [(number, end - 1, runs[members[at]][0])] if at < len(members) else []
    shared = [0] * len(groups)
    if pairs:
        number_of, first, second = np.array(pairs, np.int64).T
        for number, cost in zip(number_of.tolist(), items.shared(first, second).tolist(), strict=True):
            shared[number] = max(shared[number], cost)
    return shared


def _multifit(costs: list[int], num_groups: int) -> list[int]:
    """Assign pieces to groups by MULTIFIT (Coffman, Garey and Johnson, 1978), ignoring shared tokens.

    Runs first fit decreasing with the least capacity of a group that bisection finds.
    """
    order = sorted(range(len(costs)), key=lambda piece: -costs[piece])
    least = max(max(costs), -(-sum(costs) // num_groups))
    low, high = least, 2 * least  # twice the lower bound always suffices
    best: list[int] = [0] * len(costs)
    for _ in range(_HALVINGS):
        room = (low + high) // 2
        assignment = _first_fit(costs, order, num_groups, room)
        if assignment is None:
            low = room + 1
        else:
            best, high = assignment, room
    return best


def _first_fit(costs: list[int], order: list[int], num_groups: int, room: int) -> list[int] | None:
    """Assign every piece to the first group with room for it; return None if a piece fits nowhere."""
    left = np.full(num_groups, room, np.int64)
    group_of = [0] * len(costs)
    for piece in order:
        group = int(np.argmax(left >= costs[piece]))
        if left[group] < costs[piece]:
            return None
        left[group] -= costs[piece]
        group_of[piece] = group
    return group_of


def _members(runs: list[Run], chosen: list[int], num_groups: int) -> list[IntArray]:
    """Return the items of every group."""
    sizes = [b - a for a, b in runs]
    group_of = np.repeat(np.array(chosen, np.int64), sizes)  # runs are in order and leave nothing out
    order = np.argsort(group_of, kind="stable")
    return np.split(order, np.searchsorted(group_of[order], np.arange(1, num_groups)))
