"""Attention of a chunk: its queries over the stack below it, and over those of its own tokens that are their ancestors.

One interface, several providers: see `PROVIDERS`. Shapes: query `[1, Hq, c, D]`, key and value of the chunk
`[1, Hkv, c, D]`, of the prefix `[1, Hkv, p, D]`; Hq is a multiple of Hkv.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from dta_compile.errors import OptionError
from dta_compile.runtime.attention import triton, varlen
from dta_compile.runtime.attention.chunk_shape import ChunkShape, ChunkTable
from dta_compile.runtime.attention.cpu import FlashCPU

__all__ = ["ChunkShape", "ChunkTable", "Operands", "Provider", "Reference", "provider_for"]

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Operands(NamedTuple):
    """What one attention call reads.

    Providers that are `replayable` go by `table`, and take the `p` of the prefix for an upper bound of its length: what
    lies beyond the chunk's start may be anything, and neither is read nor gets a gradient. For the others `p` is the
    chunk's start.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    prefix_key: torch.Tensor
    prefix_value: torch.Tensor
    chunk: ChunkShape
    table: Callable[[], ChunkTable]
    scale: float  # positive, see `passes.attention_capture`: torch's and FlashAttention's kernels need it to be
    window: int  # 0: none; else a token reads itself and the `window - 1` tokens above it


class Provider(Protocol):
    """How attention is computed.

    Attributes:
        replayable: it goes by `Operands.table` alone, so that a CUDA graph of it serves chunks of other shapes.
    """

    replayable: bool

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


def provider_for(choice: str, query: torch.Tensor, value: torch.Tensor) -> Provider:
    """The provider named by `options={"attention": choice}`; for "auto" the fastest that takes these tensors.

    Raises:
        OptionError: the named one does not take them.
    """
    if choice == "auto":
        return next(found for make in PROVIDERS.values() if not isinstance(found := make(query, value), str))
    found = PROVIDERS[choice](query, value)
    if isinstance(found, str):
        raise OptionError(
            f"attention={choice!r} cannot run this model here",
            expected=found,
            got=f"{query.dtype} on {query.device.type}, heads of {query.shape[-1]} and {value.shape[-1]}",
            hint="attention='auto' picks one that can",
        )
    return found


class Reference:
    """Plain softmax over all keys at once, in at least float32: the definition of correct."""

    replayable = True

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
        key = self._wide(x, x.prefix_key, x.key)
        grad_key = sum_groups(grad_scores.mT @ x.query.to(value.dtype), groups)
        grad_value = sum_groups(weights.mT @ grad, groups)
        prefix_key_grad += grad_key[:, :, :prefix]
        prefix_value_grad += grad_value[:, :, :prefix]
        return (grad_scores @ key).to(x.query.dtype), grad_key[:, :, prefix:], grad_value[:, :, prefix:]

    def _groups(self, x: Operands) -> int:
        return x.query.shape[1] // x.key.shape[1]

    def _scores_and_values(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        value = self._wide(x, x.prefix_value, x.value)
        scores = x.query.to(value.dtype) @ self._wide(x, x.prefix_key, x.key).mT * x.scale
        return scores.masked_fill(~self._allowed(x), float("-inf")), value

    def _wide(self, x: Operands, prefix: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """`[1, Hq, p + c, D]` in at least float32; zeros beyond the chunk's start, which zero weights do not hide."""
        beyond = torch.arange(prefix.shape[2], device=own.device) >= x.table().start
        both = torch.cat([prefix.masked_fill(beyond[:, None], 0), own], 2)
        return repeat_heads(both, self._groups(x)).to(torch.promote_types(x.query.dtype, torch.float32))

    def _allowed(self, x: Operands) -> torch.Tensor:
        """Which of the `p + c` keys each of the `c` queries reads, bool `[c, p + c]`."""
        table, device = x.table(), x.query.device
        depths, number = table.depths[:, None], torch.arange(table.tokens, device=device)
        above = torch.arange(x.prefix_key.shape[2], device=device)
        prefix = (above < table.start).expand(table.tokens, -1)
        own = (number <= number[:, None]) & (number[:, None] < table.ends)
        if x.window:
            prefix, own = prefix & (depths - above < x.window), own & (depths - table.depths < x.window)
        return torch.cat([prefix, own], 1)


def repeat_heads(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """`[1, Hkv, n, D]` to `[1, Hkv * groups, n, D]`."""
    return tensor.repeat_interleave(groups, 1) if groups > 1 else tensor


def sum_groups(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """The gradient of `repeat_heads`."""
    return tensor.unflatten(1, (-1, groups)).sum(2) if groups > 1 else tensor


def _reference(query: torch.Tensor, value: torch.Tensor) -> Provider | str:
    return Reference()


def _flash_cpu(query: torch.Tensor, value: torch.Tensor) -> Provider | str:
    types = (torch.float32, torch.float64, torch.bfloat16)
    if query.device.type == "cpu" and query.dtype in types and query.shape[-1] == value.shape[-1]:
        return FlashCPU()
    return "float32, float64 or bfloat16 on a CPU, keys and values of one size"


Make = Callable[[torch.Tensor, torch.Tensor], Provider | str]

# By name: how each is made for queries and values like these, or what it takes instead; "auto" tries them in turn.
PROVIDERS: dict[str, Make] = {
    "cpu": _flash_cpu,
    "triton": triton.make,
    "flash_attn": varlen.make_flash_attn,
    "varlen": varlen.make_varlen,
    "reference": _reference,
}
