"""Facts about (token, expert) slots: integers that number them, places that are distinct, and counts of each expert's.

Called by `selected_rows` (`at_most_one`) and `sorted_slots`. A condition selects at most one slot of each token if it
compares the indices of a `topk`. That a value counts the slots of each expert, or says where each expert ends among
sorted slots, is proven by the operators that compute it: every expert index is less than the number of bins, each bin
holds one index, and every slot is counted once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.axes.shape_rules import Labels, labelled_source, labels_in
from dta_compile.passes.graphs.arguments import argument, dim_of, select_of, slice_of
from dta_compile.passes.graphs.nodes import First, behind, filled_with, is_float, is_item
from dta_compile.passes.graphs.operators import CASTS, COPIES, EXCHANGES, FILLS, KEEP_ORDER, RANGES, RESHAPES, aten
from dta_compile.passes.symbols import depends_on_data, expression, sizes, value_of

SLOT, TOKEN, INVERSE = "slot", "token", "inverse"
EXACT = (torch.int64, torch.int32, torch.float64, torch.float32)  # hold the numbers of all slots
SORTS = (aten.sort.default, aten.sort.stable)
CHOICES = (*SORTS, aten.topk.default, aten.max.dim, aten.min.dim)  # of indices along a dimension
ENTRIES = KEEP_ORDER | COPIES | EXCHANGES | {aten.permute.default, aten.slice.Tensor, aten.expand.default}


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Integers that number slots, or their tokens.

    Attributes:
        of: `SLOT` or `TOKEN`; `INVERSE`: the position that each slot is sorted to.
        is_sorted: whether they are in the order of sorted slots, not in that of tokens.
        group: the expert whose slots they number; None: they number the slots of all experts.
    """

    of: str
    is_sorted: bool = True
    group: int | None = None


def is_another_form(node: fx.Node) -> bool:
    """Return whether a node has the numbers of its first argument, one per row, possibly repeated along the row."""
    if node.target in COPIES or (node.target in CASTS and not is_float(node) and node.meta["val"].dtype in EXACT):
        return True
    source = node.args[0]
    if node.target not in KEEP_ORDER | {aten.expand.default, aten.repeat.default} or not sizes(node):
        return False
    # A view that keeps all entries along the first dimension may have another symbol for their number.
    is_column = node.target in KEEP_ORDER and len(sizes(source)) == 1 and all(size == 1 for size in sizes(node)[1:])
    same = is_column or sizes(node)[0] == sizes(source)[0]
    return same and not any(size.free_symbols for size in sizes(node)[1:])


def counts_from_zero(node: fx.Node) -> bool:
    """Return whether a range is 0, 1, 2, ..., in numbers that do not wrap or round."""
    is_unit = argument(node, "start") in (None, 0) and argument(node, "step") in (None, 1)
    return is_unit and node.meta["val"].dtype in EXACT


def repeated_for_slots(node: fx.Node, slots: int, count: sympy.Expr) -> Iterator[fx.Node]:
    """Yield the values `[N * k]` that repeat each entry of `node`, `[N]`, k times in a row, for k of at least two."""
    for raised in node.users:
        if raised.target not in KEEP_ORDER or sizes(raised) != (*sizes(node), 1):
            continue
        for expanded in raised.users:
            if expanded.target is aten.expand.default and sizes(expanded) == (*sizes(node), slots):
                pending = list(expanded.users)
                while pending:
                    user = pending.pop()
                    if user.target in COPIES:
                        pending += user.users
                    elif user.target in RESHAPES and sizes(user) == (count,):
                        yield user


# ---- Distinct places


def at_most_one(condition: fx.Node, slots: Sequence[int]) -> bool:
    """Return whether a condition is non-zero for at most one entry along `slots`, its dimensions of constant size."""
    if len(slots) != 1:
        return False
    slot = f"d{slots[0]}"
    return _holds_once(condition, tuple(f"d{dim}" for dim in range(len(sizes(condition)))), slot)


def _holds_once(node: fx.Node, at: Labels, slot: str) -> bool:
    """Return whether an entry of `node` is non-zero for at most one place along `slot`, a label of its dimensions."""
    source: Any = node.args[0] if node.args else None
    if node.target in (aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor):
        return any(_holds_once(arg, labels_in(arg, at), slot) for arg in node.all_input_nodes)
    if node.target in CASTS or (node.target in (aten.ne.Scalar, aten.gt.Scalar) and node.args[1] == 0):
        return _holds_once(source, at, slot)  # zeros stay zeros
    if (moved := _source(node, at)) is not None:
        return _holds_once(*moved, slot)
    if node.target is aten.eq.Scalar:
        return is_distinct_along(source, at, slot)
    if node.target is aten.eq.Tensor:
        left, right = node.args
        pairs = ((left, right), (right, left))
        return any(
            slot not in labels_in(other, at) and is_distinct_along(numbers, labels_in(numbers, at), slot)
            for numbers, other in pairs
        )
    return False


def _source(node: fx.Node, at: Labels) -> tuple[fx.Node, Labels] | None:
    """Return the value that a node is a copy, a view or one row of, and the labels of its dimensions."""
    if (selected := select_of(node)) is None:
        return labelled_source(node, at)
    source, dim, _ = selected
    return source, (*at[:dim], None, *at[dim:])


def _keeps_numbers(node: fx.Node) -> bool:
    """Return whether a node is a cast between index dtypes, under which distinct numbers stay distinct."""
    wide = (torch.int32, torch.int64)
    return node.target in CASTS and node.args[0].meta["val"].dtype in wide and node.meta["val"].dtype in wide


def is_distinct_along(node: fx.Node, at: Labels, slot: str) -> bool:
    """Return whether entries of `node` at two places along `slot`, a label of its dimensions, always differ."""
    if at.count(slot) != 1:
        return False
    source: Any = node.args[0] if node.args else None
    if _keeps_numbers(node) or node.target is aten.slice.Tensor:  # a slice has a subset of distinct entries
        return is_distinct_along(source, at, slot)
    if (moved := _source(node, at)) is not None:
        return is_distinct_along(*moved, slot)
    if node.target in RESHAPES and at[-1] == slot and sizes(source)[-1] == sizes(node)[-1]:
        return is_distinct_along(source, ("other",) * (len(sizes(source)) - 1) + (slot,), slot)
    is_choice = is_item(node) and node.args[1] == 1
    if is_choice and source.target in (*SORTS, aten.topk.default):
        return at[dim_of(source)] == slot
    return False


# ---- Counts


def same_numbers(node: fx.Node) -> fx.Node:
    """Return the value whose entries a node has, before copies, reshapes and exact casts."""
    while node.target in COPIES | RESHAPES or is_exact_cast(node):
        node = node.args[0]
    return node


def is_exact_cast(node: fx.Node) -> bool:
    """Return whether a cast is to a dtype that holds all expert indices, and counts as large as eager mode's."""
    return node.target in CASTS and node.meta["val"].dtype in EXACT


def bound_of(node: fx.Node) -> int | None:
    """Return an exclusive upper bound of a value's non-negative entries, as indices of features; None: unknown."""
    node = same_numbers(node)
    if node.target in ENTRIES or (node.target is aten.gather.default):
        return bound_of(node.args[0])
    if node.target in (aten.cat.default, aten.stack.default):
        bounds = [bound_of(part) for part in node.args[0]]
        return None if None in bounds else max(bounds)  # type: ignore[type-var]
    is_choice = is_item(node) and node.args[1] == 1 and node.args[0].target in CHOICES
    choice = node.args[0] if is_choice else node
    if not is_choice and (node.target is not aten.argmax.default or argument(node, "dim") is None):
        return None
    size = sizes(choice.args[0])[dim_of(choice)]
    return int(size) if size.is_Integer else None


class Counts:
    """Counts of the slots of each expert.

    Args:
        numbers: the expert indices of all slots.
    """

    def __init__(self, numbers: fx.Node, first: First) -> None:
        self.first, self.numbers = first, first.like(same_numbers(numbers))
        self.bound = bound_of(numbers)
        self.total = sympy.Mul(*sizes(numbers))
        self._counts: dict[fx.Node, int | None] = {}

    def are(self, node: fx.Node) -> bool:
        """Return whether a value has the expert indices of all slots, in any order."""
        while node.target in COPIES | RESHAPES or is_exact_cast(node) or self._is_permuted(node):
            node = node.args[0].args[0] if is_item(node) else node.args[0]
        return self.first.like(node) is self.numbers

    def _is_permuted(self, node: fx.Node) -> bool:
        """Return whether a node is sorted, or indexed by the order of a sort of as many entries."""
        if is_item(node) and node.args[0].target in SORTS and node.args[1] == 0:
            node = node.args[0]
            return len(sizes(node.args[0])) == 1
        if node.target is not aten.index.Tensor or len(node.args[1]) != 1:
            return False
        index = node.args[1][0]
        is_order = is_item(index) and index.args[1] == 1 and index.args[0].target in SORTS
        return is_order and sizes(index) == sizes(node.args[0]) and len(sizes(index)) == 1

    def of(self, node: fx.Node) -> int | None:
        """Return the number of experts whose counts a value has, in order; None: it has no counts."""
        if node not in self._counts:
            self._counts[node] = self._of(node)
        return self._counts[node]

    def _of(self, node: fx.Node) -> int | None:
        if not isinstance(node.meta.get("val"), torch.Tensor) or len(sizes(node)) != 1:
            return None
        while node.target in COPIES or is_exact_cast(node):
            node = node.args[0]
        rule: Callable[[fx.Node], int | None] | None = {
            aten.histc.default: self._histogram,
            aten.bincount.default: self._bincount,
            aten.scatter_add.default: self._added,
            aten.index_add.default: self._added,
            aten.slice.Tensor: self._first,
            aten.sum.dim_IntList: self._summed,
        }.get(node.target)
        bins = None if rule is None else rule(node)
        return bins if bins is not None and self.bound is not None and self.bound <= bins else None

    def _histogram(self, node: fx.Node) -> int | None:
        bins, low, high = (argument(node, name) for name in ("bins", "min", "max"))
        is_exact = low == 0 and high in (bins, bins - 1) and bins > 1
        return bins if is_exact and self.are(node.args[0]) else None

    def _bincount(self, node: fx.Node) -> int | None:
        weights, least = argument(node, "weights"), argument(node, "minlength")
        return least if weights is None and self.are(node.args[0]) else None

    def _first(self, node: fx.Node) -> int | None:
        """Return the number of counts in a slice of counts that starts at the first expert."""
        part, end, known = slice_of(node), argument(node, "end"), self.of(node.args[0])
        is_first = part is not None and part.start == 0 and isinstance(end, int) and end > 0
        return min(end, known) if is_first and known is not None else None

    def _added(self, node: fx.Node) -> int | None:
        base, dim, index, value = node.args[:4]
        if dim != 0 or node.kwargs or not _is_filled(base, 0) or not _is_filled(value, 1) or not self.are(index):
            return None
        return int(sizes(base)[0]) if sizes(base)[0].is_Integer and sizes(value) == sizes(index) else None

    def _summed(self, node: fx.Node) -> int | None:
        """Return the number of counts in a sum over tokens or slots of ones at their experts."""
        ones, dims = node.args[:2]
        rank = len(sizes(ones))
        if sorted(dim % rank for dim in dims) != list(range(rank - 1)) or argument(node, "keepdim"):
            return None
        ones = behind(ones, CASTS | COPIES)
        bins = sizes(ones)[-1]
        return int(bins) if bins.is_Integer and self._are_ones(ones, rank) else None

    def _are_ones(self, node: fx.Node, rank: int) -> bool:
        if node.target in (aten.scatter.value, aten.scatter.src):
            base, dim, index, value = node.args[:4]
            is_one = value == 1 or (isinstance(value, fx.Node) and _is_filled(value, 1))
            if dim % rank != rank - 1 or not is_one or not _is_filled(base, 0) or not self.are(index):
                return False
            at = tuple(f"d{i}" for i in range(rank))
            return sizes(index)[-1] == 1 or is_distinct_along(index, at, at[-1])
        if node.target is aten.eq.Tensor:
            numbers, every = node.args
            range_ = behind(every, KEEP_ORDER | COPIES)
            is_every = range_.target in RANGES and counts_from_zero(range_) and sizes(every)[-1] == sizes(node)[-1]
            return is_every and sizes(numbers)[-1] == 1 and self.are(behind(numbers, KEEP_ORDER | COPIES))
        return False

    def ends(self, node: fx.Node) -> int | None:
        """Return the number of experts whose ends among sorted slots a value has, in order; None: it has no ends."""
        while node.target in COPIES or is_exact_cast(node):
            node = node.args[0]
        return self.of(node.args[0]) if node.target is aten.cumsum.default else None

    # ---- Numbers that Python reads off counts

    def canonical(self, number: Any) -> sympy.Expr | None:
        """Return a number as a sum of counts, `count0 + count1` say; None: it depends on other data."""
        value = value_of(number)
        if not isinstance(value, (int, torch.SymInt)):
            return None
        expr = expression(value)
        known = self._items if isinstance(number, fx.Node) else {}
        expr = sympy.expand(expr.subs(known))
        return None if depends_on_data(expr) else sympy.expand(expr.subs(self.total, self.up_to(self.bound or 0)))

    def up_to(self, experts: int) -> sympy.Expr:
        """Return the number of slots of the first `experts` experts, as a sum; experts beyond the bound have none."""
        return sympy.Add(*(sympy.Symbol(f"count{i}", integer=True) for i in range(min(experts, self.bound or 0))))

    @functools.cached_property
    def _items(self) -> dict[sympy.Symbol, sympy.Expr]:
        known: dict[sympy.Symbol, sympy.Expr] = {}
        for node in self.numbers.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default):
            count, value = self._item(node.args[0]), node.meta["val"]
            symbol = expression(value) if isinstance(value, torch.SymInt) else None
            if count is not None and isinstance(symbol, sympy.Symbol):
                known[symbol] = count
        return known

    def _item(self, node: fx.Node) -> sympy.Expr | None:
        if (selected := select_of(behind(node, CASTS | COPIES))) is None:
            return None
        source, _, number = selected
        if (experts := self.of(source)) is not None:
            return self.up_to(number % experts + 1) - self.up_to(number % experts)
        if (experts := self.ends(source)) is not None:
            return self.up_to(number % experts + 1)
        return None


def _is_filled(node: fx.Node, number: int) -> bool:
    node = behind(node, ENTRIES | CASTS)
    return node.target in FILLS and filled_with(node) == number
