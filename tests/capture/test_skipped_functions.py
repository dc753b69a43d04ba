"""What Dynamo cannot trace in one call is traced in later ones, which share prefixes."""

import logging

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_full_backward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import dta_compile
from dta_compile.errors import RefusalError
from tests.support.tiny import SMALL_CHUNKS, BareLM, Block, TinyLM, after, assert_same, shared_ids, weighted

OPTIONS = {**SMALL_CHUNKS, "codegen": "eager"}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


def compiled_of(model):
    return torch.compile(model, backend="dta", options=OPTIONS)


def check(model, compiled, ids):
    """Compare a step, and see that it ran over the tree of the whole model."""
    outputs = []

    def step(run):
        outputs.append(run(ids))
        weighted(outputs[-1]).backward()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-9)
    assert dta_compile.last_plan(compiled).prefix_tree.lengths.tolist() == [ids.shape[1]] * len(ids)


class Counting(TorchDispatchMode):
    operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


def test_calls_after_one_inside_a_dispatch_mode_share_prefixes(caplog):
    model = BareLM()
    compiled = compiled_of(model)
    for ids in (shared_ids(), shared_ids(7, 8)):  # the first call of all, and one of a graph that is there
        with caplog.at_level(logging.WARNING, "dta_compile"), Counting() as mode:
            torch.testing.assert_close(compiled(ids), model(ids))
        assert mode.operators
        weighted(compiled(ids)).backward()
        assert dta_compile.last_plan(compiled).prefix_tree.lengths.tolist() == [ids.shape[1]] * len(ids)
    assert caplog.text.count("inside a dispatch mode (Counting)") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(("called_before", "of_all"), [(True, False), (False, True)])
def test_a_call_after_a_refused_one_is_not_refused(called_before, of_all):
    model, ids = TinyLM(), shared_ids()
    compiled = compiled_of(model)
    if called_before:
        check(model, compiled, ids)
    register = register_module_full_backward_hook if of_all else model.blocks[1].register_full_backward_hook
    handle = register(lambda *_: None)  # at which Dynamo gives up the loop over layers
    with pytest.raises(RefusalError, match=f"backward hooks are on {'all modules' if of_all else 'blocks.1 .Block'}"):
        compiled(ids)
    handle.remove()
    check(model, compiled, ids)


class Printing(Block):
    """Read a number, at which Dynamo gives up the loop over layers, if told to."""

    debug = False

    def forward(self, x, mask):
        x = super().forward(x, mask)
        if self.debug:
            print(x.mean().item())
        return x


class Looping(TinyLM):
    """Loop over layers in the function that is compiled."""

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, None)
        return self.head(self.norm(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("called_before", [True, False])
def test_a_break_without_gradients_leaves_training_alone(called_before):
    model, ids = Looping(), shared_ids()
    for block in model.blocks:
        block.__class__ = Printing
    compiled = compiled_of(model)
    if called_before:
        check(model, compiled, ids)
    model.blocks[1].debug = True
    with torch.no_grad():
        for width in (9, 8, 8):
            torch.testing.assert_close(compiled(ids[:, :width]), model(ids[:, :width]), rtol=0, atol=1e-9)
    model.blocks[1].debug = False
    check(model, compiled, ids[:, :7])
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids[:, :6]), model(ids[:, :6]), rtol=0, atol=1e-9)
    assert dta_compile.last_plan(compiled).prefix_tree.lengths.tolist() == [6] * len(ids)


def test_a_call_while_an_error_is_handled_is_traced_once():
    model, ids = BareLM(), shared_ids()
    compiled = compiled_of(model)
    counters.clear()
    for _ in range(2):
        try:
            raise ValueError
        except ValueError:
            compiled(ids)
    assert counters["stats"]["unique_graphs"] == 1


class Scaled(TorchFunctionMode):
    """Multiply the results of some functions of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 1.5 if func in (torch.nn.functional.linear, torch.Tensor.add, torch.Tensor.mul) else result


def test_a_function_mode_changes_the_calls_inside_once():
    model, ids = TinyLM(), shared_ids()
    compiled = compiled_of(model)
    check(model, compiled, ids)
    plain = compiled(ids)
    with Scaled():
        check(model, compiled, ids)
        assert not torch.allclose(compiled(ids), plain)
    check(model, compiled, ids)
