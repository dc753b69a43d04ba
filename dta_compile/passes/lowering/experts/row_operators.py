"""Apply operators on selected rows to all rows instead, if token rules prove that they treat each row by itself.

Called by `selected_rows` and `sorted_slots`. At tokens that are not selected, values enter as zeros, and
most operators make finite values of zeros and parameters. Where a value or derivative may be infinite there (`rsqrt`,
`log`, `div`), arguments are filled with ones and results with zeros at these tokens, so that no NaN of 0 * inf spreads,
forward or backward.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.executable.layouts import Axis, Frame, Layout
from dta_compile.ops.experts.operators import EXPERT_LINEAR
from dta_compile.ops.library import is_random
from dta_compile.ops.mixer import MIXERS
from dta_compile.passes.axes.layouts import Arguments, MixesTokens
from dta_compile.passes.axes.tokenwise_operators import rule_for
from dta_compile.passes.graphs.arguments import select_of
from dta_compile.passes.graphs.nodes import call, is_finite, is_item, raised, repeated, swaps
from dta_compile.passes.graphs.operators import (
    LOOKUPS,
    SAME_ENTRIES,
    TAKE_A_SHAPE,
    TRANSPOSITIONS,
    aten,
    is_tagged_pointwise,
)
from dta_compile.passes.program import has_tensor
from dta_compile.passes.symbols import depends_on_data, expression, sizes, symbolic, value_of
from dta_compile.torch_compat.tensors import tree_leaves

CHECKS = (aten._assert_scalar.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default)
# Operators with arguments that are indices.
INDEXED = LOOKUPS | {aten.index.Tensor, aten.scatter.src, aten.scatter.value}


# One frame for the selected rows of a condition: `nonzero` and `x[mask]` may have different symbols for their number.
SELECTED = Frame(sympy.Integer(0), sympy.Symbol("selected", integer=True, nonnegative=True))


class Unproven(Exception):
    """An operator is not proven to treat each selected row by itself, or cannot be applied to all tokens."""

    def __init__(self, reason: str, node: fx.Node) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node


@dataclasses.dataclass
class Rows:
    """Value over selected rows, replaced by a value over all rows: tokens, or (token, slot) pairs.

    Attributes:
        value: the value over all rows.
        place: the dimension of rows.
        is_masked: whether entries at rows that are not selected come from zeros and parameters alone, not from data.
    """

    value: fx.Node
    place: int
    is_masked: bool


class RowOperators:
    """Replacements of the values that are computed from the rows which one condition selects.

    Attributes:
        selected: `[N]` bool, the selected rows; None: all rows are.
        is_count: tells whether a size depends on the number of selected rows.
        tokens: the node of a row's number of tokens if rows are whole sequences; None: they are tokens, or slots.
        sizes: by node, the replacement of a size that depends on the number of selected rows.
    """

    def __init__(
        self, graph: fx.Graph, selected: fx.Node | None, is_count: Callable[[sympy.Expr], bool] = depends_on_data
    ) -> None:
        self.graph, self.selected, self.is_count = graph, selected, is_count
        self.tokens: fx.Node | None = None
        self.sizes: dict[fx.Node, Any] = {}
        self._rows: dict[fx.Node, Rows] = {}
        self._tuples: dict[fx.Node, list[Rows | None]] = {}
        self._layouts: dict[fx.Node, Layout] = {}
        self._cached: dict[Any, fx.Node] = {}

    def knows(self, node: fx.Node) -> bool:
        """Return whether a node is computed from selected rows or from their number."""
        return node in self._rows or node in self._tuples or node in self.sizes

    def is_rows(self, node: fx.Node) -> bool:
        """Return whether a node's value is over selected rows."""
        return node in self._rows

    def of(self, node: fx.Node) -> Rows:
        """Return the replacement of a value over selected rows."""
        return self._rows[node]

    def count(self) -> fx.Node:
        """Return the node of the number of all rows."""
        assert self.selected is not None
        return self._once("count", lambda: call(self.graph, aten.sym_size.int, self.selected, 0))

    def enter(self, node: fx.Node, rows: Rows) -> None:
        """Record the replacement of the rows that a node selects."""
        layout = self._layout(node)
        if self._place(layout) != rows.place:
            raise Unproven(f"{node.target}: it selects rows along several dimensions", node)
        self._rows[node], self._layouts[node] = rows, layout

    def aligned(self, node: fx.Node, rank: int, place: int, reader: fx.Node) -> fx.Node:
        """Return the value of a node with `rank` dimensions, rows along dimension `place`."""
        rows = self._rows[node]
        missing = rank - len(sizes(node))
        if missing < 0 or rows.place + missing != place:
            raise Unproven(f"{reader.target}: the selected rows lie along another dimension", reader)
        return raised(rows.value, missing)

    def visit(self, node: fx.Node) -> None:
        """Compute a node over all rows, before the node itself.

        Raises:
            Unproven: the operator is not proven to treat each row by itself.
        """
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat, int, float, bool)):
            self.sizes[node] = self._size(node)
        elif is_item(node):
            rows = self._tuples[node.args[0]][node.args[1]]
            assert rows is not None
            self._rows[node], self._layouts[node] = rows, self._layout(node)
        else:
            self._compute(node)

    def _size(self, node: fx.Node) -> Any:
        if node.target is aten.sym_size.int:
            value, dim = self._rows[node.args[0]].value, node.args[1]
            size = sizes(value)[dim]
            return call(self.graph, aten.sym_size.int, value, dim) if size.free_symbols else int(size)
        args = fx.node.map_arg(node.args, lambda arg: self.sizes.get(arg, arg))
        return call(self.graph, node.target, *args)

    # ---- One operator

    def _compute(self, node: fx.Node) -> None:
        layouts = self._prove(node)
        if any(self._place(layout) is None for layout in (layouts if isinstance(layouts, tuple) else (layouts,))):
            raise Unproven(f"{node.target}: its result does not lie along the selected rows", node)
        rows = [self._rows[arg] for arg in node.all_input_nodes if arg in self._rows]
        is_masked = node.target not in SAME_ENTRIES or all(each.is_masked for each in rows)
        value = self._applied(node, layouts)
        value.meta = {**node.meta, "val": value.meta["val"]}
        if isinstance(layouts, tuple):
            self._tuples[node] = [
                Rows(self._item(value, i), self._place(layout), True)  # type: ignore[arg-type]
                for i, layout in enumerate(layouts)
            ]
        else:
            place = self._place(layouts)
            assert place is not None
            self._rows[node] = Rows(value, place, is_masked)
            self._layouts[node] = layouts

    def _item(self, value: fx.Node, number: int) -> fx.Node:
        item = self.graph.call_function(operator.getitem, (value, number))
        item.meta = {**value.meta, "val": value.meta["val"][number]}
        return item

    def _prove(self, node: fx.Node) -> Layout | tuple[Layout, ...]:
        """Return the layout of the result, or of each result; raise Unproven unless each row is treated by itself."""
        self._require_sizes_in_place(node)
        if is_random(node.target):
            raise Unproven(f"{node.target} draws random numbers for selected rows", node)
        if node.target is aten.full.default:
            return self._layout(node)
        rule = rule_for(node.target) if node.target not in MIXERS else None
        if rule is None:
            raise Unproven(f"{node.target} has no token-wise rule", node)
        layouts = {arg: self._layout_of(node, arg) for arg in node.all_input_nodes if has_tensor(arg)}
        try:
            derived = rule(node, Arguments(layouts, dense=lambda arg: False))
        except MixesTokens as mixes:
            raise Unproven(f"{node.target}: {mixes}", node) from None
        results = node.meta["val"] if isinstance(derived, tuple) else [node.meta["val"]]
        for layout, result in zip(derived if isinstance(derived, tuple) else [derived], results, strict=True):
            if layout.dims != self._dims(node, result):
                raise Unproven(f"{node.target}: its result does not lie along the selected rows", node)
        return derived

    def _dims(self, node: fx.Node, value: torch.Tensor) -> tuple[Axis | None, ...]:
        """Return the axes of a value: TOKEN for a dimension of selected rows, or BATCH if these are sequences."""
        return tuple(self._axis(node, expression(size)) for size in value.shape)

    def _axis(self, node: fx.Node, size: sympy.Expr) -> Axis | None:
        tokens = None if self.tokens is None else expression(self.tokens.meta["val"])
        if not self.is_count(size):
            return Axis.TOKEN if size == tokens else None
        if size.is_Symbol or not depends_on_data(size):
            return Axis.TOKEN if tokens is None else Axis.BATCH
        if tokens is None or not (size / tokens).is_Symbol:
            raise Unproven(f"{node.target}: selected rows are merged with other dimensions", node)
        return Axis.ROWS

    def _place(self, layout: Layout) -> int | None:
        """Return the dimension of selected rows, alone or flattened with their tokens."""
        if self.tokens is None:
            return layout.token_dim
        return next((i for i, axis in enumerate(layout.dims) if axis in (Axis.BATCH, Axis.ROWS)), None)

    def _layout(self, node: fx.Node) -> Layout:
        layout = self._framed(self._dims(node, node.meta["val"]))
        if sum(axis is Axis.TOKEN for axis in layout.dims) > 1 or self._place(layout) is None:
            raise Unproven(f"{node.target}: its result does not lie along the selected rows", node)
        return layout

    def _framed(self, dims: tuple[Axis | None, ...]) -> Layout:
        frame = SELECTED if self.tokens is None else Frame(sympy.Integer(0), expression(self.tokens.meta["val"]))
        return Layout(dims, frame if Layout(dims).token_dim is not None else None)

    def _require_sizes_in_place(self, node: fx.Node) -> None:
        """Raise Unproven if the number of selected rows is used as anything but a size of the result."""
        position = 0 if node.target is aten.full.default else 1 if node.target in TAKE_A_SHAPE else None
        for i, arg in enumerate([*node.args, *node.kwargs.values()]):
            if i != position and any(size in self.sizes for size in tree_leaves(arg)):
                raise Unproven(f"{node.target}: how many rows are selected is used as a number", node)

    def _layout_of(self, node: fx.Node, arg: fx.Node) -> Layout:
        if arg in self._tuples:
            raise Unproven(f"{node.target} takes several results at once", node)
        if arg in self._rows:
            return self._layouts[arg]
        if any(map(self.is_count, sizes(arg))):
            raise Unproven(f"{node.target}: it combines rows that different conditions select", node)
        return self._framed(self._dims(node, arg.meta["val"]))

    def _applied(self, node: fx.Node, layouts: Any) -> fx.Node:
        """Insert the operator over all rows."""
        if self.selected is not None and (product := self._expert(node)) is not None:
            return product
        if node.target in SAME_ENTRIES or self.selected is None:
            return self._call(node, self._value)
        if is_finite(node):
            return self._call(node, self._masked)
        if node.target in INDEXED:
            return self._call(node, lambda arg: self._filled(arg, 0))
        if isinstance(layouts, tuple) or not (is_tagged_pointwise(node.target) or len(node.all_input_nodes) == 1):
            raise Unproven(f"{node.target} is not known to be finite at tokens that are not selected", node)
        result = self._call(node, lambda arg: self._filled(arg, 1, everywhere=layouts))
        return self._fill(result, layouts, 0)

    def _call(self, node: fx.Node, of: Any) -> fx.Node:
        def mapped(arg: fx.Node) -> Any:
            return self.sizes[arg] if arg in self.sizes else of(arg)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), mapped)
        return call(self.graph, node.target, *args, **kwargs)

    def _value(self, arg: fx.Node) -> fx.Node:
        return self._rows[arg].value if arg in self._rows else arg

    def _masked(self, arg: fx.Node) -> fx.Node:
        """Return a value that is masked: no data at rows that are not selected."""
        if arg not in self._rows or self._rows[arg].is_masked:
            return self._value(arg)
        return self._once(("masked", arg), lambda: self._filled(arg, 0))

    def _filled(self, arg: fx.Node, number: int, everywhere: Layout | None = None) -> fx.Node:
        """Fill a value with a number at rows that are not selected.

        Args:
            everywhere: the layout to which values that all rows share are expanded and filled, too; None: they are
                left.
        """
        if not has_tensor(arg):
            return arg
        if arg in self._rows:
            return self._fill(self._value(arg), self._layouts[arg], number)
        if everywhere is None or not arg.meta["val"].is_floating_point():
            return arg
        return self._fill(arg, everywhere, number)

    def _fill(self, value: fx.Node, layout: Layout, number: int) -> fx.Node:
        place = self._place(layout)
        assert place is not None
        outside = self._outside(len(layout.dims) - 1 - place, layout.dims[place] is Axis.ROWS)
        return call(self.graph, aten.masked_fill.Scalar, value, outside, number)

    def _outside(self, ones: int, by_token: bool) -> fx.Node:
        """Return `[N, 1, ...]` bool, the rows that are not selected, with that many dimensions of size 1."""

        def make() -> fx.Node:
            return raised(call(self.graph, aten.logical_not.default, self._selected(by_token)), ones, -1)

        return self._once(("outside", ones, by_token), make)

    def _selected(self, by_token: bool) -> fx.Node:
        """Return the selected rows, `[N]`, or for each of their tokens whether its row is selected, `[N * S]`."""
        assert self.selected is not None
        if not by_token:
            return self.selected
        return repeated(self.selected, self.tokens)

    def _once(self, key: Any, make: Any) -> fx.Node:
        if key not in self._cached:
            self._cached[key] = make()
        return self._cached[key]

    # ---- Products with a weight

    def _expert(self, node: fx.Node) -> fx.Node | None:
        """Compute a product of rows with a matrix at the selected rows only; None: the operator is another one."""
        bias, *sides = node.args if node.target is aten.addmm.default else (None, *node.args)
        if node.target not in (aten.mm.default, aten.addmm.default, aten.bmm.default) or node.kwargs:
            return None
        left, weight = sides
        is_batched = node.target is aten.bmm.default
        if left not in self._rows or weight in self._rows or self._rows[left].place != int(is_batched):
            return None
        rows = self._value(left)
        if is_batched:
            if sizes(left)[0] != 1:
                return None
            rows = call(self.graph, aten.squeeze.dim, rows, 0)
            transposed, number = True, 0
        else:
            weight, number, transposed = self._stacked(weight)
        numbers = self._numbers(number, Axis.ROWS in self._layouts[left].dims)
        out = call(self.graph, EXPERT_LINEAR, rows, numbers, weight, transposed)
        if is_batched:
            return call(self.graph, aten.unsqueeze.default, out, 0)
        return out if bias is None else call(self.graph, aten.add.Tensor, out, self._masked(bias))

    def _stacked(self, weight: fx.Node) -> tuple[fx.Node, int, bool]:
        """Return stacked weights, the index of a matrix in them, and whether they are `[E, D, O]`, not `[E, O, D]`."""
        transposed = weight.target not in TRANSPOSITIONS or not swaps(weight)
        weight = weight if transposed else weight.args[0]
        stack, dim, number = select_of(weight) or (weight, None, None)
        if dim == 0 and isinstance(number, int):
            return stack, number % stack.meta["val"].shape[0], transposed
        return call(self.graph, aten.unsqueeze.default, weight, 0), 0, transposed

    def _numbers(self, number: int, by_token: bool) -> fx.Node:
        """Return `[N]` expert indices: `number` at the selected rows, -1 (no expert) at the others."""

        def make() -> fx.Node:
            chosen = call(self.graph, aten._to_copy.default, self._selected(by_token), dtype=torch.int64)
            scaled = call(self.graph, aten.mul.Tensor, chosen, number + 1)
            return call(self.graph, aten.sub.Tensor, scaled, 1)

        return self._once(("numbers", number, by_token), make)


def drop_checks_of_numbers(graph: fx.Graph) -> None:
    """Erase Dynamo's assertions that numbers of rows, which no value has any more, are valid sizes."""
    for node in [node for target in CHECKS for node in graph.find_nodes(op="call_function", target=target)]:
        value = value_of(node.args[0])
        expr = symbolic(value)
        if value is True or (expr is not None and (expr == sympy.true or depends_on_data(expr))):
            graph.erase_node(node)
