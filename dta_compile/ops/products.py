"""Accumulating matrix products, and products over the rows that are read.

`dta::add_product_(total, left, right)` is `total += left @ right` with a float32 total and narrower factors. On a GPU
the product is accumulated inside the kernel, without a temporary of the size of the total and without rounding.

A weight of zero does not exclude a row that is not read, since 0 * NaN is NaN; `product_of_read` does.
"""

from __future__ import annotations

import functools

import torch

from dta_compile.ops.library import define


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compute `total += left @ right` for matrices; without a fused kernel the product is rounded before the sum."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda" and _has_fused(total.device, left.dtype):
        _fused(total, left, right)
    else:
        total += left @ right


def _fused(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if not total.is_contiguous():  # the kernel writes rows, so transpose all three
        total, left, right = total.t(), right.t(), left.t()
    torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)


@functools.cache
def _has_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch accumulates such products correctly, transposed and not; tested once."""
    left, right = (
        torch.arange(512, device=device).sub(256).div(64).to(dtype).reshape(shape) for shape in ((16, 32), (32, 16))
    )
    exact = left.float() @ right.float()
    totals = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device).t()
    try:
        for total in totals:
            _fused(total, left, right)
    except (AttributeError, RuntimeError):
        return False
    return all(torch.allclose(total, exact + 1, rtol=1e-2, atol=1e-2) for total in totals)


ADD_PRODUCT = define("add_product_(Tensor(a!) total, Tensor left, Tensor right) -> ()", lambda *_: None, add_product)


def are_bounded(*tensors: torch.Tensor) -> bool:
    """Return whether all numbers and all dot products of vectors of them are finite. Synchronises with the device."""
    return all(float(torch.linalg.vector_norm(tensor)) < _largest(tensor.dtype) for tensor in tensors)


def _largest(dtype: torch.dtype) -> float:
    """Return a norm below which dot products are finite by the Cauchy-Schwarz inequality, with a margin for a scale."""
    return float(torch.finfo(dtype).max) ** 0.5 / 16


def product_of_read(weights: torch.Tensor, values: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Return `weights @ values` over the rows of values that are read, without synchronising with the device.

    If a row that is read has a number that is not finite, the result is NaN in all columns in which some row has one.

    Args:
        weights: `[..., m, k]`, zero where nothing is read.
        values: `[..., k, n]`.
        read: bool, broadcast to weights.
    """
    nothing = values * 0  # NaN where a value is not finite
    others = nothing.sum(-1).isnan()[..., None, :].to(weights.dtype)
    reads_others = (others @ read.mT.to(weights.dtype)).mT > 0
    product = weights @ values.nan_to_num(0, 0, 0)
    return product.masked_fill_(reads_others & nothing.sum(-2, keepdim=True).isnan(), torch.nan)
