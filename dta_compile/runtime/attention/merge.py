"""Attention over parts of the keys, merged by the log-sum-exps of the parts' scores.

A part that has the share `exp(its log-sum-exp - that of all)` of a query's weight has this share of the output
(FlashAttention-2, Dao, 2023, section 3.1).
"""

from __future__ import annotations

import torch

__all__ = ["merge_parts", "merge_with"]


def merge_with(out: torch.Tensor, logsumexp: torch.Tensor, part: torch.Tensor, part_logsumexp: torch.Tensor) -> None:
    """Add a part to output `[..., D]` and log-sum-exp `[...]` of other keys, in place; of two, shares are a sigmoid."""
    share = torch.sigmoid(part_logsumexp - logsumexp)
    out.lerp_(part.to(out.dtype), share[..., None])
    torch.logaddexp(logsumexp, part_logsumexp, out=logsumexp)


def merge_parts(parts: torch.Tensor, logsumexps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[1, ..., D]` and log-sum-exp `[1, ...]` of parts that lie behind one another, `[n, ..., D]`."""
    logsumexp = logsumexps.logsumexp(0, keepdim=True)
    return (parts * (logsumexps - logsumexp).exp()[..., None]).sum(0, keepdim=True), logsumexp
