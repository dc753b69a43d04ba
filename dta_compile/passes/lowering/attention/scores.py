"""Collect the effect of the operators between attention's product of queries and keys and its softmax.

These are scales, a soft cap, masks that fill or are added, a column of sinks, and casts. The meaning of a spelling
follows from what each operator does to a score `s[b, h, q, k]`:

* a factor that does not depend on the key multiplies the query; a number is the scale;
* `a * tanh(c * s)` is a soft cap of `a`;
* a tensor that is added, or replaces scores, is a mask, for the prover to judge (`passes.masks`). A number that
  replaces scores hides keys if it is at most `FORBIDDEN`; other numbers are refused;
* a sum of scores `q1 @ k1 + q2 @ k2` is one product over the concatenated features;
* a number that is added to all scores of a query leaves the softmax as it is;
* softmax weights may be set to, or multiplied by, zero only where the mask hides keys, so that they are zero already;
* a column that is concatenated to the scores, and cut off again after the softmax, is a sink.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dta_compile.passes.graphs.arguments import dim_of, sum_of, where_of
from dta_compile.passes.graphs.nodes import call
from dta_compile.passes.graphs.operators import CASTS, DIFFERENCES, PRODUCTS, QUOTIENTS, SUMS, aten
from dta_compile.passes.lowering.attention.distances import cast
from dta_compile.passes.lowering.attention.factors import (
    MOVES,
    Arranged,
    Dim,
    Mismatch,
    moved,
    number_of,
    product_dims,
    unify,
)
from dta_compile.passes.program import has_tensor
from dta_compile.passes.symbols import sizes
from dta_compile.proofs.mask_class import FORBIDDEN

# Lower bounds of scores, by which models keep hidden scores finite.
FLOORS = frozenset(
    {
        *(aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor, aten.clamp.default),
        aten.nan_to_num.default,
    }
)
PathTo = Callable[[fx.Node], list[fx.Node] | None]


@dataclasses.dataclass
class Scores:
    """Product of queries and keys, with the effect of the operators applied to it so far.

    Attributes:
        product: node of the product.
        left, right: its operands, query and keys in either order.
        depth: dimension that the product sums over.
        dims: dimensions of the scores after the operators so far.
        scale: factor of the product, inside the soft cap if there is one.
        cap: soft cap, as in `cap * tanh(scale * product)`; None without one.
        by: (operator, operand) of products and quotients with tensors, or with numbers known only at the call.
        gates: factors of the softmax weights; proved later to be one, except where keys are hidden.
        masks: tensors that were added, or if boolean, True where scores were not replaced.
        sinks: column concatenated to the scores; `has_sinks_in_front`: it comes before the first key.
        constant: tensors added to scores and sinks alike, which must not depend on the key.
        filler: largest number that replaced scores, minus the `shift` that they had then.
        shift: number added to all scores.
        shifts: tensors that were added before scores were replaced.
        has_unknown_filler: a number known only at the call replaced scores.
        further: scores of further features that were added.
        path_to: returns the path from a product of activations to a node computed from it; None for other nodes.
    """

    product: fx.Node
    left: Arranged
    right: Arranged
    depth: Dim
    dims: list[Dim]
    scale: float = 1.0
    cap: float | None = None
    by: list[tuple[Any, Arranged | fx.Node]] = dataclasses.field(default_factory=list)
    gates: list[Arranged] = dataclasses.field(default_factory=list)
    masks: list[Arranged] = dataclasses.field(default_factory=list)
    sinks: Arranged | None = None
    has_sinks_in_front: bool = False
    constant: list[Arranged] = dataclasses.field(default_factory=list)
    filler: float = -math.inf
    shift: float = 0.0
    shifts: list[Arranged] = dataclasses.field(default_factory=list)
    has_unknown_filler: bool = False
    further: list[Scores] = dataclasses.field(default_factory=list)
    path_to: PathTo = lambda _: None

    @classmethod
    def along(cls, path: list[fx.Node], path_to: PathTo) -> Scores:
        """Return the scores at the end of a path that starts at the product; raises `Mismatch`."""
        scores = cls.of(path[0])
        scores.path_to = path_to
        for source, node in itertools.pairwise(path):
            scores.follow(node, source)
        return scores

    @classmethod
    def of(cls, node: fx.Node) -> Scores:
        """Return the scores that the product itself makes; raises `Mismatch`."""
        left, right = (Arranged.of(arg, scaled=True) for arg in node.args[-2:])
        outer, rows, depth, columns = product_dims(left, right)
        scores = cls(node, left, right, depth, [*outer, rows, columns], left.scale * right.scale)
        if node.target is aten.baddbmm.default:
            beta, alpha = (float(node.kwargs.get(name, 1)) for name in ("beta", "alpha"))
            scores.scale *= alpha
            if beta:
                added = node.args[0]
                added = added if beta == 1 else call(added.graph, aten.mul.Tensor, added, beta)
                scores.masks.append(Arranged.within(added, scores.dims))
        return scores

    def follow(self, node: fx.Node, source: fx.Node) -> None:
        """Apply the effect of a node whose operand `source` is the scores; raises `Mismatch`."""
        target = node.target
        if target in MOVES:
            self.dims = moved(node, self.dims)
        elif target in CASTS:
            if not node.meta["val"].is_floating_point():
                raise Mismatch("scores as integers")
        elif target is aten.neg.default:
            self._multiply(-1.0)
        elif target is aten.tanh.default:
            if self.is_changed:
                raise Mismatch("a tanh of scores that are capped or masked already")
            self.cap = 1.0
        elif target in PRODUCTS | QUOTIENTS:
            self._scale(node, source)
        elif target in SUMS:
            self._add(node, source)
        elif (selected := where_of(node)) is not None:
            self._fill(node, source, *selected)
        elif target in FLOORS:
            self._floor(node, source)
        elif target is aten.cat.default:
            self._join(node, source)
        else:
            raise Mismatch(f"{target} of scores")

    def _other(self, node: fx.Node, source: fx.Node) -> Any:
        first, second = node.args[:2]
        if first is not source and node.target not in PRODUCTS | SUMS - DIFFERENCES:
            raise Mismatch(f"{node.target} by scores")
        return second if first is source else first

    def _multiply(self, number: float) -> None:
        """Multiply the scores by a number, and so their cap, masks and shift."""
        if number <= 0 and (self.masks or self.sinks is not None):
            raise Mismatch("masked scores of the other sign")
        if self.sinks is not None:
            raise Mismatch("a scale of scores that have sinks already")
        if number == 0 and self.cap is not None:
            raise Mismatch("a soft cap of zero")
        if self.filler > -math.inf:
            self._forbid(self.filler * number)
        self.shift *= number
        self.masks = [_scaled(mask, number) if is_added(mask) else mask for mask in self.masks]
        if self.cap is not None:
            self.cap *= abs(number)
            number = -1.0 if number < 0 else 1.0
        for scores in (self, *self.further):
            scores.scale *= number

    def _scale(self, node: fx.Node, source: fx.Node) -> None:
        other, is_quotient = self._other(node, source), node.target in QUOTIENTS
        number = number_of(other)
        if is_quotient and number == 0:
            raise Mismatch("scores divided by zero")
        if number is not None:
            self._multiply(1.0 / number if is_quotient else number)
            return
        if self.is_changed or self.further:
            raise Mismatch("a scale of several numbers for scores that are capped or masked already")
        target = aten.div.Tensor if is_quotient else aten.mul.Tensor
        self.by.append((target, self.beside(other, node) if has_tensor(other) else other))

    def _add(self, node: fx.Node, source: fx.Node) -> None:
        if sum_of(node) is None:  # `alpha` may multiply the scores themselves
            raise Mismatch("a bias times a number")
        other = self._other(node, source)
        if (number := number_of(other)) is not None and abs(number) < -FORBIDDEN and self.sinks is None:
            self.shift += -number if node.target in DIFFERENCES else number  # the softmax does not change
            return
        if not isinstance(other, fx.Node) or not has_tensor(other):
            raise Mismatch("a number added to scores")
        if (path := self.path_to(other)) is not None:
            self._join_features(Scores.along(path, self.path_to), node)
            return
        other = cast(other, node.meta["val"].dtype)  # else sums of masks would round, or small integers wrap
        if node.target in DIFFERENCES:
            other = call(node.graph, aten.neg.default, other)
        (self.masks if self.sinks is None else self.constant).append(self.beside(other, node))

    @property
    def is_changed(self) -> bool:
        """Return whether the scores are more than a scaled product."""
        is_bounded = self.filler > -math.inf
        return self.cap is not None or bool(self.masks) or self.sinks is not None or self.shift != 0 or is_bounded

    def _join_features(self, other: Scores, node: fx.Node) -> None:
        """Add the scores of other features, or subtract them."""
        if self.is_changed or other.is_changed or self.by or other.by:
            raise Mismatch("a sum of scores that are scaled by several numbers, capped or masked already")
        if node.target is aten.sub.Tensor:
            other._multiply(-1.0)
        unify(self.dims, other.dims)
        self.further += [other, *other.further]

    def _fill(self, node: fx.Node, source: fx.Node, condition: fx.Node, value: Any, other: Any) -> None:
        if self.sinks is not None:
            raise Mismatch("a mask of scores that have sinks already")
        fills_where_true = other is source
        filler = value if fills_where_true else other
        number, graph = number_of(filler), node.graph
        if number is None:  # known only at the call, which tests the mask
            if self.shift:
                raise Mismatch("scores that are shifted, then replaced by a number known only at the call")
            self.has_unknown_filler = True
            self.shifts += filter(is_added, self.masks)
            zeros, poison = (call(graph, aten.full_like.default, filler, number) for number in (0.0, 1.0))
            forbids = call(graph, aten.le.Scalar, filler, FORBIDDEN)
            never = call(graph, aten.where.self, forbids, filler, poison)  # 1.0 fails the call's test of its masks
            parts = (never, zeros) if fills_where_true else (zeros, never)
            self.masks.append(self.beside(call(graph, aten.where.self, condition, *parts), node))
            return
        self._forbid(number - self.shift)
        self.shifts += filter(is_added, self.masks)
        allowed = call(graph, aten.logical_not.default, condition) if fills_where_true else condition
        self.masks.append(self.beside(allowed, node))

    def _forbid(self, filler: float) -> None:
        """Note a number that replaces scores, less their shift; raises `Mismatch` if it does not hide keys."""
        if filler > FORBIDDEN:
            raise Mismatch(f"scores replaced by {filler:g}, which do not forbid (at most {FORBIDDEN:g} does)")
        self.filler = max(self.filler, filler)

    def follow_weights(self, node: fx.Node, source: fx.Node, dims: list[Dim]) -> None:
        """Apply the effect of a node whose operand `source` is the softmax weights, of `dims`; raises `Mismatch`."""
        gate = self._other(node, source) if node.target is aten.mul.Tensor else self._kept(node, source)
        is_alike = isinstance(gate, fx.Node) and has_tensor(gate) and sizes(node) == sizes(source)
        if not is_alike or len(sizes(gate)) > len(dims):
            raise Mismatch(f"{node.target} of the weights that a softmax gives")
        self.gates.append(Arranged.within(gate, dims))

    def _kept(self, node: fx.Node, source: fx.Node) -> fx.Node | None:
        """Return the condition under which a node leaves weights as they are; None if others do not become zero."""
        selected = where_of(node)
        assert selected is not None
        condition, value, other = selected
        stays = value is source
        if number_of(other if stays else value) != 0:
            return None
        return condition if stays else call(node.graph, aten.logical_not.default, condition)

    def _floor(self, node: fx.Node, source: fx.Node) -> None:
        """Apply a lower bound of the scores, such as `finfo.min`, as a filler of hidden keys.

        `nan_to_num` is one for keys that are hidden already, since scores are finite.
        """
        if node.target is aten.nan_to_num.default:
            floor = node.args[3] if len(node.args) > 3 else None
            floor = torch.finfo(node.meta["val"].dtype).min if floor is None else floor
        else:
            floor = number_of(node.args[1] if node.args[0] is source else node.args[0])
            floor = floor if len(node.args) == 2 else None
        if floor is None:
            raise Mismatch("scores that are bounded")
        self._forbid(floor - self.shift)
        self.shifts += filter(is_added, self.masks)

    def _join(self, node: fx.Node, source: fx.Node) -> None:
        parts = node.args[0]
        if len(parts) != 2 or self.sinks is not None or self.shift:
            raise Mismatch("several columns beside the scores")
        self.has_sinks_in_front = parts[1] is source
        sinks = Arranged.of(parts[0] if self.has_sinks_in_front else parts[1])
        dim = dim_of(node)
        if sinks.dims[dim]:
            raise Mismatch("several columns beside the scores")
        if number_of(sinks.base) is not None:  # the same for all heads and queries
            sinks = dataclasses.replace(sinks, own=[[] for _ in sinks.own])
        unify(self.dims[:dim] + self.dims[dim + 1 :], sinks.dims[:dim] + sinks.dims[dim + 1 :])
        self.sinks = sinks

    def beside(self, node: fx.Node, result: fx.Node) -> Arranged:
        """Return the other operand of a node on scores; raises `Mismatch` if `result` is larger than the scores."""
        if len(result.meta["val"].shape) != len(self.dims):
            raise Mismatch("scores that are repeated")
        if any(not dim and size != 1 for dim, size in zip(self.dims, sizes(result), strict=True)):
            raise Mismatch("scores that are repeated")
        return Arranged.within(node, self.dims)


def is_added(mask: Arranged) -> bool:
    """Return whether a mask is added to scores; otherwise it is boolean."""
    return mask.base.meta["val"].dtype is not torch.bool


def _scaled(mask: Arranged, number: float) -> Arranged:
    return dataclasses.replace(mask, base=call(mask.base.graph, aten.mul.Tensor, mask.base, number))
