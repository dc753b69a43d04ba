"""Gradients of row after row's loss, summed up for everything outside of the rows and sent there once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class RowGradients:
    """Sums of the gradients that the losses of single rows send to what was there before: parameters and other leaves,
    and values that somebody computed from such for all rows.

    A row's own graph ends there. What lies behind is gone through once, after the last row, so that it need not be kept
    for the rows to come, and that hooks see the gradient of the whole batch.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[Node, int], torch.Tensor] = {}
        self._first_of_row = 0

    def begin_row(self) -> None:
        """What is computed from now on belongs to the row."""
        self._first_of_row = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]

    def of_row(self, loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """The gradients of a row's loss for some leaves (None for those that it does not depend on)."""
        own = [leaf for leaf in leaves if leaf.requires_grad]
        edges = {get_gradient_edge(leaf)[:2] for leaf in own}
        others = [edge for edge in self._ends(loss) if edge not in edges]
        inputs: list[Any] = [*own, *(GradientEdge(*edge) for edge in others)]
        with _without_hooks(others):
            found = torch.autograd.grad(loss, inputs, torch.ones_like(loss), allow_unused=True)
        for edge, gradient in zip(others, found[len(own) :], strict=True):
            if gradient is not None:
                self._add(edge, gradient)
        of_own = iter(found)
        return [next(of_own) if leaf.requires_grad else None for leaf in leaves]

    def add(self, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add to the gradient of a tensor."""
        self._add(get_gradient_edge(tensor)[:2], gradient)

    def _add(self, edge: tuple[Node, int], gradient: torch.Tensor) -> None:
        known = self._sums.get(edge)
        self._sums[edge] = gradient if known is None else known + gradient

    def send(self) -> None:
        """Send the sums on."""
        if self._sums:
            torch.autograd.backward([GradientEdge(*edge) for edge in self._sums], list(self._sums.values()))

    def _ends(self, loss: torch.Tensor) -> list[tuple[Node, int]]:
        """Where the graph of a row's loss ends: at leaves, and at what is older than the row."""
        pending: list[tuple[Node, int]] = [get_gradient_edge(loss)[:2]]
        seen: set[tuple[Node, int]] = set()
        found: dict[tuple[Node, int], None] = {}
        while pending:
            edge = pending.pop()
            if edge in seen:
                continue
            seen.add(edge)
            node = edge[0]
            if hasattr(node, "variable") or node._sequence_nr() < self._first_of_row:
                found[edge] = None
            else:
                pending.extend((after, number) for after, number in node.next_functions if after is not None)
        return list(found)


@contextlib.contextmanager
def _without_hooks(edges: Sequence[tuple[Node, int]]) -> Iterator[None]:
    """Hooks of leaves wait for the gradient of the whole batch."""
    tensors = [variable for node, _ in edges if (variable := getattr(node, "variable", None)) is not None]
    hooks = [(tensor._backward_hooks, dict(tensor._backward_hooks)) for tensor in tensors if tensor._backward_hooks]
    for present, _ in hooks:
        present.clear()
    try:
        yield
    finally:
        for present, before in hooks:
            present.update(before)
