"""Layers that are copies are differentiated once, and what differs between layers is kept apart."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dta_compile.ops.mixer import mixer_of_chunk
from dta_compile.passes.gradients import stage_traces
from tests.support.tiny import SMALL_CHUNKS, Block, TinyLM, after, assert_same, shared_ids, weighted


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


@pytest.fixture
def traced(monkeypatch):
    """The traces that are made, a kind of segment each."""
    found, build = [], stage_traces.StageTrace.__init__

    def note(self, *args):
        build(self, *args)
        found.append(self)

    monkeypatch.setattr(stage_traces.StageTrace, "__init__", note)
    return found


def check(model):
    ids = shared_ids()

    def step(run):
        outputs = run(ids)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(weighted(one) * (i + 1) for i, one in enumerate(outputs)).backward()
        return outputs

    compiled = torch.compile(model, backend="dta", options={**SMALL_CHUNKS, "codegen": "eager"}, fullgraph=True)
    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))


@pytest.mark.slow
def test_as_many_traces_for_many_layers_as_for_a_few(traced):
    counts = []
    for layers in (3, 4):
        torch.compiler.reset()
        check(TinyLM(layers=layers))
        counts.append(len(traced))
        traced.clear()
    assert counts[0] == counts[1] <= 5


class BesideAttention(Block):
    """The MLP reads what attention does, and queries attend twice."""

    def forward(self, x, mask):
        def attended(query):
            query = query.unflatten(-1, (4, -1)).transpose(1, 2)
            out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=True)
            return out.transpose(1, 2).flatten(2)

        y = self.norm(x)
        beside = self.down(F.silu(self.up(y)))
        key, value = self.key_value(y).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(attended(attended(self.query(y)).sin())) + beside


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", [Block, BesideAttention])
def test_first_and_last_layers_are_traced_with_the_others(traced, block):
    model = TinyLM(layers=3)
    for layer in model.blocks:
        layer.__class__ = block
    check(model)
    mixers = [sum(mixer_of_chunk(node.target) is not None for node in trace.module.graph.nodes) for trace in traced]
    assert sum(mixers) == (1 if block is Block else 2)


class Mixed(TinyLM):
    """Blocks of two widths, two of them used twice, with constants of their own."""

    def __init__(self):
        super().__init__(layers=4)
        one, other, *more = self.blocks
        for block in (one, more[0]):
            block.up, block.down = nn.Linear(16, 8).double(), nn.Linear(8, 16).double()
        self.blocks = nn.ModuleList([one, other, one, *more, other])

    def hidden(self, ids, mask=None):
        x = self.embedding(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, mask) * (1 + i // 4)
        return self.norm(x)


class Skipping(TinyLM):
    """Later blocks read what earlier ones made, once and several times; all of it is returned, some of it twice."""

    def __init__(self):
        super().__init__(layers=4)

    def forward(self, ids, mask=None):
        x, made = self.embedding(ids), []
        for i, block in enumerate(self.blocks):
            x = block(x, mask) + (made[0] * 0.5 if i > 1 else 0) + (made[i - 2] if i > 2 else 0)
            made.append(x.tanh())
        return self.head(self.norm(x)), *made, made[1]


class Partly(TinyLM):
    """The first blocks get no gradient; of one, it is zero."""

    def __init__(self):
        super().__init__(layers=3)
        for module in (self.embedding, self.position, self.blocks[0]):
            module.requires_grad_(False)
        self.lost = Block(16).double()

    def hidden(self, ids, mask=None):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x.detach() * 0.1 + x + self.lost(x, mask) * 0)


@pytest.mark.parametrize("build", [Mixed, *(pytest.param(one, marks=pytest.mark.slow) for one in (Skipping, Partly))])
def test_stacks_of_layers_that_differ(build):
    check(build())
