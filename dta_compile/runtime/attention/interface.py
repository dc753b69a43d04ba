"""Attention of a chunk: its queries over the stack below it, and over those of its own tokens that are their ancestors.

Shapes: query `[1, Hq, c, D]`, key and value of the chunk `[1, Hkv, c, D]`, of the prefix `[1, Hkv, p, D]`; Hq is a
multiple of Hkv.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from dta_compile.runtime.path.chunk_shape import ChunkShape, ChunkTable, Limit

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
    scale: float  # positive, as kernels need it: see `passes.lowering.attention_capture`
    limit: Limit | None  # a sliding window or chunks of the sequence; None: a token reads all above it
    softcap: float = 0.0  # 0: none; else scaled scores `s` become `softcap * tanh(s / softcap)`


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
        """New tensors: the gradients of query, key and value; those of the prefix are added to `prefix_*_grad`.

        `out` and `logsumexp` may be those of more keys than the operands have: the others' gradients are not asked for.
        """
