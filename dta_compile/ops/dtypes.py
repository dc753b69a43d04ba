"""Which dtype what is computed in."""

from __future__ import annotations

import torch


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps and of accumulated KV gradients: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32
