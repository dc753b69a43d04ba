from itertools import pairwise

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_compile.data import bundled, load_rollouts
from dta_compile.errors import PlanError
from dta_compile.plan import PrefixTree


def prefixes(sequences):
    return {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}


@given(st.data())
def test_tree_has_the_nodes_and_tokens_of_the_networkx_trie(batches, data):
    sequences = data.draw(batches)
    tree = PrefixTree.build(sequences)
    trie = networkx.prefix_tree(sequences)
    ends = set(trie.predecessors(-1))
    inner = [v for v in trie if v not in (0, -1)]
    assert tree.num_rows == len(inner)
    # A segment ends where the trie branches or where a sequence ends.
    assert len(tree.stop) == sum(trie.out_degree(v) != 1 or v in ends for v in inner)
    assert len(tree.leaves) == sum(list(trie.successors(v)) == [-1] for v in inner)


@given(st.data())
def test_tokens_share_a_row_exactly_if_their_prefixes_are_equal(batches, data):
    sequences = data.draw(batches)
    tree = PrefixTree.build(sequences)
    row_of = {}
    rows = iter(tree.token_rows().tolist())
    for sequence in sequences:
        for n in range(1, len(sequence) + 1):
            row = next(rows)
            assert row_of.setdefault(tuple(sequence[:n]), row) == row
    assert next(rows, None) is None
    assert sorted(row_of.values()) == list(range(tree.num_rows))


@given(st.data())
def test_rows_of_a_slice_are_those_of_its_tokens(batches, data):
    sequences = [s for s in data.draw(batches) if s]
    share = data.draw(st.booleans())
    tree = PrefixTree.build(sequences, share=share)
    if not sequences:
        return
    i = data.draw(st.integers(0, len(sequences) - 1))
    start = data.draw(st.integers(0, len(sequences[i])))
    stop = data.draw(st.integers(start, len(sequences[i])))
    offset = sum(map(len, sequences[:i]))
    expected = tree.token_rows()[offset + start : offset + stop].tolist()
    ranges = tree.row_ranges(i, start, stop)
    assert tree.rows(i, start, stop).tolist() == expected
    assert [row for a, b in ranges for row in range(a, b)] == expected
    assert all(b != c for (_, b), (c, _) in pairwise(ranges)), "adjacent ranges are merged"
    assert [tree.row_at(i, depth) for depth in range(start, stop)] == expected


@given(st.data())
def test_nodes_are_in_preorder_and_sequences_end_where_nodes_stop(batches, data):
    sequences = data.draw(batches)
    tree = PrefixTree.build(sequences, share=data.draw(st.booleans()))
    assert all(tree.parent < np.arange(len(tree.parent)))
    assert tree.row.tolist() == np.cumsum([0, *(tree.stop - tree.start)])[:-1].tolist()
    for index, (sequence, node) in enumerate(zip(sequences, tree.end_node.tolist(), strict=True)):
        assert node == -1 if not sequence else tree.stop[node] == len(sequence)
        assert node == -1 or index in tree.sequences_ending_at(node)
    for node, parent in enumerate(tree.parent.tolist()):
        assert tree.start[node] == (tree.stop[parent] if parent >= 0 else 0)
        assert node in (tree.children(parent) if parent >= 0 else tree.roots)
        through = tree.sequence[node]
        assert tree.row_at(through, int(tree.start[node])) == tree.row[node]


def test_order_is_numeric_for_any_width_and_sign():
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    sequences = [[most], [0, 300], [-1], [0, 2], [least], [0], []]
    assert PrefixTree.build(sequences).order.tolist() == [6, 4, 2, 5, 3, 1, 0]
    small = [[-100, 3], [-100, 2], [7]]
    assert PrefixTree.build(small).order.tolist() == [1, 0, 2]


def test_common_prefixes_and_forks():
    tree = PrefixTree.build([[1, 2, 9], [1, 2, 3], [1, 2], [4]])
    assert tree.order.tolist() == [2, 1, 0, 3]
    assert tree.lcp.tolist() == [0, 2, 2, 0]
    assert tree.forks[2:].tolist() == [[3, 9], [1, 4]]


def test_unshared_gives_every_sequence_its_own_root():
    sequences = [[1, 2], [1, 2], [], [1]]
    for tree in (PrefixTree.build(sequences, share=False), PrefixTree.build(sequences).unshared()):
        assert not tree.shared
        assert tree.num_rows == 5
        assert tree.roots == tree.leaves == [0, 1, 2]
        assert len(set(tree.token_rows().tolist())) == 5
        assert not tree.same_path(0, 1, 1)


def test_same_path():
    tree = PrefixTree.build([[1, 2, 3], [1, 2, 4], [1]])
    assert tree.same_path(0, 1, 2)
    assert not tree.same_path(0, 1, 3)
    assert not tree.same_path(0, 2, 2)
    assert tree.same_path(1, 2, 0)


def test_graph_holds_segments_and_the_sequences_that_end():
    graph = PrefixTree.build([[1, 2, 3], [1, 2, 4], [1, 2], []]).graph()
    assert graph.nodes[0] == {"start": 0, "stop": 2, "sequence": 2, "sequences": [2]}
    assert sorted(graph.edges) == [(0, 1), (0, 2)]
    assert networkx.is_arborescence(graph)


class FakeTensor:
    """What a tensor offers, as far as the tree looks."""

    def __init__(self, values):
        self.values = values

    def detach(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        return np.array(self.values)


def test_kinds_of_integers_can_be_mixed():
    sequences = [[1, 2], (1, 2), np.array([1, 2], np.uint8), np.array([1, 2], np.int32), FakeTensor([1, 2])]
    tree = PrefixTree.build(sequences)
    assert tree.num_rows == 2
    assert tree.sequences_ending_at(0) == [0, 1, 2, 3, 4]


def test_empty_batches():
    for tree in (PrefixTree.build([]), PrefixTree.build([[], []])):
        assert (tree.num_rows, tree.roots, tree.leaves) == (0, [], [])
        assert tree.token_rows().tolist() == []
        assert len(tree.graph()) == 0


@pytest.mark.parametrize(
    "sequences, where, got",
    [
        ([[1], [1.5]], "sequence 1", "float64"),
        ([np.zeros((2, 2), int)], "sequence 0", "shape (2, 2)"),
        ([1, 2], "sequence 0", "shape ()"),
        ([[1, [2]]], "sequence 0", "list"),
        ([["a"]], "sequence 0", "<U1"),
        ([[True]], "sequence 0", "bool"),
        ([[2**63]], "sequence 0", str(2**63)),
        ([[2**80]], "sequence 0", "object"),
        (7, "", "7"),
    ],
)
def test_bad_sequences_are_named(sequences, where, got):
    with pytest.raises(PlanError) as error:
        PrefixTree.build(sequences)
    assert error.value.where == where
    assert got in error.value.got


def test_slices_outside_of_a_sequence_are_refused():
    tree = PrefixTree.build([[1, 2]])
    for start, stop in ((0, 3), (2, 1), (-1, 1)):
        with pytest.raises(PlanError, match="no tokens"):
            tree.rows(0, start, stop)


def test_bundled_rollouts_give_their_published_tree():
    tree = PrefixTree.build([rollout.tokens for rollout in load_rollouts(bundled())])
    assert (len(tree.lengths), tree.lengths.sum(), tree.num_rows, len(tree.leaves)) == (40, 34728, 10267, 33)
