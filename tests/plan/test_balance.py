import math
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_compile.errors import PlanError
from dta_compile.plan import CostModel, LexicographicOrder, PrefixTree, balance, lexicographic_order, plan


def tree_tokens(sequences, group):
    return len({tuple(sequences[i][:n]) for i in group for n in range(1, len(sequences[i]) + 1)})


def tree_pairs(sequences, group):
    return sum(len(path) for path in {tuple(sequences[i][:n]) for i in group for n in range(1, len(sequences[i]) + 1)})


@dataclass(frozen=True)
class Rates:
    token: float
    pair: float

    def tree_rates(self):
        return self.token, self.pair


def partitions(order, num_groups):
    """All contiguous partitions into as many groups as `num_groups` and the sequences allow."""
    count = len(order)
    for cuts in combinations(range(1, count), min(num_groups, count) - 1):
        yield [order[a:b] for a, b in pairwise([0, *cuts, count])]


@given(st.data())
def test_contiguous_groups_are_optimal_and_not_empty(batches, data):
    sequences = data.draw(batches)[:9]
    num_groups = data.draw(st.integers(1, 11))
    groups = balance(sequences, num_groups, contiguous=True)
    order = PrefixTree.build(sequences).order.tolist()
    assert len(groups) == num_groups
    assert [i for group in groups for i in group] == order
    assert sum(map(bool, groups)) == min(num_groups, len(sequences))
    if not sequences:
        return
    least = min(max(tree_tokens(sequences, part) for part in parts) for parts in partitions(order, num_groups))
    assert max(tree_tokens(sequences, group) for group in groups) == least


def test_sequences_that_share_much_stay_together_where_the_largest_cost_allows_it():
    # The last sequence sets the largest cost, 20. Filling groups up to it would part the second from the third.
    sequences = [[0] * 4, [1] * 8 + [2] * 6, [1] * 8 + [3] * 6, [4] * 20]
    assert balance(sequences, 3) == balance(sequences, 3, contiguous=True) == [[0], [1, 2], [3]]


@st.composite
def orders(draw):
    """Lengths and what neighbours share, with long sequences that leave room for where to cut the others."""
    lengths = draw(st.lists(st.sampled_from([6, 10, 14, 40]), min_size=2, max_size=11))
    common = [0, *(draw(st.integers(0, min(pair))) for pair in pairwise(lengths))]
    count = len(lengths)
    return LexicographicOrder(np.array(lengths), np.arange(count), np.array(common), np.zeros((count, 2), np.int64))


@given(orders(), st.integers(1, 5))
def test_of_equal_largest_costs_the_least_is_computed_twice(order, num_groups):
    def costs(group):
        new = order.lengths - order.common
        return int(order.lengths[group[0]] + new[group[1:]].sum())

    num_groups = min(num_groups, len(order.lengths))
    mine = [costs(group) for group in balance(order, num_groups, contiguous=True)]

    def totals(num_groups):
        candidates = ([*map(costs, parts)] for parts in partitions(list(order.order), num_groups))
        return [sum(candidate) for candidate in candidates if max(candidate) <= max(mine)]

    # Where fewer groups would do, the surplus ones are halves, cut for balance.
    if num_groups == 1 or not totals(num_groups - 1):
        assert sum(mine) == min(totals(num_groups))


@given(st.data())
def test_a_cost_model_prices_tokens_and_pairs(batches, data):
    sequences = data.draw(batches)[:9]
    num_groups = data.draw(st.integers(1, 6))
    rate = st.sampled_from([0.0, 1e-9, 3e-7, 0.7])
    rates = Rates(*data.draw(st.tuples(rate, rate).filter(any)))
    groups = balance(sequences, num_groups, cost=rates, contiguous=True)
    order = PrefixTree.build(sequences).order.tolist()
    assert [i for group in groups for i in group] == order
    assert sum(map(bool, groups)) == min(num_groups, len(sequences))
    if not sequences:
        return

    def largest(parts):
        each = (rates.token * tree_tokens(sequences, p) + rates.pair * tree_pairs(sequences, p) for p in parts)
        return max(each)

    assert largest(groups) == pytest.approx(min(map(largest, partitions(order, num_groups))), rel=1e-12)


@given(st.data())
def test_any_division_is_whole_in_order_repeatable_and_no_worse_than_a_contiguous_one(batches, data):
    sequences = data.draw(batches)
    num_groups = data.draw(st.integers(1, 11))
    rates = Rates(*data.draw(st.sampled_from([(1.0, 0.0), (0.0, 1.0), (3e-5, 2e-9)])))
    groups = balance(sequences, num_groups, rates)
    order = PrefixTree.build(sequences).order.tolist()
    assert sorted(i for group in groups for i in group) == list(range(len(sequences)))
    assert [bool(group) for group in groups] == [k < len(sequences) for k in range(num_groups)]
    places = [[order.index(i) for i in group] for group in groups if group]
    assert places == sorted(places) and all(place == sorted(place) for place in places)
    assert groups == balance(lexicographic_order(sequences), num_groups, rates)

    def largest(parts):
        return max(rates.token * tree_tokens(sequences, p) + rates.pair * tree_pairs(sequences, p) for p in parts)

    contiguous = balance(sequences, num_groups, rates, contiguous=True)
    assert largest(groups) <= largest(contiguous) * (1 + 1e-12)


def test_sequences_that_share_nothing_are_dealt_out_freely():
    def largest(lengths, num_groups):
        groups = balance([[n] * size for n, size in enumerate(lengths)], num_groups)
        return max(sum(lengths[i] for i in group) for group in groups)

    assert largest([8, 7, 6, 5, 4], 2) == 15  # largest differencing has 16, contiguous groups 15
    assert largest([8, 4, 7, 5, 6], 2) == 15  # contiguous groups have 18
    assert largest([9, 1, 8, 2, 7, 3, 6, 4], 4) == 10
    assert largest([30, 30, 30, 20, 20, 20, 10, 10, 10], 3) == 60


def test_what_shares_little_is_cut_and_what_shares_much_is_not():
    # Two prompts of 100 tokens with 6 answers of 10 each; three of one prompt alone would repeat its 100 tokens.
    heavy = [[p] * 100 + [p, n] * 5 for p in (1, 2) for n in range(6)]
    # 9 sequences of 50 tokens that share the first one.
    light = [[0] + [n] * 49 for n in range(10, 19)]
    sequences = heavy + light
    groups = balance(sequences, 4)
    costs = [tree_tokens(sequences, group) for group in groups]
    assert sum(costs) <= PrefixTree.build(sequences).num_rows + 8, "only the shared first tokens are repeated"
    assert max(costs) <= 210


def test_the_cost_of_a_tree_is_that_of_its_schedule_and_whole_chunks_count():
    random = np.random.default_rng(5)
    sequences = [random.integers(0, 9, int(size)) for size in random.integers(300, 3000, 12)]
    shared = [np.concatenate([sequences[0][:900], one]) for one in sequences]
    model = CostModel()
    for batch in (sequences, shared, [[]], []):
        made = plan(batch, strategy="packed", chunk_size=2048)
        assert model.tree_seconds(PrefixTree.build(batch)) == pytest.approx(made.estimates.seconds, rel=1e-3)

    def slowest(groups):
        return max(model.tree_seconds(PrefixTree.build([sequences[i] for i in group])) for group in groups)

    assert slowest(balance(sequences, 4, model)) <= slowest(balance(sequences, 4, Rates(*model.tree_rates())))
    shares = [(0, 1359, [2066]), (1, 493, [1487, 2135]), (2, 808, [1313, 2253, 1629, 1956, 2597])]
    sequences = [
        [i] * shared + [9 + n] * (size - shared) for i, shared, sizes in shares for n, size in enumerate(sizes)
    ]
    assert slowest(balance(sequences, 2, model)) <= slowest(balance(sequences, 2, model, contiguous=True))


def test_pairs_weigh_long_sequences_more():
    # 8 x 100 and 16 x 50 tokens, but 8 x 5,050 and 16 x 1,275 pairs.
    sequences = [[n] * 100 for n in range(8)] + [[n] * 50 for n in range(8, 24)]
    assert [len(group) for group in balance(sequences, 2)] == [8, 16]
    assert [len(group) for group in balance(sequences, 2, cost=Rates(token=0.0, pair=1.0))] == [6, 18]


def test_the_default_cost_model_and_the_order_of_the_sequences_are_accepted():
    sequences = [[1, 2, 3, n] for n in range(20)]
    groups = balance(sequences, 3, cost=CostModel())
    assert groups == balance(sequences, 3)  # equal sequences cost the same by any measure
    assert groups == balance(lexicographic_order(sequences), 3) == balance(PrefixTree.build(sequences), 3)
    token, pair = CostModel().tree_rates()
    assert token > pair > 0


@pytest.mark.parametrize("cost", ["tokens", None, 3, Rates(-1.0, 0.0), Rates(0.0, 0.0), Rates(math.nan, 1.0)])
def test_bad_costs(cost):
    with pytest.raises(PlanError, match="expected"):
        balance([[1], [2]], 2, cost=cost)


def test_costs_of_long_sequences_do_not_overflow():
    sequences = lexicographic_order([np.full(40_000, n, np.uint8) for n in range(32)])
    assert [len(group) for group in balance(sequences, 8, cost=Rates(1e3, 1e3))] == [4] * 8


def test_no_group_is_empty_where_one_sequence_dominates():
    sequences = [[1] * 100, [2], [3]]
    assert balance(sequences, 3) == [[0], [1], [2]]


def test_empty_and_equal_sequences_are_spread():
    assert [len(group) for group in balance([[]] * 8, 4)] == [2, 2, 2, 2]
    assert all(balance([[1, 2]] * 5 + [[]] * 3, 8))


def test_the_most_expensive_group_is_split_in_balance():
    # One limit of 100 tokens holds the short sequences in one group; a third group halves that one.
    sequences = [[0] * 100, *([n] * 10 for n in range(1, 9))]
    groups = balance(sequences, 3)
    assert sorted(tree_tokens(sequences, group) for group in groups) == [40, 40, 100]


@pytest.mark.parametrize("num_groups", [2, 7, 300])
def test_large_and_odd_batches(num_groups):
    random = np.random.default_rng(num_groups)
    alone = [random.integers(0, 2**20, int(size)) for size in random.lognormal(3, 1, 5000)]
    comb = [np.arange(n) for n in range(400)] + [np.append(np.arange(n), 5000 + n) for n in range(400)]
    for sequences in (alone, comb, [np.zeros(0, np.int64)] * 1000, [np.arange(9)] * 1000):
        groups = balance(sequences, num_groups)
        assert sorted(i for group in groups for i in group) == list(range(len(sequences)))
        assert all(groups)


def test_surplus_groups_are_empty():
    assert balance([[1], [2]], 4) == [[0], [1], [], []]
    assert balance([], 2) == [[], []]


@pytest.mark.parametrize("num_groups", [0, -1, 1.5, True, None])
def test_bad_number_of_groups(num_groups):
    with pytest.raises(PlanError, match="integer >= 1"):
        balance([[1]], num_groups)
    with pytest.raises(ValueError):
        balance([[1]], num_groups)
