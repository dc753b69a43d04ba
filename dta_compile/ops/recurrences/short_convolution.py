"""Causal depthwise convolution over a forest: each token is convolved with its `k - 1` nearest ancestors.

The state is the last `k - 1` inputs `[k - 1, D]`, oldest first. The ancestors of nearly all tokens are the rows right
before them, so the kernel multiplies shifted rows; the few other tokens are computed again by gathering.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dta_compile.ops.recurrences.blocks import uploaded
from dta_compile.plan.tree.segments import Segment


class Ancestors:
    """Each token's ancestors, as indices into the initial state's rows followed by the tokens; built once.

    Attributes:
        width: `k`.
        tokens: `c`.
        kept: number of states to return.
    """

    def __init__(self, segments: Sequence[Segment], width: int, kept: Sequence[int] = ()) -> None:
        """Build them for a forest's segments and kernels of `width`; see `Blocks` for `kept`."""
        columns = np.array([(s.first, s.last, s.depth, s.parent) for s in segments], np.int64).reshape(-1, 4)
        first, last, depth, parent = columns.T
        befores = np.where(parent >= 0, first[parent] + depth - depth[parent] - 1, -1)
        tokens, initial = int(last[-1]) if len(last) else 0, width - 1
        self.width, self.tokens, self.kept = width, tokens, len(kept)
        above = np.arange(-1, initial + tokens - 1)  # the parent of each row
        above[:1] = 0
        above[initial + first] = initial + befores
        table, rows = np.empty((initial, tokens), np.int64), np.arange(initial, initial + tokens)
        for number in range(initial):
            rows = np.maximum(above[rows], 0)
            table[number] = rows
        shifted = np.arange(initial, initial + tokens) - np.arange(1, initial + 1)[:, None]
        self._others = np.flatnonzero((table != shifted).any(0))
        self._above = table[:, self._others]
        self._kept = np.empty((len(kept), initial), np.int64)
        rows = initial + np.asarray(kept, np.int64) - 1
        for number in reversed(range(initial)):
            self._kept[:, number] = rows
            rows = np.maximum(above[rows], 0)
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the m tokens whose ancestors are not right before them, these ancestors `[k - 1, m]`, and the rows of
        the kept states, on a device."""
        if device not in self._tables:
            others, above, kept = (uploaded(table, device) for table in (self._others, self._above, self._kept))
            self._tables[device] = others, above, kept
        return self._tables[device]


def forward(
    x: torch.Tensor, weight: torch.Tensor, initial: torch.Tensor, ancestors: Ancestors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output `[c, D]` for x `[c, D]` and weight `[D, k]`, and the kept states `[kept, k - 1, D]`."""
    with torch.no_grad():
        dtype = torch.promote_types(x.dtype, torch.float32)
        count, rows = ancestors.width - 1, torch.cat([initial.to(x.dtype), x])
        taps = weight.t().to(dtype).contiguous()  # [k, D]; the last one is for the token itself
        wide = rows.to(dtype)
        out = wide[count:] * taps[count]
        for number in range(count):
            out.addcmul_(wide[number : number + ancestors.tokens], taps[number])
        others, above, kept = ancestors.on(x.device)
        if count and len(others):
            own = wide.index_select(0, count + others) * taps[count]
            for number in range(count):
                own.addcmul_(wide.index_select(0, above[count - 1 - number]), taps[number])
            out.index_copy_(0, others, own)
        return out.to(x.dtype), rows.index_select(0, kept.flatten()).view(*kept.shape, x.shape[1])


def backward(
    grad_out: torch.Tensor,
    grad_kept: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    initial: torch.Tensor,
    ancestors: Ancestors,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of x, weight and the initial state, in at least float32."""
    with torch.no_grad():
        dtype = torch.promote_types(x.dtype, torch.float32)
        count, tokens = ancestors.width - 1, ancestors.tokens
        grad, rows = grad_out.to(dtype), torch.cat([initial.to(dtype), x.to(dtype)])
        taps = weight.t().to(dtype).contiguous()
        of_rows, of_taps = torch.zeros_like(rows), torch.empty_like(taps)
        torch.mul(grad, taps[count], out=of_rows[count:])
        of_taps[count] = (grad * rows[count:]).sum(0)
        others, above, kept = ancestors.on(x.device)
        own = grad.index_select(0, others)
        if count and len(others):
            grad = grad.index_fill(0, others, 0)
        for number in range(count):
            of_rows[number : number + tokens].addcmul_(grad, taps[number])
            product = grad * rows[number : number + tokens]
            if len(others):
                which = above[count - 1 - number]
                product.index_copy_(0, others, own * rows.index_select(0, which))
                of_rows.index_add_(0, which, own * taps[number])
            of_taps[number] = product.sum(0)
        if ancestors.kept:
            of_rows.index_add_(0, kept.flatten(), grad_kept.to(dtype).flatten(0, 1))
        return of_rows[count:], of_taps.t(), of_rows[:count]
