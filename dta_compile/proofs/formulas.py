"""Translate indices, numbers, tables and inputs to z3 formulas, and prove claims about them.

The rules of operators are in `logic`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
import z3

from dta_compile.proofs.call_facts import Facts, Table
from dta_compile.proofs.cases import Cases, Ranges, Untranslatable, Value, as_integer, boolean, case, merged, values_of
from dta_compile.proofs.mask_class import LONGEST_ROW
from dta_compile.proofs.pairs import Pairs, sequences_of
from dta_compile.proofs.terms import Apply, Const, Entry, Index, Number, Term, Terms, subterms

aten = torch.ops.aten

FEW = 3  # most numbers that a formula is split into
TIMEOUT = 2000  # milliseconds of one query


@dataclasses.dataclass(frozen=True)
class Atom:
    """Uninterpreted function for a term of one token; its arguments are row and token, as far as the term has them.

    `term` uses the index variable "key" for the token.
    """

    term: Term
    function: z3.FuncDeclRef


class Formulas(abc.ABC):
    """Translator of terms to formulas, and prover.

    Args:
        terms: the factory of the terms.
        sizes: size of the dimension that each index variable runs along.
        facts: known numbers and tables; None: none.
        float_role: assumption on floating-point values of a token from inputs: "binary" (zero or one) or "bias" (zero
            or at most -1e4). Recorded in `assumed`.
        integer_role: the same for integers; "" assumes nothing.
        opaque: integer terms over "row" and "key" that stay uninterpreted functions of a token.

    Attributes:
        assumed: the terms over "row" and "key" that are assumed to be "binary", "bias", or "bounded" (of absolute value
            less than `BOUND`).
        atoms: the atoms, by term.
        tokens: for each term of an atom, the index variables at which it occurs.
    """

    def __init__(
        self,
        terms: Terms,
        sizes: Mapping[str, sympy.Expr],
        facts: Facts | None = None,
        float_role: str = "binary",
        integer_role: str = "",
        opaque: frozenset[Term] = frozenset(),
    ) -> None:
        self.terms, self.sizes, self.facts = terms, dict(sizes), facts or Facts()
        self.float_role, self.integer_role, self.opaque = float_role, integer_role, opaque
        self.solver = z3.Solver()
        self.solver.set("timeout", TIMEOUT)
        self.variables: dict[str, z3.ArithRef] = {}
        self.assumed: dict[str, dict[Term, None]] = {"binary": {}, "bias": {}, "bounded": {}}
        self.ranges = Ranges()
        self.atoms: dict[Term, Atom] = {}
        self.tokens: dict[Term, set[str]] = {}
        self._values: dict[Term, Value] = {}
        self._numbers: dict[sympy.Expr, Any] = {}
        self._biased: set[Term] = set()
        self._open: tuple[z3.BoolRef, ...] = ()
        for size in self.sizes.values():
            self.ranges.learn(f"number {size}", (1, LONGEST_ROW))
            self.solver.add(self.number(size) >= 1, self.number(size) <= LONGEST_ROW)

    # Queries

    def proves(self, claim: z3.BoolRef, *hypotheses: z3.BoolRef) -> bool:
        """Return whether a claim follows from the axioms and hypotheses."""
        return self.counterexample(claim, *hypotheses) is None

    def counterexample(self, claim: z3.BoolRef, *hypotheses: z3.BoolRef) -> z3.ModelRef | None:
        """Return a model in which a claim is false, or None; raise `z3.Z3Exception` on a timeout."""
        self.solver.push()
        try:
            self.solver.add(*hypotheses, z3.Not(claim))
            answer = self.solver.check()
            if answer != z3.unsat:
                self._open = (*hypotheses, z3.Not(claim))
            if answer == z3.unknown:
                raise z3.Z3Exception(self.solver.reason_unknown())
            return self.solver.model() if answer == z3.sat else None
        finally:
            self.solver.pop()

    def dump(self) -> str:
        """Return the last query that was not proven, in SMT-LIB."""
        query = z3.Solver()
        query.add(*self.solver.assertions(), *self._open)
        return str(query.to_smt2())

    def constant(self, term: Term) -> float | None:
        """Return the number that a term equals for all inputs; None if that cannot be proven of any number."""
        try:
            number = self._constant(self.value(term))
        except (Untranslatable, z3.Z3Exception):
            return None
        return None if any(self.assumed.values()) else number  # calls would not check assumptions made here

    def _constant(self, value: Value) -> float | None:
        if isinstance(value, Cases):
            return next((number for number, guard in value.numbers if self.proves(guard)), None)
        if z3.is_bool(value):
            return 1 if self.proves(value) else 0 if self.proves(z3.Not(value)) else None
        few = self._few(value)
        return few.numbers[0][0] if few is not None and len(few.numbers) == 1 else None

    def _few(self, value: z3.ArithRef) -> Cases | None:
        """Return the numbers that an integer formula may equal if they are at most `FEW`, otherwise None."""
        if z3.is_real(value):
            return None
        numbers: list[int] = []
        while len(numbers) <= FEW:
            example = self.counterexample(z3.Or(*(value == number for number in numbers)))
            if example is None:
                return Cases(tuple((number, value == number) for number in numbers))
            numbers.append(example.eval(value, model_completion=True).as_long())
        return None

    # Variables and numbers

    def variable(self, name: str) -> z3.ArithRef:
        """Return an index variable, between 0 and the size of its dimension."""
        if name not in self.variables:
            self.variables[name] = variable = z3.Int(name)
            self.ranges.learn(name, (0, LONGEST_ROW - 1))
            self.solver.add(variable >= 0, variable < self.number(self.sizes[name]))
        return self.variables[name]

    def number(self, expr: sympy.Expr) -> Any:
        """Return the formula of a size expression, or a `float` for a known number that is not an integer."""
        if expr not in self._numbers:
            self._numbers[expr] = self._number(expr)
        return self._numbers[expr]

    def _number(self, expr: sympy.Expr) -> Any:
        known = expr.subs(self.facts.numbers)
        if known.is_number:
            return z3.IntVal(int(known)) if known.is_integer else float(known)
        parts = [self.number(part) for part in expr.args]
        name = type(expr).__name__  # torch has its own Max and Min
        if name not in _OF_NUMBERS or not all(isinstance(part, z3.ExprRef) for part in parts):
            return z3.Int(f"number {expr}")
        return functools.reduce(_OF_NUMBERS[name], parts)

    # Terms

    def value(self, term: Term) -> Value:
        """Return the formula of a term; raise `Untranslatable` if it has none."""
        if term not in self._values:
            try:
                self._values[term] = self._translated(term)
            except Untranslatable:
                if not self._is_of_one_token(term):
                    raise
                self._values[term] = self._atomic(term)
        return self._values[term]

    def boolean(self, term: Term) -> z3.BoolRef:
        """Return the formula of a boolean term, or that another term is not zero."""
        return boolean(self.value(term))

    def _translated(self, term: Term) -> Value:
        if self.opaque and self._is_opaque(term):
            raise Untranslatable(term)
        if isinstance(term, Const):
            return z3.BoolVal(term.value) if isinstance(term.value, bool) else case(term.value)
        if isinstance(term, Index):
            return self.variable(term.name)
        if isinstance(term, Number):
            number = self.number(term.expr)
            if not term.dtype.is_floating_point:
                return number if isinstance(number, z3.ExprRef) else case(number)
            if isinstance(number, z3.ExprRef) and not z3.is_int_value(number):
                raise Untranslatable(term)
            return case(float(number.as_long()) if isinstance(number, z3.ExprRef) else number)
        if isinstance(term, Entry):
            return self._entry(term)
        assert isinstance(term, Apply)
        floats = [arg for arg in term.operands if arg.dtype.is_floating_point]
        if term.dtype is torch.bool and self._is_of_one_token(term) and any(map(self._may_be_any_float, floats)):
            raise Untranslatable(term)
        return self._applied(term)

    def _entry(self, term: Entry) -> Value:
        if not term.index and term.leaf in self.facts.scalars:
            number = self.facts.scalars[term.leaf]
            return z3.BoolVal(number) if isinstance(number, bool) else case(number)
        if term.leaf in self.facts.pairs:
            return self._of_pair(term, *self.facts.pairs[term.leaf])
        table = self.facts.tables.get(term.leaf)
        if table is None:
            raise Untranslatable(term)
        index = [self.integer(at) for at in term.index]
        for at, size in zip(index, table.shape, strict=True):
            if not self.proves(z3.And(at >= 0, at < size)):
                raise Untranslatable(term, "it may read beyond the table")
        value = merged(_numbers_of(table, index))
        return boolean(value) if term.dtype is torch.bool else value

    def _of_pair(self, term: Entry, pairs: Pairs, shape: Sequence[sympy.Expr]) -> Value:
        """Return the formula of an entry of a mask whose values were tested."""
        *rows, query, key = term.index
        row = next((at for at in rows if not isinstance(at, Const)), self.terms.const(0))
        if not isinstance(row, (Const, Index)) or not row.indices <= {"row"}:
            raise Untranslatable(term)
        i, j = self.integer(query), self.integer(key)
        for at, size in zip((i, j), shape[-2:], strict=True):
            if not self.proves(z3.And(at >= 0, at < self.number(size))):
                raise Untranslatable(term, "it may read beyond the mask")

        def is_real(token: Term) -> z3.BoolRef:
            itself = self.terms.entry(term.leaf, (*rows, token, token))
            return self._atomic(self.terms.apply(aten.eq.Scalar, itself, pairs.allowed, result=torch.bool))

        within = [is_real(key)]
        if pairs.is_causal:
            within.append(j <= i)
        if pairs.is_packed:
            own, other = (self._atomic(self.terms.entry(sequences_of(term.leaf), (row, at))) for at in (query, key))
            within.append(own == other)
        if pairs.window is not None:
            within.append(i - j < pairs.window)
        anything = z3.Function(f"padding of {term.leaf.name}", *[z3.IntSort()] * 3, z3.BoolSort())
        of_padding = z3.And(i != j, anything(self.integer(row), i, j))
        allowed = z3.If(is_real(query), z3.And(*within), of_padding)
        if term.dtype is torch.bool:
            return allowed if pairs.allowed else z3.Not(allowed)
        if pairs.hidden is None:
            self._biased.add(term)
        hidden = -math.inf if pairs.hidden is None else pairs.hidden
        return Cases(((pairs.allowed, allowed), (hidden, z3.Not(allowed))))

    def _is_opaque(self, term: Term) -> bool:
        token = next(iter(term.indices - {"row"}), None)
        return self._is_of_one_token(term) and self.terms.with_index(term, token or "key", "key") in self.opaque

    def _is_of_one_token(self, term: Term) -> bool:
        return len(term.indices - {"row"}) <= 1

    def _may_be_any_float(self, term: Term) -> bool:
        """Return whether a floating-point term may have untested values of inputs; a `where` of numbers has not."""
        if isinstance(term, Apply) and term.name == "where":
            return any(map(self._may_be_any_float, term.operands[1:]))
        entries = [part for part in subterms(term) if isinstance(part, Entry) and not self._is_binary(part)]
        return any(self.reads_inputs(entry) and entry.leaf not in self.facts.pairs for entry in entries)

    def _is_binary(self, entry: Entry) -> bool:
        """Return whether calls test that an entry is zero or one, as a translated term assumes."""
        tokens = entry.indices - {"row"}
        if len(tokens) != 1:
            return False
        return self.terms.with_index(entry, next(iter(tokens)), "key") in self.assumed["binary"]

    def reads_inputs(self, term: Term) -> bool:
        """Return whether a term depends on inputs, not only on indices and known numbers and tables."""
        if isinstance(term, Apply):
            return any(map(self.reads_inputs, term.operands))
        if not isinstance(term, Entry) or term.leaf in self.facts.scalars:
            return False
        return term.leaf not in self.facts.tables or any(map(self.reads_inputs, term.index))

    def _atomic(self, term: Term) -> Value:
        """Return a term of one token as an uninterpreted function of it, with values of the term's dtype."""
        token = next(iter(term.indices - {"row"}), None)
        general = term if token is None else self.terms.with_index(term, token, "key")
        is_float = term.dtype.is_floating_point
        sort = z3.BoolSort() if is_float or term.dtype is torch.bool else z3.IntSort()
        if general not in self.atoms:
            names = sorted(general.indices)
            function = z3.Function(f"value {len(self.atoms)}", *[z3.IntSort()] * len(names), sort)
            self.atoms[general] = Atom(general, function)
            if sort == z3.IntSort():
                self.ranges.learn(function.name(), values_of(term.dtype))
        if token is not None:
            self.tokens.setdefault(general, set()).add(token)
        value = self.instance(self.atoms[general], token)
        if is_float:
            self._assume(self.float_role, general)
            if self.float_role == "bias":
                self._biased.add(term)
                return Cases(((0.0, value), (-math.inf, z3.Not(value))))
            return Cases(((1.0, value), (0.0, z3.Not(value))))
        if sort == z3.IntSort() and self.integer_role == "binary" and token is not None and self.reads_inputs(term):
            self._assume("binary", general)
            self.solver.add(z3.Or(value == 0, value == 1))
        elif sort == z3.IntSort():
            low, high = values_of(term.dtype)
            self.solver.add(value >= low, value <= high)
        return value

    def _assume(self, role: str, term: Term) -> None:
        """Record an assumption on a term of one token, which every call checks.

        Raises `Untranslatable` if the term does not depend on inputs, or reads an unknown scalar tensor, whose value a
        call provides instead.
        """
        entries = [part for part in subterms(term) if isinstance(part, Entry)]
        unread = any(not part.index and part.leaf not in self.facts.scalars for part in entries)
        if unread or not self.reads_inputs(term):
            raise Untranslatable(term)
        self.assumed[role][term] = None

    def instance(self, atom: Atom, token: str | None) -> Any:
        """Apply an atom to the token of an index variable."""
        names = ["row" if name == "row" else token or name for name in sorted(atom.term.indices)]
        return atom.function(*map(self.variable, names))

    def integer(self, term: Term) -> z3.ArithRef:
        """Return the formula of a term as one integer."""
        return as_integer(self.value(term), term)

    @abc.abstractmethod
    def _applied(self, term: Apply) -> Value:
        """Return the formula of an operator's result."""


def _numbers_of(table: Table, index: Sequence[z3.ArithRef]) -> list[tuple[Any, z3.BoolRef]]:
    """Return the numbers of a table with the conditions on an index, within the table, at which it has them."""
    at = index[-2] - index[-1] if table.is_square else index[-1]
    ends = (*table.starts[1:], None)
    return [
        (number, z3.And(at >= start, z3.BoolVal(True) if end is None else at < end))
        for number, start, end in zip(table.numbers, table.starts, ends, strict=True)
    ]


_OF_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda a, b: a + b,
    "Mul": lambda a, b: a * b,
    "Max": lambda a, b: z3.If(a >= b, a, b),
    "Min": lambda a, b: z3.If(a <= b, a, b),
}
