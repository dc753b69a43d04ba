"""Per-token states of mixers along the path (the KV cache): a buffer over depths each, and one for its gradient.

They are sliced by depth: popping the path needs no copy, and a token's state does not depend on later tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from dta_compile.executable.layers import StateSpec
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.runtime.path.mixer_runtime import Tensors


class Buffer(NamedTuple):
    """Buffer of one state of one layer: `own` is `of_layers[layer]`, and its dimension `dim` runs over depths.

    Layers with equal state specs share one tensor, so that a range of depths is sliced for all of them at once.
    """

    own: torch.Tensor
    of_layers: torch.Tensor
    layer: int
    dim: int


class Reach(Protocol):
    """Ranges of a buffer that a chunk reads and writes."""

    def above(self, buffer: Buffer) -> torch.Tensor:
        """Return the states of the tokens above the chunk."""

    def write(self, buffer: Buffer, values: torch.Tensor) -> None:
        """Copy the values of the chunk's spine into the buffer."""

    def take(self, buffer: Buffer, total: torch.Tensor) -> None:
        """Add the pending gradients of the spine to the chunk's `total`, and zero them."""


class HostReach:
    """Ranges known on the host.

    Slicing costs more host time than copying, so the slices of all layers are made at once.

    Args:
        start: number of tokens above the chunk.
        spine: number of its spine tokens.
        pending: number of spine tokens with pending gradients.
    """

    def __init__(self, start: int, spine: int, pending: int) -> None:
        self.start, self.spine, self.pending = start, spine, pending
        self._parts: dict[tuple[int, int, int], tuple[torch.Tensor, ...]] = {}

    def above(self, buffer: Buffer) -> torch.Tensor:
        """See `Reach.above`."""
        return self._part(buffer, 0, self.start)

    def write(self, buffer: Buffer, values: torch.Tensor) -> None:
        """See `Reach.write`."""
        if self.spine:
            self._part(buffer, self.start, self.spine).copy_(_first(values, buffer.dim, self.spine))

    def take(self, buffer: Buffer, total: torch.Tensor) -> None:
        """See `Reach.take`."""
        if self.pending > 0:
            pending = self._part(buffer, self.start, self.pending)
            _first(total, buffer.dim, self.pending).add_(pending)
            pending.zero_()

    def _part(self, buffer: Buffer, start: int, count: int) -> torch.Tensor:
        key = id(buffer.of_layers), start, count
        if key not in self._parts:
            self._parts[key] = buffer.of_layers.narrow(buffer.dim + 1, start, count).unbind(0)
        return self._parts[key][buffer.layer]


def _first(values: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    return values if values.shape[dim] == count else values.narrow(dim, 0, count)


class TokenStates:
    """Per-token states of one layer.

    Gradients are summed in float32 (float64 for float64 states), whatever the model's dtype.

    Attributes:
        memory: a buffer per state, with `capacity` tokens.
        memory_of_gradients: a buffer per gradient of a state; empty before the first backward.
    """

    def __init__(self, specs: Sequence[StateSpec], memory: Sequence[Buffer]) -> None:
        self.specs, self.memory = specs, memory
        self.memory_of_gradients: Sequence[Buffer] = ()

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Buffers of the states."""
        return [buffer.own for buffer in self.memory]

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Buffers of the gradients."""
        return [buffer.own for buffer in self.memory_of_gradients]

    def zero_gradients(self) -> None:
        """Zero the pending gradients."""
        for gradient in self.gradients:
            gradient.zero_()

    def copy(self, start: int, stop: int) -> Tensors:
        """Copy the states at depths `[start, stop)`."""
        return tuple(part.clone() for part in self.part(self.buffers, start, stop))

    def put(self, start: int, states: Sequence[torch.Tensor]) -> None:
        """Copy states of consecutive tokens into the buffers from depth `start` on."""
        for buffer, values in zip(self.memory, states, strict=True):
            buffer.own.narrow(buffer.dim, start, values.shape[buffer.dim]).copy_(values)

    def part(self, states: Sequence[torch.Tensor], start: int, stop: int) -> Tensors:
        """Slice states to tokens `[start, stop)`."""
        return tuple(
            values.narrow(spec.token_dim, start, stop - start) for values, spec in zip(states, self.specs, strict=True)
        )

    def write(self, reach: Reach, states: Sequence[torch.Tensor]) -> None:
        """Copy the states of a chunk's spine onto the path."""
        for buffer, values in zip(self.memory, states, strict=True):
            reach.write(buffer, values)

    def above(self, reach: Reach) -> Tensors:
        """Return the states of the tokens above a chunk."""
        return tuple(map(reach.above, self.memory))

    def gradients_above(self, reach: Reach) -> Tensors:
        """Return the gradients of the states above a chunk."""
        return tuple(map(reach.above, self.memory_of_gradients))

    def take(self, reach: Reach, totals: Sequence[torch.Tensor]) -> None:
        """Move the pending gradients of a chunk's spine into the gradients `totals` of the chunk's states."""
        for buffer, total in zip(self.memory_of_gradients, totals, strict=True):
            reach.take(buffer, total)


class PathStates:
    """Per-token states of all layers; layers with equal specs share a tensor."""

    def __init__(self, layers: Sequence[Sequence[StateSpec]], capacity: int, device: torch.device) -> None:
        self.capacity, self.device = capacity, device
        self.alike: dict[Sequence[StateSpec], list[int]] = {}
        for number, specs in enumerate(layers):
            self.alike.setdefault(specs, []).append(number)
        memory = self._allocated(lambda spec: spec.dtype)
        self.of_layers = [TokenStates(specs, memory[number]) for number, specs in enumerate(layers)]

    def allocate_gradients(self) -> None:
        """Allocate zeroed gradients; needed before the first backward."""
        if not any(states.memory_of_gradients for states in self.of_layers):
            gradients = self._allocated(lambda spec: statistics_dtype(spec.dtype))
            for number, states in enumerate(self.of_layers):
                states.memory_of_gradients = gradients[number]

    def _allocated(self, dtype_of: Callable[[StateSpec], torch.dtype]) -> dict[int, list[Buffer]]:
        """Allocate zeroed buffers for every state of every layer."""
        buffers: dict[int, list[Buffer]] = {}
        for specs, numbers in self.alike.items():
            tensors = [self._zeros(len(numbers), spec, dtype_of(spec)) for spec in specs]
            for layer, number in enumerate(numbers):
                pairs = zip(tensors, specs, strict=True)
                buffers[number] = [Buffer(tensor[layer], tensor, layer, spec.token_dim) for tensor, spec in pairs]
        return buffers

    def _zeros(self, layers: int, spec: StateSpec, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((layers, *spec.of_tokens(self.capacity)), dtype=dtype, device=self.device)
