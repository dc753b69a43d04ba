"""Models with many equal layers: passes run over a few of them, and the executable is that of all."""

import dataclasses
import re

import pytest
import torch

from dta_compile import passes
from dta_compile.passes.copies.fold import fold
from dta_compile.passes.gradients.unroll import NotRepeated
from dta_compile.passes.to_executable.seal import seal
from tests.support.tiny import SMALL_CHUNKS, TinyLM, after, assert_same, shared_ids, weighted

LAYERS = 8


class Alternating(TinyLM):
    """Every other layer is scaled; the embedding joins each."""

    def mix(self, x, pairs=None):
        first = x
        for i, block in enumerate(self.blocks):
            x = block(x + first, pairs) * (0.5 if i % 2 else 1.0)
        return self.norm(x + first)


class JoinedByFirst(TinyLM):
    """The embedding joins each layer, the first with itself, and nothing after the last."""

    def mix(self, x, pairs=None):
        first = x
        for block in self.blocks:
            x = block(0.5 * x + first, pairs)
        return self.norm(x)


class ScaledDifferently(TinyLM):
    def mix(self, x, pairs=None):
        for i, block in enumerate(self.blocks):
            x = block(x, pairs) * (1 + i / 8)
        return self.norm(x)


class AllStates(TinyLM):
    def mix(self, x, pairs=None):
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1], pairs))
        return self.norm(sum(states))


class OneShared(TinyLM):
    """Two layers far from each other have one weight."""

    def __init__(self, layers):
        super().__init__(layers=layers)
        self.blocks[5].up.weight = self.blocks[1].up.weight


class Frozen(TinyLM):
    """Gradients flow from the sixth layer on, to one weight of the last layer but one."""

    def __init__(self, layers):
        super().__init__(layers=layers)
        self.requires_grad_(False)
        self.blocks[5].requires_grad_(True)


class WrittenOver(TinyLM):
    """Layers write over what they are given."""

    def mix(self, x, pairs=None):
        total = torch.zeros_like(x)
        for block in self.blocks:
            x = block(x, pairs)
            total.add_(x)
        return self.norm(total)


class Borrowed(TinyLM):
    """What follows the layers reads weights of the first one."""

    def mix(self, x, pairs=None):
        return super().mix(x, pairs) @ self.blocks[0].out.weight


class Penalised(TinyLM):
    """A loss of the whole batch reads a weight of the last layer."""

    def forward(self, ids):
        return super().forward(ids).mean(1) + self.blocks[-1].up.weight.square().sum()


@pytest.fixture
def compiled(monkeypatch):
    """Compile a model with another function in place of `run_passes`."""
    torch.compiler.reset()

    def compile_with(model, function):
        monkeypatch.setattr("dta_compile.program_cache.cache.run_passes", function)
        options = {**SMALL_CHUNKS, "codegen": "eager", "cache_dir": "off"}
        return torch.compile(model, backend="dta", options=options, fullgraph=True)

    return compile_with


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "mixers"), [(Alternating, 2), (JoinedByFirst, 1), (WrittenOver, 1)])
def test_executable_of_a_few_copies_is_that_of_all(model, mixers, compiled):
    model, found, run_passes = model(layers=LAYERS * mixers), [], passes.run_passes

    def both(program, skip=()):
        whole = passes._run(dataclasses.replace(program, timings={}), passes.PASSES, skip, None)
        found.append((whole, program := run_passes(program, skip=skip)))
        return program

    run, ids = compiled(model, both), shared_ids()

    def step(run):
        outputs = run(ids)
        weighted(outputs).backward()
        return outputs

    assert_same(after(model, lambda: step(run)), after(model, lambda: step(model)))
    ((whole, program),) = found
    assert len(program.copied_mixers) == mixers
    assert _text(program) == _text(whole)


def test_copies_are_kept_if_a_loss_reads_their_weights(compiled):
    def only_cut(program, skip=()):
        with pytest.raises(NotRepeated):
            passes._run(fold(program), passes.PASSES, skip, "dense_graphs")
        raise passes.GraphWithoutAttention(None)

    compiled(Penalised(layers=LAYERS), only_cut)(shared_ids())


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", [ScaledDifferently, AllStates, OneShared, Frozen, Borrowed])
def test_layers_that_are_no_copies_are_kept(model, compiled):
    found = []

    def only_fold(program, skip=()):
        found.append(fold(program))
        raise passes.GraphWithoutAttention(None)

    compiled(model(layers=LAYERS), only_fold)(shared_ids())
    assert found == [None]


def _text(program):
    """All of an executable, with names of nodes numbered in order: graphs of more layers count on."""
    executable = seal(program)
    bytes_of = dict(sorted(executable.comparison.bytes.items(), key=str))
    comparison = dataclasses.replace(executable.comparison, bytes=bytes_of)
    text = repr(dataclasses.replace(executable, seconds={}, chunk_digest="", comparison=comparison))
    numbers = {}
    return re.sub(r"\b[a-z_]\w*_\d+\b", lambda match: f"#{numbers.setdefault(match[0], len(numbers))}", text)
