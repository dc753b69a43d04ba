"""Rows of a batch's tree, by hand: small batches against the definition."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_compile.plan import PrefixTree
from dta_compile.plan.tree.lexicographic import codes_of, combine
from dta_compile.runtime.rows.batch_rows import BatchRows, BatchTokens, looks_padded

BATCHES = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32 - 1))


@settings(max_examples=200, deadline=None)
@given(BATCHES, st.booleans(), st.booleans(), st.booleans())
def test_rows_are_what_they_are_defined_to_be(shape, by_column, share, packed):
    batch, tokens, seed = shape
    random = np.random.default_rng(seed)
    valid, used = random.random((2, batch, tokens)) < random.random((2, 1, 1))
    ids, kinds, labels, weights = random.integers(0, 2, (4, batch, tokens))
    starts = (random.random((batch, tokens)) < 0.5) | (np.cumsum(valid, 1) == 1) if packed else np.cumsum(valid, 1) == 1
    begins = np.maximum.accumulate(np.where(starts & valid, np.arange(tokens), 0), 1)  # column where each sequence does
    read = BatchTokens.read(valid, starts & valid if packed else None, [ids, kinds], by_column)
    tree = PrefixTree.build(read.keys, share=share)
    rows = BatchRows.of(read, tree, [labels, weights - 2**40], used)
    of_tokens, heads = {}, {}
    for position, (b, t) in enumerate(np.argwhere(valid).tolist()):
        above = [s for s in range(begins[b, t], t + 1) if valid[b, s]]
        prefix = [(int(ids[b, s]), int(kinds[b, s]), s if by_column else 0) for s in above]
        token = (tuple(prefix), None if share else (b, begins[b, t]))
        assert of_tokens.setdefault(token, rows.position_rows[position]) == rows.position_rows[position]
        head = rows.head_rows[b, t]
        if used[b, t]:
            row = rows.position_rows[position]
            assert rows.head_starts[row] <= head < rows.head_starts[row + 1]
            assert heads.setdefault((token, int(labels[b, t]), int(weights[b, t])), head) == head
        else:
            assert head == len(rows.head_positions)
    assert sorted(of_tokens.values()) == list(range(tree.num_rows))
    assert sorted(heads.values()) == list(range(len(rows.head_positions)))
    assert (rows.head_rows[~valid] == len(rows.head_positions)).all()
    assert (rows.position_rows[rows.row_positions] == np.arange(tree.num_rows)).all()
    sequences, columns = rows.coordinates(rows.head_positions)
    assert (rows.head_rows[sequences, columns] == np.arange(len(rows.head_positions))).all()
    assert rows.head_starts[0] == 0 and rows.head_starts[-1] == len(rows.head_positions)


def test_codes_are_equal_exactly_where_values_are():
    halves = np.array([[1.5], [2.5], [1.5], [-0.0], [0.0]])
    codes = codes_of(halves)
    assert codes[0] == codes[2] and len(set(codes.tolist())) == 4  # bit for bit: two zeros
    assert len(set(codes_of(np.arange(12.0).reshape(4, 3) // 6).tolist())) == 2
    wide = [np.array([0, 2**62, 0, 2**62]), np.array([-(2**62), 5, -(2**62), 2**62])]
    assert len(set(combine(wide, 4).tolist())) == 3
    assert combine([], 3).tolist() == [0, 0, 0]


def rows_of(*kinds):
    """Rows of `(left, shared, own, right)` numbers of tokens: padding, a common prompt, an answer, padding."""
    numbers = np.arange(100, 20_000)
    answers = np.arange(20_000, 20_000 + 10_000 * len(kinds)).reshape(len(kinds), -1)
    rows = [
        np.concatenate([np.full(left, 7), numbers[:shared], answers[i, :own], np.full(right, 7)])
        for i, (left, shared, own, right) in enumerate(kinds)
    ]
    return np.stack(rows)


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ([(0, 2000, 20, 80)] * 8, "8 of 8 rows end in runs of token 7.*640 of 2,800 tokens"),
        ([(i, 2000, 60 - i, 0) for i in range(8)], "4 of 8 rows begin in runs of token 7"),
        ([(256, 300, 20, 0)] * 8, None),  # an image of as many tokens in every row, or prefixes that are shared
        ([(0, 2000, 200, 4)] * 8, None),
    ],
)
def test_padding_is_noted_where_it_is_much_of_what_is_run(kinds, told):
    ids = rows_of(*kinds)
    note = looks_padded(ids, PrefixTree.build(ids).num_rows, True)
    assert note is None if told is None else re.search(told, note)
