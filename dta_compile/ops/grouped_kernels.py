# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202  (arguments of kernels are pointers, numbers and constants, which have no types)
"""Triton kernels of `grouped_products`: every program has one expert, and goes over the places that chose it.

`order` `[n]` has the places by expert, and `bounds` `[E + 1]` where in it each expert begins. Rows are read where they
are: a place's row is `place // shared`, as a value may be the same for all experts of a token.
"""

import triton
import triton.language as tl

# Numbers that differ from call to call: one compilation must do for all of them.
UNSPECIALIZED = ("left_shared", "right_shared", "rows_shared")


@triton.jit
def _rows(pointer, row_stride, places, shared, exists, columns, width):
    """`[places, columns]`; zeros where nothing exists."""
    address = pointer + (places // shared).to(tl.int64)[:, None] * row_stride + columns[None, :]
    return tl.load(address, mask=exists[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def add_kernel(
    total, left, right, order, bounds,
    total_expert, total_row, total_column, left_row, right_row, left_shared, right_shared,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
    LEFT_BLOCK: tl.constexpr, RIGHT_BLOCK: tl.constexpr, PLACES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`total[e] += sum of left[p] x right[p]`, a block of the matrix of one expert; `total` is float32."""
    left_columns = tl.program_id(0) * LEFT_BLOCK + tl.arange(0, LEFT_BLOCK)
    right_columns = tl.program_id(1) * RIGHT_BLOCK + tl.arange(0, RIGHT_BLOCK)
    expert = tl.program_id(2)
    first, last = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    if last > first:
        found = tl.zeros([LEFT_BLOCK, RIGHT_BLOCK], tl.float32)
        for begin in range(first, last, PLACES):
            numbers = begin + tl.arange(0, PLACES)
            exists = numbers < last
            places = tl.load(order + numbers, mask=exists, other=0)
            a = _rows(left, left_row, places, left_shared, exists, left_columns, LEFT)
            b = _rows(right, right_row, places, right_shared, exists, right_columns, RIGHT)
            found += tl.dot(tl.trans(a), b, input_precision=PRECISION)
        address = total + expert.to(tl.int64) * total_expert
        address = address + left_columns[:, None] * total_row + right_columns[None, :] * total_column
        inside = (left_columns < LEFT)[:, None] & (right_columns < RIGHT)[None, :]
        tl.store(address, tl.load(address, mask=inside, other=0.0) + found, mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_kernel(
    out, rows, weight, order, bounds, out_row, rows_row, weight_expert, weight_row, weight_column, rows_shared,
    WIDTH: tl.constexpr, OUT: tl.constexpr,
    PLACES: tl.constexpr, OUT_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[p] = rows[p] @ weight[e]` at the places of one expert, a block of columns; other places are left alone."""
    columns = tl.program_id(0) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    expert = tl.program_id(1)
    first, last = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    matrix = weight + expert.to(tl.int64) * weight_expert
    for begin in range(first, last, PLACES):
        numbers = begin + tl.arange(0, PLACES)
        exists = numbers < last
        places = tl.load(order + numbers, mask=exists, other=0)
        found = tl.zeros([PLACES, OUT_BLOCK], tl.float32)
        for start in range(0, WIDTH, WIDTH_BLOCK):
            features = start + tl.arange(0, WIDTH_BLOCK)
            a = _rows(rows, rows_row, places, rows_shared, exists, features, WIDTH)
            address = matrix + features[:, None] * weight_row + columns[None, :] * weight_column
            b = tl.load(address, mask=(features < WIDTH)[:, None] & (columns < OUT)[None, :], other=0.0)
            found += tl.dot(a, b, input_precision=PRECISION)
        address = out + places.to(tl.int64)[:, None] * out_row + columns[None, :]
        tl.store(address, found.to(out.dtype.element_ty), mask=exists[:, None] & (columns < OUT)[None, :])
