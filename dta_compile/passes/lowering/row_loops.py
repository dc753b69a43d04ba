"""Loops over the sequences of a batch become one operation on all of them.

`torch.stack([row.logsumexp(-1) for row in logits])`, as TRL's `selective_log_softmax` has it to save memory, is traced
as an operator per sequence. Taken literally, the logits of all tokens would have to leave the token region for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.passes.graphs.nodes import call, is_item
from dta_compile.passes.graphs.operators import ALONG_DIMENSIONS, UNARY

aten = torch.ops.aten


def undo_row_loops(graph: fx.Graph) -> None:
    """Replace every stack of what is computed alike from all rows of some tensors."""
    for node in list(graph.nodes):
        if node.target is aten.stack.default and (len(node.args) == 1 or node.args[1] == 0):
            with graph.inserting_before(node):
                batched = _batched(node.args[0])
            if batched is not None and batched.meta["val"].shape == node.meta["val"].shape:
                batched.meta = {**node.meta, **batched.meta}
                node.replace_all_uses_with(batched)
    graph.eliminate_dead_code(fx.Node.is_impure)  # what draws random numbers is, whatever inductor says


def _batched(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """One node for `[x_0, x_1, ...]`, one per row, with the rows along a new first dimension."""
    if (tensor := _whole(nodes)) is not None:
        return tensor
    first = nodes[0]
    if any(node.target is not first.target or node.kwargs != first.kwargs for node in nodes):
        return None
    columns = list(zip(*(node.args for node in nodes), strict=False))
    if first.target in ALONG_DIMENSIONS:
        columns[1] = tuple(map(_shifted, columns[1]))
    elif first.target not in UNARY:
        return None
    if not all(_has_dimensions(node) for node in first.all_input_nodes):
        return None  # the only dimension would be that of the batch
    arguments = [_batched(column) if isinstance(column[0], fx.Node) else _same(column) for column in columns]
    if any(argument is None for argument in arguments):
        return None
    return call(first.graph, first.target, *arguments, **first.kwargs)


def _has_dimensions(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _whole(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The tensor whose rows the nodes are, all of them and in order."""
    rows = [_row(node) for node in nodes]
    tensor = rows[0][0] if rows[0] is not None else None
    if tensor is None or rows != [(tensor, i) for i in range(len(nodes))]:
        return None
    size = tensor.meta["val"].shape[0]
    return tensor if isinstance(size, int) and size == len(nodes) else None


def _row(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Which row of which tensor a node is."""
    if node.target is aten.select.int and node.args[1] == 0:
        return node.args[0], node.args[2]
    if is_item(node) and node.args[0].target is aten.unbind.int and not node.args[0].args[1:]:
        return node.args[0].args[0], node.args[1]
    return None


def _shifted(dims: Any) -> Any:
    """Dimensions of a row as dimensions of the batch."""
    if isinstance(dims, (list, tuple)):
        return [_shifted(dim) for dim in dims]
    return dims + 1 if isinstance(dims, int) and dims >= 0 else dims


def _same(column: Sequence[Any]) -> Any:
    return column[0] if all(value == column[0] for value in column) else None
