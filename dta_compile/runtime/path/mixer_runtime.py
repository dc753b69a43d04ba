"""Interface between the path stack and mixer layers: compute a layer over a chunk and the path above it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from dta_compile.runtime.path.chunk_shape import ChunkShape, ChunkTable

Tensors = tuple[torch.Tensor, ...]


class LayerInputs(NamedTuple):
    """Inputs of one run of a layer.

    For `replayable` layers the length of `above` is an upper bound: they read the chunk's start from `table`, and
    tokens beyond it are arbitrary, are not read and get no gradient. For others the length is the chunk's start.

    Attributes:
        operands: the mixer's operands for the chunk's tokens, batch size one.
        constants: constant arguments of the mixer's `chunk` operator.
        above: states of the tokens above the chunk, in order of depth.
        chunk, table: the chunk's shape, on the host and as tensors.
    """

    operands: Tensors
    constants: tuple[Any, ...]
    above: Tensors
    chunk: ChunkShape
    table: Callable[[], ChunkTable]


class RecurrentInputs(NamedTuple):
    """Inputs of one run of a layer with a running state.

    Attributes:
        operands, constants, chunk: see `LayerInputs`.
        state: running state after the tokens above the chunk.
    """

    operands: Tensors
    constants: tuple[Any, ...]
    state: torch.Tensor
    chunk: ChunkShape


class LayerRuntime(Protocol):
    """Implementation of a layer for one call."""

    @property
    def replayable(self) -> bool:
        """Whether it reads the shape from `LayerInputs.table` alone, so that one CUDA graph serves all shapes."""

    @property
    def key(self) -> Hashable:
        """Facts besides sizes that a CUDA graph of the layer depends on."""

    def forward(self, x: LayerInputs) -> Tensors:
        """Return the output and the residuals, in the order of the mixer's `chunk` operator."""

    def backward(self, grad: torch.Tensor, results: Tensors, x: LayerInputs, above_grads: Tensors) -> Tensors:
        """Return the gradients of the operands as new tensors; add those of the states above to `above_grads`.

        Args:
            grad: gradient of the output.
            results: results of `forward`.
        """


class RecurrentRuntime(Protocol):
    """Implementation of a layer with a running state for one call."""

    @property
    def replayable(self) -> bool:
        """See `LayerRuntime.replayable`."""

    @property
    def key(self) -> Hashable:
        """See `LayerRuntime.key`."""

    def forward(self, x: RecurrentInputs, depths: Sequence[int]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the output, and the states at `depths` of the chunk's spine, each with its own storage."""

    def backward(
        self, grad: torch.Tensor, x: RecurrentInputs, state_grads: Mapping[int, torch.Tensor]
    ) -> tuple[Tensors, torch.Tensor]:
        """Return the gradients of the operands, as new tensors, and of the state above the chunk.

        Args:
            grad: gradient of the output.
            state_grads: gradients of the states at depths of the chunk's spine, ascending.
        """


AnyRuntime = LayerRuntime | RecurrentRuntime
