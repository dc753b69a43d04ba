"""Which dtype what is computed in."""

from __future__ import annotations

import torch


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps and of accumulated gradients: float32, or what is wider or complex."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_complex or dtype is torch.float64 else torch.float32
