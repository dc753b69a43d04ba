"""Rebuild biases that depend on the distance of query and key alone, such as T5's, as tables by distance.

Causal attention reads only keys `k <= q`. Of a bias that is a function of `q - k` for those, the entries of key 0 are
all that there is: that of query `d` holds for the distance `d`. So the *table* `[..., S, 1]` of such a bias is what the
operators of the bias compute of key 0, and has an entry for each token. `Tables.split` proves and builds it, for
`recognise` and `rewrite`: ranges of tokens whose difference is `q - k`, what pointwise operators, look-ups and moves of
entries make of them, with parameters or not, and tensors over pairs of tokens that an input gives, which each call
tests (`ops.distances`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.ops.distances import BY_DEPTH, ENTRIES_BY_DISTANCE, HIDDEN_PAIRS
from dta_compile.passes.axes.shape_rules import Labels, labels_in
from dta_compile.passes.graphs.arguments import argument, indices_of, slice_of, where_of
from dta_compile.passes.graphs.nodes import call, constructed, filled_with, is_float
from dta_compile.passes.graphs.operators import RANGES, RESHAPES, SUMS, aten
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.lowering.attention.distances import Distances, Slope, hides, positions
from dta_compile.passes.lowering.attention.factors import number_of
from dta_compile.passes.lowering.attention.pair_entries import Operands, cut_from, operands_of, over
from dta_compile.passes.program import ancestors, has_tensor
from dta_compile.passes.symbols import sizes, value_of
from dta_compile.proofs.mask_class import CERTAIN, FORBIDDEN
from dta_compile.torch_compat.sizes import statically_known_true

Known = dict[tuple[fx.Node, Labels], fx.Node]


def by_depth(node: fx.Node, weights: Collection[fx.Node]) -> fx.Node:
    """Mark a table that is made of data alone, whose entries tokens read by their depth; others are made of such."""
    return node if _is_learned(node, weights) else call(node.graph, BY_DEPTH, node)


def terms(left: fx.Node, right: fx.Node, weights: Collection[fx.Node]) -> tuple[fx.Node, fx.Node]:
    """Return two tables to be added, with one of data marked beside a learned one; a sum of data is marked itself."""
    if _is_learned(left, weights) is _is_learned(right, weights):
        return left, right
    return by_depth(left, weights), by_depth(right, weights)


def _is_learned(node: fx.Node, weights: Collection[fx.Node]) -> bool:
    """Return whether a value depends on parameters, not only on their sizes."""
    return not ancestors([node], stop=lambda value: not has_tensor(value)).isdisjoint(weights)


class Tables(Distances):
    """Analysis like that of `Distances`, with tables in the place of slopes.

    Args:
        weights: the inputs that are parameters.
        known: the values of key 0 that were built in this graph so far.
    """

    COMPUTES = False  # tables are computed as biases are

    def __init__(
        self, graph: fx.Graph, dtype: torch.dtype, exact: bool = False, *, weights: Collection[fx.Node], known: Known
    ) -> None:
        super().__init__(graph, dtype, exact)
        self.weights, self.known = set(weights), known
        self.proven: dict[tuple[fx.Node, Labels], bool] = {}
        self.tested: set[fx.Node] = set()

    def split(self, node: fx.Node, labels: Labels) -> tuple[fx.Node | None, Slope] | None:
        """Split a bias into a rest and a table; see `Distances.split`."""
        parts = super().split(node, labels)
        if parts is not None or not self._is_table(node, labels) or not self._differs_by_head(node, labels):
            return parts
        query, key = labels.index("q"), labels.index("k")
        hidden = call(self.graph, HIDDEN_PAIRS, node, query, key, FORBIDDEN, CERTAIN)
        hidden = hidden if query < key else call(self.graph, aten.transpose.int, hidden, 0, 1)
        for dim, label in enumerate(labels):
            hidden = hidden if label else call(self.graph, aten.unsqueeze.default, hidden, dim)
        dtypes = {node.meta["val"].dtype, self.dtype}
        is_free = self.of_none is not None and is_float(node) and node.meta["val"].dtype.itemsize >= 4
        rounding = 2 * min(torch.finfo(dtype).eps for dtype in dtypes) if is_free else 0.0
        return hidden, self._entries(node, labels, rounding)

    def _slope(self, node: fx.Node, labels: Labels) -> Slope | None:
        """Return the table of a bias; 0.0 if it has no keys, None if it is no function of the distance, or a mask."""
        if "k" not in labels:
            return self.of_none
        affine = self._affine(node, labels)
        if affine is not None and affine[:2] == (0, 0):
            return self.of_none
        if "q" not in labels or not self._is_bias(node, labels) or not self._is_of_distance(node, labels):
            return None
        tested = self.tested & ancestors([node])
        may_hide = any(map(is_float, tested)) or (tested and not self._differs_by_head(node, labels))
        return None if may_hide and not self._learned(node) else self._of_key_0(node, labels)  # else see `split`

    def _terms(self, left: fx.Node, right: Slope) -> tuple[fx.Node, Slope]:
        return terms(left, right, self.weights) if isinstance(right, fx.Node) else (left, right)

    def _moved(self, node: fx.Node, slope: Slope, labels: Labels) -> Slope | None:
        if not isinstance(slope, fx.Node):
            return slope
        return self._again(node, labels, {node.args[0]: slope})

    def _learned(self, node: fx.Node) -> bool:
        return _is_learned(node, self.weights)

    def _differs_by_head(self, node: fx.Node, labels: Labels) -> bool:
        return any(label is None and size != 1 for label, size in zip(labels, sizes(node), strict=True))

    def _is_bias(self, node: Any, labels: Labels) -> bool:
        """Return whether a value of pairs is no mask, nor made of one: a table would lack which keys it hides."""
        if not {"q", "k"} <= set(labels):
            return True
        if (moved := self._source(node, labels)) is not None:
            return self._is_bias(*moved)
        selected = where_of(node)
        values = node.args[:2] if node.target in SUMS else () if selected is None else selected[1:]
        is_made_of = all(not hides(arg) and self._is_bias(arg, labels_in(arg, labels)) for arg in values)
        is_own = self._differs_by_head(node, labels) or self._learned(node) or self._is_arithmetic(node)
        return is_made_of and is_own

    def _is_arithmetic(self, node: fx.Node) -> bool:
        """Return whether a value is computed without conditions and without numbers that may hide keys."""
        nodes = ancestors([node])
        numbers = [number_of(arg) for each in nodes for arg in (*each.args, *each.kwargs.values())]
        is_low = any(number is not None and not abs(number) < -FORBIDDEN for number in numbers)
        return not is_low and all(getattr(each.meta.get("val"), "dtype", None) is not torch.bool for each in nodes)

    def _is_of_distance(self, node: fx.Node, labels: Labels) -> bool:
        """Return whether the entries of a value depend on the distance `q - k >= 0` alone, and on no sequence."""
        if (node, labels) not in self.proven:
            self.proven[node, labels] = self._proof(node, labels)
        return self.proven[node, labels]

    def _proof(self, node: fx.Node, labels: Labels) -> bool:
        if any(label is None and not size.is_number for label, size in zip(labels, sizes(node), strict=True)):
            return False
        if not over(labels):
            return True
        affine = self._affine(node, labels) if set(labels) <= {"q", "k", None} else None
        if affine is not None and affine[0] + affine[1] == 0:
            return True
        operands = operands_of(node, labels)
        if operands and all(self._is_of_distance(*operand) for operand in operands):
            return True
        if (picked := self._picked(node, labels) or self._cut(node, labels)) is not None:
            self.known[node, labels] = picked
            return True
        if not self._is_table(node, labels):
            return False
        self.tested.add(node)
        return True

    def _is_table(self, node: fx.Node, labels: Labels) -> bool:
        """Return whether a call can test the entries of a value over pairs: of data, alike for all sequences."""
        is_alike = all(label or size.is_number for label, size in zip(labels, sizes(node), strict=True))
        return is_alike and labels.count("q") == labels.count("k") == 1 and not self._learned(node)

    def _picked(self, node: fx.Node, labels: Labels) -> fx.Node | None:
        """Build the entries of key 0 of rows that are picked from a value by distance; None if they are none.

        The value may have a row for each distance, which a prefix tree has no place for: an embedding of a range, or
        what a network makes of one. So the rows are computed of those that are picked from the range.
        """
        if node.target not in (aten.index.Tensor, aten.embedding.default):
            return None
        if node.target is aten.embedding.default and argument(node, "padding_idx") not in (None, -1):
            return None  # the row without a gradient is one of the embedding
        source, ((dim, index), *others) = node.args[0], indices_of(node).items()
        own = labels[dim : dim + len(sizes(index))]
        if others or own not in (("q", "k"), ("k", "q"), ("qk",), ("kq",)) or over(labels) != over(own):
            return None
        if index.meta["val"].dtype is not torch.int64 or not self._is_of_distance(index, own):
            return None
        rows = call(self.graph, aten.reshape.default, self._of_key_0(index, own), [-1])
        picked = self._at_rows(source, tuple("r" if i == dim else None for i in range(len(sizes(source)))), rows)
        if picked is None or len(own) == 1:
            return picked
        return call(self.graph, aten.unsqueeze.default, picked, dim + own.index("k"))

    def _cut(self, node: fx.Node, labels: Labels) -> fx.Node | None:
        """Build the entries of key 0 of what a learned value over more tokens is cut to; None if they are none."""
        if "k" not in labels or not self._learned(node) or (cut := cut_from(node, labels)) is None:
            return None
        if not self._is_of_distance(*cut):
            return None
        table, dim = self._of_key_0(*cut), labels.index("q")
        length, like = call(self.graph, aten.sym_size.int, node, dim), node.meta["val"]
        with like.fake_mode:
            rows = positions(self.graph, length, torch.empty(0, dtype=torch.int64, device=like.device))
        return self._at_rows(table, tuple("r" if label == "q" else None for label in labels), rows)

    def _at_rows(self, node: fx.Node, labels: Labels, rows: fx.Node) -> fx.Node | None:
        """Build the entries of a value at some rows, those along the dimension "r"; None if they depend on others."""
        if "r" not in labels:
            is_number = all(size.is_number for size in sizes(node))
            return node if is_number else None
        dim = labels.index("r")
        node = node.args[0] if node.target is BY_DEPTH else node
        if not self._learned(node):
            return by_depth(call(self.graph, aten.index.Tensor, node, [None] * dim + [rows]), self.weights)
        if sizes(node)[dim].is_number:
            return call(self.graph, aten.index.Tensor, node, [None] * dim + [by_depth(rows, self.weights)])
        if (part := slice_of(node)) is not None and part.dim == dim:
            length = call(self.graph, aten.sym_size.int, node, dim)
            if not statically_known_true(value_of(part.start) >= 0):
                return None
            rows = call(self.graph, aten.remainder.Scalar, rows, length)
            return self._at_rows(part.source, labels, call(self.graph, aten.add.Scalar, rows, part.start))
        if (operands := operands_of(node, labels)) is None:
            return None
        values = {arg: self._at_rows(arg, own, rows) for arg, own in operands}
        return None if None in values.values() else self._again(node, labels, values)

    def _of_key_0(self, node: fx.Node, labels: Labels) -> fx.Node:
        """Build the entries of key 0 of a value, with a key dimension of size one."""
        if "k" not in over(labels):
            return node
        if (node, labels) not in self.known:
            self.known[node, labels] = self._built(node, labels)
        return self.known[node, labels]

    def _built(self, node: fx.Node, labels: Labels) -> fx.Node:
        number, operands = filled_with(node), operands_of(node, labels)
        if isinstance(number, (bool, int, float)):
            value, shape = node.meta["val"], list(sizes(node))
            for dim, (label, size) in enumerate(zip(labels, sizes(node), strict=True)):
                is_known = label == "k" or size.is_number
                shape[dim] = int(label == "k" or size) if is_known else call(self.graph, aten.sym_size.int, node, dim)
            return constructed(self.graph, aten.full.default, shape, number, like=value)
        if operands is None or node in self.tested:
            return self._entries(node, labels)
        return self._again(node, labels, {arg: self._of_key_0(arg, own) for arg, own in operands}, operands)

    def _entries(self, node: fx.Node, labels: Labels, rounding: float = 0.0) -> fx.Node:
        """Build the entries of key 0 of a table of data, or of a range; `rounding` as in `ops.distances`."""
        dim = labels.index("k")
        if "q" not in labels or node.target in RANGES:
            return call(self.graph, aten.slice.Tensor, node, dim, 0, 1)
        return call(self.graph, ENTRIES_BY_DISTANCE, node, labels.index("q"), dim, rounding, where(node))

    def _again(
        self, node: fx.Node, labels: Labels, values: dict[fx.Node, fx.Node], operands: Operands | None = None
    ) -> fx.Node:
        """Build a call like a node over the entries of key 0, `values`; data are marked where parameters are added."""
        if operands is not None and self._learned(node):
            of_tokens = {arg for arg, own in operands if "q" in over(own)}
            values = {
                arg: by_depth(value, self.weights) if arg in of_tokens else value for arg, value in values.items()
            }
        args = fx.node.map_arg(node.args, lambda arg: values.get(arg, arg))
        if node.target in RESHAPES | {aten.expand.default}:
            shapes = zip(labels, node.args[1], sizes(node), strict=True)
            args = args[0], [_size(label, argument, size) for label, argument, size in shapes]
        return call(self.graph, node.target, *args, **node.kwargs)


def _size(label: str | None, argument: Any, size: sympy.Expr) -> Any:
    """Return a size that a reshape of the entries of key 0 takes, for that of all keys."""
    if label == "k":
        return 1
    return argument if label == "q" else -1 if label else int(size)
