"""Terms as formulas of integer arithmetic, which z3 decides: what a mask allows, for all rows, queries and keys.

Exact or not at all: an operator without a rule, and arithmetic that its dtype would round or wrap, is not translated.
What such a term makes of one single token becomes a function of that token that may be anything (`Atom`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
import z3

from dta_compile.passes.mask_arithmetic import COMPARISONS, arithmetic, compared
from dta_compile.passes.mask_cases import (
    Cases,
    Untranslatable,
    Value,
    as_integer,
    boolean,
    case,
    cases,
    chain,
    choices,
    exact_int,
    is_number,
    merged,
)
from dta_compile.passes.mask_tables import Facts
from dta_compile.passes.mask_terms import Apply, Const, Entry, Index, Number, Term, Terms

LONGEST_ROW = 2**24  # tokens; exact in float32
MOST_CASES = 64
FEW = 3  # numbers that are told apart one by one
TIMEOUT = 2000  # milliseconds of one question

# Integers up to these are exact, of either sign.
EXACT = {
    torch.float64: 2**53, torch.float32: 2**24, torch.bfloat16: 2**8, torch.float16: 2**11,
    torch.int32: 2**31 - 1, torch.int16: 2**15 - 1, torch.int8: 2**7 - 1,
}  # fmt: skip

AND, OR, XOR = ("bitwise_and", "logical_and"), ("bitwise_or", "logical_or"), ("bitwise_xor", "logical_xor")
NOT = ("bitwise_not", "logical_not")


@dataclasses.dataclass(frozen=True)
class Atom:
    """What a term makes of one token: a function of `(row, token)` (of those that it depends on) that may be anything.

    `term` has the index variable "key" for the token.
    """

    term: Term
    function: z3.FuncDeclRef


class Logic:
    """Formulas of terms, and proofs.

    Args:
        terms: where the terms were made.
        sizes: by index variable, the size of the dimension along which it counts.
        facts: what is known of numbers and tables; None: nothing.
        float_role: what values that inputs give a token are taken for if they are floating-point: "binary", zero or
            one, or "bias", zero or at most -1e4. Noted in `assumed`.
        integer_role: the same for integers; "" takes them for anything.

    Attributes:
        assumed: by role the terms, over "row" and "key", that are taken to be "binary" or "bias".
        atoms: by term.
        tokens: by atom the index variables of its tokens that occurred.
    """

    def __init__(
        self,
        terms: Terms,
        sizes: Mapping[str, sympy.Expr],
        facts: Facts | None = None,
        float_role: str = "binary",
        integer_role: str = "",
    ) -> None:
        self.terms, self.sizes, self.facts = terms, dict(sizes), facts or Facts()
        self.float_role, self.integer_role = float_role, integer_role
        self.solver = z3.Solver()
        self.solver.set("timeout", TIMEOUT)
        self.variables: dict[str, z3.ArithRef] = {}
        self.assumed: dict[str, dict[Term, None]] = {"binary": {}, "bias": {}}
        self.atoms: dict[Term, Atom] = {}
        self.tokens: dict[Term, set[str]] = {}
        self._values: dict[Term, Value] = {}
        self._numbers: dict[sympy.Expr, Any] = {}
        self._biased: set[Term] = set()
        for size in self.sizes.values():
            self.solver.add(self.number(size) >= 1, self.number(size) <= LONGEST_ROW)

    # Asking

    def proves(self, claim: z3.BoolRef, *hypotheses: z3.BoolRef) -> bool:
        """Whether a claim follows from the axioms and hypotheses."""
        return self.counterexample(claim, *hypotheses) is None

    def counterexample(self, claim: z3.BoolRef, *hypotheses: z3.BoolRef) -> z3.ModelRef | None:
        """Where a claim does not hold; raises `z3.Z3Exception` if that cannot be decided in time."""
        self.solver.push()
        try:
            self.solver.add(*hypotheses, z3.Not(claim))
            answer = self.solver.check()
            if answer == z3.unknown:
                raise z3.Z3Exception(self.solver.reason_unknown())
            return self.solver.model() if answer == z3.sat else None
        finally:
            self.solver.pop()

    def constant(self, term: Term) -> float | None:
        """The number that a boolean or integer term always is; None if there is none, or none that can be shown."""
        try:
            value = self.value(term)
            if isinstance(value, Cases):
                return next((int(number) for number, guard in value.numbers if self.proves(guard)), None)
            if z3.is_bool(value):
                return 1 if self.proves(value) else 0 if self.proves(z3.Not(value)) else None
            few = self._few(value)
            return few.numbers[0][0] if few is not None and len(few.numbers) == 1 else None
        except (Untranslatable, z3.Z3Exception):
            return None

    # Variables and numbers

    def variable(self, name: str) -> z3.ArithRef:
        """An index variable, between 0 and the size of its dimension."""
        if name not in self.variables:
            self.variables[name] = found = z3.Int(name)
            self.solver.add(found >= 0, found < self.number(self.sizes[name]))
        return self.variables[name]

    def number(self, expr: sympy.Expr) -> Any:
        """A size expression; a `float` is a number of the call that is none."""
        if expr not in self._numbers:
            self._numbers[expr] = self._number(expr)
        return self._numbers[expr]

    def _number(self, expr: sympy.Expr) -> Any:
        known = expr.subs(self.facts.numbers)
        if known.is_number:
            return z3.IntVal(int(known)) if known.is_integer else float(known)
        parts = [self.number(part) for part in expr.args]
        if isinstance(expr, sympy.Add):
            return z3.Sum(parts)
        return z3.Product(parts) if isinstance(expr, sympy.Mul) else z3.Int(f"number {expr}")

    # Terms

    def value(self, term: Term) -> Value:
        """The formula of a term; raises `Untranslatable`."""
        if term not in self._values:
            try:
                self._values[term] = self._translated(term)
            except Untranslatable:
                if not self._is_of_one_token(term):
                    raise
                self._values[term] = self._atomic(term)
        return self._values[term]

    def boolean(self, term: Term) -> z3.BoolRef:
        """The formula of a boolean term, or of whether a term is not zero."""
        return boolean(self.value(term))

    def _translated(self, term: Term) -> Value:
        if isinstance(term, Const):
            return z3.BoolVal(term.value) if isinstance(term.value, bool) else case(term.value)
        if isinstance(term, Index):
            return self.variable(term.name)
        if isinstance(term, Number):
            number = self.number(term.expr)
            if term.dtype.is_floating_point and isinstance(number, z3.ExprRef):
                raise Untranslatable(term)
            return number if isinstance(number, z3.ExprRef) else case(number)
        if isinstance(term, Entry):
            return self._entry(term)
        assert isinstance(term, Apply)
        if term.dtype is torch.bool and self._is_of_one_token(term) and self._compares_inputs_as_floats(term):
            raise Untranslatable(term)
        return self._applied(term)

    def _entry(self, term: Entry) -> Value:
        if not term.index and term.node in self.facts.scalars:
            number = self.facts.scalars[term.node]
            return z3.BoolVal(number) if isinstance(number, bool) else case(number)
        table = self.facts.tables.get(term.node)
        if table is None:
            raise Untranslatable(term)
        index = [self.integer(at) for at in term.index]
        for at, size in zip(index, table.shape, strict=True):
            if not self.proves(z3.And(at >= 0, at < size)):
                raise Untranslatable(term, "it may read beyond the table")
        found = merged(table.cases(index))
        return boolean(found) if term.dtype is torch.bool else found

    def _is_of_one_token(self, term: Term) -> bool:
        return len(term.indices - {"row"}) <= 1

    def _compares_inputs_as_floats(self, term: Apply) -> bool:
        """Whether a boolean is made of floating-point values of inputs, of which nothing is known."""
        floats = (arg for arg in term.operands if arg.dtype.is_floating_point)
        return any(not isinstance(arg, Const) and self.reads_inputs(arg) for arg in floats)

    def reads_inputs(self, term: Term) -> bool:
        """Whether a term depends on more than indices and numbers."""
        if isinstance(term, Apply):
            return any(map(self.reads_inputs, term.operands))
        return isinstance(term, Entry) and term.node not in self.facts.scalars

    def _atomic(self, term: Term) -> Value:
        """A term of one token as a function of it that may be anything, within the term's dtype."""
        token = next(iter(term.indices - {"row"}), None)
        general = term if token is None else self.terms.with_index(term, token, "key")
        is_float = term.dtype.is_floating_point
        sort = z3.BoolSort() if is_float or term.dtype is torch.bool else z3.IntSort()
        if general not in self.atoms:
            names = sorted(general.indices)
            function = z3.Function(f"value {len(self.atoms)}", *[z3.IntSort()] * len(names), sort)
            self.atoms[general] = Atom(general, function)
        if token is not None:
            self.tokens.setdefault(general, set()).add(token)
        found = self.instance(self.atoms[general], token)
        if is_float:
            self._assume(self.float_role, general)
            if self.float_role == "bias":
                self._biased.add(term)
                return Cases(((0.0, found), (-math.inf, z3.Not(found))))
            return Cases(((1.0, found), (0.0, z3.Not(found))))
        if sort == z3.IntSort() and self.integer_role == "binary" and token is not None and self.reads_inputs(term):
            self._assume("binary", general)
            self.solver.add(z3.Or(found == 0, found == 1))
        elif term.dtype is torch.uint8:
            self.solver.add(found >= 0, found <= 255)
        elif term.dtype in EXACT:
            self.solver.add(found >= -EXACT[term.dtype] - 1, found <= EXACT[term.dtype])
        return found

    def _assume(self, role: str, term: Term) -> None:
        """Take a term of one token for something that every call can check."""
        if not self.reads_inputs(term):
            raise Untranslatable(term)
        self.assumed[role][term] = None

    def instance(self, atom: Atom, token: str | None) -> Any:
        """An atom of the token that an index variable stands for."""
        names = ["row" if name == "row" else token or name for name in sorted(atom.term.indices)]
        return atom.function(*map(self.variable, names))

    def integer(self, term: Term) -> z3.ArithRef:
        """The formula of a term as one integer."""
        value = self.value(term)
        if isinstance(value, Cases):
            return chain([(guard, exact_int(number, term)) for number, guard in value.numbers])
        return z3.If(value, 1, 0) if z3.is_bool(value) else value

    # Operators

    def _applied(self, term: Apply) -> Value:
        name = term.name
        if name in ("where", "masked_fill"):
            condition, one, other = term.args if name == "where" else (term.args[1], term.args[2], term.args[0])
            return self._selected(term, self.boolean(condition), self._operand(one), self._operand(other))
        if name in NOT and (name == "logical_not" or term.dtype is torch.bool):
            return z3.Not(self.boolean(term.args[0]))
        if name in (*AND, *OR, *XOR) and (name.startswith("logical") or term.dtype is torch.bool):
            both = [boolean(self._operand(arg)) for arg in term.args]
            return (z3.And if name in AND else z3.Or if name in OR else z3.Xor)(*both)
        if name == "_to_copy" and term.dtype is torch.bool:
            return self.boolean(term.args[0])
        operands = [self._operand(arg) for arg in term.args]
        if not any(is_number(value) for value in operands):
            return self._by_cases(term, operands, self._folded)
        wide = [self._in_dtype(term, arg, value) for arg, value in zip(term.args, operands, strict=True)]
        if not any(is_number(value) for value in wide):
            return self._by_cases(term, wide, self._folded)
        return self._by_cases(term, wide, self._of_integers)

    def _operand(self, arg: Any) -> Any:
        if isinstance(arg, Term):
            return self.value(arg)
        return case(arg) if isinstance(arg, (int, float)) and not isinstance(arg, bool) else arg

    def _selected(self, term: Term, condition: z3.BoolRef, one: Value, other: Value) -> Value:
        if any(self._is_biased(arg) for arg in term.operands):  # type: ignore[attr-defined]
            self._biased.add(term)
        if term.dtype is torch.bool:
            return z3.If(condition, boolean(one), boolean(other))
        if is_number(one) or is_number(other):
            return z3.If(condition, *(as_integer(value, term) for value in (one, other)))
        both = ((cases(one), condition), (cases(other), z3.Not(condition)))
        return merged([(number, z3.And(guard, side)) for one, side in both for number, guard in one.numbers])

    def _is_biased(self, term: Any) -> bool:
        return term in self._biased

    def _in_dtype(self, term: Apply, arg: Any, value: Any) -> Any:
        """An operand as the dtype that the operator works in has it; refuses what that would round or wrap."""
        dtype = _working_dtype(term)
        if isinstance(value, Cases) and dtype.is_floating_point:
            return Cases(tuple((torch.tensor(number, dtype=dtype).item(), guard) for number, guard in value.numbers))
        if not is_number(value) or z3.is_real(value) or dtype is torch.int64:
            return value
        if dtype.is_floating_point and (few := self._few(value)) is not None:
            return few
        if self._is_exact(value, dtype):
            return value
        if not (isinstance(arg, Term) and dtype.is_floating_point and self._is_of_one_token(arg)):
            raise Untranslatable(term, f"{dtype} may not hold its numbers".replace("torch.", ""))
        return self._binary(arg, value)

    def _binary(self, term: Term, value: z3.ArithRef) -> Cases:
        """An integer that a token has, taken for zero or one."""
        token = next(iter(term.indices - {"row"}), None)
        self._assume("binary", term if token is None else self.terms.with_index(term, token, "key"))
        for name in ("query", "key") if token in ("query", "key") else ():
            same = self.integer(self.terms.with_index(term, str(token), name))
            self.solver.add(z3.Or(same == 0, same == 1))
        return Cases(((1, value == 1), (0, value != 1)))

    def _few(self, value: z3.ArithRef) -> Cases | None:
        """The numbers that a formula may have, if they are no more than `FEW`."""
        numbers: list[int] = []
        while len(numbers) <= FEW:
            example = self.counterexample(z3.Or(*(value == number for number in numbers)))
            if example is None:
                return Cases(tuple((number, value == number) for number in numbers))
            numbers.append(example.eval(value, model_completion=True).as_long())
        return None

    def _is_exact(self, value: z3.ArithRef, dtype: torch.dtype) -> bool:
        if dtype is torch.uint8:
            return self.proves(z3.And(value >= 0, value <= 255))
        bound = EXACT.get(dtype)
        return bound is not None and self.proves(z3.And(value >= -bound, value <= bound))

    def _by_cases(self, term: Apply, operands: Sequence[Any], apply: Callable[[Apply, list[Any]], Any]) -> Value:
        """An operator of values each of which may be one of several numbers."""
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
        found = merged(results)
        return boolean(found) if term.dtype is torch.bool else found

    def _folded(self, term: Apply, numbers: list[Any]) -> bool | int | float:
        """The operator itself of numbers, in the dtypes of its operands."""
        self._check_bias(term, numbers)
        tensors = [
            torch.full(() if arg.is_scalar else (1,), number, dtype=arg.dtype) if _is_tensor(arg) else number
            for arg, number in zip(term.args, numbers, strict=True)
        ]
        if not any(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise Untranslatable(term)
        try:
            return term.op(*tensors, **dict(term.kwargs)).item()
        except RuntimeError as error:
            raise Untranslatable(term, str(error)) from error

    def _check_bias(self, term: Apply, numbers: list[Any]) -> None:
        """A bias that is "at most -1e4" stays so if what is not positive is added, or if it is raised to such."""
        if not any(self._is_biased(arg) for arg in term.operands):
            return
        self._biased.add(term)
        others = [number for arg, number in zip(term.args, numbers, strict=True) if not self._is_biased(arg)]
        bounds = [number for number in (*others, *dict(term.kwargs).values()) if isinstance(number, (int, float))]
        most = {"add": 0.0, "minimum": 0.0, "_to_copy": 0.0, "clamp": -1e4, "clamp_min": -1e4, "maximum": -1e4}
        if term.name not in most or any(number > most[term.name] for number in bounds):
            raise Untranslatable(term, "of a bias")

    def _of_integers(self, term: Apply, args: list[Any]) -> Any:
        """The operator of integers, some of which are formulas."""
        if term.name in COMPARISONS:
            return compared(term.name, *args)
        result = arithmetic(term, args, self.proves)
        if not z3.is_real(result) and term.dtype is not torch.int64 and not self._is_exact(result, term.dtype):
            raise Untranslatable(term, f"{term.dtype} may not hold its numbers".replace("torch.", ""))
        return result


def _is_tensor(arg: Any) -> bool:
    """Whether an operator was given a tensor, not a number of Python's."""
    return isinstance(arg, Term) and not isinstance(arg, Number)


def _working_dtype(term: Apply) -> torch.dtype:
    """The dtype that an operator brings its operands to."""
    if term.name not in COMPARISONS:
        return term.dtype
    both = [
        torch.empty(() if arg.is_scalar else (1,), dtype=arg.dtype) if _is_tensor(arg) else _example_number(arg)
        for arg in term.args
    ]
    return torch.result_type(*both)


def _example_number(arg: Any) -> Any:
    return (1.0 if arg.dtype.is_floating_point else 1) if isinstance(arg, Number) else arg
