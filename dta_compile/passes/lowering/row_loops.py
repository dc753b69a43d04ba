"""Batch loops over the sequences of a batch, and rewrite writes by a mask as selections; both part of `lower`.

`torch.stack([row.logsumexp(-1) for row in logits])`, which TRL's `selective_log_softmax` does to save memory, is traced
as an operator per sequence. Left as it is, it would need the logits of all tokens outside of the token region.

A write `x[mask] = value` becomes `where(mask, value, x)`: the number of entries that `index_put` writes depends on the
data, and so does the size of its derivative. A selection has the sizes of `x` and is pointwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.passes.graphs.arguments import argument, select_of
from dta_compile.passes.graphs.nodes import call, erase_unused, raised, replace_nodes
from dta_compile.passes.graphs.operators import ALONG_DIMENSIONS, UNARY, aten
from dta_compile.passes.symbols import sizes


def undo_row_loops(graph: fx.Graph) -> None:
    """Replace every stack of the same computation on all rows of some tensors by one batched computation."""

    def batched(node: fx.Node) -> fx.Node | None:
        if node.target is not aten.stack.default or (len(node.args) > 1 and node.args[1] != 0):
            return None
        rows = _batched(node.args[0])
        return rows if rows is not None and rows.meta["val"].shape == node.meta["val"].shape else None

    replace_nodes(graph, batched)
    erase_unused(graph)


def _batched(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """Return a node that computes `stack([x_0, x_1, ...])` of one node per row; None: there is none."""
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
    values = [node.meta["val"] for node in first.all_input_nodes]
    if not all(isinstance(value, torch.Tensor) and value.dim() > 0 for value in values):
        return None  # a batched argument would have no dimension but the batch
    arguments = [_batched(column) if isinstance(column[0], fx.Node) else _same(column) for column in columns]
    if any(argument is None for argument in arguments):
        return None
    return call(first.graph, first.target, *arguments, **first.kwargs)


def _whole(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """Return the tensor whose rows the nodes are, if they are all its rows in order."""
    rows = [_row(node) for node in nodes]
    tensor = rows[0][0] if rows[0] is not None else None
    if tensor is None or rows != [(tensor, i) for i in range(len(nodes))]:
        return None
    size = tensor.meta["val"].shape[0]
    return tensor if isinstance(size, int) and size == len(nodes) else None


def _row(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the tensor and the row number of a node that takes one row."""
    selected = select_of(node)
    return (selected[0], selected[2]) if selected is not None and selected[1] == 0 else None


def _shifted(dims: Any) -> Any:
    """Return dimensions of a row as dimensions of the batch: non-negative ones move by one."""
    if isinstance(dims, (list, tuple)):
        return [_shifted(dim) for dim in dims]
    return dims + 1 if isinstance(dims, int) and dims >= 0 else dims


def _same(column: Sequence[Any]) -> Any:
    return column[0] if all(value == column[0] for value in column) else None


def select_masked_writes(graph: fx.Graph) -> None:
    """Replace every write by a mask, `x[mask] = value`, whose value is the same for all entries of the mask."""
    replace_nodes(graph, _selection)


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    return sizes(node) == sizes(other) and node.meta["val"].dtype == other.meta["val"].dtype


def _selection(node: fx.Node) -> fx.Node | None:
    if node.target is aten.slice_scatter.default and _is_alike(node, node.args[1]):
        return node.args[1]  # writes all entries, as `x[:, mask] = value` does behind its selection
    if node.target is not aten.index_put.default:
        return None
    target, indices, value = node.args[:3]
    while target.target is aten.slice.Tensor and sizes(target) == sizes(target.args[0]):
        target = target.args[0]
    *before, mask = indices
    if mask is None or any(index is not None for index in before):
        return None
    own, written = mask.meta["val"], target.meta["val"]
    if own.dtype is not torch.bool or own.device != written.device or own.dim() == 0:
        return None
    after = target.meta["val"].dim() - len(before) - mask.meta["val"].dim()
    value = _of_one_entry(value, after)
    if value is None:
        return None
    if argument(node, "accumulate"):
        value = call(node.graph, aten.add.Tensor, target, value)
    return call(node.graph, aten.where.self, raised(mask, after, -1), value, target)


def _of_one_entry(value: fx.Node, dims: int) -> fx.Node | None:
    """Return the value written to each entry of the mask, of at most `dims` dimensions; None: entries differ."""
    shape = value.meta["val"].shape
    added = max(len(shape) - dims, 0)
    if not all(isinstance(size, int) and size == 1 for size in shape[:added]):
        return None
    for _ in range(added):
        value = call(value.graph, aten.squeeze.dim, value, 0)
    return value
