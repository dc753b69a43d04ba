"""Replace operators whose result equals another value entry for entry, so that later rules need not notice.

    x.view(a).view(x.shape)          x[:, arange(S)]          cat([x[:, :1], x[:, 1:]], 1)          cat([empty, x])
    cache[:, 0:S] = k;  k = cache[:, :S]          cache.index_copy_(1, arange(S), k)          cache[:, :, arange(S)] = k

The second line is a static KV cache: a call writes `k` from position 0 on and reads back what it wrote, so that
attention can read `k` itself. Writes over a value with a gradient are left, because eager mode gives the inputs of that
value a gradient of zero, not none. Part of `lower`; after it no slice takes all of its operand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.graphs.arguments import argument, dim_of, indices_of, slice_of
from dta_compile.passes.graphs.nodes import erase_unused
from dta_compile.passes.graphs.operators import CASTS, DIFFERENTIABLE_COPIES, FILLS, RANGES, RESHAPES, aten
from dta_compile.passes.lowering.experts.slots import counts_from_zero
from dta_compile.passes.program import has_tensor
from dta_compile.passes.symbols import expression, sizes, value_of

MOVES = CASTS | DIFFERENTIABLE_COPIES


def replace_same_entries(graph: fx.Graph, trained: Iterable[fx.Node]) -> None:
    """Replace the uses of such operators by the value that has the entries.

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
        _drop_empty_parts(node)
        if (origin := _origin(node)) is not None:  # an output that is a view of another value stays one of its own
            node.replace_all_uses_with(origin, delete_user_cb=lambda user: user.op != "output")
        elif (same := _only_part(node) or _written_or_whole(node, with_gradient)) is not None:
            node.replace_all_uses_with(same)
    erase_unused(graph)


def _origin(node: fx.Node) -> fx.Node | None:
    """Return the value that a node gives back after a detour."""
    if node.target in RESHAPES and node.args[0].target in RESHAPES:
        return _before_views(node)
    if node.target in (aten.index.Tensor, aten.index_select.default):
        return _indexed_in_order(node)
    if node.target is aten.constant_pad_nd.default and not any(node.args[1]):
        return node.args[0]
    if node.target is aten.cat.default and len(node.args[0]) == 1 and _only_part(node) is None:
        return node.args[0][0]
    return _joined_again(node) if node.target is aten.cat.default else None


def _before_views(node: fx.Node) -> fx.Node | None:
    source = node.args[0].args[0]
    while sizes(source) != sizes(node) and source.target in RESHAPES:
        source = source.args[0]
    return source if _are_alike(source, node) else None


def _indexed_in_order(node: fx.Node) -> fx.Node | None:
    source, ((dim, index), *others) = node.args[0], indices_of(node).items()
    is_range = index.target in RANGES and counts_from_zero(index)
    return source if is_range and not others and sizes(index) == (sizes(source)[dim],) else None


def _joined_again(node: fx.Node) -> fx.Node | None:
    """Return the value whose slices `cat` puts together in order."""
    parts = node.args[0]
    if any(part.target is not aten.slice.Tensor for part in parts):
        return None
    source, *others = (part.args[0] for part in parts)
    if any(other is not source for other in others) or sizes(node) != sizes(source):
        return None  # of few tokens, the slices `x[:, :2]` and `x[:, -1:]` overlap, and the result is longer than `x`
    dim = dim_of(node)
    size = sizes(source)[dim]
    joined: list[sympy.Expr] = [sympy.Integer(0)]
    for part in parts:
        cut, end = slice_of(part), argument(part, "end")
        if cut is None or cut.dim != dim:
            return None
        joined += [_position(cut.start, size), _position(sys.maxsize if end is None else end, size)]
    joined.append(size)
    return source if joined[::2] == joined[1::2] else None


def _position(bound: Any, size: sympy.Expr) -> sympy.Expr:
    """Return the position that a bound of a slice stands for, if it lies within the size; negative ones count back."""
    position = expression(value_of(bound))
    if position == sys.maxsize:
        return size
    return size + position if position.is_negative else position


def _only_part(node: fx.Node) -> fx.Node | None:
    """Return the operand of a `cat` of one: what a KV cache that starts empty and is returned appends first."""
    parts = node.args[0] if node.target is aten.cat.default else []
    return parts[0] if len(parts) == 1 and _are_alike(parts[0], node) else None


def _drop_empty_parts(node: fx.Node) -> None:
    """Drop empty tensors from the operands of `cat`: KV caches, and lists of states of layers, start with one."""
    if node.target is not aten.cat.default:
        return
    parts = [part for part in node.args[0] if 0 not in sizes(part)]
    same = (part.meta["val"].dtype is node.meta["val"].dtype for part in parts)
    if parts and all(same):  # empty parts take part in type promotion
        node.args = (parts, *node.args[1:])


def _written_or_whole(node: fx.Node, with_gradient: set[fx.Node]) -> fx.Node | None:
    """Return the value that equals a node: what it writes over all of a buffer; of a slice, what was written to the
    range that it reads, or its operand if it takes all of that."""
    if node.target is not aten.slice.Tensor:
        written = _written(node, with_gradient)
        return written[0] if written is not None and _are_alike(written[0], node) else None
    source, part = node.args[0], slice_of(node)
    if _are_alike(source, node):
        return source
    if part is None or part.start != 0 or (written := _written(source, with_gradient)) is None:
        return None
    return written[0] if written[1] == part.dim and _are_alike(written[0], node) else None


def _written(node: fx.Node, with_gradient: set[fx.Node]) -> tuple[fx.Node, int] | None:
    """Return the value that a node writes over the first entries along a dimension, and that dimension."""
    if node.op != "call_function" or node.args[0] in with_gradient:
        return None
    if node.target is aten.slice_scatter.default:
        is_first = argument(node, "start") in (None, 0) and argument(node, "step") == 1
        return (node.args[1], dim_of(node)) if is_first else None
    if node.target not in (aten.index_copy.default, aten.index_put.default) or argument(node, "accumulate"):
        return None
    (dim, index), *others = indices_of(node).items()
    is_first = not others and _numbers_all_tokens(index)
    return (node.args[3 if node.target is aten.index_copy.default else 2], dim) if is_first else None


def _numbers_all_tokens(index: fx.Node) -> bool:
    """Return whether an index is 0, 1, 2, ..., in integers that do not wrap."""
    while (is_wide := index.meta["val"].dtype in (torch.int64, torch.int32)) and index.target in MOVES:
        index = index.args[0]
    return is_wide and index.target in RANGES and counts_from_zero(index)


def _are_alike(one: fx.Node, other: fx.Node) -> bool:
    return sizes(one) == sizes(other) and one.meta["val"].dtype is other.meta["val"].dtype
