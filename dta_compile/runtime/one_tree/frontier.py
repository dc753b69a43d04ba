"""Frontier values of one tree: from the ranks that compute head rows to those that own their tokens, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from dta_compile.distributed.group import Group
from dta_compile.executable.executable import FrontierValue
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.runtime.calls.schedule_buffers import gradient_buffer
from dta_compile.runtime.one_tree.routes import HeadRoutes, Transfer
from dta_compile.runtime.rows.buffers import AllRows, next_to_zero
from dta_compile.runtime.rows.tree_to_dense import BatchLayout
from dta_compile.runtime.rows.upload import upload
from dta_compile.runtime.transparent import TreeFunction, check_gradients, gradient_of_cache


class ComputedRows:
    """Layout of frontier values on the rank that computes them: head rows `[h, *features]` as they are."""

    def expand(self, index: int, buffer: AllRows) -> torch.Tensor:
        """Return the rows of a buffer."""
        return buffer.values[:-1]

    def add_gradient(self, index: int, buffer: AllRows, grad: torch.Tensor) -> None:
        """Add the gradient of `expand`."""
        buffer.values[:-1] += grad


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

    def gradient(self, number: int, grad: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Sum the gradient of a dense value onto head rows, over all ranks; return that of the computed rows."""
        value = self.frontier[number]
        buffer = gradient_buffer(AllRows, value, len(self.routes.owned), device)
        if grad is not None:
            self.layout.add_gradient(number, buffer, grad)
        places, moved = self._moved(buffer.values, self.routes.returned.back)
        shape = (len(self.routes.computed), *value.features)
        total = torch.zeros(shape, dtype=statistics_dtype(value.dtype), device=device)
        return total.index_add_(0, places, moved).to(value.dtype)

    def _moved(self, values: torch.Tensor, way: Transfer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of received entries, and the entries."""
        sent = values.index_select(0, upload(way.sent, values.device))
        return upload(way.places, values.device), self.group.all_to_all(sent, way.sizes, way.received)


class FrontierFunction(torch.autograd.Function):
    """Autograd function from computed rows of all frontier values to this rank's dense values."""

    @staticmethod
    def forward(ctx: Any, owned: OwnedRows, *computed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Send the rows of the wanted frontier values to their owners."""
        ctx.owned, ctx.device = owned, computed[0].device if computed else torch.device("cpu")
        ctx.set_materialize_grads(False)
        dense = [owned.dense(number, rows) for number, rows in zip(owned.wanted, computed, strict=True)]
        pairs = zip(owned.wanted, dense, strict=True)
        ctx.mark_non_differentiable(*(out for number, out in pairs if not owned.frontier[number].differentiable))
        return tuple(dense)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Send gradients to the ranks that computed the rows. A value with a gradient on one rank has one on all."""
        check_gradients(grads)
        owned: OwnedRows = ctx.owned
        for number, grad in zip(owned.wanted, grads, strict=True):
            if owned.frontier[number].is_cache and grad is not None:
                raise gradient_of_cache(owned.frontier[number])
        given = owned.group.gather([grad is not None for grad in grads])
        return None, *(
            owned.gradient(number, grad, ctx.device) if any(on_rank[i] for on_rank in given) else None
            for i, (number, grad) in enumerate(zip(owned.wanted, grads, strict=True))
        )

    jvp = TreeFunction.jvp
