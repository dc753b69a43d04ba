"""What besides token ids splits prefixes, and how many tokens that costs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dta_compile
from dta_compile.errors import PlanError
from dta_compile.plan import PrefixTree
from dta_compile.plan.tree.lexicographic import combine
from dta_compile.plan.tree.split_prefixes import SplitPrefixes

SEQUENCES = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3]]


def routes_of(sequences, changed=()):
    """Two layers of two experts for every token, the same for the same token; other ones at the places `changed`."""
    found = [np.array([[[token, 0], [1, token]] for token in sequence]) for sequence in sequences]
    for sequence, token in changed:
        found[sequence][token, 1] += 7
    return found


def test_equal_routes_cost_nothing():
    plan = dta_compile.plan(SEQUENCES, routes=routes_of(SEQUENCES))
    assert plan.stats.tree_tokens == dta_compile.plan(SEQUENCES).stats.tree_tokens == 5
    assert plan.tokens_lost == {} and "because of" not in str(plan)


def test_a_token_with_two_routes_is_run_twice_and_all_behind_it():
    plan = dta_compile.plan(SEQUENCES, routes=routes_of(SEQUENCES, [(1, 1)]))
    assert plan.stats.tree_tokens == 7  # the second and the third token of the second sequence are its own
    assert plan.tokens_lost == {"routes": 2}
    assert "2 tokens more because of routes (C 2.20 without)" in str(plan)


@given(st.data())
def test_what_is_lost_is_the_difference_of_two_trees(data):
    sequences = data.draw(st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=5))
    routes = [[[data.draw(st.integers(0, 1))] for _ in sequence] for sequence in sequences]
    plan = dta_compile.plan(sequences, routes=[np.array(one, int).reshape(-1, 1) for one in routes])
    without = dta_compile.plan(sequences, strategy="packed").prefix_tree.num_rows
    together = [
        [2 * token + route[0] for token, route in zip(*both, strict=True)]
        for both in zip(sequences, routes, strict=True)
    ]
    assert dta_compile.plan(together).stats.tree_tokens == plan.stats.tree_tokens
    assert sum(plan.tokens_lost.values()) == plan.prefix_tree.num_rows - without or not plan.prefix_tree.shared


def test_routes_that_do_not_fit_are_named():
    short = routes_of(SEQUENCES)
    short[1] = short[1][:-1]
    with pytest.raises(PlanError, match=r"routes do not fit(.|\n)*sequence 1(.|\n)*3 routes for 4 tokens"):
        dta_compile.plan(SEQUENCES, routes=short)
    with pytest.raises(PlanError, match="2 routes for 3 sequences"):
        dta_compile.plan(SEQUENCES, routes=short[:1] + short[:1])
    with pytest.raises(PlanError, match="routes do not fit"):
        dta_compile.plan(SEQUENCES, routes=[np.ones((len(one), 2)) for one in SEQUENCES])
    with pytest.raises(PlanError, match="no tokens to be told apart"):
        dta_compile.plan(dta_compile.plan(SEQUENCES).prefix_tree, routes=routes_of(SEQUENCES))


def test_keys_that_differ_at_the_same_tokens_are_to_blame_together():
    ids, begins = np.array([1, 2, 3, 1, 2, 3]), np.array([0, 3])
    routes = np.array([0, 0, 0, 0, 5, 0])
    tree = PrefixTree.build(np.split(combine([ids, routes, routes], 6), [3]))
    codes = {"ids": ids, "first": routes, "second": routes, "same": np.zeros(6, np.int64)}
    split = SplitPrefixes.of(tree, codes, begins, ["first", "second"])
    assert split.tokens() == {"first and second": 2}
    assert SplitPrefixes.of(tree, codes, begins, ["same"]) is None


@pytest.mark.parametrize("routes", [5, [[[0, 1], [0]]], [[[], []]], [[None, 1]], [[True, False]], [3]])
def test_bad_routes_are_errors_of_ours(routes):
    with_widths = [[[0, 1], [2, 3]], *(routes if isinstance(routes, list) else [])]
    for given_routes, sequences in ((routes, [[1, 2]]), (with_widths, [[1, 2], [1, 2]])):
        if given_routes == [[[], []]]:
            assert dta_compile.plan(sequences, routes=given_routes).tokens_lost == {}  # nothing was recorded
        else:
            with pytest.raises(PlanError, match="routes do not fit"):
                dta_compile.plan(sequences, routes=given_routes if isinstance(routes, list) else routes)


def test_a_key_is_named_only_if_the_others_do_not_explain_what_is_lost():
    ids, begins = np.array([1, 2, 3] * 3), np.array([0, 3, 6])
    first, second = np.array([0, 0, 0, 0, 5, 0, 0, 0, 7]), np.array([0, 0, 0, 0, 5, 0, 0, 0, 0])
    codes = {"ids": ids, "first": first, "second": second, "same": np.zeros(9, np.int64)}

    def lost(*suspects):
        tree = PrefixTree.build(np.split(combine(list(codes.values()), 9), begins[1:]))
        return SplitPrefixes.of(tree, codes, begins, list(suspects)).tokens()

    assert lost("first", "second", "same") == {"first and second": 3}
    assert lost("first", "same") == {"first": 1}  # of the token that `second` does not tell apart as well
