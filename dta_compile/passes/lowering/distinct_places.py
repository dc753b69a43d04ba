"""Prove that a condition selects at most one slot of each token, because it compares the indices of a `topk`.

Called by `selected_rows` (`at_most_one`) and by `expert_counts` (`is_distinct_along`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.passes.axes.layouts import argument
from dta_compile.passes.graphs.nodes import is_item
from dta_compile.passes.graphs.operators import CASTS, COPIES, EXCHANGES, RESHAPES
from dta_compile.passes.symbols import sizes

aten = torch.ops.aten

# For each dimension of a value: a constant index, or the name of the condition's dimension that runs along it.
Coordinates = tuple[Any, ...]


def at_most_one(condition: fx.Node, slots: Sequence[int]) -> bool:
    """Return whether a condition is non-zero for at most one entry along `slots`, its dimensions of constant size."""
    if len(slots) != 1:
        return False
    slot = f"d{slots[0]}"
    return _holds_once(condition, tuple(f"d{dim}" for dim in range(len(sizes(condition)))), slot)


def _holds_once(node: fx.Node, at: Coordinates, slot: str) -> bool:
    """Return whether the entry of `node` at `at` is non-zero for at most one value of `slot`."""
    source: Any = node.args[0] if node.args else None
    if node.target in (aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor):
        return any(_holds_once(arg, _broadcast(arg, at), slot) for arg in node.all_input_nodes)
    if node.target in (aten.ne.Scalar, aten.gt.Scalar) and node.args[1] == 0:
        return _holds_once(source, at, slot)
    if node.target in COPIES | CASTS:  # zeros stay zeros
        return _holds_once(source, at, slot)
    if node.target is aten.select.int:
        dim = node.args[1] % len(sizes(source))
        return _holds_once(source, (*at[:dim], node.args[2], *at[dim:]), slot)
    if node.target is aten.permute.default:
        before: list[Any] = [None] * len(at)
        for i, dim in enumerate(node.args[1]):
            before[dim % len(at)] = at[i]
        return _holds_once(source, tuple(before), slot)
    if node.target in EXCHANGES and len(at) > 1:
        order = list(at)
        first, second = node.args[1:] or (0, 1)
        order[first], order[second] = order[second], order[first]
        return _holds_once(source, tuple(order), slot)
    if node.target is aten.unsqueeze.default:
        dim = node.args[1] % len(at)
        return _holds_once(source, (*at[:dim], *at[dim + 1 :]), slot)
    if is_item(node) and source.target is aten.unbind.int:
        dim = (argument(source, 1, "dim") or 0) % (len(at) + 1)
        return _holds_once(source.args[0], (*at[:dim], node.args[1], *at[dim:]), slot)
    if node.target is aten.eq.Scalar:
        return is_distinct_along(source, at, slot)
    if node.target is aten.eq.Tensor:
        left, right = node.args
        pairs = ((left, right), (right, left))
        return any(
            slot not in _broadcast(other, at) and is_distinct_along(numbers, _broadcast(numbers, at), slot)
            for numbers, other in pairs
        )
    return False


def _keeps_numbers(node: fx.Node) -> bool:
    """Return whether a node is a cast between index dtypes, under which distinct numbers stay distinct."""
    wide = (torch.int32, torch.int64)
    return node.target in CASTS and node.args[0].meta["val"].dtype in wide and node.meta["val"].dtype in wide


def _broadcast(node: fx.Node, at: Coordinates) -> Coordinates:
    """Return the coordinates of an operand that broadcasts, aligned at the right; 0 along its dimensions of size 1."""
    own = at[len(at) - len(sizes(node)) :]
    return tuple(0 if size == 1 else index for index, size in zip(own, sizes(node), strict=True))


def is_distinct_along(node: fx.Node, at: Coordinates, slot: str) -> bool:
    """Return whether entries of `node` at two values of `slot` always differ."""
    if at.count(slot) != 1:
        return False
    source: Any = node.args[0] if node.args else None
    if node.target in COPIES or _keeps_numbers(node):
        return is_distinct_along(source, at, slot)
    if node.target is aten.unsqueeze.default:
        dim = node.args[1] % len(at)
        return is_distinct_along(source, (*at[:dim], *at[dim + 1 :]), slot)
    if node.target is aten.slice.Tensor:
        return is_distinct_along(source, at, slot)  # a subset of distinct entries
    if node.target in RESHAPES and at[-1] == slot and sizes(source)[-1] == sizes(node)[-1]:
        return is_distinct_along(source, ("other",) * (len(sizes(source)) - 1) + (slot,), slot)
    is_choice = is_item(node) and node.args[1] == 1
    if is_choice and source.target in (aten.topk.default, aten.sort.default, aten.sort.stable):
        position = {aten.topk.default: 2, aten.sort.default: 1}.get(source.target, 2)
        dim = argument(source, position, "dim")
        return at[(-1 if dim is None else dim) % len(at)] == slot
    return False
