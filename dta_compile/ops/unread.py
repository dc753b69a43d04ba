"""Products that skip what is not read: a weight of zero does not hide a NaN or an infinity, as 0 * NaN is NaN."""

from __future__ import annotations

import torch

__all__ = ["are_bounded", "product_of_read"]


def are_bounded(*tensors: torch.Tensor) -> bool:
    """Whether all numbers are finite, and products of any two vectors of them, too. Waits for the device."""
    return all(float(torch.linalg.vector_norm(tensor)) < _largest(tensor.dtype) for tensor in tensors)


def _largest(dtype: torch.dtype) -> float:
    """A norm up to which products are finite by the Cauchy-Schwarz inequality, with room for a scale."""
    return float(torch.finfo(dtype).max) ** 0.5 / 16


def product_of_read(weights: torch.Tensor, values: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """`weights @ values` over those rows of values that are read: NaN where one of them is not finite, whatever others are.

    Args:
        weights: `[..., m, k]`, zero where nothing is read.
        values: `[..., k, n]`.
        read: bool, broadcast to weights.
    """
    finite = values.isfinite()
    if values.device.type == "cpu" and bool(finite.all()):
        return weights @ values
    found = weights @ values.masked_fill(~finite, 0)
    return found.masked_fill_(read.to(weights.dtype) @ (~finite).to(weights.dtype) > 0, torch.nan)
