"""Values of terms in the logic: a z3 formula, or a few numbers, each under a condition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import z3

from dta_compile.proofs.terms import Term, shown


class Untranslatable(Exception):
    """A term has no exact formula."""

    def __init__(self, term: Term, reason: str = "") -> None:
        super().__init__(shown(term) + (f" ({reason})" if reason else ""))
        self.term = term


@dataclasses.dataclass(frozen=True)
class Cases:
    """A value that is one of some numbers: the one whose condition holds; exactly one condition does."""

    numbers: tuple[tuple[bool | int | float, z3.BoolRef], ...]


Value = Any  # z3.BoolRef, z3.ArithRef or Cases; z3 has no types


def case(number: float) -> Cases:
    """Return a number as `Cases`."""
    return Cases(((number, z3.BoolVal(True)),))


def merged(numbers: Sequence[tuple[Any, z3.BoolRef]]) -> Cases:
    """Return `Cases` in which each number occurs once."""
    guards: dict[str, list[z3.BoolRef]] = {}
    distinct: dict[str, Any] = {}
    for number, guard in numbers:
        distinct[repr(number)] = number
        guards.setdefault(repr(number), []).append(guard)
    return Cases(tuple((distinct[key], z3.simplify(z3.Or(*each))) for key, each in guards.items()))


def is_formula(value: Any) -> bool:
    """Return whether a value is an arithmetic formula."""
    return isinstance(value, z3.ArithRef)


def cases(value: Any) -> Cases:
    """Convert a boolean formula to `Cases` of True and False."""
    return value if isinstance(value, Cases) else Cases(((True, value), (False, z3.Not(value))))


def choices(value: Any) -> Sequence[tuple[Any, z3.BoolRef]]:
    """Return the alternatives of a value, each with its condition."""
    if isinstance(value, Cases):
        return value.numbers
    if isinstance(value, z3.BoolRef):
        return cases(value).numbers
    return [(value, z3.BoolVal(True))]


def boolean(value: Any) -> z3.BoolRef:
    """Return the formula that a value is not zero."""
    if isinstance(value, Cases):
        return z3.Or(*(guard for number, guard in value.numbers if number != 0))
    if isinstance(value, bool):
        return z3.BoolVal(value)
    return value if z3.is_bool(value) else value != 0


def chain(numbers: Sequence[tuple[z3.BoolRef, Any]]) -> Any:
    """Combine numbers, each under a condition, to one formula of nested `If`s."""
    *others, (_, result) = numbers
    for guard, value in reversed(others):
        result = z3.If(guard, value, result)
    return formula(result)


def formula(number: Any) -> z3.ArithRef:
    """Convert a number to a formula."""
    return number if isinstance(number, z3.ExprRef) else z3.IntVal(number)


def exact_int(number: Any, term: Term) -> int:
    """Convert a number to `int`; raise `Untranslatable` if it is not an integer."""
    if isinstance(number, (bool, int)) or (isinstance(number, float) and number.is_integer()):
        return int(number)
    raise Untranslatable(term)


def as_integer(value: Any, term: Term) -> Any:
    """Convert a value to one integer formula."""
    if isinstance(value, Cases):
        return chain([(guard, exact_int(number, term)) for number, guard in value.numbers])
    if isinstance(value, z3.BoolRef):
        return z3.If(value, 1, 0)
    return value if isinstance(value, z3.ExprRef) else z3.IntVal(exact_int(value, term))


def applications(formula: z3.ExprRef, functions: Collection[str]) -> Sequence[z3.ExprRef]:
    """Return the outermost applications of these functions in a formula."""
    applied: dict[int, z3.ExprRef] = {}
    pending, seen = [formula], set()
    while pending:
        part = pending.pop()
        if part.get_id() in seen:
            continue
        seen.add(part.get_id())
        if str(part.decl()) in functions:
            applied[part.get_id()] = part
        else:
            pending.extend(part.children())
    return list(applied.values())


Range = tuple[int, int]  # both included

# Floating-point dtypes represent all integers up to these absolute values.
EXACT = {torch.float64: 2**53, torch.float32: 2**24, torch.bfloat16: 2**8, torch.float16: 2**11}


def values_of(dtype: torch.dtype) -> Range:
    """Return the least and the greatest value of an integer or bool dtype."""
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def held_by(dtype: torch.dtype) -> Range:
    """Return the range of integers that a dtype represents exactly; only zero for other floating-point dtypes."""
    if dtype in EXACT:
        return -EXACT[dtype], EXACT[dtype]
    if dtype.is_floating_point or dtype.is_complex:
        return 0, 0
    return values_of(dtype)


def within(known: Range | None, held: Range) -> bool:
    """Return whether a known range lies in another; False if it is None."""
    return known is not None and held[0] <= known[0] and known[1] <= held[1]


class Ranges:
    """Interval analysis: ranges of formulas, from those of their variables and functions."""

    def __init__(self) -> None:
        self._leaves: dict[str, Range] = {}
        self._known: dict[int, tuple[z3.ExprRef, Range | None]] = {}  # keeps the formulas alive: z3 reuses ids

    def learn(self, name: str, known: Range) -> None:
        """Set the range of a variable, or of all values of a function."""
        self._leaves[name] = known
        self._known.clear()

    def of(self, formula: z3.ExprRef) -> Range | None:
        """Return the range of a formula, or None if it is unknown."""
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
    """Return the range of z3's quotient, which rounds down for positive divisors; None for other divisors."""
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
