"""Which dtype what is computed in."""

from __future__ import annotations

import torch


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps and of accumulated gradients: float32, or what is wider or complex."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_complex or dtype is torch.float64 else torch.float32


def autocast(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operands as autocast has them for its lower-precision list, on which opaque operators have to put themselves."""
    device = operands[0].device.type
    # Asked about "meta", which has no autocast, torch raises; whether there is one Dynamo cannot trace in torch 2.11.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype is torch.float64 else t.to(dtype) for t in operands)
