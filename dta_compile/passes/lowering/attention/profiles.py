"""Extract learned biases that a query gives to keys by their distance, such as Inkling's `gather(r(x) @ bank, q - k)`.

A *profile* `[..., q, n]` has the biases of a query by distance `q - k`; that of distance `n - 1` holds for all further
keys. `Profiles.split` finds it for `rewrite`: where entries of a tensor are gathered by a function of the distance
alone, times what does not depend on the key, and zero from some distance on. Only keys `k <= q` matter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from dta_compile.passes.axes.shape_rules import Labels, labels_in
from dta_compile.passes.graphs.arguments import sum_of, where_of
from dta_compile.passes.graphs.nodes import call, column, filled_with, is_float
from dta_compile.passes.graphs.operators import CASTS, NEGATIONS, RESHAPES, aten
from dta_compile.passes.lowering.attention.distances import CLAMPS, Distances, Slope, bounds_of
from dta_compile.passes.lowering.attention.factors import number_of
from dta_compile.passes.symbols import expression, sizes

WRAPPING = (torch.uint8, torch.int8, torch.int16)  # integers that distances may exceed
MOST = 2**16  # distances at which a function is looked at
COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    getattr(getattr(aten, name), overload): getattr(operator, name)
    for name in ("lt", "le", "gt", "ge", "eq", "ne")
    for overload in ("Tensor", "Scalar")
}
OF_TRUTH: dict[Any, Callable[[Any, Any], bool]] = {
    aten.logical_and.default: operator.and_,
    aten.bitwise_and.Tensor: operator.and_,
    aten.logical_or.default: operator.or_,
    aten.bitwise_or.Tensor: operator.or_,
}


class OfDistance(NamedTuple):
    """Function of the distance `d >= 0`: its first values, after which every step adds `slope`."""

    values: tuple[Any, ...]
    slope: int = 0

    def at(self, count: int) -> tuple[Any, ...]:
        """Return at least `count` values."""
        missing = range(1, count - len(self.values) + 1)
        return (
            *self.values,
            *(self.values[-1] + step * self.slope if self.slope else self.values[-1] for step in missing),
        )

    def joined(self, other: OfDistance, with_value: Callable[[Any, Any], Any], slope: int = 0) -> OfDistance:
        """Apply a function to the values of both."""
        count = max(len(self.values), len(other.values))
        return OfDistance(tuple(map(with_value, self.at(count), other.at(count))), slope)

    def until(self, is_last: Callable[[Any], bool]) -> OfDistance | None:
        """Return the same with values up to one of which `is_last` holds; None if there is none near."""
        if not self.slope or is_last(self.values[-1]):
            return self
        count = next((n for n in range(1, MOST) if is_last(self.values[-1] + n * self.slope)), None)
        return None if count is None else OfDistance(self.at(len(self.values) + count), self.slope)


class Profiles(Distances):
    """Analysis like that of `Distances`, with profiles in the place of slopes."""

    FACTORS = frozenset({"q"})
    COMPUTES = False  # entries are moved

    def _own(self, node: fx.Node, labels: Labels) -> Slope | None:
        if labels.count("k") != 1 or not is_float(node):
            return None
        if node.target is aten.gather.default:
            return self._gathered(node, labels)
        selected = where_of(node)
        return None if selected is None else self._cut(node, *selected, labels)

    def _combined(self, node: fx.Node, left: Slope, right: Slope) -> Slope | None:
        both = isinstance(left, fx.Node) and isinstance(right, fx.Node)
        return None if both else super()._combined(node, left, right)

    def _moved(self, node: fx.Node, slope: Slope, labels: Labels) -> Slope | None:
        return None if node.target in RESHAPES and slope else super()._moved(node, slope, labels)

    def _gathered(self, node: fx.Node, labels: Labels) -> fx.Node | None:
        """Return the profile of entries that are gathered by distance."""
        source, dim, index = node.args[:3]
        axis, rank = labels.index("k"), len(labels)
        function = self._function(index, labels_in(index, labels))
        others = [i for i in range(rank) if i != axis]
        if dim % rank != axis or function is None or function.slope:
            return None
        if [sizes(source)[i] for i in others] != [sizes(node)[i] for i in others]:
            return None
        values = list(function.values)
        while len(values) > 1 and values[-1] == values[-2]:
            values.pop()
        step = values[1] - values[0] if len(values) > 1 else 1
        if abs(step) != 1 or values != [values[0] + i * step for i in range(len(values))] or min(values) < 0:
            return None  # neither in the order of the distance nor in the opposite one
        if not sizes(source)[axis].is_number or max(values) >= sizes(source)[axis]:
            return None
        part = call(self.graph, aten.slice.Tensor, source, axis, min(values), max(values) + 1)
        return part if step == 1 else call(self.graph, aten.flip.default, part, [axis])

    def _cut(self, node: fx.Node, condition: fx.Node, value: Any, other: Any, labels: Labels) -> Slope | None:
        """Return the profile of a value that is zero from some distance on."""
        hides = number_of(value) == 0
        kept, filler = (other, value) if hides else (value, other)
        function = self._function(condition, labels_in(condition, labels))
        if number_of(filler) != 0 or function is None or not isinstance(kept, fx.Node) or sizes(kept) != sizes(node):
            return None
        profile = self._slope(kept, labels_in(kept, labels))
        is_zero = [value is hides for value in function.values]
        count = is_zero.index(True) if True in is_zero else None
        if count is None:
            return profile
        if not isinstance(profile, fx.Node):  # what the softmax cancels if it is there for all keys
            return None
        axis = labels.index("k")
        if not all(is_zero[count:]) or not 0 < count <= int(sizes(profile)[axis]):
            return None
        first = call(self.graph, aten.slice.Tensor, profile, axis, 0, count)
        return call(self.graph, aten.cat.default, [first, column(first, 0.0, axis)], axis)

    def _function(self, node: Any, labels: Labels) -> OfDistance | None:
        """Return a number or a truth value as a function of the distance alone; None if it is none."""
        if isinstance(node, fx.Node) and (is_float(node) or getattr(node.meta["val"], "dtype", None) in WRAPPING):
            return None
        affine = self._affine(node, labels)
        if affine is not None and affine[0] + affine[1] == 0 and affine[2].is_Integer and affine[0].is_Integer:
            return OfDistance((int(affine[2]),), int(affine[0]))
        if not isinstance(node, fx.Node):
            return None
        if isinstance(number := filled_with(node), bool):
            return OfDistance((number,))
        if node.target in CASTS and not is_float(node.args[0]):
            return None if node.meta["val"].dtype is torch.bool else self._function(node.args[0], labels)
        if (moved := self._source(node, labels)) is not None:
            return self._function(*moved)
        if node.target in CLAMPS:
            return self._clamped(node, labels)
        if node.target in NEGATIONS and node.meta["val"].dtype is torch.bool:
            inner = self._function(node.args[0], labels)
            return inner and OfDistance(tuple(not value for value in inner.values))
        added = sum_of(node)
        if added is None and node.target not in COMPARISONS.keys() | OF_TRUTH.keys():
            return None
        left, right = (self._function(arg, labels_in(arg, labels)) for arg in node.args[:2])
        if left is None or right is None:
            return None
        if node.target in OF_TRUTH:
            is_bool = all(isinstance(value, bool) for value in (*left.values, *right.values))
            return left.joined(right, OF_TRUTH[node.target]) if is_bool else None
        if added is not None:
            sign = added[2]
            if node.meta["val"].dtype is torch.bool:
                return None
            return left.joined(right, lambda a, b: a + sign * b, left.slope + sign * right.slope)
        less = left.joined(right, operator.sub, left.slope - right.slope)
        settled = less.until(lambda value: value * less.slope > 0)
        compare = COMPARISONS[node.target]
        return settled and OfDistance(tuple(compare(value, 0) for value in settled.values))

    def _clamped(self, node: fx.Node, labels: Labels) -> OfDistance | None:
        inner = self._function(node.args[0], labels)
        bounds = [None if bound is None else expression(bound) for bound in bounds_of(node)]
        if inner is None or any(bound is not None and not bound.is_Integer for bound in bounds):
            return None
        low, high = (None if bound is None else int(bound) for bound in bounds)
        end, start = (high, low) if inner.slope > 0 else (low, high)  # where values go, and where they come from
        further = 1 if inner.slope > 0 else -1
        settled = inner.until(
            lambda value: all(bound is None or (value - bound) * further >= 0 for bound in (end, start))
        )
        if settled is None:
            return None
        values = (value if low is None else max(value, low) for value in settled.values)
        return OfDistance(
            tuple(value if high is None else min(value, high) for value in values), settled.slope if end is None else 0
        )
