"""Tensors compared with what they should be: largest differences, relative to the largest entry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dta_compile.errors import VerificationError


def real_parts(value: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, along a new last dimension; others as they are."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def of_parts(mask: torch.Tensor) -> torch.Tensor:
    """A mask of complex numbers as one of their real and imaginary parts."""
    return mask[..., None].expand(*mask.shape, 2)


def largest_entry(value: torch.Tensor) -> float:
    """The largest magnitude of the finite entries."""
    if not value.numel():
        return 0.0
    return float(torch.nan_to_num(value.detach(), nan=0.0, posinf=0.0, neginf=0.0).abs().max())


def are_finite(values: Iterable[Any]) -> bool:
    """Whether all numbers of all tensors are finite."""
    return all(bool(value.isfinite().all()) for value in values if isinstance(value, torch.Tensor))


def comparable(mine: torch.Tensor, theirs: torch.Tensor, all_finite: bool) -> torch.Tensor:
    """Which numbers are compared, bool: all, or those that are finite in both, if not `all_finite` of the program."""
    return torch.ones_like(mine, dtype=torch.bool) if all_finite else mine.isfinite() & theirs.isfinite()


def compare_exactly(
    what: str, mine: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype
) -> float | None:
    """Whole numbers: equal; in less precision than float64 there may be a tie, or one in a hundred."""
    count = int(mask.sum())
    wrong = int(((mine != theirs) & mask).sum())
    if wrong > (0 if dtype is torch.float64 else 1 + count // 100):
        raise difference(what, f"equal numbers at {count} places", f"{wrong} others")
    return 0.0 if count else None


def compare_values(
    what: str, mine: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor, tolerance: float, rounding: float = 0.0
) -> float:
    """The largest difference, relative to the largest entry, where `mask` holds.

    Raises:
        VerificationError: it is beyond the tolerance, and beyond `rounding` in absolute terms.
    """
    wide = torch.float64 if mine.dtype is torch.float64 else torch.float32
    mine, theirs = mine.to(wide), theirs.to(wide)
    same = (mine == theirs) | (mine.isnan() & theirs.isnan()) | ~mask
    gap = (mine - theirs).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0)
    largest, scale = float(gap.max()) if gap.numel() else 0.0, largest_entry(torch.where(mask, theirs, 0))
    if not largest <= tolerance * scale + rounding:
        relative = largest / scale if scale else largest
        raise difference(what, f"a relative difference of at most {tolerance:g}", f"{relative:.3g}")
    return largest / max(scale, rounding) if largest else 0.0


def require(holds: bool, what: str, expected: Any, got: Any) -> None:
    """Raise `VerificationError` unless something holds."""
    if not holds:
        raise difference(what, str(expected), str(got))


def difference(what: str, expected: str, got: str) -> VerificationError:
    """The error for something that differs."""
    return VerificationError(
        f"{what} differs from the captured program",
        expected=expected,
        got=got,
        hint="please report the model; options={'fallback': 'dense'} does not help here, eager execution does",
    )
