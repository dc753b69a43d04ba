"""Writes where a mask says, `x[mask] = value`, as selections: `where(mask, value, x)`.

How many entries `index_put` writes is known from the data alone, and so is the size of its derivative. A selection has
the sizes of `x`, and is done token by token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dta_compile.passes.axes.layouts import argument
from dta_compile.passes.graphs.nodes import call

aten = torch.ops.aten


def select_masked_writes(graph: fx.Graph) -> None:
    """Replace every write by one mask of a value that is the same for all entries of the mask."""
    masks: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in list(graph.find_nodes(op="call_function", target=aten.index_put.default)):
        with graph.inserting_before(node):
            new = _selection(node, masks)
        if new is not None:
            new.meta = {**node.meta, **new.meta}
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _selection(node: fx.Node, masks: dict[tuple[fx.Node, int], fx.Node]) -> fx.Node | None:
    target, indices, value = node.args[:3]
    *before, mask = indices
    if mask is None or any(index is not None for index in before) or not _is_mask_of(mask, target):
        return None
    after = target.meta["val"].dim() - len(before) - mask.meta["val"].dim()
    value = _of_one_entry(value, after)
    if value is None:
        return None
    if argument(node, 3, "accumulate"):
        value = call(node.graph, aten.add.Tensor, target, value)
    return call(node.graph, aten.where.self, _with_ones(mask, after, masks), value, target)


def _is_mask_of(mask: fx.Node, target: fx.Node) -> bool:
    mine, theirs = mask.meta["val"], target.meta["val"]
    return bool(mine.dtype is torch.bool and mine.device == theirs.device and mine.dim() > 0)


def _of_one_entry(value: fx.Node, dims: int) -> fx.Node | None:
    """What is written to one entry of the mask, of at most `dims` dimensions; None if it is not always the same."""
    shape = value.meta["val"].shape
    added = max(len(shape) - dims, 0)
    if not all(isinstance(size, int) and size == 1 for size in shape[:added]):
        return None
    for _ in range(added):
        value = call(value.graph, aten.squeeze.dim, value, 0)
    return value


def _with_ones(mask: fx.Node, dims: int, known: dict[tuple[fx.Node, int], Any]) -> fx.Node:
    """The mask with dimensions of one entry behind its own; one value for all writes that it serves."""
    key = mask, dims
    if key not in known:
        known[key] = mask
        for _ in range(dims):
            known[key] = call(mask.graph, aten.unsqueeze.default, known[key], -1)
    return known[key]
