"""The order that trees and balancing begin with, for every size of block and type of token."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_compile.plan import PrefixTree, lexicographic_order
from dta_compile.plan.tree import lexicographic

TYPES = (np.uint8, np.int8, np.uint16, np.int16, np.int32, np.uint32, np.int64, np.uint64, ">i2", ">u4")


def shared(left, right):
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def check(sequences, made):
    # Python's sort of lists is numeric, stable, and puts a prefix before what it is a prefix of.
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    assert made.order.tolist() == order
    assert made.lengths.tolist() == [len(sequence) for sequence in sequences]
    for k in range(1, len(order)):
        left, right = sequences[order[k - 1]], sequences[order[k]]
        depth = shared(left, right)
        assert made.common[k] == depth
        if depth < min(len(left), len(right)):
            assert made.forks[k].tolist() == [left[depth], right[depth]]
    assert made.common[:1].tolist() == [0] * bool(order)


@given(st.data())
def test_blocks_of_any_size_give_the_order_of_lists(batches, data):
    sequences = data.draw(batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lexicographic, "BLOCK_TOKENS", data.draw(st.integers(1, 5)))
        check(sequences, lexicographic_order(sequences))


@given(st.data())
def test_tokens_of_any_type_are_compared_as_numbers(batches, data):
    # The far ends of the type: bytes, signs and wrapping differences would all put some of these out of order.
    dtype = np.dtype(data.draw(st.sampled_from(TYPES)))
    low = np.iinfo(dtype).min
    high = min(np.iinfo(dtype).max, np.iinfo(np.int64).max)
    values = {-1: low, 0: low + 1, 1: 1, 2: high}
    sequences = [[values.get(token, token) for token in sequence] for sequence in data.draw(batches)]
    arrays = [np.array(sequence, dtype) for sequence in sequences]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lexicographic, "BLOCK_TOKENS", 2)
        check(sequences, lexicographic_order(arrays))


def test_types_that_no_integer_type_covers_can_be_mixed():
    arrays = [np.array([2**63 - 1], np.uint64), np.array([-1], np.int8), np.array([7], np.uint64), [], [-1, 3]]
    check([array.tolist() if isinstance(array, np.ndarray) else array for array in arrays], lexicographic_order(arrays))


def test_arrays_of_one_type_are_not_copied():
    # An empty list has no type of its own; widening 1.2 MB of bytes to 64 bits for it would take 9.6 MB.
    arrays = [np.full(300_000, n, np.uint8) for n in range(4)]
    tracemalloc.start()
    try:
        lexicographic_order([*arrays, []])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 600_000


def test_slices_and_views_are_read_as_they_are():
    base = np.arange(4000, dtype=np.int32)
    arrays = [base[::2], base[1:1500], base[::-1], base[1:1499], base[:0]]
    check([array.tolist() for array in arrays], lexicographic_order(arrays))


def test_prefixes_longer_than_many_blocks():
    random = np.random.default_rng(0)
    prompt = random.integers(0, 50_000, 3000).tolist()
    sequences = [
        prompt[:length] + tail for length in (0, 1023, 1024, 1025, 2048, 3000) for tail in ([], [3], [70_000, 1])
    ]
    check(sequences * 2, lexicographic_order(sequences * 2))


def test_a_tree_is_cut_out_of_the_order():
    sequences = [[1, 2, 9], [1, 2, 3], [1, 2], [4]]
    made = lexicographic_order(sequences)
    assert PrefixTree(made).num_rows == PrefixTree.build(sequences).num_rows == 5
    assert PrefixTree(made, shared=False).num_rows == 9


@pytest.mark.parametrize("sequences", [[], [[]], [[], []]])
def test_nothing_to_sort(sequences):
    check(sequences, lexicographic_order(sequences))
