"""Translate operators to integer arithmetic for z3; `Formulas` supplies the values of their operands.

The translation is exact: operators without a rule, and arithmetic that its dtype might round or wrap, are not
translated. If an untranslated term depends on a single token, it becomes an uninterpreted function of that token
(`Atom`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import z3

from dta_compile.proofs.cases import (
    Cases,
    Untranslatable,
    Value,
    applications,
    as_integer,
    boolean,
    case,
    cases,
    chain,
    choices,
    exact_int,
    formula,
    held_by,
    is_formula,
    merged,
    values_of,
    within,
)
from dta_compile.proofs.formulas import Formulas
from dta_compile.proofs.mask_class import BOUND, FORBIDDEN
from dta_compile.proofs.terms import RANKED, Apply, Const, Number, Term, is_undefined

MOST_CASES = 64

AND, OR, XOR = ("bitwise_and", "logical_and"), ("bitwise_or", "logical_or"), ("bitwise_xor", "logical_xor")
NOT = ("bitwise_not", "logical_not")
SELECTIONS = ("where", "masked_fill")


class Logic(Formulas):
    """`Formulas` with the rules of operators."""

    def _applied(self, term: Apply) -> Value:
        name = term.name
        if term.op is RANKED:
            value = self.value(term.args[0])
            if any(map(self._is_biased, term.operands)):
                self._biased.add(term)
            return value
        if name in SELECTIONS:
            condition, value, other = term.args if name == "where" else (term.args[1], term.args[2], term.args[0])
            return self._selected(term, condition, value, other)
        if name in NOT and (name == "logical_not" or term.dtype is torch.bool):
            return z3.Not(self.boolean(term.args[0]))
        if name in (*AND, *OR, *XOR) and (name.startswith("logical") or term.dtype is torch.bool):
            both = [boolean(self._operand(arg)) for arg in term.args]
            return (z3.And if name in AND else z3.Or if name in OR else z3.Xor)(*both)
        if name == "_to_copy" and term.dtype is torch.bool:
            return self.boolean(term.args[0])
        operands = [self._operand(arg) for arg in term.args]
        if not any(is_formula(value) for value in operands):
            return self._by_cases(term, operands, self._folded)
        converted = [self._formula_in_dtype(term, arg, value) for arg, value in zip(term.args, operands, strict=True)]
        if not any(is_formula(value) for value in converted):
            return self._by_cases(term, converted, self._folded)
        return self._by_cases(term, [self._cases_in_dtype(term, value) for value in converted], self._of_integers)

    def _operand(self, arg: Any) -> Any:
        if isinstance(arg, Term):
            return self.value(arg)
        return case(arg) if isinstance(arg, (int, float)) and not isinstance(arg, bool) else arg

    def _selected(self, term: Apply, where: Term, *branches: Any) -> Value:
        # Branches first: what is assumed of an input there (zero or one) makes a condition on it known.
        one, other = (
            self._cases_in_dtype(term, self._formula_in_dtype(term, arg, self._operand(arg))) for arg in branches
        )
        condition = self.boolean(where)
        if any(self._is_biased(arg) for arg in term.operands):
            self._biased.add(term)
        if term.dtype is torch.bool:
            return z3.If(condition, boolean(one), boolean(other))
        if is_formula(one) or is_formula(other):
            return z3.If(condition, *(as_integer(value, term) for value in (one, other)))
        both = ((cases(one), condition), (cases(other), z3.Not(condition)))
        return merged([(number, z3.And(guard, side)) for one, side in both for number, guard in one.numbers])

    def _is_biased(self, term: Any) -> bool:
        return term in self._biased

    def _formula_in_dtype(self, term: Apply, arg: Any, value: Any) -> Any:
        """Convert an operand's formula to the operator's working dtype; raise `Untranslatable` if that may round or
        wrap."""
        dtype = _working_dtype(term)
        if not is_formula(value):
            return value
        if z3.is_real(value):
            if dtype.is_floating_point and torch.promote_types(arg.dtype, dtype) != dtype:
                raise Untranslatable(term, "a quotient that is rounded")
            return value
        if dtype.is_floating_point and (few := self._few(value)) is not None:
            return few
        if arg.dtype == dtype or self._is_exact(value, dtype):
            return value
        if not (isinstance(arg, Term) and dtype.is_floating_point and self._is_of_one_token(arg)):
            raise _narrow(term, dtype)
        return self._assume_binary(arg, value)

    def _cases_in_dtype(self, term: Apply, value: Any) -> Any:
        """Convert an operand's `Cases` to the operator's working dtype."""
        if not isinstance(value, Cases):
            return value
        dtype = _working_dtype(term)
        numbers = []
        for number, guard in value.numbers:
            if dtype.is_floating_point:
                held = torch.tensor(number, dtype=dtype).item()
                # Torch may compute with a Python number as given, or round it to the dtype first.
                is_same = held == number or number != number or term.name in (*COMPARISONS, *SELECTIONS)
            else:
                held, low, high = number, *values_of(dtype)
                is_same = number == number and low <= number <= high and number == int(number)
            if not is_same:
                raise _narrow(term, dtype)
            numbers.append((held, guard))
        return Cases(tuple(numbers))

    def _assume_binary(self, term: Term, value: z3.ArithRef) -> Cases:
        """Assume that an integer input, read at one token, is zero or one."""
        token = next(iter(term.indices - {"row"}), None)
        self._assume("binary", term if token is None else self.terms.with_index(term, token, "key"))
        for name in ("query", "key") if token in ("query", "key") else ():
            same = self.integer(self.terms.with_index(term, str(token), name))
            self.solver.add(z3.Or(same == 0, same == 1))
        return Cases(((1, value == 1), (0, value != 1)))

    def _is_exact(self, value: z3.ArithRef, dtype: torch.dtype) -> bool:
        """Return whether a dtype represents all values of a formula; for int64, assume bounds on inputs if needed."""
        low, high = held = held_by(dtype)
        if within(self.ranges.of(value), held) or (dtype is torch.int64 and self._is_bounded(value)):
            return True
        return self.proves(z3.And(value >= low, value <= high))

    def _is_bounded(self, value: z3.ArithRef) -> bool:
        """Return whether int64 represents a formula if its inputs are less than `BOUND`; if so, assume that."""
        unbound = [atom for term, atom in self.atoms.items() if term not in self.assumed["bounded"]]
        by_name = {atom.function.name(): atom for atom in unbound if atom.term.dtype is torch.int64}
        free = [by_name[name] for name in {part.decl().name() for part in applications(value, by_name)}]
        for atom in free:
            self.ranges.learn(atom.function.name(), (-BOUND, BOUND))
        if free and within(self.ranges.of(value), held_by(torch.int64)):
            self.assumed["bounded"].update((atom.term, None) for atom in free)
            return True
        for atom in free:
            self.ranges.learn(atom.function.name(), values_of(atom.term.dtype))
        return False

    def _by_cases(self, term: Apply, operands: Sequence[Any], apply: Callable[[Apply, list[Any]], Any]) -> Value:
        """Apply an operator to each combination of the numbers that its operands may be."""
        options = [choices(value) for value in operands]
        if math.prod(map(len, options)) > MOST_CASES:
            raise Untranslatable(term, "too many cases")
        results = []
        for combination in itertools.product(*options):
            guard = z3.simplify(z3.And(*(guard for _, guard in combination)))
            if not z3.is_false(guard):
                results.append((apply(term, [value for value, _ in combination]), guard))
        if any(isinstance(result, z3.ExprRef) for result, _ in results):
            if term.dtype is torch.bool:
                return z3.Or(*(z3.And(guard, result) for result, guard in results))
            return chain([(guard, as_integer(result, term)) for result, guard in results])
        merged_cases = merged(results)
        return boolean(merged_cases) if term.dtype is torch.bool else merged_cases

    def _folded(self, term: Apply, numbers: list[Any]) -> bool | int | float:
        """Compute an operator of numbers with torch, in the dtypes of its operands."""
        self._check_bias(term, numbers)
        if any(is_undefined(term.op, number, term.dtype) for number in numbers):
            raise Untranslatable(term, "a cast beyond its dtype")
        result = self._computed(term, numbers)
        # Integers of z3 have one zero, so the result must not depend on the sign of one.
        negated = [_with_other_sign(arg, number) for arg, number in zip(term.args, numbers, strict=True)]
        other = self._computed(term, negated) if repr(negated) != repr(numbers) else result
        if result != other and not (result != result and other != other):
            raise Untranslatable(term, "it depends on the sign of a zero")
        return result

    @staticmethod
    def _computed(term: Apply, numbers: list[Any]) -> bool | int | float:
        tensors = [
            torch.full(() if arg.is_scalar else (1,), number, dtype=arg.dtype) if _is_tensor(arg) else number
            for arg, number in zip(term.args, numbers, strict=True)
        ]
        if not any(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise Untranslatable(term)
        try:
            result: bool | int | float = term.op(*tensors, **dict(term.kwargs)).item()
        except RuntimeError as error:
            raise Untranslatable(term, str(error)) from error
        return result

    def _check_bias(self, term: Apply, numbers: list[Any]) -> None:
        """Raise `Untranslatable` unless the operator keeps a bias of "at most -1e4" at most -1e4.

        Adding a number that is not positive does, and so does a maximum with a number of at most -1e4.
        """
        if not any(self._is_biased(arg) for arg in term.operands):
            return
        self._biased.add(term)
        others = [number for arg, number in zip(term.args, numbers, strict=True) if not self._is_biased(arg)]
        bounds = [number for number in (*others, *dict(term.kwargs).values()) if isinstance(number, (int, float))]
        lowering, limiting = ("add", "minimum", "_to_copy"), ("clamp", "clamp_min", "maximum")
        most = 0.0 if term.name in lowering else FORBIDDEN
        if term.name not in (*lowering, *limiting) or any(number > most for number in bounds):
            raise Untranslatable(term, "of a bias")

    def _of_integers(self, term: Apply, args: list[Any]) -> Any:
        """Apply an operator to numbers, some of which are formulas."""
        if term.name in COMPARISONS:
            return compared(term.name, *args)
        result = arithmetic(term, args, self.proves)
        if not z3.is_real(result) and not self._is_exact(formula(result), term.dtype):
            raise _narrow(term, term.dtype)
        return result


def _narrow(term: Term, dtype: torch.dtype) -> Untranslatable:
    return Untranslatable(term, f"{dtype} may not hold its numbers".replace("torch.", ""))


def _with_other_sign(arg: Any, number: Any) -> Any:
    """Return a zero of a floating-point term with the other sign; any other number unchanged."""
    is_known = not isinstance(arg, Term) or isinstance(arg, Const) or not arg.dtype.is_floating_point
    return number if is_known or number != 0 else -float(number)


def _is_tensor(arg: Any) -> bool:
    """Return whether an argument is a tensor and not a Python number."""
    return isinstance(arg, Term) and not isinstance(arg, Number)


def _working_dtype(term: Apply) -> torch.dtype:
    """Return the dtype that an operator converts its operands to."""
    if term.name not in COMPARISONS:
        return term.dtype
    both = [
        torch.empty(() if arg.is_scalar else (1,), dtype=arg.dtype) if _is_tensor(arg) else _example_number(arg)
        for arg in term.args
    ]
    return torch.result_type(*both)


def _example_number(arg: Any) -> Any:
    return (1.0 if arg.dtype.is_floating_point else 1) if isinstance(arg, Number) else arg


Proves = Callable[[z3.BoolRef], bool]

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
ALWAYS = {"lt": math.inf, "le": math.inf, "gt": -math.inf, "ge": -math.inf}  # comparisons with these always hold


def arithmetic(term: Apply, args: list[Any], proves: Proves) -> Any:
    """Apply the operator of a term to unbounded integers; raise `Untranslatable` if it has no rule."""
    name, kwargs = term.name, dict(term.kwargs)
    if name in ("floor", "trunc", "ceil"):
        return _rounded(name, args[0])
    if name == "_to_copy":
        return args[0] if term.dtype.is_floating_point else _rounded("trunc", args[0])
    if name == "div" and kwargs.get("rounding_mode") is None:
        return _quotient(term, *args)
    if any(z3.is_real(arg) for arg in args if isinstance(arg, z3.ExprRef)):
        raise Untranslatable(term)
    ints: list[Any] = [arg if isinstance(arg, z3.ExprRef) or arg is None else exact_int(arg, term) for arg in args]
    if name in SIMPLE:
        return SIMPLE[name](*ints)
    if name in ("add", "sub", "rsub"):
        if kwargs or len(ints) > 2:  # `alpha`, which is lowered to a product
            raise Untranslatable(term)
        first, second = ints if name != "rsub" else ints[::-1]
        return first + second if name == "add" else first - second
    if name in ("clamp", "clamp_min", "clamp_max"):
        bounds = {key: None if bound is None else exact_int(bound, term) for key, bound in kwargs.items()}
        return _clamped(name, ints, bounds)
    if name in ("floor_divide", "remainder", "fmod", "div"):
        mode = "floor" if name in ("floor_divide", "remainder") else kwargs.get("rounding_mode", "trunc")
        if not proves(formula(ints[1]) > 0):
            raise Untranslatable(term, "division by what may not be positive")
        return _divided(ints[0], ints[1], mode, name in ("remainder", "fmod"))
    raise Untranslatable(term)


def _quotient(term: Apply, dividend: Any, divisor: Any) -> Any:
    """Return a quotient that is exact in floating point: by a power of two whose inverse is a normal number."""
    is_power = isinstance(divisor, (int, float)) and divisor >= 1 and math.frexp(divisor)[0] == 0.5
    if not is_power or z3.is_real(dividend) or 1 / divisor < torch.finfo(term.dtype).tiny:
        raise Untranslatable(term, "a quotient that is rounded")
    return z3.ToReal(dividend) / int(divisor)


def _divided(dividend: Any, divisor: Any, mode: str, takes_rest: bool) -> Any:
    dividend, divisor = formula(dividend), formula(divisor)
    quotient, rest = dividend / divisor, dividend % divisor  # z3 rounds down
    if mode == "trunc":
        negative = (-((-dividend) / divisor), -((-dividend) % divisor))
        quotient, rest = (z3.If(dividend >= 0, a, b) for a, b in zip((quotient, rest), negative, strict=True))
    return rest if takes_rest else quotient


def compared(name: str, a: Any, b: Any) -> z3.BoolRef:
    """Compare two numbers, at least one of them a formula."""
    if not isinstance(a, z3.ExprRef):
        mirrored = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(name, name)
        return compared(mirrored, b, a)
    if isinstance(b, z3.ExprRef):
        return COMPARISONS[name](a, b)
    if math.isnan(b):
        return z3.BoolVal(name == "ne")
    if math.isinf(b):
        return z3.BoolVal(name == "ne" or ALWAYS.get(name) == b)
    if b == int(b):
        return COMPARISONS[name](a, int(b))
    return COMPARISONS[name](z3.ToReal(a) if z3.is_int(a) else a, z3.Q(*b.as_integer_ratio()))


def _rounded(name: str, value: Any) -> Any:
    if not z3.is_real(value):
        return value
    down, up = z3.ToInt(value), -z3.ToInt(-value)
    return {"floor": down, "ceil": up}.get(name, z3.If(value >= 0, down, up))


def _extreme(name: str, a: Any, b: Any) -> Any:
    a, b = formula(a), formula(b)
    return z3.If(a <= b, a, b) if name == "minimum" else z3.If(a >= b, a, b)


def _clamped(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    value, *bounds = args
    low = bounds[0] if bounds and name != "clamp_max" else kwargs.get("min")
    high = bounds[0] if bounds and name == "clamp_max" else bounds[1] if len(bounds) > 1 else kwargs.get("max")
    value = value if low is None else _extreme("maximum", value, low)
    return value if high is None else _extreme("minimum", value, high)


SIMPLE: dict[str, Callable[..., Any]] = {
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "abs": lambda a: z3.If(a >= 0, a, -a),
    "minimum": lambda a, b: _extreme("minimum", a, b),
    "maximum": lambda a, b: _extreme("maximum", a, b),
}
