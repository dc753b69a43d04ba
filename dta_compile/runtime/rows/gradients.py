"""Accumulate gradients of the losses of single rows for a streaming step, and run autograd behind the rows once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from dta_compile.errors import RuntimeContractError
from dta_compile.torch_compat.autograd import sequence_number

Edge = tuple[Node, int]


class RowGradients:
    """Sums of the gradients of row losses at the edges where the autograd graphs of rows end.

    The graph of a row ends at leaves (such as parameters) and at autograd nodes made before the row. Backward behind
    these nodes runs once, after the last row, so that hooks see the gradient of the whole batch. If one of the nodes is
    behind another, the backward of each row goes on to the leaves instead. Nodes of an earlier row are refused: what is
    behind them has gone backward for that row, and is gone.

    Autograd numbers nodes in the order in which they are made, but anew in every thread. So a node with a small number
    counts as one from before only if no value of a row is behind it.
    """

    def __init__(self) -> None:
        self._sums: dict[Edge, torch.Tensor] = {}
        self._behind: dict[Node, set[Node]] = {}  # nodes behind those that are from before the step
        self._rows, self._row_of = 0, WeakTensorKeyDictionary()  # of the values that rows are given
        self._first_of_rows = self._first_of_row = sequence_number()

    def begin_row(self) -> None:
        """Mark autograd nodes that are made from now on as nodes of the row."""
        self._first_of_row = sequence_number()
        self._rows += 1

    def of_row(self, loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Return the gradients of a row's loss for some leaves (None: no dependence); add the others to the sums."""
        own = [leaf for leaf in leaves if leaf.requires_grad]
        self._row_of.update(dict.fromkeys(own, self._rows))
        edges = {get_gradient_edge(leaf)[:2] for leaf in own}
        start = get_gradient_edge(loss)[:2]
        ends = _ends(start, lambda node: _is_leaf(node) or self._row(node) < self._rows)
        if any(self._row(node) for node, _ in ends if not _is_leaf(node)):
            raise RuntimeContractError(
                "the loss of a row reads a value of another row, with its gradient",
                expected="losses that read the row they are given, and values from before the step",
                got="a graph that goes on into that of an earlier row",
                hint="detach the value (a baseline); take losses of several rows (pairs) from a whole call's outputs",
            )
        overlap = self._has_one_behind_another(ends)
        if overlap:
            ends = _ends(start, _is_leaf)
        others = [edge for edge in ends if edge not in edges]
        inputs: list[Any] = [*own, *(GradientEdge(*edge) for edge in others)]
        with _without_hooks(others):
            gradients = torch.autograd.grad(loss, inputs, torch.ones_like(loss), overlap, allow_unused=True)
        for edge, gradient in zip(others, gradients[len(own) :], strict=True):
            if gradient is not None:
                self._add(edge, gradient)
        of_own = iter(gradients)
        return [next(of_own) if leaf.requires_grad else None for leaf in leaves]

    def add(self, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add to the sum of a tensor's gradient."""
        self._add(get_gradient_edge(tensor)[:2], gradient)

    def _add(self, edge: Edge, gradient: torch.Tensor) -> None:
        total = self._sums.get(edge)
        self._sums[edge] = gradient if total is None else total + gradient

    def send(self) -> None:
        """Run backward from the sums."""
        if self._sums:
            torch.autograd.backward([GradientEdge(*edge) for edge in self._sums], list(self._sums.values()))

    def _row(self, node: Node) -> int:
        """Return the number of a row in which a node was made, from 1; 0: before the step."""
        number = node._sequence_nr()
        if node in self._behind or number >= self._first_of_rows:
            return 0 if node in self._behind else self._rows - (number < self._first_of_row)
        behind = {after for after, _ in _walk(_following(node), lambda node: False)}
        leaves = (after.variable for after in behind if _is_leaf(after))  # type: ignore[attr-defined]
        if row := max((self._row_of.get(leaf, 0) for leaf in leaves), default=0):
            return row
        self._behind[node] = behind
        return 0

    def _has_one_behind_another(self, ends: Iterable[Edge]) -> bool:
        """Return whether one end is behind another, like `p` behind a `p.exp()` that was computed before the row."""
        nodes = {node for node, _ in ends}
        return any(nodes & self._behind[node] for node in nodes if not _is_leaf(node))


def _walk(start: Iterable[Edge], is_end: Callable[[Node], bool]) -> dict[Edge, bool]:
    """Return every edge reachable from `start`, with whether the walk ends there."""
    pending = list(start)
    reached: dict[Edge, bool] = {}
    while pending:
        edge = pending.pop()
        if edge not in reached:
            reached[edge] = is_end(edge[0])
            pending.extend([] if reached[edge] else _following(edge[0]))
    return reached


def _ends(start: Edge, is_end: Callable[[Node], bool]) -> list[Edge]:
    return [edge for edge, ends in _walk([start], is_end).items() if ends]


def _following(node: Node) -> list[Edge]:
    return [(after, number) for after, number in node.next_functions if after is not None]


def _is_leaf(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"  # nodes of custom functions may have another `name`


@contextlib.contextmanager
def _without_hooks(edges: Sequence[Edge]) -> Iterator[None]:
    """Disable the hooks of leaves, which must see the gradient of the whole batch only."""
    tensors = [node.variable for node, _ in edges if _is_leaf(node)]  # type: ignore[attr-defined]
    hooks = [(tensor._backward_hooks, dict(tensor._backward_hooks)) for tensor in tensors if tensor._backward_hooks]
    for present, _ in hooks:
        present.clear()
    try:
        yield
    finally:
        for present, before in hooks:
            present.update(before)
