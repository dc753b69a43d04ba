"""States that mixers keep of every token of the path: a buffer each, over depths, and one for its gradient.

Such a state is sliced by depth: popping the path is a cut, and a token's state does not change when others follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from dta_compile.executable.layers import StateSpec
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.runtime.path.interface import Tensors


class Buffer(NamedTuple):
    """Memory for a state of one layer: `own`, which is `of_layers[layer]`, whose dimension `dim` runs over depths.

    Layers that keep alike states have theirs next to each other, so that the same part of each is cut out in one go.
    """

    own: torch.Tensor
    of_layers: torch.Tensor
    layer: int
    dim: int


class Reach(Protocol):
    """What a chunk reads and writes of a buffer."""

    def above(self, buffer: Buffer) -> torch.Tensor:
        """The part that the chunk reads: the tokens above it."""

    def write(self, buffer: Buffer, values: torch.Tensor) -> None:
        """Put the spine's part of a chunk's values there."""

    def take(self, buffer: Buffer, total: torch.Tensor) -> None:
        """Add what is pending for the spine to the chunk's `total`, and zero it."""


class HostReach:
    """By numbers of the host: tokens above the chunk, those of its spine, and for how many of these there are pending
    gradients. Cutting takes the host longer than copying, so parts are cut out for all layers at once."""

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
    """The states of one layer for the tokens of the path.

    Gradients are summed in float32 (float64 for float64 states) whatever the model's dtype is.

    Attributes:
        memory: a buffer per state, with `capacity` tokens.
        memory_of_gradients: the same for their gradients; none before the first backward.
    """

    def __init__(self, specs: Sequence[StateSpec], memory: Sequence[Buffer]) -> None:
        self.specs, self.memory = specs, memory
        self.memory_of_gradients: Sequence[Buffer] = ()

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The states of all tokens."""
        return [buffer.own for buffer in self.memory]

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Their gradients."""
        return [buffer.own for buffer in self.memory_of_gradients]

    def zero_gradients(self) -> None:
        """Forget pending gradients."""
        for gradient in self.gradients:
            gradient.zero_()

    def copy(self, start: int, stop: int) -> Tensors:
        """Copies of the states at depths `[start, stop)`."""
        return tuple(part.clone() for part in self.part(self.buffers, start, stop))

    def put(self, start: int, states: Sequence[torch.Tensor]) -> None:
        """Put the states of some tokens there, from depth `start` on."""
        for buffer, values in zip(self.memory, states, strict=True):
            buffer.own.narrow(buffer.dim, start, values.shape[buffer.dim]).copy_(values)

    def part(self, states: Sequence[torch.Tensor], start: int, stop: int) -> Tensors:
        """Tokens `[start, stop)` of states."""
        return tuple(
            values.narrow(spec.token_dim, start, stop - start) for values, spec in zip(states, self.specs, strict=True)
        )

    def write(self, reach: Reach, states: Sequence[torch.Tensor]) -> None:
        """Put the spine's part of a chunk's states on the path."""
        for buffer, values in zip(self.memory, states, strict=True):
            reach.write(buffer, values)

    def above(self, reach: Reach) -> Tensors:
        """The states that a chunk reads."""
        return tuple(map(reach.above, self.memory))

    def gradients_above(self, reach: Reach) -> Tensors:
        """The gradients of those."""
        return tuple(map(reach.above, self.memory_of_gradients))

    def take(self, reach: Reach, totals: Sequence[torch.Tensor]) -> None:
        """Add what is pending for a chunk's spine to the gradients `totals` of the chunk's states."""
        for buffer, total in zip(self.memory_of_gradients, totals, strict=True):
            reach.take(buffer, total)


class PathStates:
    """The states of all layers for the tokens of the path: what layers keep alike is one tensor."""

    def __init__(self, layers: Sequence[Sequence[StateSpec]], capacity: int, device: torch.device) -> None:
        self.capacity, self.device = capacity, device
        self.alike: dict[Sequence[StateSpec], list[int]] = {}
        for number, specs in enumerate(layers):
            self.alike.setdefault(specs, []).append(number)
        memory = self._allocated(lambda spec: spec.dtype)
        self.of_layers = [TokenStates(specs, memory[number]) for number, specs in enumerate(layers)]

    def allocate_gradients(self) -> None:
        """Zeroed gradients; needed before the first backward."""
        if not any(states.memory_of_gradients for states in self.of_layers):
            gradients = self._allocated(lambda spec: statistics_dtype(spec.dtype))
            for number, states in enumerate(self.of_layers):
                states.memory_of_gradients = gradients[number]

    def _allocated(self, dtype_of: Callable[[StateSpec], torch.dtype]) -> dict[int, list[Buffer]]:
        """Zeroed memory for every state of every layer."""
        found: dict[int, list[Buffer]] = {}
        for specs, numbers in self.alike.items():
            tensors = [self._zeros(len(numbers), spec, dtype_of(spec)) for spec in specs]
            for layer, number in enumerate(numbers):
                pairs = zip(tensors, specs, strict=True)
                found[number] = [Buffer(tensor[layer], tensor, layer, spec.token_dim) for tensor, spec in pairs]
        return found

    def _zeros(self, layers: int, spec: StateSpec, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((layers, *spec.of_tokens(self.capacity)), dtype=dtype, device=self.device)
