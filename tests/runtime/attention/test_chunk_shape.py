"""Shapes of chunks: values, and the tables that kernels read them from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.plan import Segment
from dta_compile.runtime.attention import cpu_parts
from dta_compile.runtime.path.chunk_shape import ChunkShape
from tests.support.attention import ancestry, cases, shapes


@settings(max_examples=200, deadline=None)
@given(case=cases(shapes()))
def test_a_table_says_which_tokens_read_which(case):
    """What kernels go by: token i reads token j if `j <= i < ends[j]`, and the first `start` of the stack."""
    table, shape = case.shape.table(torch.device("cpu")), case.shape
    number = torch.arange(shape.tokens)
    own = (number <= number[:, None]) & (number[:, None] < table.ends)
    depths = torch.cat([torch.arange(shape.start), table.depths])
    allowed = torch.cat([torch.ones(shape.tokens, int(table.start), dtype=torch.bool), own], 1)
    if case.limit is not None:
        allowed &= depths >= case.limit.first(table.depths)[:, None]
    assert torch.equal(allowed, ancestry(case))


def test_a_chunk_that_is_not_in_depth_first_order_has_no_table():
    parts = [Segment(0, 4, 6, 0, -1), Segment(4, 5, 5, 2, 0), Segment(5, 6, 6, 3, 0)]  # from token 1, then from token 2
    with pytest.raises(AssertionError, match="depth-first"):
        ChunkShape.of(0, 4, parts).table(torch.device("cpu"))


def test_a_shape_is_a_value():
    first, second = ChunkShape.run(3, 5), ChunkShape.run(3, 5)
    cpu_parts.parts_of(first, None, torch.float32)
    assert first == second
    assert hash(first) == hash(second)
    assert (first.tokens, first.height, first.spine) == (5, 8, 5)
    assert statistics_dtype(torch.bfloat16) is torch.float32
