"""Track dimensions as products of factors, so that reshapes, permutations and repetitions can be undone.

A view and a permutation make `[B * H, S, D]` of `[B, S, H * D]` before a batched product: other dimensions of the same
factors B, S, H and D. A dimension is a list of *factors*, the slowest first; one of size 1 is the empty list. Operators
that move entries regroup factors, a reshape that cuts through a factor splits it, and a dimension that two tensors
share makes their factors the same (`unify`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.graphs.arguments import operand_dims, run_of, select_of
from dta_compile.passes.graphs.nodes import SizeNodes, call, erase_unused, filled_with
from dta_compile.passes.graphs.operators import (
    CASTS,
    COPIES,
    DIFFERENTIABLE_COPIES,
    KEEP_ORDER,
    MAYBE_COPIES,
    PRODUCTS,
    QUOTIENTS,
    RESHAPES,
    TRANSPOSITIONS,
    aten,
)
from dta_compile.passes.graphs.source_lines import copy_stack_trace
from dta_compile.passes.symbols import sizes

MOVES = (
    KEEP_ORDER
    | TRANSPOSITIONS
    | DIFFERENTIABLE_COPIES
    | MAYBE_COPIES
    | {aten.expand.default, aten.repeat.default, aten.slice.Tensor}
)
# Operators by which models compute a scale from numbers: `scores / torch.sqrt(torch.tensor(head_dim))`.
SCALINGS = frozenset(
    {
        aten.sqrt.default,
        aten.rsqrt.default,
        aten.reciprocal.default,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.pow.Tensor_Scalar,
    }
)


class Mismatch(Exception):
    """Dimensions or operators that fit no call of attention; the message says why."""


class Factor:
    """Dimension of more than one entry, or a part of one; `parts` are what it was split into or unified with."""

    def __init__(self, size: sympy.Expr) -> None:
        self.size = size
        self.parts: tuple[Factor, ...] = ()


Dim = list[Factor]


def leaves(dim: Iterable[Factor]) -> Dim:
    """Return the factors of a dimension, each replaced by its parts."""
    return [leaf for factor in dim for leaf in (leaves(factor.parts) if factor.parts else [factor])]


def unify(dims: Iterable[Dim], others: Iterable[Dim]) -> None:
    """Make the factors of each dimension those of the other one at its place, splitting both; raises `Mismatch`."""
    for dim, other in zip(dims, others, strict=True):
        _unify(dim, other)


def _unify(dim: Dim, other: Dim) -> None:
    left, right = leaves(dim), leaves(other)
    while left and right:
        a, b = left.pop(0), right.pop(0)
        if a is b:
            continue
        if (rest := _quotient(b.size, a.size)) is not None:
            right = _split(b, a, rest) + right
        elif (rest := _quotient(a.size, b.size)) is not None:
            left = _split(a, b, rest) + left
        else:
            raise Mismatch(f"sizes {a.size} and {b.size}")
    if left or right:
        raise Mismatch("dimensions of different sizes")


def _split(factor: Factor, first: Factor, rest: sympy.Expr) -> Dim:
    """Split a factor into `first` and a new factor of size `rest`; return the new factor, if it has several entries."""
    others = [] if rest == 1 else [Factor(rest)]
    factor.parts = (first, *others)
    return others


def _quotient(size: sympy.Expr, part: sympy.Expr) -> sympy.Expr | None:
    quotient = sympy.cancel(size / part)
    return quotient if quotient.as_numer_denom()[1] == 1 else None


def whole(node: fx.Node) -> list[Dim]:
    """Return new dimensions of a value, of one factor each."""
    return [[] if size == 1 else [Factor(size)] for size in sizes(node)]


def product(dim: Iterable[Factor]) -> sympy.Expr:
    """Return the size of a dimension."""
    return sympy.Mul(*(leaf.size for leaf in leaves(dim)))


def moved(node: fx.Node, dims: list[Dim]) -> list[Dim]:
    """Return the dimensions of a node of `MOVES`, given those of its operand; raises `Mismatch`."""
    if node.target in RESHAPES:
        return _regrouped([factor for dim in dims for factor in dim], sizes(node))
    if (own := operand_dims(node)) is not None:
        new = [[] if size == 1 else [Factor(size)] for size in sizes(node)]
        return [new[i] if dim is None else dims[dim] for i, dim in enumerate(own)]
    if node.target is aten.repeat.default:
        before: list[Dim] = [[] for _ in range(len(node.args[1]) - len(dims))]
        times = [sizes(node)[i] / product(dim) for i, dim in enumerate([*before, *dims])]
        return [dim if n == 1 else [Factor(n), *dim] for dim, n in zip([*before, *dims], times, strict=True)]
    if _is_part(node):
        raise Mismatch("a part of a dimension")
    return dims


def _regrouped(factors: Dim, shape: Sequence[sympy.Expr]) -> list[Dim]:
    left, dims = leaves(factors), []
    for size in shape:
        dim: Dim = []
        while (missing := sympy.cancel(size / product(dim))) != 1:
            if not left:
                raise Mismatch(f"a reshape to {tuple(shape)}")
            factor = left.pop(0)
            if _quotient(missing, factor.size) is None:
                if (rest := _quotient(factor.size, missing)) is None:
                    raise Mismatch(f"a reshape to {tuple(shape)}")
                first = Factor(missing)
                left = _split(factor, first, rest) + left
                factor = first
            dim.append(factor)
        dims.append(dim)
    return dims


@dataclasses.dataclass(frozen=True)
class Arranged:
    """Value as a rearrangement of another one, its base.

    Attributes:
        base: node whose entries were moved.
        own: dimensions of the base.
        dims: dimensions of the value. Factors that the base lacks are repetitions.
        scale: number that the base must be multiplied by.
    """

    base: fx.Node
    own: list[Dim]
    dims: list[Dim]
    scale: float = 1.0

    @classmethod
    def of(cls, node: fx.Node, scaled: bool = False) -> Arranged:
        """Undo all operators that only move entries, and if `scaled` products with numbers, too; raises `Mismatch`."""
        chain, scale = [], 1.0
        while True:
            if node.target in MOVES and not _is_part(node):
                chain.append(node)
            elif scaled and node.target in PRODUCTS | QUOTIENTS and (by := _factor_of(node)):
                scale *= by
            else:
                break
            node = node.args[0]
        dims = own = whole(node)
        for step in reversed(chain):
            dims = moved(step, dims)
        return cls(node, own, dims, scale)

    @classmethod
    def within(cls, node: fx.Node, dims: Sequence[Dim]) -> Arranged:
        """Arrange an operand that an operator broadcasts to these dimensions; raises `Mismatch`."""
        shape = sizes(node)
        if len(shape) > len(dims):
            raise Mismatch(f"a value of sizes {shape} beside scores")
        inner = [[] if size == 1 else dim for size, dim in zip(shape, dims[len(dims) - len(shape) :], strict=True)]
        try:
            value = cls.of(node)
            unify(value.dims, inner)
        except Mismatch:  # sizes that only a guard makes equal
            return cls(node, inner, inner)
        return value

    def has(self, factor: Factor) -> bool:
        """Return whether the base has a factor; otherwise it is a repetition."""
        return any(factor is leaf for dim in self.own for leaf in leaves(dim))


def _factor_of(node: fx.Node) -> float | None:
    """Return the number that a product or quotient multiplies its first operand by; None for other nodes and for 0."""
    number = number_of(node.args[1]) if sizes(node) == sizes(node.args[0]) else None
    return (number if node.target in PRODUCTS else 1.0 / number) if number else None


def number_of(value: Any) -> float | None:
    """Return the number that an argument is, or that all its entries are; None if it is not known to be one."""
    if not isinstance(value, fx.Node):
        return float(value) if isinstance(value, (int, float)) else None
    if value.target in COPIES | {aten.expand.default}:
        return number_of(value.args[0])
    if value.op == "get_attr":
        constant = getattr(value.graph.owning_module, str(value.target), None)
        return float(constant) if isinstance(constant, torch.Tensor) and constant.dim() == 0 else None
    if value.target in SCALINGS:
        return _computed(value)
    number = number_of(value.args[0]) if value.target in CASTS else filled_with(value)
    return _rounded(number, value.meta["val"].dtype) if isinstance(number, (int, float)) else None


def _rounded(number: float, dtype: torch.dtype) -> float | None:
    """Return a number as a dtype holds it; None if it is none of integers."""
    if not dtype.is_floating_point and not math.isfinite(number):
        return None
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def _computed(node: fx.Node) -> float | None:
    """Return the finite result of an operator on numbers, in its dtype; None if an operand is not known to be one."""
    if node.meta["val"].dim():
        return None
    numbers = []
    for value in node.args:
        if (number := number_of(value)) is None:
            return None
        is_tensor = isinstance(value, fx.Node)
        numbers.append(torch.tensor(number, dtype=value.meta["val"].dtype) if is_tensor else value)
    result = float(node.target(*numbers))
    return result if math.isfinite(result) else None


def _is_part(node: fx.Node) -> bool:
    return node.target is aten.slice.Tensor and sizes(node) != sizes(node.args[0])


def product_dims(left: Arranged, right: Arranged) -> tuple[list[Dim], Dim, Dim, Dim]:
    """Return the outer dimensions, rows, summed dimension and columns of a product; raises `Mismatch`."""
    *outer, rows, depth = left.dims
    *others, other_depth, columns = right.dims
    unify([*outer, depth], [*others, other_depth])
    return outer, rows, depth, columns


def take_parts_before_moves(graph: fx.Graph) -> None:
    """Move parts of values instead of taking parts of moved values: `qkv.reshape(3, B * H, S, D).unbind(0)`.

    A part's own dimensions are no products then, so that `Arranged` can undo the moves.
    """
    arranger = Arranger(graph)
    for node in list(graph.nodes):
        part = select_of(node) or run_of(node)
        if part is None or part[0].target not in MOVES or not any(size.is_Mul for size in sizes(node)):
            continue
        with graph.inserting_before(node), contextlib.suppress(Mismatch):
            node.replace_all_uses_with(arranger.part(Arranged.of(part[0]), *part[1:]))
            copy_stack_trace(node)
    erase_unused(graph)


class Arranger:
    """Builder of nodes that move entries; insertion points must come in the order of the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.sizes = graph, SizeNodes(graph)

    def arrange(self, value: Arranged, wanted: Sequence[Dim], broadcast: bool = False) -> fx.Node:
        """Arrange the base of a value by these dimensions, which are given by their leaves.

        Args:
            broadcast: make dimensions of which the base has no factor of size 1, instead of repeating entries.

        Raises:
            Mismatch: the base has further factors, or a size is no polynomial of the sizes of inputs.
        """
        has = [leaf for dim in value.own for leaf in leaves(dim)]
        dims = [[] if broadcast and not any(leaf in has for leaf in dim) else list(dim) for dim in wanted]
        order = [leaf for dim in dims for leaf in dim]
        if not set(has) <= set(order):
            raise Mismatch("dimensions that attention has no place for")
        node = self._shaped(value.base, [[leaf] for leaf in has])
        permuted = [leaf for leaf in order if leaf in has]
        if permuted != has:
            node = call(self.graph, aten.permute.default, node, [has.index(leaf) for leaf in permuted])
        if len(permuted) < len(order):
            node = self._shaped(node, [[leaf] if leaf in has else [] for leaf in order])
            node = call(self.graph, aten.expand.default, node, [self.size([leaf]) for leaf in order])
        return self._shaped(node, dims)

    def part(self, value: Arranged, dim: int, start: Any, length: int | None = None) -> fx.Node:
        """Build the entries of a value from `start` on, along a dimension, from the same part of its base.

        Args:
            length: number of entries; None takes one, and removes the dimension.

        Raises:
            Mismatch: the dimension is not one factor of the base, or a size is no polynomial of the sizes of inputs.
        """
        factors, has = leaves(value.dims[dim]), [leaf for own in value.own for leaf in leaves(own)]
        if len(factors) != 1 or factors[0] not in has or length == 0:
            raise Mismatch("a part of a dimension")
        place, node = has.index(factors[0]), self._shaped(value.base, [[leaf] for leaf in has])
        kept: list[Dim]
        if length is None:
            node, kept = call(self.graph, aten.select.int, node, place, start), []
        else:
            node = call(self.graph, aten.slice.Tensor, node, place, start, start + length)
            kept = [[] if length == 1 else [Factor(sympy.Integer(length))]]
        own, dims = [[leaf] for leaf in has], [leaves(other) for other in value.dims]
        own[place : place + 1], dims[dim : dim + 1] = kept, kept
        return self.arrange(Arranged(node, own, dims), dims)

    def _shaped(self, node: fx.Node, dims: Sequence[Dim]) -> fx.Node:
        if sizes(node) == tuple(map(product, dims)):
            return node
        return call(self.graph, aten.reshape.default, node, [self.size(dim) for dim in dims])

    def size(self, dim: Dim) -> fx.Node | int:
        """Build the size of a dimension; raises `Mismatch` if it is no polynomial of the sizes of inputs."""
        size = self.sizes.build(product(dim))
        if size is None:
            raise Mismatch(f"a size of {product(dim)}")
        return size
