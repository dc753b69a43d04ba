"""Recognise integers that number (token, expert) slots or their tokens, and values repeated for each slot of a token.

Called by `sorted_slots`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import sympy
import torch
from torch import fx

from dta_compile.passes.graphs.arguments import argument
from dta_compile.passes.graphs.nodes import is_float
from dta_compile.passes.graphs.operators import CASTS, COPIES, KEEP_ORDER, RESHAPES, aten
from dta_compile.passes.symbols import sizes

SLOT, TOKEN, INVERSE = "slot", "token", "inverse"

EXACT = (torch.int64, torch.int32, torch.float64, torch.float32)  # hold the numbers of all slots


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
