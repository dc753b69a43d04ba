"""Drawn decoders equal eager, outputs and gradients, or are refused by name. `make fuzz` draws many more."""

import dataclasses

import pytest
import torch

from dta_compile.errors import RefusalError
from tests.fuzz import metamorphic, oracle
from tests.fuzz.__main__ import drawn
from tests.fuzz.grammar import PLAIN
from tests.fuzz.minimise import minimised
from tests.fuzz.program import load, verdict
from tests.fuzz.relations import Weighted, gradients, relations, weigh

PROGRAMS = 4


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(PROGRAMS))
def test_drawn_programs_equal_eager_or_are_refused_by_name(number):
    program = drawn(number)
    kind, detail = verdict(program)
    if kind in ("wrong", "crashed"):
        print(minimised(program, kind, attempts=30).source())
    assert kind not in ("wrong", "crashed"), detail


@pytest.mark.parametrize("number", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_drawn_programs_obey_the_relations_that_eager_obeys(number):
    """Rows permuted, doubled, split over calls; other options; models that change between calls."""
    kind, detail = metamorphic.verdict(drawn(number))
    assert kind == "equal" and "rows permuted" in detail, detail


def test_a_relation_that_does_not_hold_is_told():
    """Of a backend whose gradients are those of the first call's rows, whatever comes later."""
    call = {"ids": torch.arange(12).view(3, 4) % 13}
    model = torch.nn.Embedding(13, 2)

    def first(ids):
        first.ids = getattr(first, "ids", ids)
        return model(first.ids)

    base = Weighted(call, weigh((model(call["ids"]),), (None,)))
    expected = gradients(lambda ids: model(ids), model, (base,))
    assert all(torch.equal(gradients(first, model, (base,))[name], expected[name]) for name in expected)
    for relation in relations(base, seed=1):
        eager = gradients(lambda ids: model(ids), model, relation.calls)
        assert oracle.difference(eager, expected) < 1e-6, relation.name
        wrong = relation.name.startswith("rows p") or "calls" in relation.name
        if wrong and relation.calls[0].call["ids"].shape == (3, 4):
            assert oracle.difference(gradients(first, model, relation.calls), expected) > 1e-3, relation.name


class Saturated(torch.nn.Module):
    """The gradient of `score` is what is left of two thousands that cancel."""

    def __init__(self):
        super().__init__()
        self.score, self.values = torch.nn.Parameter(torch.tensor([50.0])), torch.nn.Parameter(torch.tensor([1e3, 2e3]))

    def forward(self, scale):
        return torch.cat([self.score, 0 * self.score]).softmax(0) @ self.values * scale


@pytest.mark.parametrize(("error", "kind"), [(1e-13, "equal"), (1e-8, "wrong")])
def test_the_oracle_knows_how_far_a_gradient_that_cancels_is_rounding(error, kind):
    def backend(module, _):
        def run(*inputs):
            score = next(t for t in inputs if isinstance(t, torch.nn.Parameter) and t.shape == (1,))
            return tuple(result + error * (score.sum() - 50) for result in module(*inputs))

        return run

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model, calls = Saturated(), [{"scale": torch.tensor(1.0)}]
        expected = [oracle.measure(model, model, lambda scale: (None,), call) for call in calls]
        found = oracle.attempt(Saturated, lambda scale: (None,), calls, expected, backend=backend)
    finally:
        torch.set_default_dtype(before)
        torch._dynamo.reset()
    assert found[0] == kind, found


def test_the_oracle_sees_wrong_values_crashes_and_refusals():
    def returns(change):
        def backend(module, _):
            return lambda *inputs: tuple(map(change, module(*inputs)))

        return backend

    def refuses(what):
        def refuse(value):
            raise RefusalError(what)

        return returns(refuse)

    script = load(dataclasses.replace(drawn(0), **PLAIN).source())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = oracle.seeded(script.Model)
        expected = [oracle.measure(model, model, script.seen, call) for call in script.CALLS]
        backends = [
            returns(lambda t: t),
            returns(lambda t: t * (1 + 1e-6)),
            returns(lambda t: t.no_such_attribute),
            refuses(""),
            refuses("cannot"),
        ]
        kinds = [oracle.attempt(script.Model, script.seen, script.CALLS, expected, backend=b)[0] for b in backends]
    finally:
        torch.set_default_dtype(before)
        torch._dynamo.reset()
    assert kinds == ["equal", "wrong", "crashed", "crashed", "refused"]
