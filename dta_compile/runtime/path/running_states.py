"""Running states of recurrences: one tensor for all tokens so far, stored at chosen depths of the path.

A running state cannot be sliced by depth, but it is immutable: popping the path drops the deeper ones, and the path
and kept spines share tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from dta_compile.executable.layers import RunningSpec
from dta_compile.ops.dtypes import statistics_dtype

Snapshots = Mapping[int, torch.Tensor]
"""States by depth: the state at depth d covers the first d tokens."""


@dataclasses.dataclass
class RunningStates:
    """Running states of one layer.

    Attributes:
        states: states of the path, by depth.
        gradients: by depth, sums of the gradients from chunks that start there, at least in float32.
    """

    spec: RunningSpec
    device: torch.device
    states: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def at(self, depth: int) -> torch.Tensor:
        """Return the state stored at a depth; zeros at the root."""
        if depth == 0:
            return torch.zeros(self.spec.shape, dtype=self.spec.dtype, device=self.device)
        return self.states[depth]

    def cut(self, depth: int) -> None:
        """Drop the states below `depth`."""
        for deeper in [stored for stored in self.states if stored > depth]:
            del self.states[deeper]

    def put(self, start: int, states: Snapshots) -> None:
        """Cut the path at depth `start` and add the states below."""
        self.cut(start)
        self.states.update(states)

    def part(self, start: int, stop: int) -> Snapshots:
        """Return the states at depths `(start, stop]`."""
        return {depth: state for depth, state in self.states.items() if start < depth <= stop}

    def add_gradient(self, depth: int, gradient: torch.Tensor) -> None:
        """Add to the gradient of the state at a depth; the state at the root has none."""
        if depth == 0:
            return
        total = self.gradients.get(depth)
        if total is None:
            self.gradients[depth] = gradient.to(statistics_dtype(self.spec.dtype))
        else:
            total += gradient

    def take_gradients(self, start: int, stop: int) -> Snapshots:
        """Remove and return the gradients at depths `(start, stop]`, ascending."""
        return {depth: self.gradients.pop(depth) for depth in sorted(self.gradients) if start < depth <= stop}
