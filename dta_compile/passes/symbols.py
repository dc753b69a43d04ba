"""Sizes and numbers of a trace as expressions of its symbols."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols


def expression(size: Any) -> sympy.Expr:
    """A size with everything the shape environment learned substituted; comparing expressions leaves no guard."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def symbolic(value: Any) -> Any:
    """The expression of a size, number or truth value that is symbolic; None for anything else."""
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else None


def sizes(node: fx.Node) -> tuple[sympy.Expr, ...]:
    """The shape of a node's value."""
    return tuple(map(expression, node.meta["val"].shape))


def free_symbols(expressions: Iterable[sympy.Expr]) -> set[sympy.Symbol]:
    """The symbols that occur in any of some expressions."""
    return {symbol for expr in expressions for symbol in expr.free_symbols}


def hint(size: Any) -> Any:
    """The number that a size had when it was traced, without a guard; None if it depends on data."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def symbol_sources(values: Iterable[Any]) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """Where inputs give each symbol: the position of the input, and its dimension, or None if it is the number."""
    found: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for index, value in enumerate(values):
        for dim, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]:
            if isinstance(symbol := symbolic(size), sympy.Symbol):
                found.setdefault(symbol, (index, dim))
    return found


def selects_rows(graph: fx.Graph) -> bool:
    """Whether a value has a size that is known from the data alone, as that of the rows that a condition selects; or a
    number is read for one."""
    values = (
        value for node in graph.nodes for key in ("val", "example_value") if (value := node.meta.get(key)) is not None
    )
    shapes = (value.shape for value in values if isinstance(value, torch.Tensor))
    reads = any(map(reads_number, graph.nodes))
    return reads or any(depends_on_data(size) for shape in shapes for size in shape)


def reads_number(node: fx.Node) -> bool:
    """Whether a node of a captured graph is a number of `.tolist()`, where Dynamo would have ended the graph."""
    value = node.meta.get("example_value")
    if node.target != "item" or not isinstance(value, torch.SymInt):
        return False
    return not value.node.shape_env.allow_scalar_outputs


def depends_on_data(size: Any) -> bool:
    """Whether a size, or the expression of one, has a symbol that no input gives."""
    return not isinstance(size, int) and bool(free_unbacked_symbols(size))
