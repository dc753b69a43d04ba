"""Small questions about the nodes of traced graphs, and making new ones that carry their value as traced ones do."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from dta_compile.passes.program import writes_in_place

aten = torch.ops.aten
TRANSPOSITIONS = (aten.t.default, aten.transpose.int, aten.permute.default)


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node at the insertion point; its value is what the operator gives for the values of its arguments."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*fx.node.map_arg(args, lambda arg: arg.meta["val"]), **kwargs)
    return node


def is_item(node: fx.Node) -> bool:
    """Whether a node picks one of several results of an operator."""
    return bool(node.target is operator.getitem)


def is_pointwise(node: fx.Node) -> bool:
    """Whether an operator computes entry by entry, the same each time."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and not writes_in_place(node)


def is_uniform(node: fx.Node) -> bool:
    """Whether a value has one number in every entry: chunks make their own, of their own size."""
    return node.target is aten.full.default and not isinstance(node.args[1], fx.Node)


def swaps(node: fx.Node) -> bool:
    """Whether a transposition of a matrix is one: it may name the same dimension twice, or leave the order."""
    if node.target is aten.t.default:
        return True
    first, second = node.args[1:] if node.target is aten.transpose.int else (0, node.args[1][0])
    return bool((first - second) % 2)
