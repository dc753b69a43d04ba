"""On a device other than the CPU, simulated: masks are proven, nothing mixes devices, and no schedule waits for one."""

from __future__ import annotations

import pytest
import torch

import dta_compile
from dta_compile.runtime.calls import executor
from dta_compile.runtime.rows import buffers, dense_to_tree
from dta_compile.runtime.rows.upload import upload
from tests.support.families import V, build
from tests.support.helpers import logits, make_batch, rollouts
from tests.support.simulated_device import DEVICE, Device, OnDevice, simulated
from tests.support.tiny import VOCABULARY, TinyLM, gradients, shared_ids

IDS = shared_ids(batch=6, tokens=12)
MASK = torch.arange(12) < torch.tensor([[12], [9], [12], [4], [1], [12]])
WEIGHTS = torch.randn(*IDS.shape, VOCABULARY, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
WEIGHTS *= MASK[..., None]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def expected_of(model):
    out = model(IDS, MASK)
    (out * WEIGHTS).sum().backward()
    expected = out.detach(), gradients(model)
    model.zero_grad()
    return expected


def check_gradients(device, model, expected):
    for name, parameter in model.named_parameters():
        found = device.put(parameter).grad
        torch.testing.assert_close(found.host, expected[name], rtol=1e-9, atol=1e-12, msg=name)
        device.put(parameter).grad = None


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"memory_budget": 0}, {"strategy": "dfs"}, pytest.param({"strategy": "vanilla"}, marks=pytest.mark.slow)],
)
def test_a_step_on_the_device(options):
    model = TinyLM(layers=1)
    expected = expected_of(model)
    with simulated() as device:
        compiled = torch.compile(model, backend="dta", options={"chunk_size": 5, "attention": "reference", **options})
        for _ in range(2):
            out = compiled(IDS, MASK)
            with device:
                (out * device.put(WEIGHTS)).sum().backward()
            torch.testing.assert_close(out.host[MASK], expected[0][MASK], rtol=1e-9, atol=1e-12)
            check_gradients(device, model, expected[1])
    assert device.waits, "the tree is built on the host"
    assert not [what for what, in_schedule in device.waits if in_schedule]


def uploads_of_a_step(layers, monkeypatch):
    """Return the number of arrays that a step by stages uploads, where nothing is kept."""
    model, uploaded = TinyLM(layers=layers), []
    for module in (executor, buffers, dense_to_tree):
        monkeypatch.setattr(module, "upload", lambda array, device: uploaded.append(array) or upload(array, device))
    with simulated() as device:
        options = {"chunk_size": 5, "attention": "reference", "memory_budget": 0, "sweep": "stages"}
        out = torch.compile(model, backend="dta", options=options)(IDS, MASK)
        with device:
            (out * device.put(WEIGHTS)).sum().backward()
    return len(uploaded)


def test_layers_share_what_a_step_uploads(monkeypatch):
    """The GPU waits for each upload, so that a step with chunks of 2,048 tokens took four times as long."""
    assert 0 < uploads_of_a_step(4, monkeypatch) <= uploads_of_a_step(2, monkeypatch)


def test_a_streaming_step_on_the_device():
    model = TinyLM(layers=1)
    _, expected = expected_of(model)
    with simulated() as device:
        compiled = torch.compile(model, backend="dta", options={"chunk_size": 5, "attention": "reference"})
        compiled(IDS, MASK)

        def loss_of_row(row, out):
            return (out * device.put(WEIGHTS[row])).sum()

        dta_compile.streaming_step(compiled, loss_of_row, IDS, MASK)
        check_gradients(device, model, expected)
    assert not [what for what, in_schedule in device.waits if in_schedule]


def test_scoring_on_the_device():
    model = TinyLM(layers=1)
    with simulated() as device, torch.no_grad():
        out = torch.compile(model, backend="dta", options={"attention": "reference"})(IDS, MASK)
    torch.testing.assert_close(out.host[MASK], model(IDS, MASK)[MASK].detach(), rtol=1e-9, atol=1e-12)
    assert isinstance(out, OnDevice) and device.waits


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma3")), "mistral"]
)
def test_masks_of_transformers(name):
    batch, model = make_batch(rollouts(V)), build(name)
    with simulated():
        found = logits(torch.compile(model, backend="dta", options={"attention": "reference"}), batch)
    with torch.no_grad():
        expected = logits(model, batch)
    torch.testing.assert_close(found.host[batch.valid], expected[batch.valid], rtol=1e-5, atol=1e-6)


def test_the_simulation_notices_what_it_is_for():
    device = Device.current = Device()
    with device:
        there = torch.ones(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="tensors of the CPU and of the device"):
            there + torch.ones(3)
        assert not device.waits and (there * torch.tensor(2.0)).host.tolist() == [2, 2, 2]
        for number, wait in enumerate((there.cpu, there.sum().item, lambda: there[there > 0], there.nonzero), start=1):
            wait()
            assert len(device.waits) == number
