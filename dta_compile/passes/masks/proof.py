"""What an attention mask is, derived from what its operators mean: causal, within a window or by chunks, up to padding
and segments.

An entry of the mask is a term of the row, the query and the key (`elements`), the term a formula (`logic`).
Which keys are real is what the mask says of a token and itself. That it allows just what a causal mask allows, with
such padding, is then proven for all rows, queries and keys; what a proof assumes of the inputs is checked at every call
(`runtime.calls.masks`). A mask that depends on numbers or tables is proven for those of each call.

One assumption is of the scores and is not checked: what a finite additive mask forbids gets no weight (`FORBIDDEN`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Iterator
from typing import Any

import sympy
import torch
import z3
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.passes.graphs.nodes import is_float
from dta_compile.passes.masks.cases import Cases, Untranslatable, applications
from dta_compile.passes.masks.elements import Elements
from dta_compile.passes.masks.formulas import Atom
from dta_compile.passes.masks.logic import Logic
from dta_compile.passes.masks.tables import Facts, Table, read_table
from dta_compile.passes.mixer_layers import MaskClass
from dta_compile.passes.program import Program, ancestors, where
from dta_compile.passes.symbols import expression, free_symbols, symbolic
from dta_compile.passes.terms import Apply, Entry, Number, Term, Terms, shown, subterms

# An additive mask of this or less is taken to leave no weight. That is so in floating point if the scores of a query
# differ by less than about 9,900, and with -1e9 for all scores that occur. Not checked: the older models that write
# -1e4 take it for granted, too.
FORBIDDEN = -1e4
SMALL = 40  # tokens of examples in messages
DIVISIONS = ("floor_divide", "div", "remainder", "fmod")  # by which chunks are told apart
MOST_ROLES = 3  # functions of a token that a mask compares between query and key

_Z3 = threading.Lock()  # z3's own context serves one thread at a time


@dataclasses.dataclass(frozen=True)
class Roles:
    """What values that a mask compares between query and key are taken for."""

    segments: tuple[Atom, ...] = ()
    positions: tuple[Atom, ...] = ()


class Mask:
    """The mask of an attention call: `[rows, heads, queries, keys]` or what broadcasts to it.

    Attributes:
        term: an entry of it, over "row", "query" and "key".
        constant: its class, if that is the same for every call.
        numbers, scalars, tables: what has to be known of a call to say the class otherwise.
        items: tensors that numbers are read from, by the symbol that Dynamo knows the number by.
        leaves: tensors that the class is read from.
    """

    def __init__(self, program: Program, mask: fx.Node) -> None:
        self.program, self.mask, self.where = program, mask, where(mask)
        if learned := ancestors([mask]) & program.parameter_dependent:
            if mask.meta["val"].dtype is torch.bool or any("topk" in str(node.target) for node in learned):
                raise self.refusal("a learned sparse mask: the model chooses keys", "use a causal mask")
            raise self.refusal("a bias computed from parameters", "add no learned bias to the attention scores")
        assert program.tokens is not None
        self.sizes = {"query": program.tokens, "key": program.tokens}
        if program.batch is not None:
            self.sizes["row"] = program.batch
        self.terms = Terms()
        with _Z3:
            self.term = self._entry()
        self._list_sources()
        self._classes: dict[object, MaskClass] = {}
        self.constant = self._constant_class()

    def __str__(self) -> str:
        return shown(self.term) if self.constant is None else str(self.constant)

    def _entry(self) -> Term:
        """The mask's term; a dimension of several heads is a "head"."""
        shape = self.mask.meta["val"].shape

        def constant_of(term: Term, size: sympy.Expr) -> float | None:
            return Logic(self.terms, {**self.sizes, "scanned": size}).constant(term)

        names = ("row", "head", "query", "key")[4 - len(shape) :]
        if len(shape) == 4 and self.program.batch is None:
            names = ("", *names[1:])
        if len(shape) > 2:
            self.sizes["head"] = expression(shape[-3])
        index = tuple(self.terms.index(name) if name else self.terms.const(0) for name in names)
        return Elements(self.program, self.terms, constant_of, self.sizes.values()).entry(self.mask, index)

    def _list_sources(self) -> None:
        parts = list(subterms(self.term))
        entries = [part for part in parts if isinstance(part, Entry)]
        of_pairs = [entry for entry in entries if not _is_of_one_token(entry)]
        pairs = {entry.node for entry in of_pairs}
        if "head" in self.term.indices:
            raise self.refusal(
                "a mask that differs between heads (ALiBi, relative bias)", "use rotary or learned positions"
            )
        for entry in of_pairs:
            if "row" in entry.indices or entry.node.op not in ("placeholder", "get_attr"):
                raise self._pair_refusal(entry.node)
        self.scalars = {entry.node for entry in entries if not entry.index}
        self.numbers = [part.expr for part in parts if isinstance(part, Number)]
        self.items = self._items()
        self.fixed: dict[fx.Node, Table] = {}
        for node in pairs:
            if node.op == "get_attr" and (table := read_table(getattr(self.program.module, str(node.target)))):
                self.fixed[node] = table
        self.tables = {node for node in pairs if node.op != "get_attr"}
        self.leaves = {entry.node for entry in entries if entry.node.op != "get_attr"} | set(self.items.values())

    def _items(self) -> dict[sympy.Symbol, fx.Node]:
        """The tensors that symbols of the numbers are read from; raises `RefusalError` if nobody knows one."""
        symbols = free_symbols((*self.numbers, *self.sizes.values()))
        items = self.program.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default)
        read = {symbolic(node.meta["val"]): node.args[0] for node in items}
        unknown = symbols - read.keys() - set(self.program.input_symbols)
        if unknown:
            got = f"{', '.join(sorted(map(str, unknown)))}, a number that is computed from tensors"
            raise self.refusal(got, "pass the number to the compiled function")
        return {symbol: read[symbol] for symbol in sorted(symbols & read.keys(), key=str)}

    def _constant_class(self) -> MaskClass | None:
        """The class, if nothing has to be known for it; None: it depends on the call. Raises `RefusalError`."""
        try:
            found = self.classify(Facts(tables=self.fixed))
        except RefusalError:
            if self.numbers or self.scalars or self.tables:
                return None
            raise
        return None if any(map(self._reads_numbers, (*found.segments, *found.positions))) else found

    def _reads_numbers(self, term: Term) -> bool:
        """Whether a term depends on a number of the call other than a size: known, it may not be taken for anything."""
        expressions = [part.expr for part in subterms(term) if isinstance(part, Number)]
        scalars = any(isinstance(part, Entry) and not part.index for part in subterms(term))
        return scalars or bool(free_symbols(expressions) - free_symbols(self.sizes.values()))

    def classify(self, facts: Facts) -> MaskClass:
        """The class of the mask for what is known of a call; raises `RefusalError` if it has none."""
        if facts.key not in self._classes:
            with _Z3:
                self._classes[facts.key] = self._classified(facts)
        return self._classes[facts.key]

    def _classified(self, facts: Facts) -> MaskClass:
        failure, is_decided = "", False
        for float_role, integer_role in (("binary", ""), ("bias", ""), ("binary", "binary")):
            if integer_role and is_decided:
                break  # whatever the integers are
            try:
                return _Proof(self, Logic(self.terms, self.sizes, facts, float_role, integer_role)).classify()
            except Failure as error:
                failure, is_decided = failure or str(error), True
            except Untranslatable as error:
                kind = "an additive bias with values other than 0 and -inf" if is_float(self.mask) else "a mask"
                failure = failure or f"{kind} that cannot be decided: {error}"
            except z3.Z3Exception as error:
                failure = failure or f"a mask that cannot be decided in time ({error})"
        raise self.refusal(
            failure, "use a causal mask, a sliding window or chunks of the sequence, and padding from one mask"
        )

    def refusal(self, got: str, hint: str) -> RefusalError:
        """The error for a mask of no supported class."""
        expression = f"\n  mask: {shown(self.term)}" if hasattr(self, "term") else ""
        return RefusalError(
            "this attention mask cannot be proven causal",
            where=self.where,
            expected="causal, also within a sliding window or by chunks, with padding that is the same for every query",
            got=got + expression,
            hint=hint,
        )

    def _pair_refusal(self, node: fx.Node) -> RefusalError:
        if node.op == "placeholder":
            return self.refusal(
                "a mask over pairs of tokens given as an input", "pass a [batch, tokens] padding mask instead"
            )
        return self.refusal(
            f"{node.target} of pairs of tokens, which is not understood in a mask",
            "make the mask of comparisons of positions, of per-token conditions and of where",
        )


class Failure(Exception):
    """A mask is none of the supported classes."""


class _Proof:
    """One attempt to classify a mask, with what a `Logic` takes for granted."""

    def __init__(self, mask: Mask, logic: Logic) -> None:
        self.mask, self.logic, self.terms = mask, logic, mask.terms
        self.query, self.key = logic.variable("query"), logic.variable("key")
        self.allowed = self._allowed(mask.term)
        self.compared = [logic.atoms[term] for term, tokens in logic.tokens.items() if {"query", "key"} <= tokens]
        # A token is real if it may attend to itself.
        self.diagonal = mask.terms.with_index(mask.term, "query", "key")
        self.valid_key = self._allowed(self.diagonal)
        self.valid_query = self._allowed(mask.terms.with_index(mask.term, "key", "query"))

    def _allowed(self, term: Term) -> z3.BoolRef:
        """Where the mask allows; raises `Failure` if it does anything but allow and forbid."""
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
                raise Failure(f"an additive bias with values other than 0 and -inf: {number}")
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
        """The class of the mask, of roles that make it one and its window or chunks alone. Raises `Failure`.

        Positions that are wrongly taken to grow make everything but a token itself another segment: of several such
        classes the one with the widest window or chunks is right for more inputs.
        """
        found, failure = [], None
        for roles in self._roles():
            try:
                one = self._with_roles(roles)
            except Failure as error:
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
        if self.diagonal.dtype is torch.bool:
            return self.diagonal
        return self.terms.apply(torch.ops.aten.eq.Scalar, self.diagonal, 0)

    def _require_padding(self) -> None:
        """That a token is padding depends on the inputs, not on its place alone: any token may be real."""
        atoms = self.logic.atoms.values()
        inputs = applications(self.valid_key, {str(one.function) for one in atoms if self.logic.reads_inputs(one.term)})
        fresh = [z3.FreshConst(one.sort()) for one in inputs]
        never = z3.substitute(z3.Not(self.valid_key), *zip(inputs, fresh, strict=True))
        claim = z3.Not(z3.ForAll(fresh, never)) if fresh else self.valid_key
        if (example := self._counterexample(claim)) is not None:
            raise Failure(f"a mask that hides every token {self._number(example, self.key)} from itself")

    def _roles(self) -> Iterator[Roles]:
        """What the values that are compared between query and key may be taken for, the least first."""
        integers = [atom for atom in self.compared if atom.function.range() == z3.IntSort()]
        compared = self.compared if len(self.compared) <= MOST_ROLES else integers[:MOST_ROLES]
        options = [("", "segment", "position") if atom in integers else ("", "segment") for atom in compared]
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
        """The class of the mask if values have these roles, and its window or chunks. Raises `Failure`."""
        distance = self.query - self.key
        both_real = [self.valid_query, self.valid_key]
        same = [self._difference(atom, z3.BoolRef) for atom in roles.segments]
        positions = [self._difference(atom) == distance for atom in roles.positions]
        in_sequence = z3.And(self.valid_key, *same)
        given = [self.valid_query, *(z3.Implies(in_sequence, known) for known in positions)]
        if (example := self._counterexample(z3.Implies(self.allowed, distance >= 0), *given)) is not None:
            raise Failure(f"a mask that lets tokens attend to later ones: {self._pair(example)}")
        found = MaskClass(
            segments=tuple(atom.term for atom in roles.segments),
            positions=tuple(atom.term for atom in roles.positions),
        )
        expected = z3.And(distance >= 0, self.valid_key, *same)
        window = self._window(*given, *both_real, *same, distance >= 0)
        in_window = expected if window is None else z3.And(expected, distance < window)
        if (example := self._counterexample(self.allowed == in_window, *given)) is None:
            return dataclasses.replace(found, window=window)
        for counted, chunk in self._divided():
            query, key = (self.logic.integer(self.terms.with_index(counted, "key", name)) for name in ("query", "key"))
            if self.logic.proves(self.allowed == z3.And(expected, query / chunk == key / chunk), *given):
                return dataclasses.replace(found, chunk=chunk, counted=counted)
        raise Failure(
            "a mask that hides earlier tokens in another way than padding, a sliding window or chunks: "
            + self._pair(example)
        )

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
        for term in subterms(self.mask.term):
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

    def _pair(self, example: z3.ModelRef) -> str:
        return f"query {self._number(example, self.query)} and key {self._number(example, self.key)}, say"

    @staticmethod
    def _number(example: z3.ModelRef, value: z3.ArithRef) -> int:
        return int(example.eval(value, model_completion=True).as_long())


def _is_of_one_token(entry: Entry) -> bool:
    return len(entry.indices - {"row", "head"}) <= 1
