"""Normalisation over the tokens of all ranks."""

from __future__ import annotations

import torch

from dta_compile.distributed.group import Group, GroupLike
from dta_compile.errors import RuntimeContractError


def global_count(mask: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Non-zero entries of `mask` on all ranks together, a scalar int64 tensor on the mask's device."""
    return Group(group).sum((mask != 0).sum())


def token_mean(
    values: torch.Tensor, mask: torch.Tensor, *, total: torch.Tensor | float | None = None, group: GroupLike = None
) -> torch.Tensor:
    """This rank's part of the mean of `values` over the tokens where `mask` is not 0, of all ranks.

    DDP and FSDP average gradients over ranks. The average of what this returns is the mean over all tokens, however
    many of them each rank has, and so are the gradients: equal to those of one process with the whole batch. Values
    where the mask is 0 do not matter, not even if they are no numbers.

    Args:
        values: losses, any shape.
        mask: of the same shape; bool, integer or float, and only zero or not counts.
        total: tokens of the whole step, if this is one of several micro-batches (see `global_count`); by default those
            of `mask` on all ranks.
        group: the ranks that gradients are averaged over: a process group, a one-dimensional mesh, or None for all.

    Returns:
        a scalar; in float32 for values of a narrower dtype, which could not hold the sum or the number of tokens.

    Raises:
        RuntimeContractError: shapes differ.
    """
    if values.shape != mask.shape:
        raise RuntimeContractError(
            "values and mask do not fit", expected=f"a mask {tuple(values.shape)}", got=f"{tuple(mask.shape)}"
        )
    ranks = Group(group)
    # Sums and counts of 16-bit floats end at 65,504, or are rounded from 256 on.
    wide = torch.promote_types(values.dtype, torch.float32)
    count = global_count(mask, group) if total is None else torch.as_tensor(total, device=values.device)
    part = values.masked_fill(mask == 0, 0).sum(dtype=wide)
    return part * (ranks.size / count.to(wide).clamp(min=1.0))
