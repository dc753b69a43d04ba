"""Prove that a condition selects at most one slot of each token, because it compares the indices of a `topk`.

Called by `selected_rows` (`at_most_one`) and by `expert_counts` (`is_distinct_along`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.passes.axes.shape_rules import Labels, labelled_source, labels_in
from dta_compile.passes.graphs.arguments import dim_of, select_of
from dta_compile.passes.graphs.nodes import is_item
from dta_compile.passes.graphs.operators import CASTS, RESHAPES, aten
from dta_compile.passes.symbols import sizes


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
    if is_choice and source.target in (aten.topk.default, aten.sort.default, aten.sort.stable):
        return at[dim_of(source)] == slot
    return False
