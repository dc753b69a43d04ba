"""Load balancing over ranks: contiguous groups in lexicographic order (paper Algorithm 4), or subtrees dealt out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import numpy as np

from dta_compile.errors import PlanError
from dta_compile.options import CHUNK_TOKENS, as_integer
from dta_compile.plan.division.exchange import Group, Groups, deals, exchange
from dta_compile.plan.division.run_costs import Items, RunCosts, contiguous_groups
from dta_compile.plan.tree.lexicographic import IntArray, LexicographicOrder, lexicographic_order
from dta_compile.plan.tree.prefix_tree import PrefixTree

NEAR_ENOUGH = 2**10  # the largest cost may be above its bound by one part of so many
WORTH_DEALING = 2**7  # the same after exchanges between contiguous groups, with which dealing out is tried as well
IMPROVED = 2  # divisions by dealing out that exchanges improve
ROUNDS = 64  # of exchanges, and two for every group
FEW_CHUNKS = 32  # of a group, up to which whole chunks count: one more is a hundredth of its time, or more


class TreeCost(Protocol):
    """A model that prices the tokens of a tree, as `CostModel` does."""

    def tree_rates(self) -> tuple[float, float]:
        """Seconds per token of the tree and per attention pair; a token at depth d takes part in d + 1 pairs."""


def balance(
    sequences: Iterable[Any] | LexicographicOrder | PrefixTree,
    num_groups: int,
    cost: Literal["tree_tokens"] | TreeCost = "tree_tokens",
    contiguous: bool = False,
) -> list[list[int]]:
    """Groups of sequence indices whose largest tree cost is small, no larger than that of the best contiguous groups.

    Groups that are contiguous in lexicographic order keep shared prefixes together (paper Algorithm 4); of the cuts
    with the same least largest cost, those are taken at which the groups share least. Unless that is as good as any
    division can be, subtrees that share little are dealt out freely as well, by longest processing time and by largest
    differencing, and subtrees are exchanged between groups while that makes the most expensive one cheaper. The
    cheapest division is taken. Takes O(N + K log N log C) after the sort, C being the cost of everything, and for
    exchanges a time that grows with K.

    Args:
        sequences: 1-D integer sequences (see `PrefixTree.build`), their order, or their tree.
        num_groups: K >= 1. Exactly K groups come back, none of them empty if there are at least K sequences; else
            the surplus groups at the end are empty.
        cost: of a group's tree. "tree_tokens" counts its tokens, as the paper does; a cost model, such as the
            calibrated `CostModel`, prices tokens and attention pairs.
        contiguous: only groups that are contiguous in lexicographic order.

    Returns:
        The groups, each in lexicographic order, by where in it their first sequences are.

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
    groups: list[IntArray] = []
    if count:
        costs = RunCosts(sequences, *rates)
        groups = _divide(costs, min(groups_wanted, count), contiguous, getattr(cost, "tree_seconds", None))
    return [sequences.order[group].tolist() for group in groups] + [[] for _ in range(groups_wanted - len(groups))]


def _divide(costs: RunCosts, num_groups: int, contiguous: bool, seconds: TreeSeconds | None) -> list[IntArray]:
    """Positions of the lexicographic order, ascending, in every group."""
    runs = contiguous_groups(costs, num_groups)
    few = int((costs.order.lengths - costs.order.common).sum()) <= FEW_CHUNKS * CHUNK_TOKENS * num_groups
    least, largest = costs.bound(num_groups), max(costs(a, b) for a, b in runs)
    if contiguous or num_groups == 1 or (largest <= least + least // NEAR_ENOUGH and not (few and seconds)):
        return [np.arange(a, b) for a, b in runs]
    items = Items(costs, [a for a, _ in runs])
    best = _cheapest(items, np.searchsorted(items.starts, [a for a, _ in runs]), least)
    if few and seconds:
        exchange_whole_chunks(costs.order, best, seconds)
    found = [items.positions(group.members) for group in best.groups]
    return sorted(found, key=lambda positions: int(positions[0]))


def _cheapest(items: Items, begins: IntArray, least: int) -> Groups:
    """The cheapest of the divisions tried; `begins` are the items at which contiguous groups begin."""
    target, rounds = least + least // NEAR_ENOUGH, ROUNDS + 2 * len(begins)
    in_order = Groups(items, np.split(np.arange(len(items)), begins[1:]))
    if exchange(in_order, target, rounds) or in_order.costs.max() <= least + least // WORTH_DEALING:
        return in_order
    dealt = [Groups(items, members) for members in deals(items, len(begins), least)]
    dealt = sorted((one for one in dealt if not one.has_empty), key=Groups.rank)[:IMPROVED]
    any(exchange(one, target, rounds) for one in dealt)
    return min([in_order, *dealt], key=Groups.rank)


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
