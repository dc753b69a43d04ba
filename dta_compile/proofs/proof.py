"""What an attention mask is, derived from what its operators mean: causal, within a window or by chunks, up to padding
and segments.

An entry of the mask is a term of the row, the query and the key (`elements`), the term a formula (`logic`).
Which keys are real is what the mask says of a token and itself; where every token may attend to itself, so that no
query is without a key, a condition on the key alone that the mask contains. That it allows just what a causal mask
allows, with such padding, is then proven for all rows, queries and keys; what a proof assumes of the inputs is checked
at every call (`runtime.calls.masks`). A mask that depends on numbers or tables is proven for those of each call.

One assumption is of the scores and is not checked: what a finite additive mask forbids gets no weight (`FORBIDDEN`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
import z3

from dta_compile.proofs.cases import Cases, Untranslatable, applications
from dta_compile.proofs.formulas import Atom
from dta_compile.proofs.logic import Logic
from dta_compile.proofs.mask_class import FORBIDDEN, MaskClass
from dta_compile.proofs.pairs import sequences_of
from dta_compile.proofs.tables import Facts
from dta_compile.proofs.terms import Apply, Entry, Term, Terms, in_order, subterms

SMALL = 40  # tokens of examples in messages
DIVISIONS = ("floor_divide", "div", "remainder", "fmod")  # by which chunks are told apart
MOST_ROLES = 3  # functions of a token that a mask compares between query and key
MOST_CONDITIONS = 4  # on the key alone that are tried

Z3_LOCK = threading.Lock()  # z3's own context serves one thread at a time


@dataclasses.dataclass(frozen=True)
class Roles:
    """What values that a mask compares between query and key are taken for."""

    segments: tuple[Atom, ...] = ()
    positions: tuple[Atom, ...] = ()


class Unproven(Exception):
    """A mask is of no supported class, as far as can be shown; says why.

    Attributes:
        query: what z3 was asked last without a proof, in SMT-LIB; a model of it is a counterexample.
    """

    def __init__(self, reason: str, query: str) -> None:
        super().__init__(reason)
        self.query = query


def classify(term: Term, sizes: Mapping[str, sympy.Expr], facts: Facts) -> MaskClass:
    """The class of a mask for what is known of a call.

    Args:
        term: an entry of the mask, over "row", "query" and "key".
        sizes: by index variable, the size of the dimension along which it counts.

    Raises:
        Unproven: none can be shown.
    """
    refused, is_decided = None, False
    with Z3_LOCK:
        for float_role, integer_role in (("binary", ""), ("bias", ""), ("binary", "binary")):
            if integer_role and is_decided:
                break  # whatever the integers are
            logic = Logic(Terms(in_order(term)), sizes, facts, float_role, integer_role)
            try:
                return _Proof(term, logic).classify()
            except Unproven as error:
                if (found := _by_a_condition(term, logic)) is not None:
                    return found
                refused, is_decided = refused or error, True
            except Untranslatable as error:
                is_bias = term.dtype.is_floating_point
                kind = "an additive bias with values other than 0 and -inf" if is_bias else "a mask"
                refused = refused or Unproven(f"{kind} that cannot be decided: {error}", logic.dump())
            except z3.Z3Exception as error:
                refused = refused or Unproven(f"a mask that cannot be decided in time ({error})", logic.dump())
    assert refused is not None
    raise refused


def _by_a_condition(term: Term, logic: Logic) -> MaskClass | None:
    """The class of a mask that lets every token attend to itself, by a condition on the key that makes it one; None if
    there is none, or none that can be shown.

    Padding then attends to itself alone, or to real tokens as well. As with any padding, what it gets is not given, and
    a gradient for it is an error.
    """
    undecided = (Unproven, Untranslatable, z3.Z3Exception)
    try:
        if not logic.proves(_Proof(term, logic).valid_key):
            return None
    except undecided:
        return None
    of_key = [one for one in subterms(term) if one.indices - {"row"} == {"key"} and one.dtype is torch.bool]
    for condition in [one for one in of_key if logic.reads_inputs(one)][:MOST_CONDITIONS]:
        for is_real in (True, False):
            other = Logic(Terms(in_order(term)), logic.sizes, logic.facts, logic.float_role, logic.integer_role)
            real = condition if is_real else other.terms.apply(torch.ops.aten.logical_not.default, condition)
            with contextlib.suppress(*undecided):
                return _Proof(term, other, real).classify()
    return None


class _Proof:
    """One attempt to classify a mask, with what a `Logic` takes for granted.

    Args:
        real: which tokens are real, over "row" and "key"; None: those that may attend to themselves.
    """

    def __init__(self, term: Term, logic: Logic, real: Term | None = None) -> None:
        self.term, self.logic, self.terms = term, logic, logic.terms
        self.query, self.key = logic.variable("query"), logic.variable("key")
        self.allowed = self._allowed(term)
        self.compared = [logic.atoms[term] for term, tokens in logic.tokens.items() if {"query", "key"} <= tokens]
        self.real: Term = self.terms.with_index(term, "query", "key") if real is None else real
        self.valid_key = self._allowed(self.real)
        self.valid_query = self._allowed(self.terms.with_index(self.real, "key", "query"))

    def _allowed(self, term: Term) -> z3.BoolRef:
        """Where the mask allows; raises `Unproven` if it does anything but allow and forbid."""
        value = self.logic.value(term)
        if term.dtype is torch.bool:
            return self.logic.boolean(term)
        if not isinstance(value, Cases):
            raise Untranslatable(term)
        allowed = []
        for number, guard in value.numbers:
            if number == 0:
                allowed.append(guard)
            elif not number <= FORBIDDEN and not self.logic.proves(z3.Not(guard)):
                raise self._failure(f"an additive bias with values other than 0 and -inf: {number}")
        return z3.Or(*allowed)

    def classify(self) -> MaskClass:
        is_padded = not self.logic.proves(self.valid_key)
        if is_padded:
            self._require_padding()
        return dataclasses.replace(
            self._most_permissive(),
            valid=self._valid_term() if is_padded else None,
            binary=tuple(self.logic.assumed["binary"]),
            bias=tuple(self.logic.assumed["bias"]),
            bounded=tuple(self.logic.assumed["bounded"]),
        )

    def _most_permissive(self) -> MaskClass:
        """The class of the mask, of roles that make it one and its window or chunks alone. Raises `Unproven`.

        Positions that are wrongly taken to grow make everything but a token itself another segment: of several such
        classes the one with the widest window or chunks is right for more inputs.
        """
        found, failure = [], None
        for roles in self._roles():
            try:
                one = self._with_roles(roles)
            except Unproven as error:
                failure = failure or error
                continue
            if not roles.positions:
                return one
            found.append(one)
        if not found:
            assert failure is not None
            raise failure
        return max(found, key=lambda one: one.window or one.chunk or math.inf)

    def _valid_term(self) -> Term:
        if self.real.dtype is torch.bool:
            return self.real
        return self.terms.apply(torch.ops.aten.eq.Scalar, self.real, 0)

    def _require_padding(self) -> None:
        """That a token is padding depends on the inputs, not on its place alone: any token may be real."""
        atoms = self.logic.atoms.values()
        inputs = applications(self.valid_key, {str(one.function) for one in atoms if self.logic.reads_inputs(one.term)})
        fresh = [z3.FreshConst(one.sort()) for one in inputs]
        never = z3.substitute(z3.Not(self.valid_key), *zip(inputs, fresh, strict=True))
        claim = z3.Not(z3.ForAll(fresh, never)) if fresh else self.valid_key
        if (example := self._counterexample(claim)) is not None:
            raise self._failure(f"a mask that hides every token {self._number(example, self.key)} from itself")

    def _roles(self) -> Iterator[Roles]:
        """What the values that are compared between query and key may be taken for, the least first."""
        integers = [atom for atom in self.compared if atom.function.range() == z3.IntSort()]
        compared = self.compared if len(self.compared) <= MOST_ROLES else integers[:MOST_ROLES]
        named = {sequences_of(mask) for mask in self.logic.facts.pairs}  # numbers that count nothing
        counting = [one for one in integers if not (isinstance(one.term, Entry) and one.term.leaf in named)]
        options = [("", "segment", "position") if atom in counting else ("", "segment") for atom in compared]
        choices = sorted(
            itertools.product(*options), key=lambda roles: (roles.count("position"), roles.count("segment"))
        )
        for chosen in choices:
            taken = list(zip(compared, chosen, strict=True))
            yield Roles(
                tuple(atom for atom, role in taken if role == "segment"),
                tuple(atom for atom, role in taken if role == "position"),
            )

    def _with_roles(self, roles: Roles) -> MaskClass:
        """The class of the mask if values have these roles, and its window or chunks. Raises `Unproven`."""
        distance = self.query - self.key
        both_real = [self.valid_query, self.valid_key]
        same = [self._difference(atom, z3.BoolRef) for atom in roles.segments]
        positions = [self._difference(atom) == distance for atom in roles.positions]
        in_sequence = z3.And(self.valid_key, *same)
        given = [self.valid_query, *(z3.Implies(in_sequence, known) for known in positions)]
        if (example := self._counterexample(z3.Implies(self.allowed, distance >= 0), *given)) is not None:
            raise self._failure(f"a mask that lets tokens attend to later ones: {self._pair(example)}")
        found = MaskClass(
            segments=tuple(atom.term for atom in roles.segments),
            positions=tuple(atom.term for atom in roles.positions),
        )
        expected = z3.And(distance >= 0, self.valid_key, *same)
        window = self._window(*given, *both_real, *same, distance >= 0)
        in_window = expected if window is None else z3.And(expected, distance < window)
        if (example := self._counterexample(self.allowed == in_window, *given)) is None:
            return dataclasses.replace(found, window=window)
        failure = self._failure(
            "a mask that hides earlier tokens in another way than padding, a sliding window or chunks: "
            + self._pair(example)
        )
        for counted, chunk in self._divided():
            query, key = (self.logic.integer(self.terms.with_index(counted, "key", name)) for name in ("query", "key"))
            if self.logic.proves(self.allowed == z3.And(expected, query / chunk == key / chunk), *given):
                return dataclasses.replace(found, chunk=chunk, counted=counted)
        raise failure

    def _window(self, *hidden: z3.BoolRef) -> int | None:
        """The least distance at which a key is not allowed if all of `hidden` holds; None: there is none."""
        distance = self.query - self.key
        if (example := self.logic.counterexample(self.allowed, *hidden)) is None:
            return None
        first, last = 1, self._number(example, distance)
        while first < last:
            middle = (first + last) // 2
            closer = self.logic.counterexample(self.allowed, *hidden, distance <= middle)
            first, last = (middle + 1, last) if closer is None else (first, self._number(closer, distance))
        return last

    def _divided(self) -> Iterator[tuple[Term, int]]:
        """Integers of a token, over the row and the key, that the mask divides, each with the number it divides by."""
        found: dict[tuple[Term, int], None] = {}
        for term in subterms(self.term):
            if not isinstance(term, Apply) or term.name not in DIVISIONS or len(term.indices - {"row"}) != 1:
                continue
            dividend, divisor = term.args
            if isinstance(dividend, Term) and not dividend.dtype.is_floating_point and (number := self._known(divisor)):
                found[self.terms.with_index(dividend, "query", "key"), number] = None
        yield from found

    def _known(self, divisor: Any) -> int | None:
        """The number that a divisor is, if that is a positive integer."""
        term = divisor if isinstance(divisor, Term) else self.terms.const(divisor)
        try:
            number = z3.simplify(self.logic.integer(term))
        except Untranslatable:
            return None
        return number.as_long() if z3.is_int_value(number) and number.as_long() > 0 else None

    def _difference(self, atom: Atom, kind: type = z3.ArithRef) -> z3.ExprRef:
        """The difference of an atom's values at query and key, or whether they are the same."""
        query, key = self.logic.instance(atom, "query"), self.logic.instance(atom, "key")
        return query == key if kind is z3.BoolRef else query - key

    def _counterexample(self, claim: z3.BoolRef, *given: z3.BoolRef) -> z3.ModelRef | None:
        """One that people can follow, if there is one."""
        found = self.logic.counterexample(claim, *given)
        small = found and self.logic.counterexample(claim, *given, self.query < SMALL, self.key < SMALL)
        return small or found

    def _failure(self, reason: str) -> Unproven:
        """What the question asked last has shown."""
        return Unproven(reason, self.logic.dump())

    def _pair(self, example: z3.ModelRef) -> str:
        return f"query {self._number(example, self.query)} and key {self._number(example, self.key)}, say"

    @staticmethod
    def _number(example: z3.ModelRef, value: z3.ArithRef) -> int:
        return int(example.eval(value, model_completion=True).as_long())
