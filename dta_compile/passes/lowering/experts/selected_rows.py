"""Replace values over the rows that a condition selects, `x[mask]` and `x[torch.where(mask)]`, by values over all rows.

Part of `lower`. A mixture of experts that is written by hand selects the tokens of an expert, computes something per
token, and adds it to the rows they came from. The number of selected rows depends on the data. The replacement is over
all tokens, and those that are not selected do not contribute:

    x[rows]                         x
    rows @ weight                   dta::expert_linear, with an expert at the selected tokens and none at the others
    row-wise operators              the same (`row_operators`)
    out.index_add(0, rows, y)       out + (y where selected, else 0)

A condition may have one dimension more than tokens have, for the slots of a token's k experts. If at most one slot of
a token can be selected, since the experts of a `topk` are distinct, the rows are those of the selected slots. Else each
(token, slot) pair is a row. A condition over sequences, as on their language, selects all tokens of a row. Unproven
selections are left; before the last attention they are refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.errors import FinalRefusal
from dta_compile.ops.mixer import MIXERS
from dta_compile.passes.axes.layouts import batch_and_tokens, mixer_calls
from dta_compile.passes.graphs.arguments import argument, dim_of, indices_of
from dta_compile.passes.graphs.nodes import (
    First,
    SizeNodes,
    call,
    descendants,
    erase_unused,
    is_item,
    raised,
    regrouped,
    repeated,
    swaps,
)
from dta_compile.passes.graphs.operators import CASTS, COPIES, KEEP_ORDER, RESHAPES, SQUEEZES, TRANSPOSITIONS, aten
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.lowering.experts.row_operators import RowOperators, Rows, Unproven, drop_checks_of_numbers
from dta_compile.passes.lowering.experts.slots import at_most_one
from dta_compile.passes.program import ancestors
from dta_compile.passes.symbols import sizes
from dta_compile.torch_compat.sizes import free_unbacked_symbols

ENTRIES = (aten.index.Tensor, aten.index_select.default)
EXITS = (aten.index_add.default, aten.index_put.default, aten.scatter_add.default)
PARTS = (aten.unbind.int, aten.select.int)
ANY_ORDER = "any_order"  # in the meta of a `nonzero` that replaces slots of an unstable sort


def spread_selected_rows(graph: fx.Graph, parameters: Collection[fx.Node]) -> None:
    """Replace every selection of rows whose readers work row by row.

    Args:
        graph: a lowered graph.
        parameters: inputs that gradients may flow to.

    Raises:
        FinalRefusal: a selection is not proven to be used row by row, and precedes the last attention or replaces
            slots that an unstable sort orders.
    """
    first = First(())
    selections = _selections(graph, first)
    mode = next((node.meta["val"].fake_mode for nodes in selections.values() for node in nodes), None)
    for mask, makers in selections.items():
        with mode, torch.no_grad():  # type: ignore[union-attr]
            try:
                _Spreading(graph, first, mask, makers).run()
            except Unproven as unproven:
                _refuse_any_order(makers, unproven)
                _refuse_before_attention(graph, makers, parameters, unproven)
    if selections:
        drop_checks_of_numbers(graph)
        erase_unused(graph)


def _selections(graph: fx.Graph, first: First) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes that select rows, `nonzero` and `x[mask]`, by condition."""
    selections: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        mask = node.args[0] if node.target is aten.nonzero.default else _mask_of(node)
        if (
            mask is not None
            and node.target is not aten.index_put.default
            and any(size.free_symbols for size in sizes(mask))
        ):
            selections.setdefault(_condition(mask, first), []).append(node)
    return selections


def _condition(mask: fx.Node, first: First) -> fx.Node:
    """Return the first node that computes a mask, before reshapes of tokens alone."""
    while mask.target in RESHAPES and all(size.free_symbols for value in (mask, mask.args[0]) for size in sizes(value)):
        mask = mask.args[0]
    return first.like(mask)


def _mask_of(node: fx.Node) -> fx.Node | None:
    """Return the mask of `x[:, ..., mask]` or `x[:, ..., mask] = y`."""
    if node.target not in (aten.index.Tensor, aten.index_put.default):
        return None
    *before, last = node.args[1]
    is_mask = last is not None and not any(before) and last.meta["val"].dtype is torch.bool
    return last if is_mask else None


def _refuse_any_order(makers: list[fx.Node], unproven: Unproven) -> None:
    """Refuse unstable sorts, also after the last attention: no condition orders an expert's slots as they do."""
    if any(maker.meta.get(ANY_ORDER) for maker in makers):
        raise FinalRefusal(
            "tokens are sorted by expert in an unstable way, and it is not proven that each is treated by itself",
            where=where(unproven.node),
            expected="operators that work row by row, or a stable sort",
            got=unproven.reason,
            hint="sort with argsort(stable=True) or sort(stable=True)",
        ) from None


def _refuse_before_attention(
    graph: fx.Graph, makers: list[fx.Node], parameters: Collection[fx.Node], unproven: Unproven
) -> None:
    """Raise FinalRefusal, unless the selection reads data alone or follows the last attention (metrics, losses)."""
    mixers = [node for node in graph.nodes if node.target in MIXERS]
    before = ancestors(mixers)
    read = ancestors([*makers, *(user for user in descendants(graph, makers) if user.target in ENTRIES)])
    if before.isdisjoint(makers) or read.isdisjoint(parameters):
        return
    raise FinalRefusal(
        "tokens are selected by a condition, and it is not proven that each selected one is treated by itself",
        where=where(unproven.node),
        expected="operators that work row by row, and index_add or an assignment to the rows they came from",
        got=unproven.reason,
        hint="write the mixture of experts so, or with dta_compile.expert_linear",
    ) from None


@dataclasses.dataclass(frozen=True)
class _Index:
    """Dimensions of a tensor that the coordinates of selected rows index, and the dimension of rows in the result.

    Attributes:
        mask: the condition, in the shape that indexes this tensor.
        of: the tensor's dimension, by dimension of the condition.
        place: the dimension of rows in the selected value.
    """

    mask: fx.Node
    of: dict[int, int]
    place: int

    @property
    def tokens(self) -> list[int]:
        """Dimensions of the condition with symbolic sizes."""
        return [dim for dim, size in enumerate(sizes(self.mask)) if size.free_symbols]

    @property
    def slots(self) -> list[int]:
        """The other dimensions of the condition."""
        return [dim for dim, size in enumerate(sizes(self.mask)) if not size.free_symbols]

    def order(self, rank: int) -> list[int]:
        """Return the dimensions of a tensor: those of tokens, then those of slots, then the others."""
        front = [self.of[dim] for dim in self.tokens + self.slots if dim in self.of]
        return front + [dim for dim in range(rank) if dim not in front]


@dataclasses.dataclass(frozen=True)
class _Coordinates:
    """Coordinates of selected rows, as `nonzero` returns them.

    Attributes:
        mask: the condition, in the shape that `nonzero` reads.
        column: a dimension of the condition; None: all of them, `[n, dims]`.
        columns_first: whether they are transposed, `[dims, n]`.
    """

    mask: fx.Node
    column: int | None = None
    columns_first: bool = False


class _Spreading:
    """Rewrite of one condition, and of all values that are computed from the rows it selects.

    Attributes:
        mask: the condition, of any dtype: non-zero entries are selected.
        slots: dimensions of the mask with constant sizes.
        coordinates: by node, the coordinates of the selected rows that it has.
        exits: nodes that write selected rows back, with their replacements.
    """

    def __init__(self, graph: fx.Graph, first: First, mask: fx.Node, makers: list[fx.Node]) -> None:
        self.graph, self.first, self.mask, self.makers = graph, first, mask, makers
        self.slots = [dim for dim, size in enumerate(sizes(mask)) if not size.free_symbols]
        self.coordinates: dict[fx.Node, _Coordinates] = {}
        self.exits: list[tuple[fx.Node, fx.Node]] = []

    def run(self) -> None:
        """Rewrite the graph.

        Raises:
            Unproven: a reader of selected rows has no replacement. The graph is unchanged but for unused nodes.
        """
        begin = self.makers[0]
        self._require_symbol(begin)
        with self.graph.inserting_before(begin):
            self._conditions()
        after = itertools.dropwhile(lambda node: node is not begin, list(self.graph.nodes))
        for node in itertools.takewhile(lambda node: node.op != "output", after):
            with self.graph.inserting_before(node):
                self._visit(node)
        output = next(iter(reversed(self.graph.nodes)))
        if self._reads(output):
            raise Unproven("the selected rows are results themselves", output)
        for node, new in self.exits:
            new.meta = {**node.meta, "val": new.meta["val"]}
            node.replace_all_uses_with(new)

    def _require_symbol(self, maker: fx.Node) -> None:
        size = next((s for s in sizes(maker) if s.free_symbols and free_unbacked_symbols(s)), None)
        if size is None or not size.is_Symbol:
            raise Unproven("as many rows are selected as another value has", maker)

    def _conditions(self) -> None:
        """Compute the condition as `[N, *slots]`, and of rows: tokens if at most one slot of each is selected."""
        mask = self.mask
        if mask.meta["val"].dtype is not torch.bool:
            mask = call(self.graph, aten.ne.Scalar, mask, 0)
        self.selected = self._rows_first(mask, _Index(mask, {dim: dim for dim in range(len(sizes(mask)))}, 0))
        self.number = math.prod(int(sizes(self.mask)[dim]) for dim in self.slots)
        self.one_slot = self.number == 1 or at_most_one(self.mask, self.slots)
        rows = self._any_slot(self.selected) if self.one_slot else self._slots_first(self.selected)
        self.rows = RowOperators(self.graph, rows)
        batch, tokens = next(map(batch_and_tokens, mixer_calls(self.graph)), (None, None))
        if sizes(self.mask) == (batch,) and isinstance(count := SizeNodes(self.graph).build(tokens), fx.Node):
            self.rows.tokens = count

    def _any_slot(self, value: fx.Node) -> fx.Node:
        for _ in self.slots:
            value = call(self.graph, aten.any.dim, value, 1)
        return value

    def _slots_first(self, value: fx.Node) -> fx.Node:
        """Reshape `[N, *slots, ...]` to `[N * k, ...]`."""
        return regrouped(value, [-1], 1 + len(self.slots))

    def _of_slots(self, value: fx.Node) -> fx.Node:
        """Reshape `[N * k, ...]` to `[N, *slots, ...]`; rows that are tokens, to `[N, 1, ...]`."""
        return regrouped(value, [-1, *(1 if self.one_slot else int(sizes(self.mask)[dim]) for dim in self.slots)])

    # ---- The graph, node by node

    def _visit(self, node: fx.Node) -> None:
        if node.target is aten.nonzero.default and node in self.makers:
            self.coordinates[node] = _Coordinates(node.args[0])
        elif node in self.makers or (self._selects_by_mask(node) and self._reads(node)):
            by_mask = self._by_mask(node)
            self._leave(node, by_mask, node.args[2]) if node.target in EXITS else self._enter(node, by_mask)
        elif not self._reads(node) or node.target is aten._assert_scalar.default or self._is_coordinate(node):
            return
        elif node.target in ENTRIES and (index := self._indexed(node)) is not None:
            self._enter(node, index)
        elif node.target in EXITS and (index := self._indexed(node)) is not None:
            self._leave(node, index, node.args[2 if node.target is aten.index_put.default else 3])
        elif node.target is aten.sym_size.int and node.args[0] in self.coordinates:
            is_count = bool(node.args[1]) is self.coordinates[node.args[0]].columns_first
            self.rows.sizes[node] = self.rows.count() if is_count else int(node.meta["val"])
        elif any(arg in self.coordinates for arg in node.all_input_nodes):
            raise Unproven(f"{node.target}: the numbers of the selected tokens are used as values", node)
        else:
            self.rows.visit(node)

    def _reads(self, node: fx.Node) -> bool:
        return any(arg in self.coordinates or self.rows.knows(arg) for arg in node.all_input_nodes)

    def _selects_by_mask(self, node: fx.Node) -> bool:
        mask = _mask_of(node)
        return mask is not None and _condition(mask, self.first) is self.mask

    def _by_mask(self, node: fx.Node) -> _Index:
        before, mask = len(node.args[1]) - 1, node.args[1][-1]
        return _Index(mask, {dim: before + dim for dim in range(len(sizes(mask)))}, before)

    def _is_coordinate(self, node: fx.Node) -> bool:
        """Return whether a node has one or all columns of `nonzero` in another form; record them if so."""
        source: Any = node.args[0] if node.args else None
        if source not in self.coordinates:
            return False
        coordinates, value = self.coordinates[source], node.meta["val"]
        dims = len(sizes(coordinates.mask))
        if node.target in COPIES or (node.target in CASTS and value.dtype in (torch.int32, torch.int64)):
            self.coordinates[node] = coordinates
        elif is_item(node) and source.target is aten.unbind.int:
            self.coordinates[node] = dataclasses.replace(coordinates, column=node.args[1] % dims)
        elif coordinates.column is not None and node.target in KEEP_ORDER | {aten.expand.default} and value.dim() > 0:
            if sizes(node)[0] != sizes(source)[0] or any(size.free_symbols for size in sizes(node)[1:]):
                return False
            self.coordinates[node] = coordinates  # `[n, 1]` or `[n, D]`, equal for all features
        elif coordinates.column is None and node.target in RESHAPES | SQUEEZES and value.dim() == 1 == dims:
            self.coordinates[node] = dataclasses.replace(coordinates, column=0)
        elif coordinates.column is None and node.target in TRANSPOSITIONS and swaps(node):
            self.coordinates[node] = dataclasses.replace(coordinates, columns_first=not coordinates.columns_first)
        elif (
            coordinates.column is None and node.target in PARTS and coordinates.columns_first is not bool(dim_of(node))
        ):
            column = node.args[2] % dims if node.target is aten.select.int else None
            self.coordinates[node] = dataclasses.replace(coordinates, column=column)
        else:
            return False
        return True

    def _indexed(self, node: fx.Node) -> _Index | None:
        """Return how coordinates index the first argument; None: other values index it, too."""
        of: dict[int, int] = {}
        masks = set()
        for dim, index in indices_of(node).items():
            numbers = self.coordinates.get(index)
            if numbers is None or numbers.column is None or numbers.column in of or not self._fits(node, index):
                return None
            of[numbers.column] = dim
            masks.add(numbers.mask)
        if len(masks) != 1:
            return None
        dims = sorted(of.values())
        return _Index(masks.pop(), of, dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0)

    def _fits(self, node: fx.Node, index: fx.Node) -> bool:
        """Return whether whole rows are indexed, by one number each."""
        if node.target is not aten.scatter_add.default:
            return len(sizes(index)) == 1
        rest = sizes(index)[1:]
        return node.args[1] == 0 and rest == sizes(node.args[0])[1:] and rest == sizes(node.args[3])[1:]

    # ---- From tokens to selected rows, and back

    def _enter(self, node: fx.Node, index: _Index) -> None:
        source = node.args[0]
        self._require_tokens(node, source, index)
        flat = self._rows_first(source, index)
        slots = [dim for dim in index.slots if dim in index.of]
        if slots and slots != index.slots:
            raise Unproven(f"{node.target}: some of the condition's dimensions are left out", node)
        if slots:
            flat = self._at_selected_slot(flat) if self.one_slot else self._slots_first(flat)
        elif not self.one_slot:
            flat = repeated(flat, self.number)
        rows = self._moved(flat, 0, index.place)
        self.rows.enter(node, Rows(rows, index.place, is_masked=bool(slots) and self.one_slot))

    def _at_selected_slot(self, flat: fx.Node) -> fx.Node:
        """Return the entries of `[N, *slots, ...]` at the selected slot of each token, zero where none is selected."""
        outside = call(self.graph, aten.logical_not.default, self._with_ones(self.selected, flat))
        flat = call(self.graph, aten.masked_fill.Scalar, flat, outside, 0)
        if flat.meta["val"].dtype is torch.bool:
            return self._any_slot(flat)
        dims = list(range(1, 1 + len(self.slots)))
        return call(self.graph, aten.sum.dim_IntList, flat, dims, dtype=flat.meta["val"].dtype)

    def _leave(self, node: fx.Node, index: _Index, source: Any) -> None:
        target = node.args[0]
        if self.rows.knows(target):
            raise Unproven(f"{node.target}: it writes to selected rows", node)
        self._require_tokens(node, target, index)
        adds = node.target is not aten.index_put.default or bool(argument(node, "accumulate"))
        slots = [dim for dim in index.slots if dim in index.of]
        if slots != index.slots and (slots or not (adds or self.one_slot)):
            raise Unproven(f"{node.target}: a token that is selected twice is written twice", node)
        rank = len(sizes(target)) - len(index.of) + 1  # of the written values
        if not isinstance(source, fx.Node) or not self.rows.is_rows(source):
            raise Unproven(f"{node.target}: what is written are no selected rows", node)
        value = self._moved(self.rows.aligned(source, rank, index.place, node), index.place, 0)
        flat, selected = self._rows_first(target, index), self.rows.selected
        assert selected is not None
        alpha = {"alpha": node.kwargs["alpha"]} if "alpha" in node.kwargs else {}
        if slots:
            value, selected = self._of_slots(value), self.selected
            value = call(self.graph, aten.add.Tensor, flat, value, **alpha) if adds else value
        elif adds:
            outside = call(self.graph, aten.logical_not.default, self._with_ones(selected, value))
            value = call(self.graph, aten.masked_fill.Scalar, value, outside, 0)
            if not self.one_slot:
                dims, dtype = list(range(1, 1 + len(self.slots))), value.meta["val"].dtype
                value = call(self.graph, aten.sum.dim_IntList, self._of_slots(value), dims, dtype=dtype)
            flat = call(self.graph, aten.add.Tensor, flat, value, **alpha)
        if slots or not adds:
            flat = call(self.graph, aten.where.self, self._with_ones(selected, flat), value, flat)
        self.exits.append((node, self._rows_back(flat, target, index)))

    def _require_tokens(self, node: fx.Node, value: fx.Node, index: _Index) -> None:
        for dim, size in enumerate(sizes(index.mask)):
            if dim not in index.of and dim in index.tokens:
                raise Unproven(f"{node.target}: some of the tokens' dimensions are not indexed", node)
            if dim in index.of and sizes(value)[index.of[dim]] != size:
                raise Unproven(f"{node.target}: the condition is not over the rows that are indexed", node)

    # ---- Shapes

    def _rows_first(self, value: fx.Node, index: _Index) -> fx.Node:
        """Return a value as `[N, *slots, ...]`: dimensions of tokens flattened, then those of slots, then the rest."""
        value = self._permuted(value, index.order(len(sizes(value))))
        return value if len(index.tokens) == 1 else regrouped(value, [-1], len(index.tokens))

    def _rows_back(self, flat: fx.Node, like: fx.Node, index: _Index) -> fx.Node:
        """Reverse `_rows_first` for a value with the sizes of `like`."""
        order = index.order(len(sizes(like)))
        if len(index.tokens) > 1:
            flat = regrouped(flat, [call(self.graph, aten.sym_size.int, index.mask, dim) for dim in index.tokens])
        return self._permuted(flat, sorted(range(len(order)), key=order.__getitem__))

    def _permuted(self, value: fx.Node, order: Sequence[int]) -> fx.Node:
        if list(order) == list(range(len(order))):
            return value
        return call(self.graph, aten.permute.default, value, list(order))

    def _moved(self, value: fx.Node, source: int, place: int) -> fx.Node:
        order = list(range(len(sizes(value))))
        order.insert(place, order.pop(source))
        return self._permuted(value, order)

    def _with_ones(self, value: fx.Node, like: fx.Node) -> fx.Node:
        return raised(value, len(sizes(like)) - len(sizes(value)), -1)
