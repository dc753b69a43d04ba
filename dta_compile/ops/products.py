"""Matrix products that are added to a sum, and products over what is read alone.

`dta::add_product_(total, left, right)` is `total += left @ right`, where the total is float32 and the factors are not.
On a GPU the product is added as it is made: no temporary of the size of the total, and no rounding before the sum.

A weight of zero does not hide what is not read: 0 * NaN is NaN. `product_of_read` does.
"""

from __future__ import annotations

import functools

import torch

from dta_compile.ops.library import LIBRARY

LIBRARY.define("add_product_(Tensor(a!) total, Tensor left, Tensor right) -> ()")
ADD_PRODUCT = torch.ops.dta.add_product_.default


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`total += left @ right` for matrices; the product is rounded first where nothing better is known."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda" and _has_fused(total.device, left.dtype):
        _fused(total, left, right)
    else:
        total += left @ right


def _fused(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if not total.is_contiguous():  # a transposed sum: the kernel writes rows
        total, left, right = total.t(), right.t(), left.t()
    torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)


@functools.cache
def _has_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds such products right, transposed and not; tried once."""
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


@torch.library.register_fake("dta::add_product_", lib=LIBRARY)
def _fake(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    return None


LIBRARY.impl("add_product_", add_product, "CompositeExplicitAutograd")


def are_bounded(*tensors: torch.Tensor) -> bool:
    """Whether all numbers are finite, and products of any two vectors of them, too. Waits for the device."""
    return all(float(torch.linalg.vector_norm(tensor)) < _largest(tensor.dtype) for tensor in tensors)


def _largest(dtype: torch.dtype) -> float:
    """A norm up to which products are finite by the Cauchy-Schwarz inequality, with room for a scale."""
    return float(torch.finfo(dtype).max) ** 0.5 / 16


def product_of_read(weights: torch.Tensor, values: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """`weights @ values` over those rows of values that are read. Waits for no device.

    A result is NaN where one of these rows is not finite, in the columns in which some row is not.

    Args:
        weights: `[..., m, k]`, zero where nothing is read.
        values: `[..., k, n]`.
        read: bool, broadcast to weights.
    """
    nothing = values * 0  # NaN where a value is not finite
    others = nothing.sum(-1).isnan()[..., None, :].to(weights.dtype)
    reads_others = (others @ read.mT.to(weights.dtype)).mT > 0
    found = weights @ values.nan_to_num(0, 0, 0)
    return found.masked_fill_(reads_others & nothing.sum(-2, keepdim=True).isnan(), torch.nan)
