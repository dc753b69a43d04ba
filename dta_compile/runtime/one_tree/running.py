"""Running states between ranks: from piece to piece, each of which needs those before, and their gradients back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dta_compile.distributed.group import Group, Work
from dta_compile.executable.layers import RunningSpec
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.runtime.one_tree.routes import StateRoutes


class RunningRows:
    """Exchange of running states after rows of the tree, for the layers of one part.

    Ranks run a round in the order of their pieces: states of earlier rounds are sent before a rank runs its recurrence,
    those of this round after.

    Attributes:
        kept: by layer and row, running states after own tokens that other pieces read.
        owed: by layer and row, gradients of running states after own tokens.
    """

    def __init__(
        self, specs: Mapping[int, RunningSpec], device: torch.device, group: Group, routes: StateRoutes
    ) -> None:
        self.specs, self.device, self.group, self.routes = specs, device, group, routes
        self.kept: dict[int, dict[int, torch.Tensor]] = {layer: {} for layer in specs}
        self.owed: dict[int, dict[int, torch.Tensor]] = {layer: {} for layer in specs}
        self._works: list[Work] = []

    def receive(self, layer: int, number: int) -> dict[int, torch.Tensor]:
        """Return the states that a piece begins with, by row; send others what earlier rounds left."""
        self._send(layer, number, earlier=True)
        spec, states = self.specs[layer], dict[int, torch.Tensor]()
        for source, rows in self.routes.received_states[number].items():
            if source == self.group.rank:
                states |= {row: self.kept[layer][row] for row in rows}
            else:
                states |= zip(rows, self._receive(source, rows, spec, spec.dtype), strict=True)
        return states

    def send(self, layer: int, number: int) -> None:
        """Send states after rows of a piece to the pieces of its round that begin with them."""
        self._send(layer, number, earlier=False)
        self._wait()

    def receive_gradients(self, layer: int, number: int, earlier: bool = False) -> None:
        """Add what later pieces of a round have for own states to `owed`; or `earlier` ones, for earlier rounds."""
        spec = self.specs[layer]
        for reader, rows in self.routes.sent_states[number].items():
            if self.routes.is_earlier(reader, number) == earlier:
                for row, gradient in zip(
                    rows, self._receive(reader, rows, spec, statistics_dtype(spec.dtype)), strict=True
                ):
                    self._owe(layer, row, gradient)

    def send_gradients(self, layer: int, number: int, gradients: Mapping[int, torch.Tensor]) -> None:
        """Send gradients of the states that a piece began with to their ranks; then take those of earlier rounds."""
        for source, rows in self.routes.received_states[number].items():
            if source == self.group.rank:
                for row in rows:
                    self._owe(layer, row, gradients[row])
            else:
                self._post(gradients, rows, source)
        self.receive_gradients(layer, number, earlier=True)
        self._wait()

    def _owe(self, layer: int, row: int, gradient: torch.Tensor) -> None:
        owed = self.owed[layer]
        owed[row] = owed[row] + gradient if row in owed else gradient.clone()

    def _send(self, layer: int, number: int, earlier: bool) -> None:
        for reader, rows in self.routes.sent_states[number].items():
            if self.routes.is_earlier(reader, number) == earlier:
                self._post(self.kept[layer], rows, reader)

    def _post(self, states: Mapping[int, torch.Tensor], rows: Sequence[int], rank: int) -> None:
        self._works.append(self.group.post(torch.stack([states[row] for row in rows]), rank))

    def _receive(self, source: int, rows: Sequence[int], spec: RunningSpec, dtype: torch.dtype) -> torch.Tensor:
        return self.group.receive(source, (len(rows), *spec.shape), dtype, self.device)

    def _wait(self) -> None:
        while self._works:
            self._works.pop().wait()
