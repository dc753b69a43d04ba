"""Frontier values of one tree: from the ranks that compute head rows to those that own their tokens, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from dta_compile.distributed.group import Group
from dta_compile.executable.executable import FrontierValue
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.runtime.calls.schedule_buffers import gradient_buffer
from dta_compile.runtime.one_tree.routes import HeadRoutes, Transfer
from dta_compile.runtime.rows.buffers import AllRows, next_to_zero
from dta_compile.runtime.rows.tree_to_dense import BatchLayout
from dta_compile.runtime.rows.upload import upload


class ComputedRows:
    """Layout of frontier values on the rank that computes them: head rows `[h, *features]` as they are."""

    def is_in_order(self, index: int) -> bool:
        """Return False: rows are copied on their way to the ranks that own them."""
        return False

    def expand(self, index: int, buffer: AllRows) -> torch.Tensor:
        """Return the rows of a buffer."""
        return buffer.heads

    def add_gradient(self, index: int, buffer: AllRows, grad: torch.Tensor) -> None:
        """Add the gradient of `expand`."""
        buffer.heads.add_(grad)


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedRows:
    """Ways of frontier values to the ranks that own their tokens.

    Attributes:
        layout: maps between this rank's own head rows and dense values.
        wanted: numbers of the frontier values that are computed.
    """

    group: Group
    routes: HeadRoutes
    layout: BatchLayout
    frontier: Sequence[FrontierValue]
    wanted: Sequence[int]

    def dense(self, number: int, computed: torch.Tensor) -> torch.Tensor:
        """Send computed rows of a frontier value to their owners; return this rank's dense value."""
        value, count = self.frontier[number], len(self.routes.owned)
        buffer = AllRows(count, value.features, value.dtype, computed.device)
        if computed.requires_grad or value.differentiable:
            next_to_zero(buffer.padding)
        places, moved = self._moved(computed, self.routes.returned)
        buffer.values.index_copy_(0, places, moved)
        return self.layout.expand(number, buffer)

    def summed(self, number: int, grad: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Sum the gradient of a dense value onto this rank's own head rows."""
        buffer = gradient_buffer(AllRows, self.frontier[number], len(self.routes.owned), device)
        if grad is not None:
            self.layout.add_gradient(number, buffer, grad)
        return buffer.values

    def gradient(self, number: int, summed: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Sum such sums over all ranks, which call this together; return the gradient of the computed rows."""
        value = self.frontier[number]
        places, moved = self._moved(summed, self.routes.returned.back)
        shape = (len(self.routes.computed), *value.features)
        total = torch.zeros(shape, dtype=statistics_dtype(value.dtype), device=device)
        return total.index_add_(0, places, moved).to(value.dtype)

    def _moved(self, values: torch.Tensor, way: Transfer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of received entries, and the entries."""
        sent = values.index_select(0, upload(way.sent, values.device))
        return upload(way.places, values.device), self.group.all_to_all(sent, way.sizes, way.received)
