"""Forward writes to reads for a KV cache that a call fills from its first token on, and reads as far as it is filled.

    cache[:, 0:S] = k;  k = cache[:, :S]          cache.index_copy_(1, arange(S), k)          cache[:, :, arange(S)] = k

Part of `lower`. Each read returns the written entries, so that attention reads `k` itself. Writes over a value with a
gradient are left, because eager mode gives the inputs of that value a gradient of zero, not none.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from dta_compile.passes.axes.layouts import argument
from dta_compile.passes.graphs.operators import CASTS, DIFFERENTIABLE_COPIES, FILLS, RANGES
from dta_compile.passes.lowering.experts.slot_numbers import counts_from_zero
from dta_compile.passes.program import has_tensor
from dta_compile.passes.symbols import sizes

aten = torch.ops.aten
MOVES = CASTS | DIFFERENTIABLE_COPIES


def read_what_was_written(graph: fx.Graph, trained: Iterable[fx.Node]) -> None:
    """Replace writes of all entries, and reads of the written part, by the written value.

    Args:
        graph: a functional graph.
        trained: the inputs that get a gradient.
    """
    with_gradient = set(trained)
    for node in graph.nodes:
        if node.target not in FILLS and not with_gradient.isdisjoint(node.all_input_nodes):
            with_gradient.add(node)
    for node in list(graph.nodes):
        if node.op != "call_function" or not has_tensor(node):
            continue
        if (same := _same(node, with_gradient)) is not None:
            node.replace_all_uses_with(same)
    graph.eliminate_dead_code(fx.Node.is_impure)


def _same(node: fx.Node, with_gradient: set[fx.Node]) -> fx.Node | None:
    """Return the value whose entries a node has; None: there is none."""
    if node.target is aten.slice.Tensor:
        return _read(node, with_gradient)
    written = _written(node, with_gradient)
    return written[0] if written is not None and _are_alike(written[0], node) else None


def _read(node: fx.Node, with_gradient: set[fx.Node]) -> fx.Node | None:
    """Return the value written to the part that a slice takes, or its source if it takes all entries."""
    source = node.args[0]
    if _are_alike(source, node):
        return source
    if argument(node, 2, "start") not in (None, 0) or (argument(node, 4, "step") or 1) != 1:
        return None
    written, dim = _written(source, with_gradient), (argument(node, 1, "dim") or 0) % node.meta["val"].dim()
    return written[0] if written is not None and written[1] == dim and _are_alike(written[0], node) else None


def _written(node: fx.Node, with_gradient: set[fx.Node]) -> tuple[fx.Node, int] | None:
    """Return the value that a node writes over the first entries along a dimension, and that dimension."""
    if node.op != "call_function" or node.args[0] in with_gradient:
        return None
    if node.target is aten.slice_scatter.default:
        value, dim = node.args[1], argument(node, 2, "dim") or 0
        if argument(node, 3, "start") not in (None, 0) or (argument(node, 5, "step") or 1) != 1:
            return None
    elif node.target is aten.index_copy.default:
        dim, index, value = node.args[1:]
        if not _numbers_all_tokens(index):
            return None
    elif node.target is aten.index_put.default and not argument(node, 3, "accumulate"):
        *whole, index = node.args[1]
        dim, value = len(whole), node.args[2]
        if any(one is not None for one in whole) or not _numbers_all_tokens(index):
            return None
    else:
        return None
    return value, dim % node.meta["val"].dim()


def _numbers_all_tokens(index: fx.Node) -> bool:
    """Return whether an index is 0, 1, 2, ..., in integers that do not wrap."""
    while (is_wide := index.meta["val"].dtype in (torch.int64, torch.int32)) and index.target in MOVES:
        index = index.args[0]
    return is_wide and index.target in RANGES and counts_from_zero(index)


def _are_alike(one: fx.Node, other: fx.Node) -> bool:
    return sizes(one) == sizes(other) and one.meta["val"].dtype is other.meta["val"].dtype
