"""Values of terms in formulas: a formula of z3, or one of a few numbers each under a condition."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import z3

from dta_compile.proofs.terms import Term, shown


class Untranslatable(Exception):
    """A term has no exact formula."""

    def __init__(self, term: Term, reason: str = "") -> None:
        super().__init__(shown(term) + (f" ({reason})" if reason else ""))
        self.term = term


@dataclasses.dataclass(frozen=True)
class Cases:
    """One of some numbers, each where its formula holds; just one of them does."""

    numbers: tuple[tuple[bool | int | float, z3.BoolRef], ...]


Value = Any  # z3.BoolRef, z3.ArithRef or Cases; z3 has no types


def case(number: float) -> Cases:
    """One number, everywhere."""
    return Cases(((number, z3.BoolVal(True)),))


def merged(numbers: Sequence[tuple[Any, z3.BoolRef]]) -> Cases:
    """Cases with each number once."""
    guards: dict[str, list[z3.BoolRef]] = {}
    distinct: dict[str, Any] = {}
    for number, guard in numbers:
        distinct[repr(number)] = number
        guards.setdefault(repr(number), []).append(guard)
    return Cases(tuple((distinct[key], z3.simplify(z3.Or(*each))) for key, each in guards.items()))


def is_number(value: Any) -> bool:
    """Whether a value is a formula of a number."""
    return isinstance(value, z3.ArithRef)


def cases(value: Any) -> Cases:
    """A truth value as a number."""
    return value if isinstance(value, Cases) else Cases(((True, value), (False, z3.Not(value))))


def choices(value: Any) -> Sequence[tuple[Any, z3.BoolRef]]:
    """What a value may be, and where it is."""
    if isinstance(value, Cases):
        return value.numbers
    if isinstance(value, z3.BoolRef):
        return cases(value).numbers
    return [(value, z3.BoolVal(True))]


def boolean(value: Any) -> z3.BoolRef:
    """Whether a value is not zero."""
    if isinstance(value, Cases):
        return z3.Or(*(guard for number, guard in value.numbers if number != 0))
    if isinstance(value, bool):
        return z3.BoolVal(value)
    return value if z3.is_bool(value) else value != 0


def chain(numbers: Sequence[tuple[z3.BoolRef, Any]]) -> Any:
    """One formula for numbers, each under a condition."""
    *others, (_, result) = numbers
    for guard, value in reversed(others):
        result = z3.If(guard, value, result)
    return formula(result)


def formula(number: Any) -> z3.ArithRef:
    """A number as a formula."""
    return number if isinstance(number, z3.ExprRef) else z3.IntVal(number)


def exact_int(number: Any, term: Term) -> int:
    """A number that is an integer, as one."""
    if isinstance(number, (bool, int)) or (isinstance(number, float) and number.is_integer()):
        return int(number)
    raise Untranslatable(term)


def as_integer(value: Any, term: Term) -> Any:
    """A value as one formula of an integer."""
    if isinstance(value, Cases):
        return chain([(guard, exact_int(number, term)) for number, guard in value.numbers])
    if isinstance(value, z3.BoolRef):
        return z3.If(value, 1, 0)
    return value if isinstance(value, z3.ExprRef) else z3.IntVal(exact_int(value, term))


def applications(formula: z3.ExprRef, functions: Collection[str]) -> Sequence[z3.ExprRef]:
    """The values of these functions in a formula."""
    found: dict[int, z3.ExprRef] = {}
    pending, seen = [formula], set()
    while pending:
        one = pending.pop()
        if one.get_id() in seen:
            continue
        seen.add(one.get_id())
        if str(one.decl()) in functions:
            found[one.get_id()] = one
        else:
            pending.extend(one.children())
    return list(found.values())
