"""Drop operators that give back a value's own entries at their places, by way of forms that rules do not know."""

from __future__ import annotations

import sys
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.axes.layouts import argument
from dta_compile.passes.graphs.operators import RANGES, RESHAPES
from dta_compile.passes.lowering.experts.slot_numbers import counts_from_zero
from dta_compile.passes.lowering.shifts import unsliced
from dta_compile.passes.symbols import expression, sizes

aten = torch.ops.aten
BOUNDS = ("dim", "start", "end", "step")  # of aten.slice


def drop_detours(graph: fx.Graph) -> None:
    """Replace `x.view(a).view(x.shape)`, `x[:, arange(S)]` and `cat([x[:, :1], x[:, 1:]], 1)` by `x`.

    Outputs stay values of their own.
    """
    for node in graph.nodes:
        if node.op == "call_function" and (origin := _origin(node)) is not None:
            node.replace_all_uses_with(origin, delete_user_cb=lambda user: user.op != "output")


def _origin(node: fx.Node) -> fx.Node | None:
    if node.target in RESHAPES and node.args[0].target in RESHAPES:
        return _before_views(node)
    if node.target is aten.index.Tensor:
        return _indexed_in_order(node)
    return _joined_again(node) if node.target is aten.cat.default else None


def _before_views(node: fx.Node) -> fx.Node | None:
    source = node.args[0].args[0]
    while sizes(source) != sizes(node) and source.target in RESHAPES:
        source = source.args[0]
    same = sizes(source) == sizes(node) and source.meta["val"].dtype == node.meta["val"].dtype
    return source if same else None


def _indexed_in_order(node: fx.Node) -> fx.Node | None:
    source, indices = node.args
    chosen = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(chosen) != 1:
        return None
    dim, index = chosen[0]
    is_range = index.target in RANGES and counts_from_zero(index)
    return source if is_range and sizes(index) == (sizes(source)[dim],) else None


def _joined_again(node: fx.Node) -> fx.Node | None:
    """Return the value whose slices `cat` puts together in order."""
    parts = node.args[0]
    if any(part.target is not aten.slice.Tensor for part in parts):
        return None
    source, *others = (unsliced(part.args[0]) for part in parts)
    if any(other is not source for other in others) or sizes(node) != sizes(source):
        return None  # in few tokens, `x[:, :2]` and `x[:, -1:]` overlap
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(sizes(source))
    size = sizes(source)[dim]
    joined: list[sympy.Expr] = [sympy.Integer(0)]
    for part in parts:
        along, start, end, step = (argument(part, at, name) for at, name in enumerate(BOUNDS, 1))
        if along % len(sizes(source)) != dim or step != 1:
            return None
        joined += [_position(start or 0, size), _position(sys.maxsize if end is None else end, size)]
    joined.append(size)
    return source if joined[::2] == joined[1::2] else None


def _position(bound: Any, size: sympy.Expr) -> sympy.Expr:
    """Return the index that a bound of a slice means, if it is not cut to the size."""
    position = expression(bound.meta["val"] if isinstance(bound, fx.Node) else bound)
    if position == sys.maxsize:
        return size
    return size + position if position.is_negative else position
