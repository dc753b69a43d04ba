"""On a GPU: equality with float64 on the CPU, rounding in bfloat16, CUDA graphs, and nothing that waits or lingers.

`python -m pytest -m cuda`; skipped without a GPU.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools

import pytest
import torch

import dta_compile
from benchmarks.gpu.checks import BUDGETS, CHECKS, CHUNK_SIZES, EQUAL, STRATEGIES, Trial, forward, loss_of, tree_batch
from benchmarks.methods.ours import replan
from dta_compile.runtime.cuda_graphs.arenas import CudaRecorder
from tests.support.helpers import assert_equal
from tests.support.tiny import (
    PACKED_IDS,
    SEGMENTS,
    StatedLM,
    TinyLM,
    after,
    assert_same,
    shared_ids,
    weighted,
    weights_like,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = torch.device("cuda")
# Tested one by one below, so that a failure names what differs.
ONE_BY_ONE = "float32 equals float64"


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def trial():
    """One compilation for all plans; no other test of this file may reset the compiler before the last use."""
    torch._dynamo.reset()
    trial = Trial(DEVICE, torch.float32)
    trial.ours(tree_batch(0, 20))
    return trial


@pytest.fixture(scope="module")
def expected(trial):
    """Measurements in float64 by seed and length."""
    return functools.cache(lambda seed, length: trial.expected(tree_batch(seed, length)))


@pytest.mark.parametrize(("strategy", "size", "budget"), list(itertools.product(STRATEGIES, CHUNK_SIZES, BUDGETS)))
def test_float32_equals_float64_on_the_cpu(trial, expected, strategy, size, budget):
    replan(trial.function, strategy=strategy, chunk_size=size, memory_budget=budget)
    for seed in range(3):
        length = 30 if size < 64 else 250 + 70 * seed
        assert_equal(trial.ours(tree_batch(seed, length)), expected(seed, length), EQUAL)
        schedule = dta_compile.last_plan(trial.function).schedule
        assert (schedule.strategy, schedule.chunk_size) == (strategy, size)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", [name for name in CHECKS if name != ONE_BY_ONE])
def test_checks_of_the_benchmark(name):
    found = CHECKS[name](DEVICE)
    assert found.passed, found.text


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("graphs", [True, False])
def test_two_models_at_once(graphs):
    trials = [Trial(DEVICE, torch.float32, cuda_graphs=graphs) for _ in range(2)]
    with torch.no_grad():
        for model in (trials[1].model, trials[1].exact):
            model.model.norm.weight.fill_(0.5)
    batches = [tree_batch(seed, 90) for seed in range(2)]
    outputs = [run_forward(one, batch) for one, batch in zip(trials, batches, strict=True)]  # both before a backward
    for one, batch, output in zip(trials, batches, outputs, strict=True):
        loss_of(batch)(masked(output, batch)).backward()
        check_gradients(one, one.expected(batch).gradients)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("graphs", [True, False])
def test_gradients_accumulate(graphs):
    trial, batches = Trial(DEVICE, torch.float32, cuda_graphs=graphs), [tree_batch(seed, 60) for seed in range(3)]
    for batch in batches:
        loss_of(batch)(masked(run_forward(trial, batch), batch)).backward()
    expected = [trial.expected(batch).gradients for batch in batches]
    check_gradients(trial, {name: sum(one[name] for one in expected) for name in expected[0]})


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("graphs", [True, False])
def test_weights_that_change_and_move(graphs):
    """Steps of an optimizer change weights in place; moving a model to the CPU and back puts them elsewhere."""
    trial, batch = Trial(DEVICE, torch.float32, cuda_graphs=graphs), tree_batch(0, 60)
    for _ in range(2):
        assert_equal(trial.ours(batch), trial.expected(batch), EQUAL)
        with torch.no_grad():
            for mine, theirs in zip(trial.model.parameters(), trial.exact.parameters(), strict=True):
                mine.mul_(1.25), theirs.mul_(1.25)
    trial.model.cpu()
    held = [parameter.to(DEVICE) for parameter in trial.model.parameters()]  # where the weights were before
    trial.model.to(DEVICE)
    assert_equal(trial.ours(batch), trial.expected(batch), EQUAL)
    del held


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_packed_rows_with_sinks_soft_cap_and_window(attention):
    model = StatedLM()
    exact = copy.deepcopy(model)
    compiled = torch.compile(model.float().to(DEVICE), backend="dta", options={"attention": attention})

    def step(run, device):
        ids, segments = PACKED_IDS.to(device), SEGMENTS.to(device)
        out = torch.where((segments != 0)[..., None], run(ids, segments), 0)
        (out * weights_like(out.double().cpu()).to(out)).sum().backward()
        return out.detach()

    out, gradients = after(model, lambda: step(compiled, DEVICE))
    found = (
        out.double().cpu(),
        {name: grad if grad is None else grad.double().cpu() for name, grad in gradients.items()},
    )
    assert_same(found, after(exact, lambda: step(exact, torch.device("cpu"))), 1e-4)
    assert dta_compile.last_plan(compiled).stats.tree_tokens == 6


def test_a_float64_model_is_exact():
    """No kernel but plain math takes float64."""
    model, ids = TinyLM(), shared_ids()
    expected = after(model, lambda: weighted(model(ids)).backward())
    model.to(DEVICE)
    compiled = torch.compile(model, backend="dta")
    actual = after(model, lambda: weighted(compiled(ids.to(DEVICE)).cpu()).backward())
    assert_same({name: grad.cpu() for name, grad in actual[1].items()}, expected[1])


def run_forward(trial, batch):
    return forward(trial.function, batch.to(DEVICE))


def masked(output, batch):
    return torch.where(batch.valid.to(DEVICE), output, 0.0)


def check_gradients(trial, expected):
    found = {name: parameter.grad.cpu().double() for name, parameter in trial.model.named_parameters()}
    assert_same(found, {name: grad.double() for name, grad in expected.items()}, EQUAL)


def test_graphs_are_recorded_after_all_earlier_ones_are_gone():
    record, x = CudaRecorder(), torch.ones(4, device=DEVICE)
    for _ in range(3):
        outputs, replay = record(lambda: [x * 2])
        replay()
        assert outputs[0].tolist() == [2.0] * 4
        del outputs, replay
        gc.collect()


def test_a_capture_that_fails_leaves_stream_and_generator_usable():
    record, stream = CudaRecorder(), torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        record(lambda: [torch.ones((), device=DEVICE).item()])  # waits for the device, which a capture cannot
    assert torch.cuda.current_stream() == stream
    assert torch.randn(2, device=DEVICE).isfinite().all()
