"""simplify: identities in a functional graph that derivative formulas leave behind, each of them exact.

The derivative of `x.pow(2).mean(-1)` comes as `expand(s) / n * (2.0 * x.pow(1.0))`: four passes over a value of full
size where `(s / n * 2.0) * x` needs one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
TRANSPOSITIONS = (aten.t.default, aten.transpose.int)
SCALINGS = (aten.mul.Scalar, aten.div.Scalar)


def simplify(graph: fx.Graph) -> None:
    """Apply every rule to every node, in order: a rule sees its arguments simplified."""
    for node in list(graph.nodes):
        for rule in RULES:
            with graph.inserting_before(node):
                replacement = rule(node)
            if replacement is not None:
                node.replace_all_uses_with(replacement)
                break
    graph.eliminate_dead_code()


def _detached(node: fx.Node) -> fx.Node | None:
    """`x.detach()` is x: nothing differentiates the graph."""
    return node.args[0] if node.target is aten.detach.default else None


def _first_power(node: fx.Node) -> fx.Node | None:
    """`x ** 1.0` is x."""
    if node.target is not aten.pow.Tensor_Scalar or node.args[1] != 1:
        return None
    return node.args[0] if node.args[0].meta["val"].dtype == node.meta["val"].dtype else None


def _transposed_twice(node: fx.Node) -> fx.Node | None:
    if node.target not in TRANSPOSITIONS or node.args[0].target is not node.target:
        return None
    return node.args[0].args[0] if node.args[0].args[1:] == node.args[1:] else None


def _scaled_after_expand(node: fx.Node) -> fx.Node | None:
    """`x.expand(...) / n` is `(x / n).expand(...)`."""
    if node.target not in SCALINGS or node.args[0].target is not aten.expand.default:
        return None
    expand = node.args[0]
    scaled = _call(node, node.target, expand.args[0], *node.args[1:])
    return _call(node, aten.expand.default, scaled, *expand.args[1:])


def _factor_of_the_small(node: fx.Node) -> fx.Node | None:
    """`s.expand(...) * (2.0 * x)` is `(2.0 * s).expand(...) * x`; exact for powers of two."""
    if node.target is not aten.mul.Tensor or node.kwargs:
        return None
    small, scaled = node.args
    if not isinstance(small, fx.Node) or small.target is not aten.expand.default or not _is_doubling(scaled):
        return None
    factor = _call(node, aten.mul.Scalar, small.args[0], scaled.args[1])
    return _call(node, aten.mul.Tensor, _call(node, aten.expand.default, factor, *small.args[1:]), scaled.args[0])


def _is_doubling(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.target is not aten.mul.Scalar:
        return False
    x, factor = node.args
    same_dtype = x.meta["val"].dtype == node.meta["val"].dtype
    return same_dtype and abs(math.frexp(factor)[0]) == 0.5


def _call(origin: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A node like another one, with the value that the operator has for these arguments."""
    node = origin.graph.call_function(target, args)
    values = fx.node.map_arg(args, lambda arg: arg.meta["val"])
    node.meta = {**origin.meta, "val": target(*values)}
    return node


RULES: tuple[Callable[[fx.Node], fx.Node | None], ...] = (
    _detached,
    _first_power,
    _transposed_twice,
    _scaled_after_expand,
    _factor_of_the_small,
)
