"""Prove that a value counts the slots of each expert, or says where each expert ends among sorted slots.

Called by `sorted_slots`. A slot is a (token, expert) pair. The proof goes by the operators that compute the value:
every expert index is less than the number of bins, each bin holds one index, and every slot is counted once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.graphs.arguments import argument, dim_of, select_of, slice_of
from dta_compile.passes.graphs.nodes import First, behind, filled_with, is_item
from dta_compile.passes.graphs.operators import CASTS, COPIES, EXCHANGES, FILLS, KEEP_ORDER, RANGES, RESHAPES, aten
from dta_compile.passes.lowering.experts.distinct_places import is_distinct_along
from dta_compile.passes.lowering.experts.slot_numbers import EXACT, counts_from_zero
from dta_compile.passes.symbols import depends_on_data, expression, sizes, value_of

SORTS = (aten.sort.default, aten.sort.stable)
CHOICES = (*SORTS, aten.topk.default, aten.max.dim, aten.min.dim)  # of indices along a dimension
ENTRIES = KEEP_ORDER | COPIES | EXCHANGES | {aten.permute.default, aten.slice.Tensor, aten.expand.default}


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
