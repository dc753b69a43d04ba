from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_compile.errors import PlanError
from dta_compile.plan import PrefixTree, balance


def tree_tokens(sequences, group):
    return len({tuple(sequences[i][:n]) for i in group for n in range(1, len(sequences[i]) + 1)})


@given(st.data())
def test_groups_are_contiguous_optimal_and_not_empty(batches, data):
    sequences = data.draw(batches)[:9]
    num_groups = data.draw(st.integers(1, 11))
    groups = balance(sequences, num_groups)
    order = PrefixTree.build(sequences).order.tolist()
    assert len(groups) == num_groups
    assert [i for group in groups for i in group] == order
    assert sum(map(bool, groups)) == min(num_groups, len(sequences))
    if not sequences:
        return
    # Brute force over all contiguous partitions into at most `num_groups` groups.
    count, least = len(order), None
    for cuts in combinations(range(1, count), min(num_groups, count) - 1):
        bounds = [0, *cuts, count]
        parts = [order[a:b] for a, b in pairwise(bounds)]
        cost = max(tree_tokens(sequences, part) for part in parts)
        least = cost if least is None else min(least, cost)
    assert max(tree_tokens(sequences, group) for group in groups) == least


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


def test_surplus_groups_are_empty():
    assert balance([[1], [2]], 4) == [[0], [1], [], []]
    assert balance([], 2) == [[], []]


@pytest.mark.parametrize("num_groups", [0, -1, 1.5, True, None])
def test_bad_number_of_groups(num_groups):
    with pytest.raises(PlanError, match="integer >= 1"):
        balance([[1]], num_groups)
    with pytest.raises(ValueError):
        balance([[1]], num_groups)
