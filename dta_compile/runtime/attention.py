"""Attention of a chunk: its queries over the stack below it, and over those of its own tokens that are their ancestors.

One interface, several providers: `Reference` in plain math, and `FlashCPU`. Shapes: query `[1, Hq, c, D]`, key and
value of the chunk `[1, Hkv, c, D]`, of the prefix `[1, Hkv, p, D]`; Hq is a multiple of Hkv.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from dta_compile.runtime.attention_cpu import FlashCPU
from dta_compile.runtime.chunk_shape import ChunkShape

__all__ = ["ChunkShape", "Operands", "Provider", "Reference", "provider_for"]

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Operands(NamedTuple):
    """What one attention call reads."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    prefix_key: torch.Tensor
    prefix_value: torch.Tensor
    chunk: ChunkShape
    scale: float
    window: int  # 0: none; else a token reads itself and the `window - 1` tokens above it


class Provider(Protocol):
    """How attention is computed."""

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `[1, Hq, c, Dv]` and log-sum-exp `[1, Hq, c]`."""

    def backward(
        self,
        grad: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        x: Operands,
        prefix_key_grad: torch.Tensor,
        prefix_value_grad: torch.Tensor,
    ) -> Tensors:
        """New tensors: the gradients of query, key and value; those of the prefix are added to `prefix_*_grad`."""


def provider_for(query: torch.Tensor, value: torch.Tensor) -> Provider:
    """The fastest provider for these tensors."""
    flash_types = (torch.float32, torch.float64, torch.bfloat16)
    if query.device.type == "cpu" and query.dtype in flash_types and query.shape[-1] == value.shape[-1]:
        return FlashCPU()
    return Reference()


class Reference:
    """Plain softmax over all keys at once, in at least float32: the definition of correct."""

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        scores, value = self._scores_and_values(x)
        logsumexp = scores.logsumexp(-1)
        return ((scores - logsumexp[..., None]).exp() @ value).to(x.query.dtype), logsumexp

    def backward(
        self,
        grad: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        x: Operands,
        prefix_key_grad: torch.Tensor,
        prefix_value_grad: torch.Tensor,
    ) -> Tensors:
        scores, value = self._scores_and_values(x)
        grad, out = grad.to(value.dtype), out.to(value.dtype)
        weights = (scores - logsumexp[..., None]).exp()
        grad_scores = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) * x.scale
        prefix, groups = x.prefix_key.shape[2], self._groups(x)
        key = repeat_heads(torch.cat([x.prefix_key, x.key], 2), groups).to(value.dtype)
        grad_key = sum_groups(grad_scores.mT @ x.query.to(value.dtype), groups)
        grad_value = sum_groups(weights.mT @ grad, groups)
        prefix_key_grad += grad_key[:, :, :prefix]
        prefix_value_grad += grad_value[:, :, :prefix]
        return (grad_scores @ key).to(x.query.dtype), grad_key[:, :, prefix:], grad_value[:, :, prefix:]

    def _groups(self, x: Operands) -> int:
        return x.query.shape[1] // x.key.shape[1]

    def _scores_and_values(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(x.query.dtype, torch.float32)
        key = repeat_heads(torch.cat([x.prefix_key, x.key], 2), self._groups(x)).to(wide)
        value = repeat_heads(torch.cat([x.prefix_value, x.value], 2), self._groups(x)).to(wide)
        scores = x.query.to(wide) @ key.mT * x.scale
        return scores.masked_fill(~self._allowed(x), float("-inf")), value

    def _allowed(self, x: Operands) -> torch.Tensor:
        """Which of the `p + c` keys each of the `c` queries reads, bool `[c, p + c]`."""
        device, tokens = x.query.device, range(x.chunk.tokens)
        kept, name = x.chunk.kept, (Reference, x.window, device)
        if name not in kept:
            depths, own = x.chunk.depths, x.chunk.allowed(tokens, tokens, x.window)
            kept[name] = torch.from_numpy(depths).to(device), torch.from_numpy(own).to(device)
        depths, own = kept[name]
        reach = x.window or x.chunk.height
        prefix = depths[:, None] - torch.arange(x.chunk.start, device=device) < reach
        return torch.cat([prefix, own], 1)


def repeat_heads(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """`[1, Hkv, n, D]` to `[1, Hkv * groups, n, D]`."""
    return tensor.repeat_interleave(groups, 1) if groups > 1 else tensor


def sum_groups(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """The gradient of `repeat_heads`."""
    return tensor.unflatten(1, (-1, groups)).sum(2) if groups > 1 else tensor
