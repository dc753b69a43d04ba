# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202  (arguments of kernels are pointers, numbers and constants, which have no types)
"""Triton kernels that add results over some of the keys to those over others, unless a number in them is not finite."""

import triton
import triton.language as tl

SIZES = ("tokens", "out_head", "out_row", "own_head", "own_row", "statistics_head", "own_statistics_head")
ROWS = 32  # tokens of a program


@triton.jit
def _is_finite(checked):
    """Return whether a sum is finite, which it only is if all that was added up is."""
    return tl.abs(tl.load(checked)) < float("inf")


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(
    out, statistics, own_out, own_statistics, checked,
    tokens, out_head, out_row, own_head, own_row, statistics_head, own_statistics_head,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the output and log-sum-exp of a block of queries over further keys into those that are there, -inf where
    there are none."""
    head, rows, features = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    exists = rows < tokens
    real = exists[:, None] & (features < DIM)[None, :]
    if _is_finite(checked):
        before = tl.load(statistics + head * statistics_head + rows, mask=exists, other=0.0)
        own = tl.load(own_statistics + head * own_statistics_head + rows, mask=exists, other=0.0)
        top = tl.maximum(before, own)
        weight, own_weight = tl.exp(before - top), tl.exp(own - top)
        total = weight + own_weight
        target = out + head * out_head + rows.to(tl.int64)[:, None] * out_row + features[None, :]
        source = own_out + head * own_head + rows.to(tl.int64)[:, None] * own_row + features[None, :]
        result = tl.load(target, mask=real, other=0.0).to(tl.float32) * (weight / total)[:, None]
        result += tl.load(source, mask=real, other=0.0).to(tl.float32) * (own_weight / total)[:, None]
        tl.store(target, result.to(out.dtype.element_ty), mask=real)
        tl.store(statistics + head * statistics_head + rows, top + tl.log(total), mask=exists)


@triton.jit(do_not_specialize=SIZES)
def add_kernel(
    out, own_out, checked, tokens, out_head, out_row, own_head, own_row,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add a block of rows of one head to those that are there."""
    head, rows, features = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = (rows < tokens)[:, None] & (features < DIM)[None, :]
    if _is_finite(checked):
        target = out + head * out_head + rows.to(tl.int64)[:, None] * out_row + features[None, :]
        source = own_out + head * own_head + rows.to(tl.int64)[:, None] * own_row + features[None, :]
        result = tl.load(target, mask=real, other=0.0).to(tl.float32)
        result += tl.load(source, mask=real, other=0.0).to(tl.float32)
        tl.store(target, result.to(out.dtype.element_ty), mask=real)
