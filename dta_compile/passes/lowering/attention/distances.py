"""Extract the slopes of biases by the distance of query and key, such as ALiBi's `-slope * |q - k|`.

A softmax ignores what is added to all scores of a query alike, and causal attention reads only keys `k <= q`. So a bias
that equals `slope * k + f(q)` for those keys has the effect of `slope * k`. `Distances.split` finds the slope, for
`recognise` and `rewrite`: `|q - k|` equals `q - k`; sums, products with factors that depend on neither index, and
operators that only move entries have a slope if their operands do. Fills that hide keys remain as the rest of the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from dta_compile.passes.axes.shape_rules import Labels, labelled_source, labels_in
from dta_compile.passes.graphs.arguments import argument, sum_of, where_of
from dta_compile.passes.graphs.nodes import call, constructed, filled_with, is_float, raised
from dta_compile.passes.graphs.operators import (
    CASTS,
    DIFFERENCES,
    DIFFERENTIABLE_COPIES,
    MAYBE_COPIES,
    PRODUCTS,
    QUOTIENTS,
    RANGES,
    RESHAPES,
    SUMS,
    aten,
)
from dta_compile.passes.lowering.attention.factors import number_of
from dta_compile.passes.program import has_tensor
from dta_compile.passes.symbols import expression, sizes
from dta_compile.proofs.mask_class import FORBIDDEN

Slope: TypeAlias = float | fx.Node  # a node has the dimensions of the value, those of queries and keys with size 1
Affine = tuple[sympy.Expr, sympy.Expr, sympy.Expr]  # a * q + b * k + c

EARLIER_KEYS = "bias_of_earlier_keys"  # in the `meta` of attention whose bias is right for keys `k <= q` alone
CLAMPS = frozenset({aten.clamp_min.default, aten.clamp_max.default, aten.clamp.default, aten.relu.default})


class Distances:
    """Analysis of the biases of one graph; new nodes are inserted at the graph's insertion point.

    Args:
        dtype: that of the scores. What is rounded to a narrower one is no multiple of a distance.
        exact: whether what is added to all scores of a query alike is part of the rest. It is where there are sinks.

    Attributes:
        of_earlier_keys: whether a slope is that of a value only for keys `k <= q`.
    """

    FACTORS: frozenset[str] = frozenset()  # what a factor of a slope may vary with
    COMPUTES = True  # slopes by arithmetic, so that what is rounded has none

    def __init__(self, graph: fx.Graph, dtype: torch.dtype, exact: bool = False) -> None:
        self.graph, self.dtype, self.of_none = graph, dtype, None if exact else 0.0
        self.of_earlier_keys = False

    def split(self, node: fx.Node, labels: Labels) -> tuple[fx.Node | None, Slope] | None:
        """Split a bias into a rest and `slope * k`; a rest of None is zero. Return None if no slope is found."""
        if slope := self._slope(node, labels):
            return None, slope
        if self.COMPUTES and self._rounds(node):
            return None
        target, added = node.target, sum_of(node)
        if added is not None and all(isinstance(arg, fx.Node) and has_tensor(arg) for arg in added[:2]):
            return self._sum(node, *added, labels)
        if (selected := where_of(node)) is not None:
            return self._filled(node, *selected, labels)
        if (moved := self._source(node, labels)) is not None:
            source, before = moved
            if (parts := self.split(source, before)) is not None:
                rest, slope = parts
                if rest is not None and target in RESHAPES and sizes(rest) != sizes(source):
                    return None  # the rest has fewer entries, since it is not broadcast
                if rest is not None:
                    rest = call(self.graph, target, rest, *node.args[1:], **node.kwargs)
                return self._with_slope(rest, self._moved(node, slope, labels))
        return None

    def _with_slope(self, rest: fx.Node | None, slope: Slope | None) -> tuple[fx.Node | None, Slope] | None:
        return None if slope is None else (rest, slope)

    def _sum(
        self, node: fx.Node, first: fx.Node, second: fx.Node, sign: int, labels: Labels
    ) -> tuple[fx.Node | None, Slope] | None:
        parts = [self.split(arg, labels_in(arg, labels)) for arg in (first, second)]
        if parts == [None, None]:
            return None
        (left, slope), (right, further) = (part or (arg, 0.0) for part, arg in zip(parts, (first, second), strict=True))
        left, right = (None if rest is None else _promoted(rest, node) for rest in (left, right))
        if right is None:
            rest = left
        elif left is None:
            rest = call(self.graph, aten.neg.default, right) if sign < 0 else right
        else:
            rest = call(self.graph, node.target, left, right)
        rest = None if rest is None else self._raised(rest, node)
        return self._with_slope(rest, self._combined(node, slope, further))

    def _filled(
        self, node: fx.Node, condition: fx.Node, value: Any, other: Any, labels: Labels
    ) -> tuple[fx.Node | None, Slope] | None:
        """Split a bias that is filled where keys are hidden; the rest is filled likewise."""
        source = other if hides(value) else value if hides(other) else None
        if not isinstance(source, fx.Node) or (parts := self.split(source, labels_in(source, labels))) is None:
            return None
        rest, slope = parts
        rest = self._zero(source) if rest is None else rest
        args = [rest if arg is source else arg for arg in node.args]
        rest = self._raised(call(self.graph, node.target, *args, **node.kwargs), node)
        return self._with_slope(rest, self._raised(slope, node))

    def _zero(self, like: fx.Node) -> fx.Node:
        """Return a zero of the rank of a value, on which it does not depend."""
        value = like.meta["val"]
        return constructed(self.graph, aten.full.default, [1] * value.dim(), 0.0, like=value)

    def _slope(self, node: fx.Node, labels: Labels) -> Slope | None:
        """Return the slope of a value `slope * k + f(q)`, 0.0 if it has no keys, None if it has another form."""
        if "k" not in labels:
            return self.of_none
        if (own := self._own(node, labels)) is not None:
            return own
        if self.COMPUTES and self._rounds(node):
            return None
        if (moved := self._source(node, labels)) is not None:
            slope = self._slope(*moved)
            return None if slope is None else self._moved(node, slope, labels)
        if (added := sum_of(node)) is not None:
            slopes = [self._slope(arg, labels_in(arg, labels)) for arg in added[:2]]
            return None if None in slopes else self._combined(node, *slopes)
        if node.target is aten.neg.default:
            return self._times(self._slope(node.args[0], labels), -1.0, node)
        if node.target in PRODUCTS | QUOTIENTS:
            factor, by = node.args[:2]
            if node.target in PRODUCTS and not _varies(by, labels) <= _varies(factor, labels):
                factor, by = by, factor
            if isinstance(factor, fx.Node) and has_tensor(factor) and _varies(by, labels) <= self.FACTORS:
                return self._times(self._slope(factor, labels_in(factor, labels)), by, node)
        return None

    def _own(self, node: fx.Node, labels: Labels) -> Slope | None:
        """Return the slope of a value that is no sum or product of values with one."""
        affine = self._affine(node, labels)
        return None if affine is None else float(affine[1])

    def _times(self, slope: Slope | None, by: Any, node: fx.Node) -> Slope | None:
        """Return the slope of a product of a value with this slope and `by`, or of a quotient if the node is one."""
        number = number_of(by)
        if slope is None or slope == 0 or (number == 0 and node.target in QUOTIENTS):
            return slope if slope == 0 else None
        if number is not None and not isinstance(slope, fx.Node):
            return slope / number if node.target in QUOTIENTS else slope * number
        if number is None and not has_tensor(by):
            return None  # a number known only at the call
        factor = number if number is not None else cast(self._raised(by, node), node.meta["val"].dtype)
        if isinstance(slope, fx.Node):
            slope = _promoted(slope, node)
            target = aten.div if node.target in QUOTIENTS else aten.mul
            return call(self.graph, target.Tensor if isinstance(factor, fx.Node) else target.Scalar, slope, factor)
        if node.target in QUOTIENTS:
            factor = call(self.graph, aten.reciprocal.default, factor)
        return call(self.graph, aten.mul.Scalar, factor, slope)

    def _combined(self, node: fx.Node, left: Slope, right: Slope) -> Slope:
        """Return the slope of a sum, or of a difference if the node is one."""
        left, right = (_promoted(slope, node) if isinstance(slope, fx.Node) else slope for slope in (left, right))
        if node.target in DIFFERENCES:
            right = call(self.graph, aten.neg.default, right) if isinstance(right, fx.Node) else -right
        left, right = self._raised(left, node), self._raised(right, node)
        if not isinstance(left, fx.Node):
            left, right = right, left
        if not isinstance(left, fx.Node):
            return left + right
        target = aten.add.Tensor if isinstance(right, fx.Node) else aten.add.Scalar
        return left if right == 0 else call(self.graph, target, *self._terms(left, right))

    def _terms(self, left: fx.Node, right: Slope) -> tuple[fx.Node, Slope]:
        """Return the operands of a sum of slopes."""
        return left, right

    def _raised(self, slope: Slope, node: fx.Node) -> Slope:
        """Prepend dimensions of size 1 up to the rank of a node that the value of `slope` is broadcast to."""
        if not isinstance(slope, fx.Node):
            return slope
        return raised(slope, node.meta["val"].dim() - slope.meta["val"].dim())

    def _moved(self, node: fx.Node, slope: Slope, labels: Labels) -> Slope | None:
        """Return the slope of a node that moves entries of a value with this slope, or casts them."""
        if not isinstance(slope, fx.Node) or node.target in DIFFERENTIABLE_COPIES | MAYBE_COPIES:
            return slope
        if node.target is aten.expand.default:
            return self._raised(slope, node)
        if node.target in RESHAPES:
            shape = [1 if label else size for label, size in zip(labels, sizes(node), strict=True)]
            if sympy.Mul(*shape) != sympy.Mul(*sizes(slope)) or sympy.Mul(*shape).free_symbols:
                return None
            return call(self.graph, aten.reshape.default, slope, [int(size) for size in shape])
        return call(self.graph, node.target, slope, *node.args[1:], **node.kwargs)

    def _source(self, node: fx.Node, labels: Labels) -> tuple[fx.Node, Labels] | None:
        """Return the operand whose entries a node moves or casts, and its labels; None for other nodes."""
        if node.target in CASTS:
            return (node.args[0], labels) if node.meta["val"].is_floating_point() else None
        return labelled_source(node, labels)

    def _rounds(self, node: fx.Node) -> bool:
        """Return whether the dtype of a value has fewer digits than scores have."""
        return is_float(node) and node.meta["val"].dtype.itemsize < max(self.dtype.itemsize, 4)

    def _affine(self, node: Any, labels: Labels) -> Affine | None:
        """Return a value as an affine function of query and key index, valid for keys `k <= q`; None if it is none."""
        zero = sympy.Integer(0)
        if not isinstance(node, fx.Node):
            return (zero, zero, sympy.sympify(node)) if isinstance(node, (int, float)) else None
        if not has_tensor(node):
            return zero, zero, expression(node.meta["val"])
        if node.meta["val"].dtype.itemsize < 4:
            return None  # it does not hold the number of every token
        value = self._of_numbers(node, labels)
        is_exact = value is not None and all(part.is_integer for part in value)
        return value if is_exact or not self._rounds(node) else None

    def _of_numbers(self, node: fx.Node, labels: Labels) -> Affine | None:
        """Return a tensor as an affine function, if it is not rounded."""
        zero = sympy.Integer(0)
        if node.target in RANGES:
            return _range(node, labels)
        if isinstance(filled_with(node), (int, float)) and (number := number_of(node)) is not None:
            return zero, zero, sympy.Integer(int(number)) if number.is_integer() else sympy.sympify(number)
        if (moved := self._source(node, labels)) is not None:
            return self._affine(*moved)
        if node.target in CLAMPS | {aten.abs.default}:
            return self._bent(node, labels)
        if node.target is aten.neg.default:
            return _scaled(self._affine(node.args[0], labels), -1)
        is_known = node.target in SUMS | PRODUCTS | QUOTIENTS | {aten.rsub.Scalar}
        if not is_known or argument(node, "alpha") not in (None, 1):
            return None
        left, right = (self._affine(arg, labels_in(arg, labels)) for arg in node.args[:2])
        if left is None or right is None:
            return None
        if node.target in SUMS:
            return _added(left, _scaled(right, -1 if node.target in DIFFERENCES else 1))
        if node.target is aten.rsub.Scalar:
            return _added(right, _scaled(left, -1))
        if node.target in PRODUCTS and left[:2] == (0, 0):
            left, right = right, left
        is_number = right[:2] == (0, 0) and right[2].is_number and (node.target in PRODUCTS or right[2] != 0)
        return _scaled(left, 1 / right[2] if node.target in QUOTIENTS else right[2]) if is_number else None

    def _bent(self, node: fx.Node, labels: Labels) -> Affine | None:
        """Return the absolute value of a multiple of `q - k`, or its clamp at zero."""
        value = self._affine(node.args[0], labels)
        if value is None or value[0] + value[1] != 0 or value[2] != 0:
            return None
        self.of_earlier_keys = True
        is_negative = bool(value[1] > 0)  # as k - q is
        if node.target is aten.abs.default:
            return _scaled(value, -1 if is_negative else 1)
        low, high = bounds_of(node)
        if low not in (None, 0) or high not in (None, 0):
            return None
        cut = (low == 0 and is_negative) or (high == 0 and not is_negative)
        return _scaled(value, 0) if cut else value


def _promoted(value: fx.Node, result: fx.Node) -> fx.Node:
    """Cast an operand as its operator does: bool is no number, small integers have no sign, 16 bits round."""
    return cast(value, torch.promote_types(value.meta["val"].dtype, result.meta["val"].dtype))


def bounds_of(node: fx.Node) -> tuple[Any, Any]:
    """Return the least and the largest number that one of `CLAMPS` gives; None: it has no such bound."""
    return 0 if node.target is aten.relu.default else argument(node, "min"), argument(node, "max")


def _varies(arg: Any, labels: Labels) -> set[str | None]:
    return set(labels_in(arg, labels)) - {None}


def hides(filler: Any) -> bool:
    """Return whether a number that replaces scores hides keys."""
    number = number_of(filler)
    return number is not None and number <= FORBIDDEN


def _range(node: fx.Node, labels: Labels) -> Affine | None:
    start = argument(node, "start") or 0
    if argument(node, "step") not in (None, 1) or labels[0] is None:
        return None
    start = expression(start.meta["val"]) if isinstance(start, fx.Node) else sympy.sympify(start)
    return sympy.Integer(labels[0] == "q"), sympy.Integer(labels[0] == "k"), start


def _scaled(value: Affine | None, by: Any) -> Affine | None:
    return None if value is None else (value[0] * by, value[1] * by, value[2] * by)


def _added(left: Affine, right: Affine | None) -> Affine | None:
    return None if right is None else (left[0] + right[0], left[1] + right[1], sympy.expand(left[2] + right[2]))


def labels_of(dims: Sequence[Any], query: Any, key: Any) -> Labels:
    """Return labels for dimensions given as factors; `()` if one has other factors beside that of queries or keys."""
    labels: list[str | None] = []
    for dim in dims:
        if len(dim) > 1 and (query in dim or key in dim):
            return ()
        labels.append("q" if query in dim else "k" if key in dim else None)
    return tuple(labels)


def positions(graph: fx.Graph, length: fx.Node | int, like: torch.Tensor) -> fx.Node:
    """Insert token indices `[S]` with the dtype and device of `like`."""
    return constructed(graph, aten.arange.default, length, like=like)


def cast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return a value in another dtype; no node is inserted if it has it already."""
    is_so = node.meta["val"].dtype is dtype
    return node if is_so else call(node.graph, aten._to_copy.default, node, dtype=dtype)
