"""Shapes of chunks: values, and the tables that kernels read them from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.plan import Segment
from dta_compile.runtime.attention import cpu_parts
from dta_compile.runtime.path.chunk_shape import LISTED_KEYS, LISTED_QUERIES, ChunkShape, ChunkTable
from tests.support.attention import ancestry, cases, shapes


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(case=cases(shapes()))
def test_a_table_says_which_tokens_read_which(case):
    """What kernels go by: token i reads token j if `j <= i < ends[j]`, or, with units, if `begins[j] <= i < ends[j]`;
    and the first `start` of the stack."""
    table, shape = case.shape.table(torch.device("cpu")), case.shape
    number = torch.arange(shape.tokens)
    own = ((table.begins if case.units else number) <= number[:, None]) & (number[:, None] < table.ends)
    depths = torch.cat([torch.arange(shape.start), table.depths])
    allowed = torch.cat([torch.ones(shape.tokens, int(table.start), dtype=torch.bool), own], 1)
    if case.limit is not None:
        allowed &= depths >= case.limit.first(table.depths)[:, None]
    assert torch.equal(allowed, ancestry(case))


@settings(max_examples=30, deadline=None)
@given(shape=shapes(sizes=(1, 30, 64, 100, 200)))
def test_a_table_lists_the_blocks_that_are_read(shape):
    """By blocks of 128 queries and 64 keys: runs of those that every query reads whole, then those read in part."""
    table, tokens = shape.table(torch.device("cpu")), shape.tokens
    numbers = table.numbers[1 + 3 * tokens :].tolist()
    assert len(table.numbers) == ChunkTable.size(tokens)
    rows, columns = -(-tokens // LISTED_QUERIES), -(-tokens // LISTED_KEYS)
    allowed, more = (shape.allowed(range(tokens), range(tokens), units=units) for units in (False, True))
    for row in range(rows):
        runs, parts = numbers[2 * row : 2 * row + 2]
        ends = numbers[2 * rows + row * 2 * (columns + 1) :][: 2 * runs]
        listed = numbers[2 * rows * (columns + 2) + row * columns :][:columns]
        queries = allowed[row * LISTED_QUERIES :][:LISTED_QUERIES]
        blocks = [queries[:, column * LISTED_KEYS :][:, :LISTED_KEYS] for column in range(columns)]
        of_any = more[row * LISTED_QUERIES :][:LISTED_QUERIES].any(0)
        is_read = [of_any[column * LISTED_KEYS :][:LISTED_KEYS].any() for column in range(columns)]
        above = row * LISTED_QUERIES // LISTED_KEYS
        whole = [number for number, block in enumerate(blocks[:above]) if block.all()]
        assert [
            number for first, last in zip(ends[::2], ends[1::2], strict=True) for number in range(first, last)
        ] == whole
        assert all(last < first for last, first in zip(ends[1::2], ends[2::2], strict=False)), (
            "runs are as long as they can be"
        )
        assert sorted([*whole, *listed[:parts]]) == [number for number, block in enumerate(is_read) if block]
        assert sorted(listed) == list(range(columns))


@settings(max_examples=80, deadline=None)
@given(shape=shapes(sizes=(1, 2, 3, 8)))
def test_a_chunk_is_divided_below_what_all_of_its_branches_read(shape):
    tokens, trunk = range(shape.tokens), shape.trunk
    allowed = shape.allowed(tokens, tokens)
    if len(shape.segments) > 1 and shape.segments[0].end == shape.tokens:
        assert trunk > 0
    if trunk:
        above, below = shape.divided
        assert (above.tokens, below.start) == (trunk, shape.start + trunk)
        assert allowed[trunk:, :trunk].all()
        assert (allowed[:trunk, :trunk] == above.allowed(range(trunk), range(trunk))).all()
        assert (allowed[trunk:, trunk:] == below.allowed(range(below.tokens), range(below.tokens))).all()
        assert (shape.subtree_ends[trunk:] == below.subtree_ends + trunk).all()


def test_a_chunk_that_is_not_in_depth_first_order_has_no_table():
    parts = [Segment(0, 4, 6, 0, -1), Segment(4, 5, 5, 2, 0), Segment(5, 6, 6, 3, 0)]  # from token 1, then from token 2
    with pytest.raises(AssertionError, match="depth-first"):
        ChunkShape.of(0, 4, parts).table(torch.device("cpu"))


def test_a_shape_is_a_value():
    first, second = ChunkShape.run(3, 5), ChunkShape.run(3, 5)
    cpu_parts.parts_of(first, None, False, torch.float32)
    assert first == second
    assert hash(first) == hash(second)
    assert (first.tokens, first.height, first.spine) == (5, 8, 5)
    assert statistics_dtype(torch.bfloat16) is torch.float32
