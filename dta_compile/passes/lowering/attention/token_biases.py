"""Extract learned biases by token: numbers that parameters give to a key, whatever the query, or to a query.

The bias of a key is one more feature of the keys, whose feature of the query is one (`rewrite`). The Forgetting
Transformer (arXiv 2503.02130) adds `f(q) - f(k)` with a running sum `f` of gates. A softmax ignores `f(q)`, which is a
feature of the query all the same: both are large, and so are their gradients, far from the first token.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from torch import fx

from dta_compile.passes.axes.shape_rules import Labels, labels_in
from dta_compile.passes.graphs.arguments import sum_of, where_of
from dta_compile.passes.graphs.nodes import call, is_float
from dta_compile.passes.graphs.operators import CASTS, RESHAPES, aten
from dta_compile.passes.lowering.attention.distances import Distances, Slope, hides
from dta_compile.passes.lowering.attention.factors import number_of
from dta_compile.passes.program import ancestors, has_tensor


class TokenBiases(Distances):
    """Analysis like that of `Distances`, with values by key or by query in the place of slopes.

    Args:
        weights: the inputs that are parameters.
        of: label of the tokens.
    """

    COMPUTES = False

    def __init__(
        self,
        graph: fx.Graph,
        dtype: torch.dtype,
        exact: bool = False,
        *,
        weights: Collection[fx.Node],
        of: Literal["q", "k"] = "k",
    ) -> None:
        super().__init__(graph, dtype, exact)
        self.weights, self.of, self.other = weights, of, "k" if of == "q" else "q"

    def split(self, node: fx.Node, labels: Labels) -> tuple[fx.Node | None, Slope] | None:
        """Split a bias as `Distances` does, but leave the parts of a difference that is rounded as precise as they are.

        Both may be large where their difference is small, far from the first token.
        """
        if node.target in CASTS and is_float(node):
            parts = self.split(node.args[0], labels)
            if parts is None or (parts[0] is not None and not self._is_data(parts[0])):
                return parts
        return super().split(node, labels)

    def _is_data(self, node: fx.Node) -> bool:
        return ancestors([node], stop=lambda value: not has_tensor(value)).isdisjoint(self.weights)

    def _slope(self, node: fx.Node, labels: Labels) -> Slope | None:
        if self.of in labels:
            return super()._slope(node, labels) if "k" in labels else self._own(node, labels)
        is_value = isinstance(node, fx.Node) and has_tensor(node)
        return None if "k" in labels or (is_value and self._is_learned(node, labels)) else self.of_none

    def _own(self, node: fx.Node, labels: Labels) -> Slope | None:
        is_of_token = self.other not in labels and labels.count(self.of) == 1
        return node if is_of_token and is_float(node) and self._is_learned(node, labels) else None

    def _is_learned(self, node: fx.Node, labels: Labels) -> bool:
        """Return whether a value comes from parameters, and no part of it may hide keys, as a mask does."""
        if (moved := self._source(node, labels)) is not None:
            return self._is_learned(*moved)
        selected, added = where_of(node), sum_of(node)
        parts = selected[1:] if selected else added[:2] if added else ()
        if not parts:
            return not self._is_data(node)
        values = [part for part in parts if number_of(part) is None]
        if not values or any(map(hides, parts)):
            return False
        return all(isinstance(value, fx.Node) and self._is_learned(value, labels_in(value, labels)) for value in values)

    def _moved(self, node: fx.Node, slope: Slope, labels: Labels) -> Slope | None:
        if not isinstance(slope, fx.Node) or node.target not in RESHAPES:
            return super()._moved(node, slope, labels)
        shape = [1 if label == self.other else size for label, size in zip(labels, node.args[1], strict=True)]
        return call(self.graph, aten.reshape.default, slope, shape)
