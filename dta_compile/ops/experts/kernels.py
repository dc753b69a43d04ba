# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202  (arguments of kernels are pointers, numbers and constants, which have no types)
"""Triton kernels of `products`: each program handles one expert and loops over its (token, expert) slots.

`order` `[n]` lists the slots sorted by expert, and `bounds` `[E + 1]` is the start of each expert in it. Rows are read
in place: the row of a slot is `slot // shared`, as a value may be the same for all experts of a token.
"""

import triton
import triton.language as tl

# Arguments that differ from call to call and must not trigger another compilation.
UNSPECIALIZED = ("left_shared", "right_shared", "rows_shared")


@triton.jit
def _rows(pointer, row_stride, slots, shared, exists, columns, width):
    """Load rows `[slots, columns]`; zeros where slots or columns do not exist."""
    address = pointer + (slots // shared).to(tl.int64)[:, None] * row_stride + columns[None, :]
    return tl.load(address, mask=exists[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def add_kernel(
    total, left, right, order, bounds,
    total_expert, total_row, total_column, left_row, right_row, left_shared, right_shared,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
    LEFT_BLOCK: tl.constexpr, RIGHT_BLOCK: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to a block of one expert's matrix: `total[e] += sum of left[s] x right[s]` over slots s; total is float32."""
    left_columns = tl.program_id(0) * LEFT_BLOCK + tl.arange(0, LEFT_BLOCK)
    right_columns = tl.program_id(1) * RIGHT_BLOCK + tl.arange(0, RIGHT_BLOCK)
    expert = tl.program_id(2)
    first, last = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    if last > first:
        accumulator = tl.zeros([LEFT_BLOCK, RIGHT_BLOCK], tl.float32)
        for begin in range(first, last, SLOTS):
            numbers = begin + tl.arange(0, SLOTS)
            exists = numbers < last
            slots = tl.load(order + numbers, mask=exists, other=0)
            a = _rows(left, left_row, slots, left_shared, exists, left_columns, LEFT)
            b = _rows(right, right_row, slots, right_shared, exists, right_columns, RIGHT)
            accumulator += tl.dot(tl.trans(a), b, input_precision=PRECISION)
        address = total + expert.to(tl.int64) * total_expert
        address = address + left_columns[:, None] * total_row + right_columns[None, :] * total_column
        inside = (left_columns < LEFT)[:, None] & (right_columns < RIGHT)[None, :]
        tl.store(address, tl.load(address, mask=inside, other=0.0) + accumulator, mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_kernel(
    out, rows, weight, order, bounds, out_row, rows_row, weight_expert, weight_row, weight_column, rows_shared,
    WIDTH: tl.constexpr, OUT: tl.constexpr,
    SLOTS: tl.constexpr, OUT_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute `out[s] = rows[s] @ weight[e]` for the slots of one expert, a block of columns; others stay unchanged."""
    columns = tl.program_id(0) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    expert = tl.program_id(1)
    first, last = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    matrix = weight + expert.to(tl.int64) * weight_expert
    for begin in range(first, last, SLOTS):
        numbers = begin + tl.arange(0, SLOTS)
        exists = numbers < last
        slots = tl.load(order + numbers, mask=exists, other=0)
        accumulator = tl.zeros([SLOTS, OUT_BLOCK], tl.float32)
        for start in range(0, WIDTH, WIDTH_BLOCK):
            features = start + tl.arange(0, WIDTH_BLOCK)
            a = _rows(rows, rows_row, slots, rows_shared, exists, features, WIDTH)
            address = matrix + features[:, None] * weight_row + columns[None, :] * weight_column
            b = tl.load(address, mask=(features < WIDTH)[:, None] & (columns < OUT)[None, :], other=0.0)
            accumulator += tl.dot(a, b, input_precision=PRECISION)
        address = out + slots.to(tl.int64)[:, None] * out_row + columns[None, :]
        tl.store(address, accumulator.to(out.dtype.element_ty), mask=exists[:, None] & (columns < OUT)[None, :])
