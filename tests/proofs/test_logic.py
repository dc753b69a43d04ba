"""Formulas of terms against torch: random terms of all dtypes, at indices around which dtypes round or wrap."""

import random

import pytest
import sympy
import torch
import z3

from dta_compile.proofs.cases import Cases, Untranslatable
from dta_compile.proofs.logic import Logic
from dta_compile.proofs.terms import Evaluation, Term, Terms, shown

aten = torch.ops.aten
INTEGERS = [torch.int64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
DTYPES = [*INTEGERS, torch.float32, torch.float64, torch.bfloat16, torch.float16]
SMALL = [0, 1, 2, 3, 4, 7, -1, -4, 100, 127, 128, 200, 255, 256, 257, 300, 0.5, 2.5, 4.0]
LARGE = [2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**40, 1e9, -1e9, torch.inf, -torch.inf, torch.nan, 1e300, 2.0**150]
PLACES = [0, 1, 2, 3, 8, 127, 128, 129, 255, 256, 257, 299]
BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.minimum.default, aten.maximum.default]
BINARY += [aten.floor_divide.default, aten.remainder.Tensor, aten.fmod.Tensor, aten.div.Tensor]
BINARY += [aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.logical_and.default, aten.bitwise_xor.Tensor]
SCALAR = [aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.rsub.Scalar, aten.remainder.Scalar, aten.div.Scalar]
SCALAR += [aten.floor_divide.Scalar, aten.fmod.Scalar, aten.clamp_min.default, aten.clamp_max.default]
UNARY = [aten.neg.default, aten.abs.default, aten.floor.default, aten.ceil.default, aten.trunc.default]
UNARY += [aten.logical_not.default, aten.bitwise_not.default]
COMPARED = [getattr(aten, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")]


class Grammar:
    def __init__(self, seed):
        self.random, self.terms = random.Random(seed), Terms()

    def number(self):
        return self.random.choice(SMALL if self.random.random() < 0.7 else LARGE)

    def term(self, depth):
        if depth == 0:
            term = self.terms.index(self.random.choice(["query", "key"]))
            return term if self.random.random() < 0.6 else self.cast(term)
        return self.random.choice(
            [self.cast, self.unary, self.scalar, self.binary, self.clamp, self.where, self.compare]
        )(self.term(depth - 1))

    def other(self):
        return self.term(self.random.randrange(3))

    def cast(self, term):
        dtype = self.random.choice(DTYPES)
        return term if dtype == term.dtype else self.terms.apply(aten._to_copy.default, term, dtype=dtype)

    def unary(self, term):
        return self.terms.apply(self.random.choice(UNARY), term)

    def scalar(self, term):
        return self.terms.apply(self.random.choice(SCALAR), term, self.number())

    def binary(self, term):
        op = self.random.choice(BINARY)
        alpha = {"alpha": self.random.choice([3, -1])} if op in BINARY[:2] and self.random.random() < 0.3 else {}
        return self.terms.apply(op, term, self.other(), **alpha)

    def clamp(self, term):
        return self.terms.apply(aten.clamp.default, term, min=self.number(), max=self.number())

    def where(self, term):
        condition = self.compare(self.other())
        return self.terms.apply(aten.where.self, condition, *self.random.sample([term, self.other()], 2))

    def compare(self, term):
        op = self.random.choice(COMPARED)
        if self.random.random() < 0.5:
            return self.terms.apply(op.Tensor, term, self.other())
        return self.terms.apply(op.Scalar, term, self.number())


def at_place(value, variables, place):
    """What a value is at one query and key."""
    numbers = [(variable, z3.IntVal(number)) for variable, number in zip(variables, place, strict=True)]

    def number(formula):
        found = z3.simplify(z3.substitute(formula, *numbers))
        return (
            z3.is_true(found)
            if z3.is_bool(found)
            else float(found.as_fraction())
            if z3.is_real(found)
            else found.as_long()
        )

    if not isinstance(value, Cases):
        return number(value)
    (found,) = [one for one, guard in value.numbers if number(guard)]
    return found


def compare(term: Term, terms: Terms) -> bool:
    """Compare a term's formula with torch; False: torch gives none, or there is no formula."""
    query, key = torch.tensor(PLACES)[:, None], torch.tensor(PLACES)[None]
    logic = Logic(terms, dict.fromkeys(("query", "key"), sympy.Integer(300)))
    try:
        expected = Evaluation({}, int, {"query": query, "key": key})(term)
        value = logic.value(term)
    except (RuntimeError, Untranslatable, z3.Z3Exception):
        return False
    assert expected.dtype == term.dtype, shown(term)
    expected, variables = (
        expected.expand(len(PLACES), -1).expand(-1, len(PLACES)),
        list(map(logic.variable, ("query", "key"))),
    )
    if logic.atoms:
        return False
    for row, column in random.Random(0).sample([(i, j) for i in range(12) for j in range(12)], 20):
        found = at_place(value, variables, (PLACES[row], PLACES[column]))
        actual = expected[row, column].item()
        assert found == actual or (found != found and actual != actual), (shown(term), PLACES[row], PLACES[column])
    return True


@pytest.mark.parametrize("seed", range(4))
def test_formulas_say_what_torch_computes(seed):
    grammar, compared = Grammar(seed), 0
    for _ in range(150):
        try:
            term = grammar.term(grammar.random.randrange(1, 5))
        except (RuntimeError, AttributeError):  # torch has no such operator
            continue
        compared += compare(term, grammar.terms)
    assert compared > 30
