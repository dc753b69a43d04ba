"""Sweeps of stages that keep the hidden states before some parts alone, and compute those in between again."""

import functools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import dta_compile
from dta_compile.errors import RuntimeContractError
from dta_compile.options import Options
from dta_compile.runtime.transparent import TreeRun
from tests.support.inside import inside
from tests.support.tiny import (
    PACKED_IDS,
    SEGMENTS,
    SMALL_CHUNKS,
    StatedLM,
    TiedLM,
    TinyLM,
    after,
    assert_same,
    shared_ids,
    weighted,
)

IDS = shared_ids()
MASK = torch.arange(9) < torch.tensor([9, 5, 8, 1, 7])[:, None]
LAYERS = 5  # and so seven parts


@pytest.fixture(scope="module")
def model():
    return TiedLM(layers=LAYERS, detached=1)


@pytest.fixture(scope="module")
def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="dta", options=SMALL_CHUNKS | {"sweep": "stages", "stride": 2})


def same(model, compiled, step, stride=2):
    expected = after(model, lambda: step(model))
    assert_same(after(model, lambda: step(compiled)), expected)
    assert dta_compile.last_plan(compiled).schedule.stride == stride


@pytest.mark.sample(1)
@pytest.mark.parametrize("stride", [2, 3, 7])
def test_strides_are_exact_with_padding_and_in_a_second_backward(model, compiled, stride):
    def step(forward):
        logits = forward(IDS, MASK)[MASK]
        weighted(logits).backward(retain_graph=True)
        weighted(logits).square().backward()
        return logits.detach()

    same(model, compiled, lambda forward: weighted(forward(IDS, MASK)[MASK][:4]).backward())
    inside(compiled).use(Options(**SMALL_CHUNKS, sweep="stages", stride=stride))
    same(model, compiled, step, stride)
    with torch.autograd.graph.save_on_cpu():
        same(model, compiled, lambda forward: weighted(forward(IDS, MASK)[MASK]).backward(), stride)
    inside(compiled).use(Options(**SMALL_CHUNKS, sweep="stages", stride=2))


def test_gradients_of_some_parameters(model, compiled):
    for wanted in ([model.embedding.weight, model.blocks[3].up.bias], [model.blocks[4].up.bias]):
        same(
            model,
            compiled,
            lambda forward, wanted=wanted: torch.autograd.grad(weighted(forward(IDS, MASK)[MASK]), wanted),
        )


def test_a_gradient_arrives_once_and_before_layers_below_run(model, compiled):
    arrived, hooks = [], []
    for name, parameter in model.named_parameters():
        note = functools.partial(lambda name, _: arrived.append(name), name)
        hooks.append(parameter.register_post_accumulate_grad_hook(note))
    weighted(compiled(IDS, MASK)[MASK]).backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    of_layers = [int(name.split(".")[1]) for name in arrived if name.startswith("blocks")]
    assert len(set(arrived)) == len(arrived)
    assert of_layers == sorted(of_layers, reverse=True) and of_layers


def test_few_hidden_states_are_there_at_a_time(model, compiled, monkeypatch):
    """Forward, those that are kept and what the next part reads; backward, those of one stretch besides."""
    sent, alive = [], []
    forward, backward = TreeRun.forward_rows, TreeRun.backward

    def note(run):
        alive.append(sum(not storage.expired() for storage in sent) / len(run.chunks))

    def forward_rows(run, received):
        values, rows = forward(run, received)
        note(run)
        sent.extend(StorageWeakRef(value.untyped_storage()) for value in values)
        return values, rows

    def of_part(run, grads, kept, parameters):
        gradients = backward(run, grads, kept, parameters)
        note(run)
        return gradients

    monkeypatch.setattr(TreeRun, "forward_rows", forward_rows)
    monkeypatch.setattr(TreeRun, "backward", of_part)
    loss = weighted(compiled(IDS, MASK)[MASK])
    # Stretches of parts: 0 to 2, 3 to 4, 5, and 6. What parts 2, 4 and 5 send is kept.
    assert alive == [0, 1, 1, 1, 2, 2, 3], alive
    del alive[:]
    loss.backward()
    model.zero_grad()
    assert max(alive) <= 4 and alive[-1] <= 1


def test_a_parameter_that_is_written_to_before_the_backward_is_an_error(model, compiled):
    loss = weighted(compiled(IDS, MASK)[MASK])
    with torch.no_grad():
        model.blocks[2].up.bias.add_(0.0)
    with pytest.raises(RuntimeContractError, match="changed in place"):
        loss.backward()
    model.zero_grad()


class Between(TinyLM):
    """Returns the hidden states between layers, and logits."""

    def mix(self, x, pairs=None):
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1], pairs))
        return *states[1:-1], self.head(self.norm(states[-1]))

    def forward(self, ids, mask):
        return self.hidden(ids, mask)


@pytest.mark.slow
def test_a_backward_may_begin_between_layers():
    torch._dynamo.reset()
    model = Between(layers=LAYERS)
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS | {"sweep": "stages", "stride": 3})

    def step(forward):
        outputs = [output[MASK] for output in forward(IDS, MASK)]
        for chosen in (outputs[1:2], outputs[2:3], outputs[:1] + outputs[3:], outputs[2:4]):
            sum(map(weighted, chosen)).backward(retain_graph=True)
        return outputs[-1].detach()

    same(model, compiled, step, stride=3)


def test_strides_of_packed_rows():
    """With a sink, a window and a soft cap."""
    torch._dynamo.reset()
    model, real = StatedLM(), SEGMENTS.bool()
    options = {**SMALL_CHUNKS, "sweep": "stages", "stride": 2}
    compiled = torch.compile(model, backend="dta", options=options)
    same(model, compiled, lambda forward: weighted(forward(PACKED_IDS, SEGMENTS)[real]).backward())
