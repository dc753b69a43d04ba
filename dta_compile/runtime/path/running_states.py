"""States that a recurrence keeps of all tokens so far: one tensor, at chosen depths of the path.

Such a state cannot be cut, but it is never written to either: popping the path forgets those that are deeper, and a
state on the path and the same one kept for later are one tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from dta_compile.executable.layers import RunningSpec
from dta_compile.ops.dtypes import statistics_dtype

Snapshots = Mapping[int, torch.Tensor]
"""States by depth: that at depth d is of the first d tokens."""


@dataclasses.dataclass
class RunningStates:
    """The states of one layer.

    Attributes:
        states: of the path.
        gradients: what chunks that start there left for the states, at least in float32.
    """

    spec: RunningSpec
    device: torch.device
    states: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def at(self, depth: int) -> torch.Tensor:
        """The state at a depth at which one is kept; zero at the root."""
        if depth == 0:
            return torch.zeros(self.spec.shape, dtype=self.spec.dtype, device=self.device)
        return self.states[depth]

    def cut(self, depth: int) -> None:
        """Forget the states below."""
        for deeper in [known for known in self.states if known > depth]:
            del self.states[deeper]

    def put(self, start: int, states: Snapshots) -> None:
        """Put the states of what continues the path at depth `start`."""
        self.cut(start)
        self.states.update(states)

    def part(self, start: int, stop: int) -> Snapshots:
        """The states at depths `(start, stop]`."""
        return {depth: state for depth, state in self.states.items() if start < depth <= stop}

    def add_gradient(self, depth: int, gradient: torch.Tensor) -> None:
        """Leave a gradient for the state at a depth; that at the root has none."""
        if depth == 0:
            return
        known = self.gradients.get(depth)
        if known is None:
            self.gradients[depth] = gradient.to(statistics_dtype(self.spec.dtype))
        else:
            known += gradient

    def take_gradients(self, start: int, stop: int) -> Snapshots:
        """The gradients left at depths `(start, stop]`, ascending, which are then gone."""
        return {depth: self.gradients.pop(depth) for depth in sorted(self.gradients) if start < depth <= stop}
