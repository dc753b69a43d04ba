"""Sizes and numbers of a trace (SymInt, SymFloat, SymBool) as sympy expressions of its symbols, without guards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.torch_compat.dynamo import ConstantSource
from dta_compile.torch_compat.sizes import (
    DimDynamic,
    ShapeEnv,
    SymNode,
    SymT,
    free_unbacked_symbols,
    symbol_is_type,
)

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def expression(size: Any) -> sympy.Expr:
    """Return a size as an expression, with all replacements of the ShapeEnv; comparing expressions adds no guard."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def value_of(argument: Any) -> Any:
    """Return the traced value of an argument that is a node; any other argument as it is."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def symbolic(value: Any) -> Any:
    """Return the expression of a SymInt, SymFloat or SymBool; None for anything else."""
    return value.node.expr if isinstance(value, SYMBOLIC) else None


def sizes(node: fx.Node) -> tuple[sympy.Expr, ...]:
    """Return the shape of a node's value as expressions."""
    return tuple(map(expression, node.meta["val"].shape))


def free_symbols(expressions: Iterable[sympy.Expr]) -> set[sympy.Symbol]:
    """Return the symbols that occur in any of some expressions."""
    return {symbol for expr in expressions for symbol in expr.free_symbols}


def new_size(env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    """Return a size with a symbol of its own, which is `hint` in the trace."""
    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    size = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(size, torch.SymInt)
    return size


def hint(size: Any) -> Any:
    """Return the number that a size had during tracing, without adding a guard; None if it is unbacked."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def make_constant(value: torch.SymInt | torch.SymFloat) -> None:
    """Make the symbols of a number constants, under guards: from one on `1 - x`, torch draws no float `x`."""
    env = value.node.shape_env
    for symbol in sorted(symbolic(value).free_symbols, key=str):
        is_float = symbol_is_type(symbol, SymT.FLOAT)
        number: Any = SymNode(symbol, env, float if is_float else int, None)
        float(torch.SymFloat(number)) if is_float else int(torch.SymInt(number))


def symbol_sources(values: Iterable[Any]) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """By symbol, return the position of the input that defines it and the dimension; None: the input is that number."""
    sources: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for index, value in enumerate(values):
        for dim, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]:
            if isinstance(symbol := symbolic(size), sympy.Symbol):
                sources.setdefault(symbol, (index, dim))
    return sources


def selects_rows(graph: fx.Graph) -> bool:
    """Return whether a value has an unbacked size, like the number of rows that a boolean index selects, or a number is
    read for one."""
    values = (
        value for node in graph.nodes for key in ("val", "example_value") if (value := node.meta.get(key)) is not None
    )
    shapes = (value.shape for value in values if isinstance(value, torch.Tensor))
    reads = any(map(reads_number, graph.nodes))
    return reads or any(depends_on_data(size) for shape in shapes for size in shape)


def reads_number(node: fx.Node) -> bool:
    """Return whether a node of a captured graph is a number of `.tolist()`, where Dynamo would have ended the graph."""
    value = node.meta.get("example_value")
    if node.target != "item" or not isinstance(value, torch.SymInt):
        return False
    return not value.node.shape_env.allow_scalar_outputs


def depends_on_data(size: Any) -> bool:
    """Return whether a size, or the expression of one, has an unbacked symbol."""
    return not isinstance(size, int) and bool(free_unbacked_symbols(size))
