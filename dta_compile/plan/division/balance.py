"""Balance sequences over ranks: contiguous groups in lexicographic order (paper Algorithm 4), or subtrees dealt out.

`balance` starts from the best contiguous groups. `division/` supplies their costs, the partitioners and local search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import numpy as np

from dta_compile.errors import PlanError
from dta_compile.options import CHUNK_TOKENS, as_integer
from dta_compile.plan.division.exchange import Group, Groups, deals, exchange
from dta_compile.plan.division.run_costs import Items, RunCosts, contiguous_groups
from dta_compile.plan.tree.lexicographic import IntArray, LexicographicOrder, common_of_some, lexicographic_order
from dta_compile.plan.tree.prefix_tree import PrefixTree

NEAR_ENOUGH = 2**10  # search stops within 1/1024 of the lower bound of the largest cost
WORTH_DEALING = 2**7  # dealing out is skipped if exchanges bring contiguous groups within 1/128 of the lower bound
IMPROVED = 2  # dealt divisions that local search improves
ROUNDS = 64  # of local search, plus two per group
FEW_CHUNKS = 32  # chunks a group, up to which whole chunks are priced: one more costs at least about 1% of its time


class TreeCost(Protocol):
    """Interface of a model that prices the tokens of a tree, like `CostModel`."""

    def tree_rates(self) -> tuple[float, float]:
        """Return seconds per token of the tree and per attention pair; a token at depth d has d + 1 pairs."""


def balance(
    sequences: Iterable[Any] | LexicographicOrder | PrefixTree,
    num_groups: int,
    cost: Literal["tree_tokens"] | TreeCost = "tree_tokens",
    contiguous: bool = False,
) -> list[list[int]]:
    """Divide sequences into groups, minimising the largest tree cost; never worse than the best contiguous groups.

    Groups that are contiguous in lexicographic order keep shared prefixes together (paper Algorithm 4). Among cuts
    with the same least largest cost, those with the fewest tokens shared across them are chosen. If the result is not
    within 1/1024 of the lower bound, subtrees that share little are also dealt out freely (longest processing time,
    MULTIFIT), and local search exchanges subtrees between groups while the most expensive group gets cheaper. The
    cheapest division is returned. Takes O(N + K log N log C) after the sort, where C is the cost of the whole tree;
    the time of local search grows with K.

    Args:
        sequences: 1-D integer sequences (see `PrefixTree.build`), their order, or their tree.
        num_groups: K >= 1. Exactly K groups are returned. None is empty if there are at least K sequences; otherwise
            the surplus groups at the end are empty.
        cost: cost of a group's tree. "tree_tokens" counts its tokens (as in the paper); a cost model such as the
            calibrated `CostModel` prices tokens and attention pairs.
        contiguous: allow only groups that are contiguous in lexicographic order.

    Returns:
        Groups of sequence indices, each in lexicographic order; groups are ordered by their first sequence.

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
    """Return every group as ascending positions of the lexicographic order."""
    runs = contiguous_groups(costs, num_groups)
    few = int((costs.order.lengths - costs.order.common).sum()) <= FEW_CHUNKS * CHUNK_TOKENS * num_groups
    least, largest = costs.bound(num_groups), max(costs(a, b) for a, b in runs)
    in_order = [np.arange(a, b) for a, b in runs]
    if contiguous or num_groups == 1 or (largest <= least + least // NEAR_ENOUGH and not (few and seconds)):
        return in_order
    items = Items(costs, [a for a, _ in runs])
    best = _cheapest(items, np.searchsorted(items.starts, [a for a, _ in runs]), least)
    if few and seconds:
        slowest = exchange_whole_chunks(costs.order, best, seconds)
        if slowest is not None and slowest >= max(seconds(_tree(costs.order, group)) for group in in_order):
            return in_order  # what costs less by tokens and pairs may have more chunks that are not full
    groups = [items.positions(group.members) for group in best.groups]
    return sorted(groups, key=lambda positions: int(positions[0]))


def _cheapest(items: Items, begins: IntArray, least: int) -> Groups:
    """Return the cheapest division found; `begins` are the first items of the contiguous groups."""
    target, rounds = least + least // NEAR_ENOUGH, ROUNDS + 2 * len(begins)
    in_order = Groups(items, np.split(np.arange(len(items)), begins[1:]))
    if exchange(in_order, target, rounds) or in_order.costs.max() <= least + least // WORTH_DEALING:
        return in_order
    dealt = [Groups(items, members) for members in deals(items, len(begins), least)]
    dealt = sorted((division for division in dealt if not division.has_empty), key=Groups.rank)[:IMPROVED]
    any(exchange(division, target, rounds) for division in dealt)
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

_WORK = 2**14  # budget of sequences whose trees are priced, retries included: bounds the time
_TRIES = 16  # exchanges priced per round, best estimates by tokens and pairs first


def exchange_whole_chunks(order: LexicographicOrder, groups: Groups, seconds: TreeSeconds) -> float | None:
    """Exchange subtrees while the slowest group gets faster; `seconds` prices a whole tree, chunk by chunk.

    Returns the seconds of the slowest group; None if there are too many sequences to price.
    """
    work = _WORK - len(order.order)
    if work < 0:
        return None

    def price(group: Group) -> float:
        return seconds(_tree(order, groups.items.positions(group.members)))

    prices, improved = [price(group) for group in groups.groups], True
    while work > 0 and improved:
        improved, priced = groups.improve(prices, price, _TRIES, _TRIES)
        work -= priced
    return max(prices)


def _tree(order: LexicographicOrder, positions: IntArray) -> PrefixTree:
    """Build the tree of the sequences at ascending `positions`, renumbered from 0; its `forks` are zeros."""
    count, common = len(positions), common_of_some(order.common, positions)
    lengths = order.lengths[order.order[positions]]
    return PrefixTree(LexicographicOrder(lengths, np.arange(count), common, np.zeros((count, 2), np.int64)))
