"""Frontier values (results of the chunks that the epilogue reads) of a call over one tree that several ranks divide.

Chunks compute them on the ranks that run these; then they are sent to the ranks whose batch has the tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from dta_compile.runtime.one_tree.call import PieceCall
from dta_compile.runtime.one_tree.frontier import OwnedRows
from dta_compile.runtime.transparent import TreeFunction, check_gradients, dense_frontier, gradient_of_cache


def owned_frontier(call: PieceCall) -> list[torch.Tensor | None]:
    """Run the forward of all parts; return this rank's dense frontier values, with autograd history (None: not wanted).

    All ranks have to call this together.
    """
    computed = dense_frontier(call)
    wanted = [number for number, rows in enumerate(computed) if rows is not None]
    dense = FrontierFunction.apply(call.owned, *(computed[number] for number in wanted))
    by_number = dict(zip(wanted, dense, strict=True))
    return [by_number.get(number) for number in range(len(computed))]


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
        """Send gradients to the ranks that computed the rows: zeros, if other ranks alone have gradients."""
        owned: OwnedRows = ctx.owned
        sums = list[torch.Tensor]()

        def summed() -> list[bool]:
            check_gradients(grads)
            for number, grad in zip(owned.wanted, grads, strict=True):
                if owned.frontier[number].is_cache and grad is not None:
                    raise gradient_of_cache(owned.frontier[number])
                sums.append(owned.summed(number, grad, ctx.device))
            return [grad is not None for grad in grads]

        given = owned.group.gather_checked(summed)
        return None, *(
            owned.gradient(number, sums[i], ctx.device) if any(on_rank[i] for on_rank in given) else None
            for i, number in enumerate(owned.wanted)
        )

    jvp = TreeFunction.jvp
