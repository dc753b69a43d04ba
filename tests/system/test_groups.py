"""Groups of subtrees at run time: outputs and gradients of a batch whose hidden states are there for a part of it."""

import functools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import dta_compile
from dta_compile.errors import RuntimeContractError
from dta_compile.runtime.transparent import TreeRun
from tests.support.tiny import (
    PACKED_IDS,
    SEGMENTS,
    SMALL_CHUNKS,
    StatedLM,
    TiedLM,
    after,
    assert_same,
    shared_ids,
    weighted,
)

IDS = shared_ids()
MASK = torch.arange(9) < torch.tensor([9, 5, 8, 1, 7])[:, None]
BY_GROUPS = {**SMALL_CHUNKS, "sweep": "stages", "groups": 3}


@pytest.fixture(scope="module")
def model():
    return TiedLM(layers=3, detached=0)


@pytest.fixture(scope="module")
def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="dta", options=BY_GROUPS)


def same(model, compiled, step):
    expected = after(model, lambda: step(model))
    assert_same(after(model, lambda: step(compiled)), expected)
    assert len(dta_compile.last_plan(compiled).schedule.groups) >= 3


def test_groups_are_exact_with_padding_and_in_a_second_backward(model, compiled):
    def step(forward):
        logits = forward(IDS, MASK)[MASK]
        weighted(logits).backward(retain_graph=True)
        weighted(logits).square().backward()
        return logits.detach()

    same(model, compiled, step)
    same(model, compiled, lambda forward: weighted(forward(IDS, MASK)[MASK][:4]).backward())


@pytest.mark.parametrize("empty", [[0], [2], [3, 4]])
def test_rows_of_padding_alone_are_in_no_group(model, compiled, empty):
    mask = MASK.clone()
    mask[empty] = False
    expected = after(model, lambda: weighted(model(IDS, mask)[mask]).backward())
    assert_same(after(model, lambda: weighted(compiled(IDS, mask)[mask]).backward()), expected)
    assert len(dta_compile.last_plan(compiled).schedule.groups) == 3


def test_there_are_no_more_groups_than_rows(model, compiled):
    weighted(compiled(IDS[:2], MASK[:2])[MASK[:2]]).backward()
    assert len(dta_compile.last_plan(compiled).schedule.groups) == 2
    model.zero_grad()


def test_gradients_of_some_parameters_and_none_at_padding(model, compiled):
    wanted = [model.embedding.weight, model.blocks[2].up.bias]
    same(model, compiled, lambda forward: torch.autograd.grad(weighted(forward(IDS, MASK)[MASK]), wanted))
    with pytest.raises(RuntimeContractError, match="outputs at padding positions"):
        weighted(compiled(IDS, MASK)).backward()


def test_a_gradient_arrives_once_and_before_layers_below_run(model, compiled):
    arrived, hooks = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hooks.append(
                parameter.register_post_accumulate_grad_hook(functools.partial(lambda n, _: arrived.append(n), name))
            )
    weighted(compiled(IDS, MASK)[MASK]).backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    assert len(set(arrived)) == len(arrived) > len(hooks) / 2
    of_layers = [int(name.split(".")[1]) for name in arrived if name.startswith("blocks")]
    assert of_layers == sorted(of_layers, reverse=True)


def test_values_between_parts_are_freed_as_soon_as_they_were_read(model, compiled, monkeypatch):
    sent, alive, expected = [], [], []
    forward, backward = TreeRun.forward_rows, TreeRun.backward

    def note(count):
        alive.append(sum(not storage.expired() for storage in sent))
        expected.append(count)

    def before(run):
        return sum(len(part.writes) for part in run.call.parts[: run.number]) * len(run.chunks)

    def forward_rows(run, received):
        values, rows = forward(run, received)
        if not keeps:
            is_last = len(alive) >= (len(dta_compile.last_plan(compiled).schedule.groups) - 1) * len(run.call.parts)
            note(before(run) if is_last else len(received))
        sent.extend(StorageWeakRef(value.untyped_storage()) for value in values)
        return values, rows

    def of_part(run, grads, received, parameters):
        note(before(run))
        return backward(run, grads, received, parameters)

    monkeypatch.setattr(TreeRun, "forward_rows", forward_rows)
    monkeypatch.setattr(TreeRun, "backward", of_part)
    keeps = False
    loss = weighted(compiled(IDS, MASK)[MASK])
    keeps = True  # each group but the last goes forward once more, for its backward
    loss.backward()
    model.zero_grad()
    assert alive == expected and max(alive) > 0


def test_a_parameter_that_is_written_to_before_the_backward_is_an_error(model, compiled):
    loss = weighted(compiled(IDS, MASK)[MASK])
    with torch.no_grad():
        model.blocks[2].up.bias.add_(0.0)
    with pytest.raises(RuntimeContractError, match="changed in place"):
        loss.backward()
    model.zero_grad()


def test_groups_of_packed_rows():
    """With a sink, a window and a soft cap; each sequence of a row is in a group of its own choice."""
    torch._dynamo.reset()
    model, real = StatedLM(), SEGMENTS.bool()
    compiled = torch.compile(model, backend="dta", options=BY_GROUPS)
    same(model, compiled, lambda forward: weighted(forward(PACKED_IDS, SEGMENTS)[real]).backward())
