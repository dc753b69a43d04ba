"""Models with many equal layers: passes run over a few of them, and the executable is that of all."""

import dataclasses
import re

import pytest
import torch
from torch import nn

from dta_compile import passes
from dta_compile.passes.sealing.seal import seal
from tests.support.tiny import SMALL_CHUNKS, Block, TinyLM, after, assert_same, shared_ids, weighted

LAYERS = 7


class Alternating(TinyLM):
    """Every other layer is scaled; the embedding joins each."""

    def mix(self, x, pairs=None):
        first = x
        for i, block in enumerate(self.blocks):
            x = block(x + first, pairs) * (0.5 if i % 2 else 1.0)
        return self.norm(x + first)


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


MODELS = {
    "alike": (lambda: TinyLM(layers=LAYERS), 1),
    "alternating": (lambda: Alternating(layers=2 * LAYERS), 2),
    "written over": (lambda: WrittenOver(layers=LAYERS), 1),
    "scaled differently": (lambda: ScaledDifferently(layers=LAYERS), 0),
    "all states": (lambda: AllStates(layers=LAYERS), 0),
    "one shared": (lambda: OneShared(LAYERS), 0),
    "frozen": (lambda: Frozen(LAYERS), 0),
    "borrowed": (lambda: Borrowed(layers=LAYERS), 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_executable_of_a_few_copies_is_that_of_all(name, monkeypatch):
    torch.compiler.reset()
    build, mixers = MODELS[name]
    model, found, run_passes = build(), [], passes.run_passes

    def both(program, skip=()):
        whole = passes._run(dataclasses.replace(program, timings={}), passes.PASSES, skip, None)
        found.append((whole, program := run_passes(program, skip=skip)))
        return program

    monkeypatch.setattr("dta_compile.program_cache.cache.run_passes", both)
    options = {**SMALL_CHUNKS, "codegen": "eager", "cache_dir": "off"}
    compiled, ids = torch.compile(model, backend="dta", options=options, fullgraph=True), shared_ids()

    def step(run):
        outputs = run(ids)
        weighted(outputs).backward()
        return outputs

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    ((whole, program),) = found
    assert len(program.copied_mixers) == mixers
    assert (program.folding is not None) == bool(mixers)
    assert _text(program) == _text(whole)


def _text(program):
    """All of an executable, with names of nodes numbered in order: graphs of more layers count on."""
    executable = seal(program)
    bytes_of = dict(sorted(executable.comparison.bytes.items(), key=str))
    comparison = dataclasses.replace(executable.comparison, bytes=bytes_of)
    text = repr(dataclasses.replace(executable, seconds={}, chunk_digest="", comparison=comparison))
    numbers = {}
    return re.sub(r"\b[a-z_]\w*_\d+\b", lambda match: f"#{numbers.setdefault(match[0], len(numbers))}", text)
