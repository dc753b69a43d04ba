"""Dimensions as products of factors, so that a reshape, a permutation or a repetition can be taken back.

`[B, S, H * D]` becomes `[B * H, S, D]` on its way into a batched product, and it is the same tensor in the same order
of B, S, H and D. A dimension is a list of *factors*, the slowest first; one of size 1 is the empty list. Moving entries
around regroups factors, a reshape that cuts through one splits it, and a dimension that two tensors share makes their
factors the same (`unify`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.axes.shape_rules import transpose_order
from dta_compile.passes.graphs.nodes import SizeNodes, call, filled_with
from dta_compile.passes.graphs.operators import (
    CASTS,
    COPIES,
    DIFFERENTIABLE_COPIES,
    KEEP_ORDER,
    MAYBE_COPIES,
    PRODUCTS,
    QUOTIENTS,
    RESHAPES,
    SQUEEZES,
    TRANSPOSITIONS,
)
from dta_compile.passes.symbols import sizes

aten = torch.ops.aten

MOVES = (
    KEEP_ORDER
    | TRANSPOSITIONS
    | DIFFERENTIABLE_COPIES
    | MAYBE_COPIES
    | {aten.expand.default, aten.repeat.default, aten.slice.Tensor}
)


class Mismatch(Exception):
    """Dimensions that no regrouping of factors makes the same."""


class Factor:
    """A dimension or a part of one, of more than one entry; what it was split into, or found to be, are its `parts`."""

    def __init__(self, size: sympy.Expr) -> None:
        self.size = size
        self.parts: tuple[Factor, ...] = ()


Dim = list[Factor]


def leaves(dim: Iterable[Factor]) -> Dim:
    """The factors of a dimension as far as they are split by now."""
    return [leaf for factor in dim for leaf in (leaves(factor.parts) if factor.parts else [factor])]


def unify(one: Dim, other: Dim) -> None:
    """Make the factors of two dimensions the same, splitting those of either; raises `Mismatch`."""
    left, right = leaves(one), leaves(other)
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
    """What is left of a factor whose first part is another one."""
    left = [] if rest == 1 else [Factor(rest)]
    factor.parts = (first, *left)
    return left


def _quotient(size: sympy.Expr, part: sympy.Expr) -> sympy.Expr | None:
    quotient = sympy.cancel(size / part)
    return quotient if quotient.as_numer_denom()[1] == 1 else None


def whole(node: fx.Node) -> list[Dim]:
    """A factor for every dimension of a value."""
    return [[] if size == 1 else [Factor(size)] for size in sizes(node)]


def product(dim: Iterable[Factor]) -> sympy.Expr:
    """The size of a dimension."""
    return sympy.Mul(*(leaf.size for leaf in leaves(dim)))


def moved(node: fx.Node, dims: list[Dim]) -> list[Dim]:
    """The dimensions of what one of `MOVES` makes of a tensor; raises `Mismatch`."""
    target, rank = node.target, len(dims)
    if target in RESHAPES:
        return _regrouped([factor for dim in dims for factor in dim], sizes(node))
    if target is aten.permute.default:
        return [dims[dim % rank] for dim in node.args[1]]
    if target in TRANSPOSITIONS:
        return [dims[dim] for dim in transpose_order(node, rank)]
    if target is aten.unsqueeze.default:
        place = node.args[1] % (rank + 1)
        return [*dims[:place], [], *dims[place:]]
    if target in SQUEEZES:
        chosen = node.args[1] if len(node.args) > 1 else range(rank)
        chosen = {dim % rank for dim in ([chosen] if isinstance(chosen, int) else chosen)}
        return [dim for i, dim in enumerate(dims) if dim or i not in chosen]
    if target is aten.expand.default:
        after = sizes(node)
        before: list[Dim] = [[] for _ in range(len(after) - rank)]
        return [
            [Factor(size)] if not dim and size != 1 else dim for dim, size in zip([*before, *dims], after, strict=True)
        ]
    if target is aten.repeat.default:
        before = [[] for _ in range(len(node.args[1]) - rank)]
        times = [sizes(node)[i] / product(dim) for i, dim in enumerate([*before, *dims])]
        return [dim if n == 1 else [Factor(n), *dim] for dim, n in zip([*before, *dims], times, strict=True)]
    if target is aten.slice.Tensor and sizes(node) != sizes(node.args[0]):
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
    """A value that is another one whose entries were moved.

    Attributes:
        base: that other one.
        own: its dimensions.
        dims: those of the value. Factors that the base lacks are repetitions.
        scale: of the value, by which the base is to be multiplied.
    """

    base: fx.Node
    own: list[Dim]
    dims: list[Dim]
    scale: float = 1.0

    @classmethod
    def of(cls, node: fx.Node, scaled: bool = False) -> Arranged:
        """With everything taken back that only moves entries, and if it is to be `scaled`, that multiplies them by a
        number; raises `Mismatch`."""
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
        for one in reversed(chain):
            dims = moved(one, dims)
        return cls(node, own, dims, scale)

    @classmethod
    def within(cls, node: fx.Node, dims: Sequence[Dim]) -> Arranged:
        """A tensor that broadcasts to these dimensions, as an operator has made sure of; raises `Mismatch`."""
        shape = sizes(node)
        if len(shape) > len(dims):
            raise Mismatch(f"a value of sizes {shape} beside scores")
        inner = [[] if size == 1 else dim for size, dim in zip(shape, dims[len(dims) - len(shape) :], strict=True)]
        try:
            found = cls.of(node)
            for one, other in zip(found.dims, inner, strict=True):
                unify(one, other)
        except Mismatch:  # sizes that are only known to be equal
            return cls(node, inner, inner)
        return found

    def has(self, factor: Factor) -> bool:
        """Whether the base has a factor, so that it is no repetition."""
        return any(factor is leaf for dim in self.own for leaf in leaves(dim))


def _factor_of(node: fx.Node) -> float | None:
    """The number by which a product or quotient has the sizes of its first operand; None: it is none, or zero."""
    number = number_of(node.args[1]) if sizes(node) == sizes(node.args[0]) else None
    return (number if node.target in PRODUCTS else 1.0 / number) if number else None


def number_of(value: Any) -> float | None:
    """The number that an argument is, or that all entries of it are."""
    while isinstance(value, fx.Node) and value.target in CASTS | COPIES | {aten.expand.default}:
        value = value.args[0]
    if isinstance(value, fx.Node):
        constant = getattr(value.graph.owning_module, str(value.target), None) if value.op == "get_attr" else None
        if isinstance(constant, torch.Tensor) and constant.dim() == 0:
            return float(constant)
        value = filled_with(value)
    return float(value) if isinstance(value, (int, float)) else None


def _is_part(node: fx.Node) -> bool:
    return node.target is aten.slice.Tensor and sizes(node) != sizes(node.args[0])


class Arranger:
    """Makes the nodes that move entries; insertion points come in the order of the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.sizes = graph, SizeNodes(graph)

    def arrange(self, value: Arranged, wanted: Sequence[Dim], broadcast: bool = False) -> fx.Node:
        """The base with these dimensions, given by their leaves.

        Args:
            broadcast: dimensions of which the base has no factor have size 1, in place of repetitions.

        Raises:
            Mismatch: the base has other factors besides, or a size is no polynomial of those of inputs.
        """
        has = [leaf for dim in value.own for leaf in leaves(dim)]
        dims = [[] if broadcast and not any(leaf in has for leaf in dim) else list(dim) for dim in wanted]
        order = [leaf for dim in dims for leaf in dim]
        if not set(has) <= set(order):
            raise Mismatch("dimensions that attention has no place for")
        node = self._shaped(value.base, [[leaf] for leaf in has])
        kept = [leaf for leaf in order if leaf in has]
        if kept != has:
            node = call(self.graph, aten.permute.default, node, [has.index(leaf) for leaf in kept])
        if len(kept) < len(order):
            node = self._shaped(node, [[leaf] if leaf in has else [] for leaf in order])
            node = call(self.graph, aten.expand.default, node, [self.size([leaf]) for leaf in order])
        return self._shaped(node, dims)

    def _shaped(self, node: fx.Node, dims: Sequence[Dim]) -> fx.Node:
        if sizes(node) == tuple(map(product, dims)):
            return node
        return call(self.graph, aten.reshape.default, node, [self.size(dim) for dim in dims])

    def size(self, dim: Dim) -> fx.Node | int:
        """That of a dimension; raises `Mismatch` if it is no polynomial of those of inputs."""
        size = self.sizes.build(product(dim))
        if size is None:
            raise Mismatch(f"a size of {product(dim)}")
        return size
