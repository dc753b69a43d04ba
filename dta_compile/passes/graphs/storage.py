"""Whose memory a value lives in, and how many bytes that is for a chunk of any size."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from dta_compile.passes.graphs.nodes import is_item
from dta_compile.passes.program import has_tensor

aten = torch.ops.aten
UNDECLARED_VIEWS = (aten._unsafe_view.default,)
Storage = tuple[fx.Node | str, int]  # the node that allocates (the name of an input's), and which of its results


class Bytes(NamedTuple):
    """Bytes for a chunk: `fixed + per_token * tokens + per_head_row * head_rows`."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_head_row: float = 0.0

    def at(self, tokens: float, head_rows: float) -> float:
        return self.fixed + self.per_token * tokens + self.per_head_row * head_rows

    def times(self, factor: float) -> Bytes:
        return Bytes(*(factor * number for number in self))

    def plus(self, other: Bytes) -> Bytes:
        return Bytes(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Bytes) -> Bytes:
        return Bytes(*(a - b for a, b in zip(self, other, strict=True)))


class ChunkSizes:
    """Sizes of traced values in terms of the chunk's number of tokens and of head rows."""

    def __init__(self, tokens: torch.SymInt, head_rows: torch.SymInt) -> None:
        self.symbols = (tokens.node.expr, head_rows.node.expr)
        self._known: dict[Any, Bytes] = {}

    def bytes(self, value: Any) -> Bytes:
        """Bytes of the elements of a tensor, or of all tensors of a tuple."""
        if isinstance(value, (tuple, list)):
            return total(self.bytes(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return Bytes()
        size = Bytes(fixed=value.element_size())
        for length in value.shape:
            size = _product(size, self._linear(length))
        return size

    def head_dim(self, value: torch.Tensor) -> int | None:
        """The dimension of a tensor that runs over head rows."""
        return next((i for i, size in enumerate(value.shape) if size_expression(size) == self.symbols[1]), None)

    def _linear(self, size: int | torch.SymInt) -> Bytes:
        expression = size_expression(size)
        if expression not in self._known:
            at = [expression.subs(dict(zip(self.symbols, point, strict=True))) for point in ((0, 0), (1, 0), (0, 1))]
            fixed, per_token, per_head_row = (float(number) for number in at)
            self._known[expression] = Bytes(fixed, per_token - fixed, per_head_row - fixed)
        return self._known[expression]


def total(parts: Iterable[Bytes]) -> Bytes:
    return functools.reduce(Bytes.plus, parts, Bytes())


def size_expression(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _product(left: Bytes, right: Bytes) -> Bytes:
    if left.per_token or left.per_head_row:
        left, right = right, left
    assert not (left.per_token or left.per_head_row), "tokens and head rows run along one dimension of a value"
    return right.times(left.fixed)


def same_memory_format(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two values have the same dtype, sizes and strides."""
    if one.dtype != other.dtype or one.dim() != other.dim():
        return False
    sizes = zip((*one.shape, *one.stride()), (*other.shape, *other.stride()), strict=True)
    return all(str(a) == str(b) for a, b in sizes)


def view_source(node: fx.Node) -> fx.Node | None:
    """The argument whose memory a node's result is in: for views, their items, and operators that work in place."""
    if is_item(node):
        return view_source(node.args[0])
    if node.target in UNDECLARED_VIEWS:
        return node.args[0]
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    if not schema.returns or schema.returns[0].alias_info is None:
        return None
    return next(arg for arg, formal in zip(node.args, schema.arguments, strict=False) if formal.alias_info is not None)


def owner(node: fx.Node) -> fx.Node:
    """The node that made the memory of a value: an operator, an item of an operator's results, or a placeholder."""
    while (source := view_source(node)) is not None:
        node = source
    return node


def storages(node: fx.Node) -> list[Storage]:
    """The memory that a node's result is in: several pieces if it is a tuple."""
    if not has_tensor(node):
        return []
    node = owner(node)
    if "memory" in node.meta:
        return [(node.meta["memory"][0], 0)]
    if is_item(node):
        return [(node.args[0], node.args[1])]
    value = node.meta["val"]
    return [(node, i) for i in range(len(value) if isinstance(value, (tuple, list)) else 1)]
