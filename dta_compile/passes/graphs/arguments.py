"""Read the arguments of calls: by name, and alike for operators that spell one thing in several ways."""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

from torch import fx

from dta_compile.passes.graphs.nodes import is_item
from dta_compile.passes.graphs.operators import (
    COPIES,
    DIFFERENCES,
    MASKED_FILLS,
    MAYBE_COPIES,
    SQUEEZES,
    SUMS,
    TRANSPOSITIONS,
    aten,
)
from dta_compile.passes.symbols import sizes


@functools.cache
def _parameter(target: Any, name: str) -> tuple[int, Any]:
    """Return position and default of a parameter in an operator's schema; one without such a name has None."""
    parameters = enumerate(target._schema.arguments)
    return next(((i, formal.default_value) for i, formal in parameters if formal.name == name), (sys.maxsize, None))


def argument(node: fx.Node, name: str) -> Any:
    """Return an argument of an operator, or its default; None if the operator has no parameter of this name."""
    position, default = _parameter(node.target, name)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def dim_of(node: fx.Node) -> int:
    """Return the dimension of its operand that an operator works along, counted from the front."""
    operand = node.args[0] if isinstance(node.args[0], fx.Node) else node.args[0][0]
    return int(argument(node, "dim") or 0) % max(operand.meta["val"].dim(), 1)


class Slice(NamedTuple):
    """Adjacent entries of a value along a dimension, from `start` on."""

    source: fx.Node
    dim: int
    start: Any


def slice_of(node: fx.Node) -> Slice | None:
    """Return the slice that a node is; None for other nodes, and for slices with a step."""
    is_slice = node.target is aten.slice.Tensor and argument(node, "step") in (None, 1)
    return Slice(node.args[0], dim_of(node), argument(node, "start") or 0) if is_slice else None


def select_of(node: fx.Node) -> tuple[fx.Node, int, Any] | None:
    """Return value, dimension and index of a `select`, or of a result of `unbind`; None for other nodes."""
    if node.target is aten.select.int:
        return node.args[0], dim_of(node), node.args[2]
    if is_item(node) and node.args[0].target is aten.unbind.int:
        return node.args[0].args[0], dim_of(node.args[0]), node.args[1]
    return None


def run_of(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """Return value, dimension, start and length of a slice or a result of a split; None for others or symbolic ones."""
    if (part := slice_of(node)) is not None:
        source, dim, start = part
    elif is_item(node) and node.args[0].target in (aten.split.Tensor, aten.split_with_sizes.default):
        source, dim, index, lengths = node.args[0].args[0], dim_of(node.args[0]), node.args[1], node.args[0].args[1]
        before = lengths[:index] if isinstance(lengths, (list, tuple)) else [lengths] * index
        start = sum(before) if all(isinstance(length, int) for length in before) else None
    else:
        return None
    size, length = sizes(source)[dim], sizes(node)[dim]
    if not (isinstance(start, int) and size.is_Integer and length.is_Integer):
        return None
    return source, dim, max(start + int(size), 0) if start < 0 else start, int(length)


def indices_of(node: fx.Node) -> dict[int, fx.Node]:
    """Return the indices at which an operator reads or writes entries, by dimension of its operand."""
    if node.target is aten.embedding.default:
        return {0: node.args[1]}
    if isinstance(node.args[1], (list, tuple)):
        return {dim: index for dim, index in enumerate(node.args[1]) if index is not None}
    return {dim_of(node): node.args[2]}


def where_of(node: fx.Node) -> tuple[fx.Node, Any, Any] | None:
    """Return condition, value where it holds, and value elsewhere, of a `where` or `masked_fill`; None for others."""
    if node.target is aten.where.self:
        return node.args
    return (node.args[1], node.args[2], node.args[0]) if node.target in MASKED_FILLS else None


def sum_of(node: fx.Node) -> tuple[Any, Any, int] | None:
    """Return the operands of a sum or difference, and the sign of the second; None for others, and with `alpha`."""
    if node.target not in SUMS or argument(node, "alpha") != 1:
        return None
    return node.args[0], node.args[1], -1 if node.target in DIFFERENCES else 1


def order_of(node: fx.Node, rank: int) -> list[int]:
    """Return the dimension of the argument for each dimension of one of `TRANSPOSITIONS`."""
    if node.target is aten.permute.default:
        return [dim % rank for dim in node.args[1]]
    order = list(range(rank))
    if rank > 1:
        first, second = (node.args[1], node.args[2]) if len(node.args) > 2 else (0, 1)
        order[first], order[second] = order[second], order[first]
    return order


def operand_dims(node: fx.Node) -> list[int | None] | None:
    """Return the dimension of the operand for each dimension of a copy, permutation, squeeze, unsqueeze or expansion.

    One that is new, or repeats entries, is None; for other operators, everything is.
    """
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not hasattr(source.meta.get("val"), "shape"):
        return None
    shape = sizes(source)
    dims: list[Any] = list(range(len(shape)))
    if node.target in TRANSPOSITIONS:
        return [*order_of(node, len(shape))]
    if node.target is aten.unsqueeze.default:
        dims.insert(node.args[1] % (len(shape) + 1), None)
    elif node.target in SQUEEZES:
        chosen = node.args[1] if len(node.args) > 1 else dims
        chosen = {dim % len(shape) for dim in ([chosen] if isinstance(chosen, int) else chosen)}
        dims = [dim for dim in dims if dim not in chosen or shape[dim] != 1]
    elif node.target is aten.expand.default:
        after = sizes(node)
        added = len(after) - len(shape)
        kept = [i >= added and (shape[i - added] != 1 or size == 1) for i, size in enumerate(after)]
        dims = [i - added if is_kept else None for i, is_kept in enumerate(kept)]
    elif node.target not in COPIES | MAYBE_COPIES:
        return None
    return dims
