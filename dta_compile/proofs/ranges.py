"""Which integers a dtype holds, and between which ones a formula stays: whether arithmetic wraps or rounds it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import z3

Range = tuple[int, int]  # both included

# Floating-point numbers hold all integers up to these, of either sign.
EXACT = {torch.float64: 2**53, torch.float32: 2**24, torch.bfloat16: 2**8, torch.float16: 2**11}


def held_by(dtype: torch.dtype) -> Range:
    """The integers from one to another, all of which a dtype holds; of a dtype without arithmetic just zero."""
    if dtype in EXACT:
        return -EXACT[dtype], EXACT[dtype]
    if dtype.is_floating_point or dtype.is_complex:
        return 0, 0
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def within(known: Range | None, held: Range) -> bool:
    """Whether a range that is known (None: none is) lies in another."""
    return known is not None and held[0] <= known[0] and known[1] <= held[1]


class Ranges:
    """Ranges of formulas, from those of the variables and functions in them."""

    def __init__(self) -> None:
        self._leaves: dict[str, Range] = {}
        self._known: dict[int, tuple[z3.ExprRef, Range | None]] = {}  # holds the formulas: z3 gives ids away again

    def learn(self, name: str, known: Range) -> None:
        """The range of a variable, or of all values of a function."""
        self._leaves[name] = known
        self._known.clear()

    def of(self, formula: z3.ExprRef) -> Range | None:
        """Between which integers a formula stays; None: nothing is known."""
        key = formula.get_id()
        if key not in self._known:
            self._known[key] = formula, self._of(formula)
        return self._known[key][1]

    def _of(self, formula: z3.ExprRef) -> Range | None:
        if z3.is_int_value(formula):
            return formula.as_long(), formula.as_long()
        kind = formula.decl().kind()
        if kind == z3.Z3_OP_UNINTERPRETED:
            return self._leaves.get(str(formula.decl().name()))
        if kind not in (*_RANGE_RULES, z3.Z3_OP_UMINUS) or not z3.is_int(formula):
            return None
        first, *others = [self.of(part) for part in formula.children() if not z3.is_bool(part)]
        if kind == z3.Z3_OP_UMINUS:
            return first and (-first[1], -first[0])
        for part in others:
            first = None if first is None or part is None else _RANGE_RULES[kind](first, part)
        return first


def _divided(a: Range, b: Range) -> Range | None:
    """z3 rounds down what is divided by a positive number."""
    return _spanned(*(x // y for x in a for y in b)) if b[0] > 0 else None


def _spanned(*numbers: int) -> Range:
    return min(numbers), max(numbers)


_RANGE_RULES: dict[int, Callable[[Range, Range], Range | None]] = {
    z3.Z3_OP_ADD: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    z3.Z3_OP_SUB: lambda a, b: (a[0] - b[1], a[1] - b[0]),
    z3.Z3_OP_MUL: lambda a, b: _spanned(*(x * y for x in a for y in b)),
    z3.Z3_OP_ITE: lambda a, b: _spanned(*a, *b),
    z3.Z3_OP_IDIV: _divided,
    z3.Z3_OP_MOD: lambda a, b: (0, b[1] - 1) if b[0] > 0 else None,
}
