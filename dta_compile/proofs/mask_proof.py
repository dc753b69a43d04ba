"""Prove the class of an attention mask from the semantics of its operators: causal, with a window or chunks, padding,
segments, and blocks of tokens that read each other both ways.

An entry of the mask is a term over row, query and key (`passes.masks.elements`), which becomes a formula (`logic`).
A key is real if the mask lets it attend to itself. Some masks let every token do so, to give each query a key; then the
padding is a condition on the key alone that occurs in the mask. z3 proves, for all rows, queries and keys, that the
mask allows exactly the pairs of a mask of the class. Assumptions on inputs are checked at every call
(`runtime.calls.masks`). A mask that depends on numbers or tables of a call is proven for their values in each call.

One assumption concerns scores and is not checked: pairs that a finite additive mask forbids get no weight
(`FORBIDDEN`).
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

from dta_compile.proofs.call_facts import Facts
from dta_compile.proofs.cases import Cases, Untranslatable, applications
from dta_compile.proofs.formulas import Atom
from dta_compile.proofs.logic import Logic
from dta_compile.proofs.mask_class import FORBIDDEN, Bound, MaskClass
from dta_compile.proofs.pairs import sequences_of
from dta_compile.proofs.terms import Apply, Entry, Term, Terms, in_order, subterms

SMALL = 40  # bound of token positions in counterexamples for messages
DIVISIONS = ("floor_divide", "div", "remainder", "fmod")  # operators that may compute the number of a chunk
MOST_ROLES = 3  # values compared between query and key whose roles are all tried
MOST_CONDITIONS = 4  # conditions on the key alone that are tried as padding, or as what stays visible

Z3_LOCK = threading.Lock()  # z3's own context serves one thread at a time


@dataclasses.dataclass(frozen=True)
class Roles:
    """Roles assigned to the values that a mask compares between query and key."""

    segments: tuple[Atom, ...] = ()
    positions: tuple[Atom, ...] = ()
    bounds: tuple[tuple[Atom, Bound], ...] = ()


class Unproven(Exception):
    """A mask could not be proven to be of a supported class; the message says why.

    Attributes:
        query: the last query of z3 that was not proven, in SMT-LIB; a model of it is a counterexample.
    """

    def __init__(self, reason: str, query: str) -> None:
        super().__init__(reason)
        self.query = query


def classify(term: Term, sizes: Mapping[str, sympy.Expr], facts: Facts) -> MaskClass:
    """Return the class of a mask given the facts of a call.

    Args:
        term: one entry of the mask, over "row", "query" and "key".
        sizes: size of the dimension that each index variable runs along.

    Raises:
        Unproven: no class can be proven.
    """
    # Whatever numbers are computed of a token, equal ones may tell sequences.
    numbers = [value for _, value in _compared_values(term, Terms(in_order(term))) if _is_number_of(value)]
    sums = [value for value in numbers if isinstance(value, Apply) and value.name in ("add", "sub", "rsub")]
    sums = [value for value in sums if not any(_divides(part) for part in subterms(value))]  # `x - x % 4`: chunks
    if sums:  # z3 takes long to find that their parts have no such role
        with contextlib.suppress(Unproven):
            return _classify(term, sizes, facts, frozenset(sums))
    try:
        return _classify(term, sizes, facts)
    except Unproven:
        if numbers:
            with contextlib.suppress(Unproven):
                return _classify(term, sizes, facts, frozenset(numbers))
        raise


def _classify(
    term: Term, sizes: Mapping[str, sympy.Expr], facts: Facts, opaque: frozenset[Term] = frozenset()
) -> MaskClass:
    """Return the class of a mask with `opaque` terms as numbers about which nothing is known; raise `Unproven`."""
    refused, is_decided = None, False
    with Z3_LOCK:
        roles = ("binary", ""), ("bias", ""), ("binary", "binary")
        # Padding that may read itself comes first: it is no window of one token beside which real tokens stay visible.
        for with_kept, (float_role, integer_role) in itertools.product((False, True), roles):
            if integer_role and is_decided:
                continue  # the answer does not depend on what integers are taken for
            logic = Logic(Terms(in_order(term)), sizes, facts, float_role, integer_role, opaque)
            try:
                mask_class = _Proof(term, logic, with_kept=with_kept).classify()
                # A window of one token goes with any value that is taken for a position. If padding reads itself, and
                # real tokens read others, the value numbers sequences.
                reads_itself = mask_class.positions and mask_class.window == 1
                return (_by_a_condition(term, logic, with_kept) if reads_itself else None) or mask_class
            except Unproven as error:
                if (padded := _by_a_condition(term, logic, with_kept)) is not None:
                    return padded
                refused, is_decided = refused or error, True
            except Untranslatable as error:
                is_bias = term.dtype.is_floating_point
                kind = "an additive bias with values other than 0 and -inf" if is_bias else "a mask"
                refused = refused or Unproven(f"{kind} that cannot be decided: {error}", logic.dump())
            except z3.Z3Exception as error:
                refused = refused or Unproven(f"a mask that cannot be decided in time ({error})", logic.dump())
    assert refused is not None
    raise refused


def forbidden_by(term: Term, sizes: Mapping[str, sympy.Expr], facts: Facts) -> float | None:
    """Return the filler of a mask that is proven to allow no pair, whatever its inputs are; None if it is not.

    Arguments as of `classify`.
    """
    with Z3_LOCK:
        for float_role in ("binary", "bias"):
            logic = Logic(Terms(in_order(term)), sizes, facts, float_role, "")
            with contextlib.suppress(Unproven, Untranslatable, z3.Z3Exception):
                proof = _Proof(term, logic)
                if logic.proves(z3.Not(proof.allowed)) and not any(logic.assumed.values()):
                    return proof.filler()
    return None


def _compared_values(term: Term, terms: Terms) -> Iterator[tuple[Apply, Term]]:
    """Yield the parts of a mask that ask whether a value is equal at query and key, each with it over row and key."""
    for part in subterms(term):
        if not isinstance(part, Apply) or part.name not in ("eq", "ne") or not {"query", "key"} <= part.indices:
            continue
        first, second = part.args
        if isinstance(first, Term) and isinstance(second, Term) and "query" in first.indices:
            first, second = second, first
        if isinstance(second, Term) and first is terms.with_index(second, "query", "key"):
            yield part, first


def _divides(part: Term) -> bool:
    return isinstance(part, Apply) and part.name in DIVISIONS


def _is_number_of(value: Term) -> bool:
    """Return whether a value over row and key is an integer that is computed from inputs of each token."""
    is_integer = not value.dtype.is_floating_point and value.dtype is not torch.bool
    is_read = any(isinstance(part, Entry) and part.indices for part in subterms(value))
    return is_integer and is_read and isinstance(value, Apply) and value.indices <= {"row", "key"}


def _by_a_condition(term: Term, logic: Logic, with_kept: bool) -> MaskClass | None:
    """Return the class of a mask that lets padding attend to itself or others, with a condition on the key as padding.

    Returns None if no condition gives a provable class. As with any padding, its outputs are not computed, and a
    gradient for them is an error.
    """
    undecided = (Unproven, Untranslatable, z3.Z3Exception)
    for condition in [part for part in _conditions_on_key(term) if logic.reads_inputs(part)][:MOST_CONDITIONS]:
        for is_real in (True, False):
            roles = logic.float_role, logic.integer_role
            other = Logic(Terms(in_order(term)), logic.sizes, logic.facts, *roles, logic.opaque)
            real = condition if is_real else other.terms.apply(torch.ops.aten.logical_not.default, condition)
            with contextlib.suppress(*undecided):
                proof = _Proof(term, other, real, with_kept)
                # Without this, tokens that attend to nothing would be the real ones, and those that do the padding.
                if other.proves(z3.Implies(proof.valid_key, proof.self_allowed)):
                    return proof.classify()
    return None


def _conditions_on_key(term: Term) -> Iterator[Term]:
    """Yield the conditions on the key alone in a term, over row and key."""
    return (part for part in subterms(term) if part.indices - {"row"} == {"key"} and part.dtype is torch.bool)


class _Proof:
    """One attempt to classify a mask under the assumptions of a `Logic`.

    Args:
        real: term over "row" and "key" for the real tokens; None: the tokens that may attend to themselves.
        with_kept: look for tokens that stay visible beside a window, too.
    """

    def __init__(self, term: Term, logic: Logic, real: Term | None = None, with_kept: bool = False) -> None:
        self.with_kept = with_kept
        self.term, self.logic, self.terms = term, logic, logic.terms
        self.query, self.key = logic.variable("query"), logic.variable("key")
        self.allowed = self._allowed(term)
        self.compared = [logic.atoms[term] for term, tokens in logic.tokens.items() if {"query", "key"} <= tokens]
        self.bounding = [
            Bound(term, tokens == {"key"})
            for term, tokens in logic.tokens.items()
            if tokens in ({"query"}, {"key"}) and logic.reads_inputs(term)
        ]
        attends_to_itself = self.terms.with_index(term, "query", "key")
        self.self_allowed = self._allowed(attends_to_itself)
        self.real: Term = attends_to_itself if real is None else real
        self.valid_key = self._allowed(self.real)
        self.valid_query = self._allowed(self.terms.with_index(self.real, "key", "query"))

    def _allowed(self, term: Term) -> z3.BoolRef:
        """Return the formula of the allowed pairs; raise `Unproven` if entries neither allow nor forbid."""
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
            filler=self.filler(),
        )

    def filler(self) -> float:
        """Return the largest finite number that hides keys, besides those of biases, which calls read."""
        if self.term.dtype is torch.bool:
            return -math.inf
        numbers = [number for number, _ in self.logic.value(self.term).numbers if number <= FORBIDDEN]
        return max((*numbers, *(pairs.filler for pairs, _ in self.logic.facts.pairs.values())), default=-math.inf)

    def _most_permissive(self) -> MaskClass:
        """Return the class for the roles with the fewest restrictions on inputs; raise `Unproven` if no roles work.

        If a value is wrongly taken for a position, only a token itself is in its segment. So among several classes with
        positions the one with the widest window or chunks holds for most inputs.
        """
        classes, failure = [], None
        for roles in self._roles():
            try:
                mask_class = self._with_roles(roles)
            except Unproven as error:
                failure = failure or error
                continue
            if not roles.positions:
                return mask_class
            classes.append(mask_class)
        if not classes:
            assert failure is not None
            raise failure
        return max(classes, key=lambda mask_class: mask_class.window or mask_class.chunk or math.inf)

    def _valid_term(self) -> Term:
        if self.real.dtype is torch.bool:
            return self.real
        return self.terms.apply(torch.ops.aten.eq.Scalar, self.real, 0)

    def _require_padding(self) -> None:
        """Raise `Unproven` if some token is padding whatever inputs and rows are: any must be able to be real."""
        atoms = self.logic.atoms.values()
        inputs = applications(
            self.valid_key, {str(atom.function) for atom in atoms if self.logic.reads_inputs(atom.term)}
        )
        fresh = [z3.FreshConst(value.sort()) for value in inputs]
        never = z3.substitute(z3.Not(self.valid_key), *zip(inputs, fresh, strict=True))
        claim = z3.Not(z3.ForAll(fresh, never)) if fresh else self.valid_key
        if (example := self._counterexample(claim)) is not None:
            token = self._number(example, self.key)
            in_all_rows = "row" not in self.real.indices  # else other rows, or sizes, may make it real: `pad_sequence`
            if in_all_rows or self.logic.proves(z3.Not(self.valid_key), self.key == token):
                raise self._failure(f"a mask that hides every token {token} from itself")

    def _roles(self) -> Iterator[Roles]:
        """Yield assignments of roles to the values compared between query and key, those with fewest roles first."""
        integers = [atom for atom in self.compared if atom.function.range() == z3.IntSort()]
        compared = self.compared if len(self.compared) <= MOST_ROLES else integers[:MOST_ROLES]
        named = {sequences_of(mask) for mask in self.logic.facts.pairs}  # sequence numbers, which are no positions
        counting = [atom for atom in integers if not (isinstance(atom.term, Entry) and atom.term.leaf in named)]
        options = [("", "segment", "position") if atom in counting else ("", "segment") for atom in compared]
        choices = sorted(
            itertools.product(*options), key=lambda roles: (roles.count("position"), roles.count("segment"))
        )
        for bounds in self._bounds():
            for chosen in choices:
                assigned = list(zip(compared, chosen, strict=True))
                yield Roles(
                    tuple(atom for atom, role in assigned if role == "segment"),
                    tuple(atom for atom, role in assigned if role == "position"),
                    bounds,
                )

    def _bounds(self) -> Iterator[tuple[tuple[Atom, Bound], ...]]:
        """Yield no bound, then each integer of one token as the bound of its sequence that it may be.

        A mask reads the last column of a key's sequence, inclusive or not, and the first column of a query's.
        """
        yield ()
        for bound in self.bounding:
            if (atom := self.logic.atoms[bound.term]).function.range() != z3.IntSort():
                continue
            own = self.logic.instance(atom, "key")
            if not bound.is_last:
                yield ((atom, bound),)
            elif self.logic.proves(z3.Implies(self.valid_key, self.key <= own)):
                is_next = self.logic.proves(z3.Implies(self.valid_key, self.key < own))  # real tokens are before it
                yield ((atom, bound._replace(offset=int(is_next))),)

    def _with_roles(self, roles: Roles) -> MaskClass:
        """Return the class of the mask for these roles, with its window or chunks; raise `Unproven` if it has none."""
        distance = self.query - self.key
        both_real = [self.valid_query, self.valid_key]
        bounding = [atom for atom, _ in roles.bounds]
        same = [self._difference(atom, z3.BoolRef) for atom in (*roles.segments, *bounding)]
        positions = [self._difference(atom) == distance for atom in roles.positions]
        in_sequence = z3.And(self.valid_key, *same)
        hypotheses = [self.valid_query, *(z3.Implies(in_sequence, known) for known in positions)]
        for atom, bound in roles.bounds:
            end = self.logic.instance(atom, "key" if bound.is_last else "query") - bound.offset
            is_within = self.query <= end if bound.is_last else self.key >= end
            ordered = z3.And(self.valid_key, distance >= 0)
            hypotheses.append(z3.Implies(ordered, is_within == self._difference(atom, z3.BoolRef)))
            if not bound.is_last:  # else queries behind it would read a key that does not read itself
                hypotheses.append(self.key >= self.logic.instance(atom, "key"))
        if (example := self._counterexample(z3.Implies(self.allowed, distance >= 0), *hypotheses)) is not None:
            failure = self._failure(f"a mask that lets tokens attend to later ones: {self._pair(example)}")
            with contextlib.suppress(Untranslatable, z3.Z3Exception):  # other roles may be decided
                has_others = roles.positions or roles.bounds
                if not has_others and (with_blocks := self._with_blocks(roles, *hypotheses)) is not None:
                    return with_blocks
            raise failure
        mask_class = MaskClass(
            segments=tuple(atom.term for atom in (*roles.segments, *bounding)),
            positions=tuple(atom.term for atom in roles.positions),
            bounds=tuple(bound for _, bound in roles.bounds),
        )
        expected = z3.And(distance >= 0, self.valid_key, *same)
        window = self._window(*hypotheses, *both_real, *same, distance >= 0)
        in_window = expected if window is None else z3.And(expected, distance < window)
        if (example := self._counterexample(self.allowed == in_window, *hypotheses)) is None:
            return dataclasses.replace(mask_class, window=window)
        failure = self._failure(
            "a mask that hides earlier tokens in another way than padding, a sliding window or chunks: "
            + self._pair(example)
        )
        for kept in self._conditions() if self.with_kept and window is not None else ():
            reads = z3.And(expected, z3.Or(distance < window, self.logic.boolean(kept)))
            if self.logic.proves(self.allowed == reads, *hypotheses):
                return dataclasses.replace(mask_class, window=window, kept=kept)
        for counted, chunk in self._divided():
            query, key = (self.logic.integer(self.terms.with_index(counted, "key", name)) for name in ("query", "key"))
            if self.logic.proves(self.allowed == z3.And(expected, query / chunk == key / chunk), *hypotheses):
                return dataclasses.replace(mask_class, chunk=chunk, counted=counted)
        raise failure

    def _with_blocks(self, roles: Roles, *hypotheses: z3.BoolRef) -> MaskClass | None:
        """Return the class of a mask whose tokens read later ones of their block alone; None if there are no such
        blocks."""
        distance = self.query - self.key
        sequence = [self.valid_key, *(self._difference(atom, z3.BoolRef) for atom in roles.segments)]
        window = self._window(*hypotheses, self.valid_query, *sequence, distance >= 0)
        near = z3.BoolVal(True) if window is None else distance < window
        for equal, block, in_block in self._blocks():
            same_block = z3.And(equal, *(self.logic.boolean(term) for term in in_block))
            cut, whole = z3.And(near, z3.Or(distance >= 0, same_block)), z3.Or(z3.And(near, distance >= 0), same_block)
            for fits_window, reads in ((False, cut), (True, whole)):
                if self.logic.proves(self.allowed == z3.And(*sequence, reads), *hypotheses):
                    return MaskClass(
                        window=window,
                        segments=tuple(atom.term for atom in roles.segments),
                        block=block,
                        in_block=in_block[0] if in_block else None,
                        fits_window=fits_window,
                    )
        return None

    def _blocks(self) -> Iterator[tuple[z3.BoolRef, Term, tuple[Term, ...]]]:
        """Yield what may number blocks: whether it is equal at query and key, the term over row and key, and, over key
        and query, a condition on a token of a block, if any."""
        parts = list(subterms(self.term))
        of_token = [part for part in parts if len(part.indices - {"row"}) == 1 and part.dtype is torch.bool]
        conditions = dict.fromkeys(self.terms.with_index(part, "query", "key") for part in of_token)
        both = [(part, self.terms.with_index(part, "key", "query")) for part in conditions]
        for part, value in _compared_values(self.term, self.terms):
            same = self.logic.boolean(part)
            equal = same if part.name == "eq" else z3.Not(same)
            yield from ((equal, value, pair) for pair in ((), *both))

    def _window(self, *hypotheses: z3.BoolRef) -> int | None:
        """Return the least distance at which a key is forbidden although `hypotheses` hold; None if there is none."""
        distance = self.query - self.key
        if (example := self.logic.counterexample(self.allowed, *hypotheses)) is None:
            return None
        first, last = 1, self._number(example, distance)
        while first < last:
            middle = (first + last) // 2
            closer = self.logic.counterexample(self.allowed, *hypotheses, distance <= middle)
            first, last = (middle + 1, last) if closer is None else (first, self._number(closer, distance))
        return last

    def _conditions(self) -> Iterator[Term]:
        """Yield the first conditions on the key alone in the mask, and the opposites of them."""
        for condition in itertools.islice(_conditions_on_key(self.term), MOST_CONDITIONS):
            yield from (condition, self.terms.apply(torch.ops.aten.logical_not.default, condition))

    def _divided(self) -> Iterator[tuple[Term, int]]:
        """Yield the integers of a token, over row and key, that the mask divides, each with its divisor."""
        dividends: dict[tuple[Term, int], None] = {}
        for term in subterms(self.term):
            if not isinstance(term, Apply) or term.name not in DIVISIONS or len(term.indices - {"row"}) != 1:
                continue
            dividend, divisor = term.args
            if isinstance(dividend, Term) and not dividend.dtype.is_floating_point and (number := self._known(divisor)):
                dividends[self.terms.with_index(dividend, "query", "key"), number] = None
        yield from dividends

    def _known(self, divisor: Any) -> int | None:
        """Return the value of a divisor if it is a known positive integer, otherwise None."""
        term = divisor if isinstance(divisor, Term) else self.terms.const(divisor)
        try:
            number = z3.simplify(self.logic.integer(term))
        except Untranslatable:
            return None
        return number.as_long() if z3.is_int_value(number) and number.as_long() > 0 else None

    def _difference(self, atom: Atom, kind: type = z3.ArithRef) -> z3.ExprRef:
        """Return the difference of an atom's values at query and key, or for `BoolRef` whether they are equal."""
        query, key = self.logic.instance(atom, "query"), self.logic.instance(atom, "key")
        return query == key if kind is z3.BoolRef else query - key

    def _counterexample(self, claim: z3.BoolRef, *hypotheses: z3.BoolRef) -> z3.ModelRef | None:
        """Return a counterexample or None, if possible one with small positions, for messages."""
        example = self.logic.counterexample(claim, *hypotheses)
        small = example and self.logic.counterexample(claim, *hypotheses, self.query < SMALL, self.key < SMALL)
        return small or example

    def _failure(self, reason: str) -> Unproven:
        """Return the error with the last query."""
        return Unproven(reason, self.logic.dump())

    def _pair(self, example: z3.ModelRef) -> str:
        return f"query {self._number(example, self.query)} and key {self._number(example, self.key)}, say"

    @staticmethod
    def _number(example: z3.ModelRef, value: z3.ArithRef) -> int:
        return int(example.eval(value, model_completion=True).as_long())
