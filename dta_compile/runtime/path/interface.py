"""How one mixer layer is computed over a chunk and the path above it: what the path stack asks of every mixer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from dta_compile.runtime.path.chunk_shape import ChunkShape, ChunkTable

__all__ = ["AnyRuntime", "LayerInputs", "LayerRuntime", "RecurrentInputs", "RecurrentRuntime", "Tensors"]

Tensors = tuple[torch.Tensor, ...]


class LayerInputs(NamedTuple):
    """What one run of a layer reads.

    Layers that are `replayable` go by `table`, and take the tokens of `above` for an upper bound of their number: what
    lies beyond the chunk's start may be anything, and neither is read nor gets a gradient. For the others `above` has
    as many tokens as the chunk's start says.

    Attributes:
        operands: of the chunk's tokens, with the dimensions of the mixer and a batch of one.
        constants: as the mixer's `chunk` operator takes them.
        above: the states of the tokens above the chunk, in order of depth.
        chunk, table: the chunk's shape, for the host and as tensors.
    """

    operands: Tensors
    constants: tuple[Any, ...]
    above: Tensors
    chunk: ChunkShape
    table: Callable[[], ChunkTable]


class RecurrentInputs(NamedTuple):
    """What one run of a layer with a running state reads.

    Attributes:
        operands, constants, chunk: see `LayerInputs`.
        state: that of the tokens above the chunk.
    """

    operands: Tensors
    constants: tuple[Any, ...]
    state: torch.Tensor
    chunk: ChunkShape


class LayerRuntime(Protocol):
    """How a layer is computed, for one call."""

    @property
    def replayable(self) -> bool:
        """Whether it goes by `LayerInputs.table` alone, so that a CUDA graph of it serves chunks of other shapes."""

    @property
    def key(self) -> Hashable:
        """What else than sizes a CUDA graph of it depends on."""

    def forward(self, x: LayerInputs) -> Tensors:
        """The output and the residuals, as the mixer's `chunk` operator returns them."""

    def backward(self, grad: torch.Tensor, results: Tensors, x: LayerInputs, above_grads: Tensors) -> Tensors:
        """The gradients of the operands, as new tensors; those of the states above are added to `above_grads`.

        Args:
            grad: of the output.
            results: what `forward` returned.
        """


class RecurrentRuntime(Protocol):
    """How a layer with a running state is computed, for one call."""

    @property
    def replayable(self) -> bool:
        """See `LayerRuntime.replayable`."""

    @property
    def key(self) -> Hashable:
        """See `LayerRuntime.key`."""

    def forward(self, x: RecurrentInputs, depths: Sequence[int]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The output, and the states at `depths` of the chunk's spine, each in memory of its own."""

    def backward(
        self, grad: torch.Tensor, x: RecurrentInputs, state_grads: Mapping[int, torch.Tensor]
    ) -> tuple[Tensors, torch.Tensor]:
        """The gradients of the operands, as new tensors, and of the state above the chunk.

        Args:
            grad: of the output.
            state_grads: of the states at depths of the chunk's spine, ascending.
        """


AnyRuntime = LayerRuntime | RecurrentRuntime
