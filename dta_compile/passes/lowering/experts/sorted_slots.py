"""Compute values over slots that are sorted by expert in the order of tokens instead.

Part of `lower`. A slot is a (token, expert) pair, `[N * k]` of N tokens. Training code sorts slots by expert,
multiplies each group by the weights of its expert, and restores the order. A permutation and its inverse cancel around
operators that treat each slot by itself, so these are computed over unsorted slots:

    order = experts.argsort()
    x[order // k], y[order]              x of each slot's token, y
    row-wise operators                   the same (`row_operators`)
    grouped_mm(rows, weight, ends)       dta::expert_linear: each slot with the weights of its expert
    rows.split(counts), rows[a:b]        the slots that a condition selects: `x[torch.where(experts == e)]`
    torch.cat(all of these)              each group written to the slots that its condition selects
    out.index_add(0, order // k, rows)   a sum over the slots of each token
    out[order] = rows, rows[inverse]     the rows

Groups are those of experts if their lengths are proven to be the experts' numbers of slots (`slots`).
Selections by a condition are left to `selected_rows`. Unproven nodes are left; before the last attention they are
refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.ops.experts.operators import EXPERT_LINEAR
from dta_compile.passes.graphs.arguments import argument, dim_of, indices_of, slice_of
from dta_compile.passes.graphs.nodes import (
    First,
    call,
    erase_unused,
    is_float,
    is_item,
    regrouped,
    repeated,
    repeated_from,
)
from dta_compile.passes.graphs.operators import COPIES, RANGES, RESHAPES, aten
from dta_compile.passes.lowering.experts.row_operators import RowOperators, Rows, Unproven, drop_checks_of_numbers
from dta_compile.passes.lowering.experts.selected_rows import ANY_ORDER
from dta_compile.passes.lowering.experts.slots import (
    INVERSE,
    SLOT,
    SORTS,
    TOKEN,
    Counts,
    Numbers,
    counts_from_zero,
    is_another_form,
    is_exact_cast,
    repeated_for_slots,
)
from dta_compile.passes.program import tensors_of
from dta_compile.passes.symbols import depends_on_data, sizes, value_of
from dta_compile.torch_compat.sizes import GuardOnDataDependentSymNode

GROUPED = (aten._grouped_mm.default,)
ENTRIES = (aten.index.Tensor, aten.index_select.default, aten.gather.default)
SUMS = (aten.index_add.default, aten.scatter_add.default)
WRITES = (aten.index_put.default, aten.scatter.src, aten.index_copy.default)
DIVISIONS = (aten.floor_divide.default, aten.div.Tensor_mode)


def unsort_slots(graph: fx.Graph) -> None:
    """Replace values over sorted slots by values over unsorted slots."""
    first = First(())
    orders = [node for node in graph.nodes if _is_sort_of_slots(node)]
    changed = False
    for sort in orders:
        mode = sort.args[0].meta["val"].fake_mode
        with mode, torch.no_grad(), mode.shape_env.ignore_fresh_unbacked_symbols():
            unsorting = _Unsorting(graph, first, sort)
            unsorting.run()
            changed |= unsorting.changed
    if changed:
        drop_checks_of_numbers(graph)
        erase_unused(graph)


def _is_sort_of_slots(node: fx.Node) -> bool:
    """Return whether a node sorts integers, one per token or slot of the call."""
    if node.target not in SORTS or is_float(node.args[0]) or len(sizes(node.args[0])) != 1:
        return False
    numbers = node.args[0]
    is_order = is_item(numbers) and numbers.args[1] == 1 and numbers.args[0].target in SORTS  # its sort is an inverse
    size = sizes(numbers)[0]
    return bool(size.free_symbols) and not depends_on_data(size) and not is_order


class _Unsorting:
    """Rewrite of one sort, and of all values that are computed from slots in its order.

    Attributes:
        numbers: `[N * k]`, the expert indices that slots are sorted by.
        source: the indices before they are flattened, `[*tokens, k]`.
        slots: k.
        count: N * k.
        tokens: N.
        known: by node, the slots or tokens that it numbers.
        inverses: nodes with the position that each slot is sorted to.
        groups: by node, the expert whose slots alone it has rows of.
    """

    def __init__(self, graph: fx.Graph, first: First, sort: fx.Node) -> None:
        self.graph, self.first, self.sort = graph, first, sort
        self.numbers: fx.Node = sort.args[0]
        self.descends = bool(argument(sort, "descending"))
        self.count = sizes(self.numbers)[0]
        self.source, self.slots = self._slots()
        self.tokens = sympy.cancel(self.count / self.slots)
        self.counts = Counts(self.numbers, first)
        self.known: dict[fx.Node, Numbers] = {}
        self.inverses: set[fx.Node] = set()
        self.groups: dict[fx.Node, int] = {}
        self.rows = RowOperators(graph, None, lambda size: bool(size == self.count))
        self.changed = False
        self._selected: dict[int, tuple[fx.Node, fx.Node]] = {}

    def _slots(self) -> tuple[fx.Node, int]:
        """Return the expert indices as `[*tokens, k]`, and k."""
        source = self.numbers
        while len(sizes(source)) == 1 and (source.target in RESHAPES | COPIES or is_exact_cast(source)):
            source = source.args[0]
        *tokens, last = sizes(source)
        return (source, int(last)) if tokens and last.is_Integer else (self.numbers, 1)

    def run(self) -> None:
        """Rewrite the graph; unproven nodes are left."""
        self._natural_numbers()
        nodes = list(self.graph.nodes)
        for node in nodes:
            if node.op != "call_function" or node.meta.get("val") is None:
                continue
            with self.graph.inserting_before(node), contextlib.suppress(Unproven, GuardOnDataDependentSymNode):
                _find_size(node)
                self._visit(node)

    # ---- Numbers of slots

    def _natural_numbers(self) -> None:
        """Record the nodes that number unsorted slots or their tokens: `torch.arange`, repeated k times for tokens."""
        for node in self.graph.nodes:
            if node.target not in RANGES or not counts_from_zero(node):
                continue
            size = sizes(node)[0]
            if size == self.count:
                self.known[node] = Numbers(SLOT, is_sorted=False)
            elif size == self.tokens:
                for user in repeated_for_slots(node, self.slots, self.count):
                    self.known[user] = Numbers(TOKEN, is_sorted=False)

    def _note_numbers(self, node: fx.Node) -> bool:
        """Return whether a node numbers slots or tokens, in any form; record it if so."""
        source: Any = node.args[0] if node.args else None
        if is_item(node) and source is self.sort:
            if node.args[1] == 1:
                self.known[node] = Numbers(SLOT)
            else:
                self.rows.enter(node, Rows(self.numbers, 0, True))
            return True
        if is_item(node) and node.args[1] == 1 and source.target in SORTS and self._sorts_order(source):
            self.inverses.add(node)
            return True
        if source in self.inverses and is_another_form(node):
            self.inverses.add(node)
            return True
        if is_item(node) and source.target is aten.split_with_sizes.default and source.args[0] in self.known:
            numbers = self.known[source.args[0]]
            if numbers.is_sorted and numbers.group is None and self._splits_by_expert(source):
                self.known[node] = dataclasses.replace(numbers, group=node.args[1])
            return True
        if source not in self.known:
            return False
        numbers = self.known[source]
        if is_another_form(node):
            self.known[node] = numbers
        elif node.target in DIVISIONS and numbers.of == SLOT and self._divides_by_slots(node):
            self.known[node] = dataclasses.replace(numbers, of=TOKEN)
        elif (group := self._group_of(node)) is not None and numbers.is_sorted and numbers.group is None:
            self.known[node] = dataclasses.replace(numbers, group=group) if group >= 0 else numbers
        else:
            return False
        return True

    def _sorts_order(self, sort: fx.Node) -> bool:
        """Return whether a sort of sorted slots' numbers gives their inverse."""
        numbers = sort.args[0]
        is_ascending = not argument(sort, "descending")
        return self.known.get(numbers) == Numbers(SLOT) and len(sizes(numbers)) == 1 and is_ascending

    def _divides_by_slots(self, node: fx.Node) -> bool:
        return node.args[1] == self.slots and node.kwargs.get("rounding_mode", "floor") in ("floor", "trunc")

    # ---- The graph, node by node

    def _visit(self, node: fx.Node) -> None:
        self._note_group(node)
        if self._note_numbers(node):
            return
        if node.target in ENTRIES and (index := self._index(node)) is not None:
            self._enter(node, node.args[0], index)
        elif node.target in SUMS and (index := self._index(node)) is not None:
            self._add(node, index, node.args[3])
        elif node.target in WRITES and (index := self._index(node)) is not None:
            self._write(node, index, node.args[3 if node.target is not aten.index_put.default else 2])
        elif node.target is aten.cat.default:
            self._join(node)
        elif not any(map(self.rows.knows, node.all_input_nodes)) or node.target is aten._assert_scalar.default:
            return
        elif not isinstance(node.meta["val"], (torch.Tensor, tuple, list)):
            return  # a size, which unsorting does not change
        elif node.target in GROUPED:
            self._multiply(node)
        elif node.target is aten.split_with_sizes.default:
            self._split(node)
        elif node.target is aten.slice.Tensor and (group := self._group_of(node)) is not None:
            self._take(node, self.rows.of(node.args[0]), group)
        elif not (is_item(node) and not self.rows.knows(node.args[0])):
            self.rows.visit(node)

    def _index(self, node: fx.Node) -> Numbers | None:
        """Return the numbers that index whole rows of the first argument; None: other values index it."""
        indices = indices_of(node)
        if indices.keys() != {0}:
            return None
        index = indices[0]
        numbers = Numbers(INVERSE) if index in self.inverses else self.known.get(index)
        whole = node.target in (aten.gather.default, aten.scatter_add.default, aten.scatter.src)
        if numbers is None or (len(sizes(index)) > 1 and not whole):
            return None
        if whole and sizes(index)[1:] != sizes(node.args[0])[1:]:
            raise Unproven(f"{node.target}: it indexes a part of each row", node)
        return numbers

    def _enter(self, node: fx.Node, source: fx.Node, index: Numbers) -> None:
        if index.of == INVERSE:
            if self.rows.is_rows(source) and self.rows.of(source).place == 0:
                self._replace(node, self.rows.of(source).value)
            return
        if self.rows.is_rows(source) or sizes(source)[0] != (self.count if index.of == SLOT else self.tokens):
            raise Unproven(f"{node.target}: others are indexed than slots or their tokens", node)
        if index.group is not None:
            self._replace(node, self._of_group(source, index.of, index.group), index.group)
            return
        value = source if index.of == SLOT or self.slots == 1 else repeated(source, self.slots)
        if index.is_sorted:
            self.rows.enter(node, Rows(value, 0, True))
        elif index.of == TOKEN:
            self._replace(node, value)

    def _by_token(self, value: fx.Node) -> fx.Node:
        """Reshape `[N * k, ...]` to `[N, k, ...]`."""
        return regrouped(value, [-1, self.slots])

    def _add(self, node: fx.Node, index: Numbers, value: fx.Node) -> None:
        if index.group is not None:
            self._index_by_condition(node, index)
            return
        self._require_sorted(node, index)
        rows = self._rows_of(node, value)
        if index.of == TOKEN:
            rows = call(self.graph, aten.sum.dim_IntList, self._by_token(rows), [1])
        alpha = {"alpha": node.kwargs["alpha"]} if "alpha" in node.kwargs else {}
        self._require_rows(node, self.tokens if index.of == TOKEN else self.count)
        self._replace(node, call(self.graph, aten.add.Tensor, node.args[0], rows, **alpha))

    def _write(self, node: fx.Node, index: Numbers, value: Any) -> None:
        adds = node.target is aten.index_put.default and bool(argument(node, "accumulate"))
        if adds:
            self._add(node, index, value)
            return
        if index.group is not None:
            self._index_by_condition(node, index)
            return
        is_arange = index == Numbers(SLOT) and self.known.get(value) == Numbers(SLOT, is_sorted=False)
        if is_arange and sizes(node) == (self.count,):  # `inverse[order] = torch.arange(n)`
            self.inverses.add(node)
            return
        self._require_sorted(node, index)
        if index.of != SLOT and self.slots != 1:
            raise Unproven(f"{node.target}: a token is written once for each of its slots", node)
        self._require_rows(node, self.count, of_base=not self.rows.is_rows(node.args[0]))
        self._replace(node, self._rows_of(node, value))

    def _require_sorted(self, node: fx.Node, index: Numbers) -> None:
        if index.of == INVERSE or not index.is_sorted:
            raise Unproven(f"{node.target}: sorted slots are written elsewhere than where they came from", node)

    def _require_rows(self, node: fx.Node, count: sympy.Expr, of_base: bool = True) -> None:
        if of_base and sizes(node.args[0])[0] != count and not depends_on_data(sizes(node.args[0])[0]):
            raise Unproven(f"{node.target}: others are written than slots or their tokens", node)

    def _rows_of(self, node: fx.Node, value: Any) -> fx.Node:
        """Return the written rows of all slots, unsorted."""
        if not isinstance(value, fx.Node) or not self.rows.is_rows(value) or self.rows.of(value).place != 0:
            raise Unproven(f"{node.target}: what is written are no sorted slots", node)
        if sizes(value)[1:] != sizes(node)[1:]:
            raise Unproven(f"{node.target}: what is written is broadcast, or written in part", node)
        return self.rows.of(value).value

    def _replace(self, node: fx.Node, new: fx.Node, group: int | None = None) -> None:
        self.changed = True
        if group is not None:
            self.groups[new] = group
            new.meta = dict(node.meta)  # keeps the symbol for the group's size that readers' values have
        elif new.op == "call_function" and not new.meta.get("stack_trace"):
            new.meta = {**node.meta, "val": new.meta["val"]}
        node.replace_all_uses_with(new)

    # ---- Groups

    def _multiply(self, node: fx.Node) -> None:
        """Replace a grouped product, each group of rows times its expert's matrix, by `dta::expert_linear`."""
        rows, weight = node.args[:2]
        ends, bias = argument(node, "offs"), argument(node, "bias")
        experts = None if ends is None else self.counts.ends(ends)
        if not self.rows.is_rows(rows) or self.rows.is_rows(weight) or len(sizes(weight)) != 3:
            raise Unproven(f"{node.target}: its first argument are no sorted slots", node)
        if experts is None or sizes(weight)[0] != experts or self.descends:
            raise Unproven(f"{node.target}: its groups are not known to be those of experts", node)
        numbers = call(self.graph, aten._to_copy.default, self.numbers, dtype=torch.int64)
        value = self.rows.of(rows).value
        if (source := repeated_from(value, 0, self.slots)) is not None:  # one row serves all slots of its token
            new = call(self.graph, EXPERT_LINEAR, source, self._by_token(numbers), weight, True)
            new = call(self.graph, aten.reshape.default, new, [-1, int(sizes(weight)[2])])
        else:
            new = call(self.graph, EXPERT_LINEAR, value, numbers, weight, True)
        if bias is not None:
            new = call(self.graph, aten.add.Tensor, new, call(self.graph, aten.index.Tensor, bias, [numbers]))
        if new.meta["val"].dtype is not node.meta["val"].dtype:
            new = call(self.graph, aten._to_copy.default, new, dtype=node.meta["val"].dtype)
        new.meta = {**node.meta, "val": new.meta["val"]}
        self.rows.enter(node, Rows(new, 0, True))

    def _group_of(self, node: fx.Node) -> int | None:
        """Return the expert whose group a slice of sorted slots is, -1 for all slots; None: it is no group."""
        part = slice_of(node)
        if part is None or part.dim != 0 or self.descends or self.counts.bound is None:
            return None
        every, end = self.counts.up_to(self.counts.bound), argument(node, "end")
        low = self.counts.canonical(part.start)
        high = every if end is None or (isinstance(end, int) and end > 2**62) else self.counts.canonical(end)
        if low is None or high is None:
            return None
        if low == 0 and high == every:
            return -1
        for group in range(self.counts.bound):
            if low == self.counts.up_to(group) and high == self.counts.up_to(group + 1):
                return group
        return None

    def _take(self, node: fx.Node, rows: Rows, group: int) -> None:
        if rows.place != 0:
            raise Unproven(f"{node.target}: it takes a part of sorted slots along another dimension", node)
        if group < 0:
            node.meta["val"] = node.args[0].meta["val"]
            self.rows.enter(node, rows)
            return
        self._replace(node, self._of_group(rows.value, SLOT, group), group)

    def _split(self, node: fx.Node) -> None:
        rows = self.rows.of(node.args[0])
        if rows.place != 0 or not self._splits_by_expert(node):
            raise Unproven(f"{node.target}: its parts are not known to be those of experts", node)
        for item in list(node.users):
            with self.graph.inserting_before(item):
                self._replace(item, self._of_group(rows.value, SLOT, item.args[1]), item.args[1])

    def _splits_by_expert(self, node: fx.Node) -> bool:
        if argument(node, "dim") or self.descends:
            return False
        ends = [self.counts.up_to(number) for number in range(len(node.args[1]) + 1)]
        lengths = map(self.counts.canonical, node.args[1])
        return all(length == end - start for length, start, end in zip(lengths, ends, ends[1:], strict=False))

    def _condition(self, group: int) -> tuple[fx.Node, fx.Node]:
        """Return the nodes of the token and the slot number of each of a group's slots, inserted before the sort."""
        if group not in self._selected:
            with self.graph.inserting_before(self.sort):
                numbers = self.source
                if len(sizes(numbers)) != 2 or sizes(numbers)[0] != self.tokens:
                    numbers = call(self.graph, aten.reshape.default, numbers, [-1, self.slots])
                chosen = call(self.graph, aten.nonzero.default, call(self.graph, aten.eq.Scalar, numbers, group))
                columns = [call(self.graph, aten.select.int, chosen, 1, column) for column in range(2)]
            for node in (chosen, *columns):
                node.meta = {**self.sort.meta, "val": node.meta["val"]}
            if not self.sort.kwargs.get("stable"):
                chosen.meta[ANY_ORDER] = True
            self._selected[group] = columns[0], columns[1]
            self.groups |= dict.fromkeys(columns, group)
        return self._selected[group]

    def _of_group(self, value: fx.Node, of: str, group: int) -> fx.Node:
        """Select the rows of a group from a value over all slots, or over their tokens."""
        tokens, slots = self._condition(group)
        if of == TOKEN or self.slots == 1:
            return call(self.graph, aten.index.Tensor, value, [tokens])
        source = repeated_from(value, 0, self.slots)
        if source is not None:
            return call(self.graph, aten.index.Tensor, source, [tokens])
        return call(self.graph, aten.index.Tensor, self._by_token(value), [tokens, slots])

    def _index_by_condition(self, node: fx.Node, index: Numbers) -> None:
        """Rewrite `out.index_add(0, tokens[a:b], rows)` to index by the group's condition."""
        assert index.group is not None
        if index.of != TOKEN and self.slots != 1:
            raise Unproven(f"{node.target}: it writes to slots of a group", node)
        tokens, _ = self._condition(index.group)
        if node.target in (aten.scatter_add.default, aten.scatter.src):
            with self.graph.inserting_before(node):
                column = call(self.graph, aten.unsqueeze.default, tokens, -1)
                tokens = call(self.graph, aten.expand.default, column, [-1, *map(int, sizes(node.args[0])[1:])])
            self.groups |= dict.fromkeys((column, tokens), index.group)
        self.changed = True
        if node.target is aten.index_put.default:
            node.args = (node.args[0], [tokens], *node.args[2:])
        else:
            node.args = (*node.args[:2], tokens, *node.args[3:])

    def _note_group(self, node: fx.Node) -> None:
        groups = {self.groups[arg] for arg in node.all_input_nodes if arg in self.groups}
        values = tensors_of(node.meta["val"])
        if len(groups) == 1 and values and all(any(map(depends_on_data, value.shape)) for value in values):
            self.groups[node] = groups.pop()

    def _join(self, node: fx.Node) -> None:
        """Replace a concatenation of all groups by a write of each to the slots that its condition selects."""
        parts = node.args[0]
        numbers = [self.groups.get(part) for part in parts]
        if not any(number is not None for number in numbers):
            if any(map(self.rows.knows, parts)):
                self.rows.visit(node)
            return
        if numbers != list(range(self.counts.bound or 0)) or dim_of(node) != 0:
            raise Unproven(f"{node.target}: it does not join the rows of all experts, in order", node)
        rest = [int(size) for size in parts[0].meta["val"].shape[1:]]
        value = node.meta["val"]
        tokens = call(self.graph, aten.sym_size.int, self._by_token(self.numbers), 0)
        shape = [tokens, self.slots, *rest]
        joined = call(self.graph, aten.full.default, shape, 0, dtype=value.dtype, device=value.device)
        for number, part in enumerate(parts):
            written = self.graph.call_function(aten.index_put.default, (joined, list(self._condition(number)), part))
            written.meta = {**node.meta, "val": joined.meta["val"]}
            joined = written
        flat = regrouped(joined, [-1], 2)
        flat.meta = {**node.meta, "val": flat.meta["val"]}
        self.changed = True
        node.meta["val"] = flat.meta["val"]  # with the symbol for the number of all slots
        self.rows.enter(node, Rows(flat, 0, True))


def _find_size(node: fx.Node) -> None:
    """Recompute the sizes of a value that depend on data, where those of its arguments no longer do."""
    if is_item(node):
        node.meta["val"] = node.args[0].meta["val"][node.args[1]]
        return
    arguments = [arg.meta["val"] for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]
    if not any(any(map(depends_on_data, result.shape)) for result in tensors_of(node.meta["val"])) or not arguments:
        return
    if any(any(map(depends_on_data, value.shape)) for value in arguments) or node.target is aten.nonzero.default:
        return
    if node.target in RESHAPES:
        node.args = (node.args[0], [-1 if depends_on_data(value_of(size)) else size for size in node.args[1]])
    with contextlib.suppress(RuntimeError, GuardOnDataDependentSymNode):
        new = call(node.graph, node.target, *node.args, **node.kwargs)
        node.meta["val"] = new.meta["val"]
        node.graph.erase_node(new)
