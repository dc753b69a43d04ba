"""Dtypes that operators compute in."""

from __future__ import annotations

import torch


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of log-sum-exps and accumulated gradients: float32, or a wider or complex dtype."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_complex or dtype is torch.float64 else torch.float32


def autocast(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast operands as autocast does for operators on its lower-precision list; custom operators are not on it."""
    device = operands[0].device.type
    # For "meta" `is_autocast_enabled` raises, and Dynamo cannot trace `is_autocast_available` in torch 2.11.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype is torch.float64 else t.to(dtype) for t in operands)
