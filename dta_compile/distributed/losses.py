"""Normalise losses over the tokens of all ranks."""

from __future__ import annotations

import torch

from dta_compile.distributed.group import Group, GroupLike
from dta_compile.errors import RuntimeContractError


def global_count(mask: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Count the non-zero entries of `mask` on all ranks: a scalar int64 tensor on the mask's device."""
    return Group(group).sum((mask != 0).sum())


def token_mean(
    values: torch.Tensor, mask: torch.Tensor, *, total: torch.Tensor | float | None = None, group: GroupLike = None
) -> torch.Tensor:
    """Return this rank's part of the mean of `values` over the tokens of all ranks where `mask` is not 0.

    DDP and FSDP average gradients over ranks. The average of these parts is the mean over all tokens, however many each
    rank has, so that gradients equal those of one process with the whole batch. Values where the mask is 0 are ignored,
    even NaNs.

    Args:
        values: losses, any shape.
        mask: bool, integer or float of the same shape; only zero or non-zero matters.
        total: number of tokens of the whole step, if this is one of several micro-batches (see `global_count`); by
            default those of `mask` on all ranks.
        group: the ranks over which gradients are averaged: a process group, a one-dimensional mesh, or None for all.

    Returns:
        a scalar; float32 for narrower dtypes, which cannot hold the sum or the number of tokens.

    Raises:
        RuntimeContractError: shapes differ.
    """
    if values.shape != mask.shape:
        raise RuntimeContractError(
            "values and mask do not fit", expected=f"a mask {tuple(values.shape)}", got=f"{tuple(mask.shape)}"
        )
    ranks = Group(group)
    # float16 overflows beyond 65,504, and bfloat16 rounds integers beyond 256.
    wide = torch.promote_types(values.dtype, torch.float32)
    count = global_count(mask, group) if total is None else torch.as_tensor(total, device=values.device)
    part = values.masked_fill(mask == 0, 0).sum(dtype=wide)
    return part * (ranks.size / count.to(wide).clamp(min=1.0))
