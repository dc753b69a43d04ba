"""States that mixers keep of every token of the path: a buffer each, over depths, and one for its gradient.

Such a state is sliced by depth: popping the path is a cut, and a token's state does not change when others follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.passes.mixer_layers import StateSpec
from dta_compile.runtime.path.interface import Tensors


class Reach(Protocol):
    """What a chunk reads and writes of a buffer whose dimension `dim` runs over depths."""

    def above(self, buffer: torch.Tensor, dim: int) -> torch.Tensor:
        """The part that the chunk reads: the tokens above it."""

    def write(self, buffer: torch.Tensor, dim: int, values: torch.Tensor) -> None:
        """Put the spine's part of a chunk's values there."""

    def take(self, buffer: torch.Tensor, dim: int, total: torch.Tensor) -> None:
        """Add what is pending for the spine to the chunk's `total`, and zero it."""


@dataclasses.dataclass(frozen=True)
class HostReach:
    """By numbers of the host: tokens above the chunk, those of its spine, and for how many of these there are pending
    gradients."""

    start: int
    spine: int
    pending: int

    def above(self, buffer: torch.Tensor, dim: int) -> torch.Tensor:
        """See `Reach.above`."""
        return buffer.narrow(dim, 0, self.start)

    def write(self, buffer: torch.Tensor, dim: int, values: torch.Tensor) -> None:
        """See `Reach.write`."""
        if self.spine:
            buffer.narrow(dim, self.start, self.spine).copy_(values.narrow(dim, 0, self.spine))

    def take(self, buffer: torch.Tensor, dim: int, total: torch.Tensor) -> None:
        """See `Reach.take`."""
        if self.pending > 0:
            pending = buffer.narrow(dim, self.start, self.pending)
            total.narrow(dim, 0, self.pending).add_(pending)
            pending.zero_()


class TokenStates:
    """The states of one layer for the tokens of the path.

    Gradients are summed in float32 (float64 for float64 states) whatever the model's dtype is.

    Attributes:
        buffers: a tensor per state, with `capacity` tokens.
        gradients: the same for their gradients; none before the first backward.
    """

    def __init__(self, specs: Sequence[StateSpec], capacity: int, device: torch.device) -> None:
        self.specs, self.capacity, self.device = specs, capacity, device
        self.buffers = [self._buffer(spec, spec.dtype) for spec in specs]
        self.gradients: list[torch.Tensor] = []

    def _buffer(self, spec: StateSpec, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(spec.of_tokens(self.capacity), dtype=dtype, device=self.device)

    def allocate_gradients(self) -> None:
        """Zeroed gradients; needed before the first backward."""
        if not self.gradients:
            self.gradients = [self._buffer(spec, statistics_dtype(spec.dtype)) for spec in self.specs]

    def zero_gradients(self) -> None:
        """Forget pending gradients."""
        for gradient in self.gradients:
            gradient.zero_()

    def copy(self, start: int, stop: int) -> Tensors:
        """Copies of the states at depths `[start, stop)`."""
        return tuple(part.clone() for part in self.part(self.buffers, start, stop))

    def put(self, start: int, states: Sequence[torch.Tensor]) -> None:
        """Put the states of some tokens there, from depth `start` on."""
        for buffer, values, spec in zip(self.buffers, states, self.specs, strict=True):
            buffer.narrow(spec.token_dim, start, values.shape[spec.token_dim]).copy_(values)

    def part(self, states: Sequence[torch.Tensor], start: int, stop: int) -> Tensors:
        """Tokens `[start, stop)` of states."""
        return tuple(
            values.narrow(spec.token_dim, start, stop - start) for values, spec in zip(states, self.specs, strict=True)
        )

    def write(self, reach: Reach, states: Sequence[torch.Tensor]) -> None:
        """Put the spine's part of a chunk's states on the path."""
        for buffer, values, spec in zip(self.buffers, states, self.specs, strict=True):
            reach.write(buffer, spec.token_dim, values)

    def above(self, reach: Reach) -> Tensors:
        """The states that a chunk reads."""
        return self._above(reach, self.buffers)

    def gradients_above(self, reach: Reach) -> Tensors:
        """The gradients of those."""
        return self._above(reach, self.gradients)

    def _above(self, reach: Reach, buffers: Sequence[torch.Tensor]) -> Tensors:
        return tuple(reach.above(buffer, spec.token_dim) for buffer, spec in zip(buffers, self.specs, strict=True))

    def take(self, reach: Reach, totals: Sequence[torch.Tensor]) -> None:
        """Add what is pending for a chunk's spine to the gradients `totals` of the chunk's states."""
        for buffer, total, spec in zip(self.gradients, totals, self.specs, strict=True):
            reach.take(buffer, spec.token_dim, total)
