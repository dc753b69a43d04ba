"""Subtrees dealt out to groups: cut where little is shared, then placed by three rules of makespan scheduling."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from dta_compile.plan.division.run_costs import Items
from dta_compile.plan.tree.lexicographic import IntArray

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
