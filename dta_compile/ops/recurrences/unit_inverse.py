"""Inverses of many small matrices: lower triangular ones with ones on the diagonal.

A triangular solve takes the matrices one after the other, on all threads each: with a core that has other work to do,
thousands of them wait for it thousands of times. Products of all matrices at once do not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["unit_inverse"]

SMALLEST = 8  # summed as a series, whose terms may still not be much larger than the sum


def unit_inverse(lower: torch.Tensor) -> torch.Tensor:
    """`(I + lower)^-1` for `[B, L, L]`, of which only what is below the diagonal counts.

    By halves: with the inverses P and R of the diagonal blocks, that of `[[A, 0], [B, C]]` is `[[P, 0], [-R B P, R]]`.
    """
    length = lower.shape[-1]
    size = SMALLEST
    whole = max(SMALLEST, 1 << (length - 1).bit_length())
    if whole > length:
        lower = F.pad(lower, (0, whole - length) * 2)
    found = _by_series(_diagonal(lower, size))
    while size < whole:
        first, second = found[:, 0::2], found[:, 1::2]
        below = _diagonal(lower, 2 * size)[..., size:, :size]
        joined = lower.new_zeros((lower.shape[0], first.shape[1], 2 * size, 2 * size))
        joined[..., :size, :size] = first
        joined[..., size:, size:] = second
        joined[..., size:, :size] = (second @ below @ first).neg_()
        found, size = joined, 2 * size
    return found[:, 0, :length, :length].contiguous()


def _diagonal(matrices: torch.Tensor, size: int) -> torch.Tensor:
    """The blocks on the diagonal, `[B, n, size, size]`."""
    count = matrices.shape[-1] // size
    return matrices.view(-1, count, size, count, size).diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _by_series(lower: torch.Tensor) -> torch.Tensor:
    """`I - A + A^2 - ... = (I - A) (I + A^2) (I + A^4)` for `A^8 = 0`."""
    negative = lower.tril(-1).neg_()
    square = negative @ negative
    unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    found = negative + unit
    found = found + found @ square
    return found + found @ (square @ square)
