from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_compile.errors import PlanError
from dta_compile.options import CHOICES
from dta_compile.plan import PrefixTree
from dta_compile.plan.tree.leaf_order import branch_depths, leaf_order


def sequences_in_order(sequences, order):
    tree = PrefixTree.build(sequences)
    return [sequences[tree.sequence[leaf]] for leaf in leaf_order(tree, order)]


def test_backward_dfs_order_is_algorithm_1():
    # Below 1: leaf child (tail 2); node 1,5 with leaves at depths 3 and 5 (tail 3); node 1,6 with tail 4.
    # Child order: leaf, (1,5), (1,6); within (1,5) the shorter leaf first. The root's other child is a leaf.
    sequences = [[1, 4], [1, 5, 7], [1, 5, 8, 8, 8], [1, 6, 7, 7], [1, 6, 8, 8, 8], [9, 9, 9]]
    forward = [[9, 9, 9], [1, 4], [1, 5, 7], [1, 5, 8, 8, 8], [1, 6, 7, 7], [1, 6, 8, 8, 8]]
    assert sequences_in_order(sequences, "backward_dfs") == forward[::-1]


def test_lexicographic_order():
    sequences = [[3], [1, 9], [1, 2, 5], [1]]
    assert sequences_in_order(sequences, "lexicographic") == [[1, 2, 5], [1, 9], [3]]


def test_random_order_is_reproducible_and_depends_on_the_seed():
    tree = PrefixTree.build([[n // 5, n] for n in range(25)])
    assert leaf_order(tree, "random", seed=3) == leaf_order(tree, "random", seed=3)
    assert len({tuple(leaf_order(tree, "random", seed=s)) for s in range(5)}) == 5


@given(st.data())
def test_orders_are_depth_first(batches, data):
    sequences = data.draw(batches)
    tree = PrefixTree.build(sequences, share=data.draw(st.booleans()))
    leaves = leaf_order(tree, data.draw(st.sampled_from(CHOICES["order"])), seed=data.draw(st.integers(0, 5)))
    assert sorted(leaves) == tree.leaves
    paths = []
    for node in leaves:
        path = set()
        while node >= 0:
            path.add(node)
            node = int(tree.parent[node])
        paths.append(path)
    for node in range(len(tree.stop)):
        inside = [node in path for path in paths]
        assert sum(a != b for a, b in zip([False, *inside], [*inside, False], strict=True)) == 2, "one visit per node"
    expected = [max((int(tree.stop[n]) for n in a & b), default=0) for a, b in pairwise(paths)]
    assert branch_depths(tree, leaves) == ([*expected, 0] if leaves else [])


@pytest.mark.parametrize("order", CHOICES["order"])
def test_deep_chains_and_wide_fans(order):
    caterpillar = PrefixTree.build([[*([1] * n), 0] for n in range(2000)])
    assert len(leaf_order(caterpillar, order)) == 2000
    fan = PrefixTree.build([[1, n] for n in range(20000)])
    assert len(leaf_order(fan, order)) == 20000


def test_unknown_order():
    with pytest.raises(PlanError, match="backward_dfs, lexicographic or random"):
        leaf_order(PrefixTree.build([[1]]), "sideways")
