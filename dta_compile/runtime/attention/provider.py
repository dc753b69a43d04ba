"""Interface of attention providers: queries of a chunk over the stack and over their ancestors in the chunk.

Shapes: query `[1, Hq, c, D]`, key and value of the chunk `[1, Hkv, c, D]`, of the prefix `[1, Hkv, p, D]`; Hq is a
multiple of Hkv.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from dta_compile.ops.scoring import Scoring
from dta_compile.runtime.path.chunk_shape import ChunkShape, ChunkTable, Limit

Tensors = tuple[torch.Tensor, ...]


class Operands(NamedTuple):
    """Inputs of one attention call.

    For `replayable` providers `p` is an upper bound: they read the chunk's start from `table`, and the prefix beyond it
    is arbitrary, is not read and gets no gradient. For others `p` is the chunk's start.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    prefix_key: torch.Tensor
    prefix_value: torch.Tensor
    chunk: ChunkShape
    table: Callable[[], ChunkTable]
    scoring: Scoring
    limit: Limit | None  # a sliding window or chunks of the sequence; None: a token reads all above it
    units: bool = False  # whether a token also reads later ones of its unit, see `ChunkShape.units`
    choice: torch.Tensor | None = None  # `[1, H or 1, c, count]`: blocks of keys chosen for each query; None: all
    bias: torch.Tensor | None = None  # `[1, Hq, c or 1, n]`: added to scores by distance, see `ops.attention`
    stride: int = 1  # keys and values are those of the last tokens of windows of so many; `p` and `c` are of queries

    def with_dense_rows(self) -> Operands:
        """Make the features of query, key and value contiguous, as kernels assume."""
        query, key, value = (
            tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (self.query, self.key, self.value)
        )
        return self._replace(query=query, key=key, value=value)


class Provider(Protocol):
    """Implementation of chunk attention.

    Attributes:
        replayable: it reads the shape from `Operands.table` alone, so that a CUDA graph serves chunks of other shapes.
    """

    replayable: bool

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output `[1, Hq, c, Dv]` and log-sum-exp `[1, Hq, c]`."""

    def backward(
        self,
        grad: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        x: Operands,
        prefix_key_grad: torch.Tensor,
        prefix_value_grad: torch.Tensor,
    ) -> Tensors:
        """Return gradients of query, key, value and bias as new tensors; add those of the prefix to `prefix_*_grad`.

        `out` and `logsumexp` may cover more keys than the operands; gradients are those of the operands alone.
        """
