"""Small questions about the nodes of traced graphs, and making new ones that carry their value as traced ones do.

Sizes of intermediate values become arithmetic on the sizes of inputs, so that a size alone keeps no value alive: a
reshape of sliced logits asks the slice for its number of tokens. Left as it is, that question would make the slice a
frontier value of `[B, S, V]`, or pull the model into the epilogue.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from dta_compile.passes.graphs.operators import FILL_ARGUMENTS, FILL_NUMBERS, is_tagged_pointwise
from dta_compile.passes.program import has_tensor, writes_in_place
from dta_compile.passes.symbols import expression, symbol_sources

aten = torch.ops.aten


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node at the insertion point; its value is what the operator gives for the values of its arguments."""
    node = graph.call_function(target, args, kwargs)
    with enable_python_dispatcher():  # some operators know symbolic sizes only so: expand in that of baddbmm
        node.meta["val"] = target(*fx.node.map_arg(args, lambda arg: arg.meta["val"]), **kwargs)
    return node


class First:
    """Which nodes compute the same: `ids.eq(1).cumsum(1)` may be written once for each layer. `draws` never do."""

    def __init__(self, draws: Collection[fx.Node]) -> None:
        self._draws = set(draws)
        self._known: dict[fx.Node, fx.Node] = {}
        self._computed: dict[tuple[Any, str], fx.Node] = {}

    def like(self, node: fx.Node) -> fx.Node:
        """The first node asked for that computes the same as this one."""
        if node.op != "call_function" or node in self._draws:
            return node
        if node not in self._known:
            same = fx.node.map_arg((node.args, node.kwargs), self.like)
            self._known[node] = self._computed.setdefault((node.target, repr(same)), node)
        return self._known[node]


def is_item(node: fx.Node) -> bool:
    """Whether a node picks one of several results of an operator."""
    return bool(node.target is operator.getitem)


def is_float(node: fx.Node) -> bool:
    """Whether a node's value is a tensor of floating-point numbers."""
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def may_have_gradient(node: fx.Node) -> bool:
    """Whether a node's value is a tensor of floating-point or complex numbers."""
    value = node.meta["val"]
    return is_float(node) or (isinstance(value, torch.Tensor) and value.is_complex())


def is_pointwise(node: fx.Node) -> bool:
    """Whether an operator computes a new value entry by entry, the same each time."""
    return is_tagged_pointwise(node.target) and not writes_in_place(node)


def filled_with(node: fx.Node) -> Any:
    """What a constructor writes to every entry, a number or a node that is one; None: it is none of `FILLS`."""
    position = FILL_ARGUMENTS.get(node.target)
    return FILL_NUMBERS.get(node.target) if position is None else node.args[position]


def is_uniform(node: fx.Node) -> bool:
    """Whether a value has one number in every entry: chunks make their own, of their own size."""
    return node.target is aten.full.default and not isinstance(node.args[1], fx.Node)


def descendants(graph: fx.Graph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes` and everything that is computed from them; what they are computed from: `program.ancestors`."""
    found = set(nodes)
    for node in graph.nodes:
        if node.op != "output" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def swaps(node: fx.Node) -> bool:
    """Whether a transposition of a matrix is one: it may name the same dimension twice, or leave the order."""
    if node.target is aten.t.default:
        return True
    first, second = node.args[1:] if node.target is aten.transpose.int else (0, node.args[1][0])
    return bool((first - second) % 2)


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
