"""Accumulating matrix products, sums of parameter gradients, and products over the rows that are read.

`dta::add_product_(total, left, right)` is `total += left @ right` with a float32 total and narrower factors. On a GPU
the product is accumulated inside the kernel, without a temporary of the size of the total and without rounding.

A sum that is zeroed before the first chunk takes memory while nothing is in it, and time to be written and read again.
So backward graphs add to a `Sum`, which begins with its first summand, or to a tensor where addresses have to stay.

A weight of zero does not exclude a row that is not read, since 0 * NaN is NaN; `product_of_read` does.
"""

from __future__ import annotations

import functools

import torch

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.library import define


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compute `total += left @ right` for matrices; without a fused kernel the product is rounded before the sum."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif has_fused(left):
        _fused(total, left, right)
    else:
        total += left @ right


def has_fused(factor: torch.Tensor) -> bool:
    """Return whether products with a factor of a narrow dtype are accumulated without rounding them first."""
    return factor.device.type == "cuda" and _has_fused(factor.device, factor.dtype)


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


class Sum:
    """Sum of the gradients of a parameter.

    Attributes:
        value: the sum so far; None: nothing has been added. A single summand may be in the parameter's dtype, further
            ones are added in `statistics_dtype`.
    """

    __slots__ = ("_dtype", "_parameter", "value")

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter, self._dtype = parameter.detach(), statistics_dtype(parameter.dtype)
        self.value: torch.Tensor | None = None

    def may_begin_with(self, shape: tuple[int, ...]) -> bool:
        """Return whether nothing is in the sum, and a new contiguous tensor of this shape may become it."""
        return self.value is None and self._parameter.is_contiguous() and self._parameter.shape == shape

    def begin(self, first: torch.Tensor) -> None:
        """Take the first summand, a new tensor, as the sum."""
        self.value = first if first.dtype == self._parameter.dtype else first.to(self._dtype)

    def tensor(self) -> torch.Tensor:
        """Return the sum in `statistics_dtype`, zero if nothing has been added, for additions in place."""
        if self.value is None:
            self.value = torch.zeros_like(self._parameter, dtype=self._dtype)
        elif self.value.dtype != self._dtype:
            self.value = self.value.to(self._dtype)
        return self.value

    def taken(self) -> torch.Tensor:
        """Return the sum in the parameter's dtype, and forget it."""
        total = torch.zeros_like(self._parameter) if self.value is None else self.value.to(self._parameter.dtype)
        self.value = None
        return total


AnySum = Sum | torch.Tensor


def tensor_of(total: AnySum) -> torch.Tensor:
    """Return the tensor of a sum that an operator adds to in place."""
    return total.tensor() if isinstance(total, Sum) else total


def add_product_to(total: AnySum, left: torch.Tensor, right: torch.Tensor, is_transposed: bool = False) -> None:
    """Add the matrix product `left @ right`, or its transpose."""
    if is_transposed:
        left, right = right.t(), left.t()
    if isinstance(total, Sum):
        if total.may_begin_with((left.shape[0], right.shape[1])) and not (
            left.dtype != statistics_dtype(left.dtype) and has_fused(left)  # which would be rounded before the sum
        ):
            return total.begin(left @ right)
        total = total.tensor()
    add_product(total, left, right)


def add_to(total: AnySum, summand: torch.Tensor) -> None:
    """Add a tensor of the sum's shape."""
    if isinstance(total, Sum) and total.may_begin_with(summand.shape):
        return total.begin(torch.empty_like(summand, memory_format=torch.contiguous_format).copy_(summand))
    tensor_of(total).add_(summand)


def are_bounded(*tensors: torch.Tensor) -> bool:
    """Return whether all numbers and all dot products of vectors of them are finite. Synchronises with the device."""
    return all(float(_norm(tensor)) < _largest(tensor.dtype) for tensor in tensors)


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of all numbers, in two steps where one would read them out of the order of memory."""
    by_vector = tensor if tensor.is_contiguous() or not tensor.dim() else torch.linalg.vector_norm(tensor, dim=-1)
    norm: torch.Tensor = torch.linalg.vector_norm(by_vector)
    return norm


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
