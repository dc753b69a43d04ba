"""Token shift over a forest: the value of the k-th ancestor, a short convolution whose taps are one and zeros.

The state is the last `k` inputs `[k, D]`, oldest first. A token's own value and the values in between are not read.
"""

from __future__ import annotations

import torch

from dta_compile.ops.recurrences.short_convolution import Ancestors


def forward(
    x: torch.Tensor, taps: torch.Tensor, initial: torch.Tensor, ancestors: Ancestors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output `[c, D]` for x `[c, D]`, and the kept states `[kept, k, D]`; only the shape of taps matters."""
    with torch.no_grad():
        rows = torch.cat([initial.to(x.dtype), x])
        out = rows[: ancestors.tokens].clone()
        others, above, kept = ancestors.on(x.device)
        if len(others):
            out.index_copy_(0, others, rows.index_select(0, above[-1]))
        return out, rows.index_select(0, kept.flatten()).view(*kept.shape, x.shape[1])


def backward(
    grad_out: torch.Tensor,
    grad_kept: torch.Tensor,
    x: torch.Tensor,
    taps: torch.Tensor,
    initial: torch.Tensor,
    ancestors: Ancestors,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of x, the taps (zeros, since they are constant) and the initial state, in at least float32."""
    with torch.no_grad():
        dtype = torch.promote_types(x.dtype, torch.float32)
        grad, count = grad_out.to(dtype), ancestors.width - 1
        of_rows = grad.new_zeros((count + ancestors.tokens, x.shape[1]))
        others, above, kept = ancestors.on(x.device)
        of_rows[: ancestors.tokens] = grad.index_fill(0, others, 0) if len(others) else grad
        if len(others):
            of_rows.index_add_(0, above[-1], grad.index_select(0, others))
        if ancestors.kept:
            of_rows.index_add_(0, kept.flatten(), grad_kept.to(dtype).flatten(0, 1))
        return of_rows[count:], torch.zeros_like(taps, dtype=dtype), of_rows[:count]
