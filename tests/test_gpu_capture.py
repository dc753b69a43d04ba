"""What is captured on a GPU is analysed on machines without one: inputs say that they are on it, and nothing is run."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch._subclasses import fake_tensor

from dta_compile.runtime.engine import Engine
from tests.helpers import logits, make_batch, rollouts
from tests.test_models import V, build
from tests.tiny import TinyLM, shared_ids

GPU = torch.device("meta")  # like a GPU: not the CPU


@contextlib.contextmanager
def captured_on_a_gpu():
    """Parameters and inputs that Dynamo takes up from now on are on a GPU for it, and for what is compiled."""
    convert, create = fake_tensor.FakeTensorConverter.from_real_tensor, fake_tensor.FakeTensor.__new__
    is_input = False

    def convert_input(self, fake_mode, tensor, *args, **kwargs):
        nonlocal is_input
        before, is_input = is_input, kwargs.get("source") is not None
        try:
            return convert(self, fake_mode, tensor, *args, **kwargs)
        finally:
            is_input = before

    def create_on_gpu(cls, fake_mode, elem, device, *args, **kwargs):
        return create(cls, fake_mode, elem, GPU if is_input else device, *args, **kwargs)

    with (
        mock.patch.object(fake_tensor.FakeTensorConverter, "from_real_tensor", convert_input),
        mock.patch.object(fake_tensor.FakeTensor, "__new__", create_on_gpu),
    ):
        yield


class Reached(Exception):
    """An engine was made and called."""


def check_analysis(function):
    torch._dynamo.reset()
    engines = []

    def reach(self, *args):
        engines.append(self)
        raise Reached

    with captured_on_a_gpu(), mock.patch.object(Engine, "__call__", reach), pytest.raises(Reached):
        function()
    values = [node.meta["val"] for node in engines[0].program.placeholders]
    assert {value.device for value in values if isinstance(value, torch.Tensor)} == {GPU}


def test_a_mask_made_on_the_gpu():
    model, ids = TinyLM(), shared_ids()
    check_analysis(lambda: torch.compile(model, backend="dta")(ids, torch.ones_like(ids, dtype=torch.bool)))


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3"])
def test_masks_of_transformers(name):
    batch = make_batch(rollouts(V))
    check_analysis(lambda: logits(torch.compile(build(name), backend="dta"), batch))
