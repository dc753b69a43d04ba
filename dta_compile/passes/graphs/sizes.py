"""Sizes of intermediate values become arithmetic on the sizes of inputs, so that a size alone keeps no value alive.

A reshape of sliced logits asks the slice for its number of tokens. Left as it is, that question would make the slice a
frontier value of `[B, S, V]`, or pull the model into the epilogue.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.graphs.nodes import call
from dta_compile.passes.program import has_tensor
from dta_compile.passes.symbols import expression, symbol_sources

aten = torch.ops.aten


def sizes_from_inputs(graph: fx.Graph) -> None:
    """Replace every size that is read off an intermediate value, if it is a sum of products of input sizes."""
    builder = SizeNodes(graph)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        asks_a_tensor = any(has_tensor(arg) and arg.op != "placeholder" for arg in node.all_input_nodes)
        if node.op != "call_function" or not isinstance(value, torch.SymInt) or not asks_a_tensor:
            continue
        with graph.inserting_before(node):
            replacement = builder.build(expression(value))
        if isinstance(replacement, fx.Node):
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)


def is_polynomial(value: Any) -> bool:
    """Whether a size is a sum of products of symbols and integers, as `SizeNodes` can compute it."""
    return isinstance(value, (int, torch.SymInt)) and all(
        isinstance(part, (sympy.Integer, sympy.Symbol, sympy.Add, sympy.Mul))
        for part in sympy.preorder_traversal(expression(value))
    )


class SizeNodes:
    """Nodes of a graph that compute sizes from those of its inputs so far."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.inputs = list(graph.find_nodes(op="placeholder"))
        self.sources = symbol_sources(node.meta.get("val") for node in self.inputs)
        self.built: dict[sympy.Expr, fx.Node] = {}

    def build(self, expr: sympy.Expr) -> fx.Node | int | None:
        """Nodes that compute an expression, before the current insertion point; None if it is not a polynomial.

        Insertion points come in the order of the graph: what was built before is there.
        """
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if expr not in self.built:
            node = self._build(expr)
            if node is None:
                return None
            self.built[expr] = node
        return self.built[expr]

    def _build(self, expr: sympy.Expr) -> fx.Node | None:
        if isinstance(expr, sympy.Symbol) and expr in self.sources:
            index, dim = self.sources[expr]
            node = self.inputs[index]
            return node if dim is None else call(self.graph, aten.sym_size.int, node, dim)
        joined = {sympy.Add: operator.add, sympy.Mul: operator.mul}.get(expr.func)
        parts = [self.build(part) for part in expr.args]
        if joined is None or any(part is None for part in parts):
            return None
        return functools.reduce(lambda a, b: call(self.graph, joined, a, b), parts)
