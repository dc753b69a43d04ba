"""Outputs, losses and every gradient equal the one-sequence-at-a-time reference, whatever the tree and the options."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dta_compile
from dta_compile.options import Options
from tests.support.cases import (
    LOSSES,
    QUICK,
    cases,
    chain,
    check_plan,
    check_streaming,
    check_transparent,
    fan,
    make_case,
    options,
    reference,
    with_options,
)
from tests.support.tiny import TinyLM, after, assert_same, gradients, log_probs, shared_ids


@pytest.fixture(scope="module")
def model():
    return TinyLM()


@pytest.fixture(scope="module")
def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="dta")


@settings(max_examples=50, **QUICK)
@given(case=cases, chosen=options, loss=st.sampled_from(sorted(LOSSES)))
def test_forward_and_backward(model, compiled, case, chosen, loss):
    check_transparent(model, compiled, case, chosen, loss)


MANY = {**QUICK, "max_examples": 250, "derandomize": False}


@pytest.mark.slow
@settings(**MANY)
@given(case=cases, chosen=options, loss=st.sampled_from(sorted(LOSSES)))
def test_many_batches(model, compiled, case, chosen, loss):
    check_transparent(model, compiled, case, chosen, loss)


@settings(max_examples=30, **QUICK)
@given(case=cases, chosen=options)
def test_streaming(model, compiled, case, chosen):
    check_streaming(model, compiled, case, chosen)


@pytest.mark.slow
@settings(**MANY)
@given(case=cases, chosen=options)
def test_many_streaming_steps(model, compiled, case, chosen):
    check_streaming(model, compiled, case, chosen)


@settings(max_examples=20, **QUICK)
@given(case=cases, chosen=options)
def test_scoring(model, compiled, case, chosen):
    with torch.no_grad():
        compiled(torch.zeros(3, 5, dtype=torch.int64)), compiled(torch.zeros(3, 5).long(), torch.ones(3, 5).bool())
        logits = with_options(compiled, chosen)(*case.arguments)
        check_plan(compiled, case, chosen, "score")
        assert_same(torch.where(case.mask[..., None], logits, 0.0), reference(model, case))


@pytest.mark.parametrize(
    ("strategy", "padding"),
    [
        *(("packed", "right"), ("packed", "left"), ("vanilla", "right"), ("dfs", "left")),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("vanilla", "left"), ("dfs", "right"))),
    ],
)
@pytest.mark.parametrize("sequences", [chain(40), fan(49), [[2]] * 6, [[], [3], [], [3, 1]], [[i] for i in range(9)]])
def test_extreme_trees(model, compiled, sequences, strategy, padding):
    for budget in (0, None):
        chosen = Options(chunk_size=5, strategy=strategy, memory_budget=budget)
        check_transparent(model, compiled, make_case(sequences, padding), chosen, "weights")


def test_a_batch_of_padding_alone_has_no_gradients(model, compiled):
    ids, mask = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.bool)
    with_options(compiled, Options())
    logits = compiled(ids, mask)
    (logits * mask[..., None]).sum().backward()
    assert all(grad is None or not grad.any() for grad in gradients(model).values())
    model.zero_grad()


def test_streaming_reaches_parameters_that_only_the_loss_uses(model, compiled):
    critic = torch.nn.Linear(31, 1).double()
    case = make_case([[1, 2, 3], [1, 2], [1, 2, 3, 0]], "right")
    both = torch.nn.ModuleList([model, critic])

    def loss_of_row(row, logits):
        return torch.where(case.mask[row, :, None], critic(logits), 0.0).pow(2).sum()

    def eager():
        sum(loss_of_row(row, logits) for row, logits in enumerate(reference(model, case))).backward()

    compiled(*case.arguments)
    actual = after(both, lambda: dta_compile.streaming_step(compiled, loss_of_row, *case.arguments) and None)
    assert_same(actual, after(both, eager))


def test_an_autocast_object_made_outside_caches_no_casts_of_a_trace():
    """As accelerate wraps the forward of a model for mixed precision."""
    model = TinyLM(layers=1).float()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    ids, seen = shared_ids(), []
    for function in (torch.compile(model, backend="dta"), model):
        logits = function(ids).float()
        model.zero_grad()
        log_probs(logits, ids).sum().backward()
        seen.append([logits, *(parameter.grad for parameter in model.parameters())])
    for actual, expected in zip(*seen, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0.05 * float(expected.detach().abs().max()))


def test_streaming_evaluates_the_loss_under_the_users_autocast(model):
    seen, ids = [], torch.zeros(3, 5, dtype=torch.int64)

    def loss_of_row(row, logits):
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return logits.sum()

    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(model, backend="dta")
        actual = after(model, lambda: dta_compile.streaming_step(compiled, loss_of_row, ids))
        expected = after(model, lambda: [row.backward(retain_graph=True) or row for row in model(ids).sum((1, 2))])
    assert seen == [torch.bfloat16] * 3
    assert_same(actual, expected)  # autocast leaves float64 models alone
