"""A mixer other than attention through the whole pipeline: alone, and beside attention in one model."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dta_compile
from dta_compile.errors import RefusalError, RuntimeContractError, VerificationError
from dta_compile.options import Options
from dta_compile.runtime.cuda_graphs import arenas
from tests.support.cases import LOSSES, QUICK, chain, check_plan, fan, make_case, rollouts, with_options
from tests.support.inside import inside
from tests.support.replay import Recorder
from tests.support.tiny import LONGEST, VOCABULARY, WIDTH, Block, after, assert_same, weighted
from tests.support.toy_mixer import OPS, ToyRuntime


class ToyBlock(nn.Module):
    """A gated decayed sum of what is above, and an MLP."""

    def __init__(self, width, decay):
        super().__init__()
        self.decay, self.norm = decay, nn.LayerNorm(width)
        self.value, self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, mask):
        y = self.norm(x)
        mixed = torch.ops.toy.decayed_sum(self.value(y), self.decay)
        return x + self.out(self.gate(y).sigmoid() * mixed).tanh()


class MixedLM(nn.Module):
    """Logits `[B, S, V]` of ids `[B, S]`; `kinds` has a letter per layer, "t" for the toy and "a" for attention."""

    def __init__(self, kinds):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(
            Block(WIDTH) if kind == "a" else ToyBlock(WIDTH, 0.9 - number / 10) for number, kind in enumerate(kinds)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, ids, mask=None):
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        pairs = None
        if mask is not None:
            triangle = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
            pairs = triangle & mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, pairs)
        return self.head(self.norm(x))


class Compiled:
    """A model, and one compilation of it for all options."""

    def __init__(self, kinds):
        torch._dynamo.reset()
        self.model = MixedLM(kinds)
        self.function = torch.compile(self.model, backend="dta", options={"attention": "reference"})

    def with_options(self, chosen):
        if not inside(self.function).engines:
            self.function(torch.zeros(3, 5, dtype=torch.int64))
        return with_options(self.function, chosen)

    def check(self, case, chosen, loss="weights"):
        """Outputs and all gradients are those of eager mode."""

        def step(run):
            logits = run(*case.arguments)
            LOSSES[loss](logits, case.mask).backward()
            return logits.detach()

        actual = after(self.model, lambda: step(self.with_options(chosen)))
        check_plan(self.function, case, chosen, "transparent")
        assert_same(actual, after(self.model, lambda: step(self.model)))

    @property
    def program(self):
        return inside(self.function).engines[0].program


@pytest.fixture(scope="module", params=["tat", *(pytest.param(kinds, marks=pytest.mark.slow) for kinds in ("t", "at"))])
def compiled(request):
    return Compiled(request.param)


# "group" is left out: a bias shifts all rows alike, so that its gradient there is nothing but rounding.
losses = st.sampled_from(sorted(LOSSES.keys() - {"group"}))
cases = st.builds(make_case, rollouts(), st.just("none"))
options = st.builds(
    Options,
    chunk_size=st.sampled_from([1, 2, 3, 5, 7, 10_000]),
    strategy=st.sampled_from(["packed", "packed", "vanilla", "dfs", "dense"]),
    memory_budget=st.none() | st.just(0) | st.integers(1_000, 150_000),
    attention=st.sampled_from(["reference", "auto"]),
)


@settings(max_examples=20, **QUICK)
@given(case=cases, chosen=options, loss=losses)
def test_any_batch(compiled, case, chosen, loss):
    compiled.check(case, chosen, loss)


OFTEN = {("packed", 0, 1), ("packed", 0, 3), ("packed", None, 3), ("packed", None, 10_000)}
OFTEN |= {("vanilla", 0, 3), ("vanilla", None, 10_000), ("dfs", 0, 10_000), ("dfs", None, 3)}


@pytest.mark.parametrize(
    ("strategy", "budget", "chunk_size"),
    [
        one if one in OFTEN else pytest.param(*one, marks=pytest.mark.slow)
        for one in itertools.product(("packed", "vanilla", "dfs"), (0, None), (1, 2, 3, 5, 10_000))
    ],
)
@pytest.mark.sample(3)
def test_forks_and_chains(compiled, strategy, budget, chunk_size):
    for sequences in (fan(20), chain(12), [[1, 2, 3, 4]] * 4):
        compiled.check(make_case(sequences, "none"), Options(chunk_size, strategy, memory_budget=budget))


@settings(max_examples=10, **QUICK)
@given(case=cases, chosen=options)
def test_streaming(compiled, case, chosen):
    def loss_of_row(row, logits):
        return weighted(logits.log_softmax(-1))

    def eager():
        losses = [loss_of_row(row, logits) for row, logits in enumerate(compiled.model(case.ids))]
        sum(losses).backward()
        return [loss.detach() for loss in losses]

    run = compiled.with_options(chosen)
    actual = after(compiled.model, lambda: dta_compile.streaming_step(run, loss_of_row, case.ids))
    check_plan(compiled.function, case, chosen, "streaming")
    assert_same(actual, after(compiled.model, eager))


def test_scoring(compiled):
    case = make_case(fan(9), "none")
    with torch.no_grad():
        compiled.function(torch.zeros(3, 5, dtype=torch.int64))
        logits = compiled.with_options(Options(chunk_size=3))(case.ids)
        check_plan(compiled.function, case, Options(chunk_size=3), "score")
        assert_same(logits, compiled.model(case.ids))


@pytest.mark.slow
def test_replays(compiled, monkeypatch):
    monkeypatch.setattr(arenas.ReplayCache, "pays", lambda cache, device, chunks: True)
    monkeypatch.setattr(arenas, "CudaRecorder", Recorder)
    monkeypatch.setattr(arenas, "SIZES", (4, 8))
    compiled.with_options(Options())
    for engine in inside(compiled.function).engines:
        monkeypatch.setattr(engine, "replays", arenas.ReplayCache())
    for budget in (0, None):
        for _ in range(3):
            compiled.check(
                make_case(fan(20), "none"), Options(3, sweep="chunks", memory_budget=budget, attention="reference")
            )
        counts = dta_compile.last_plan(compiled.function).estimates.replays
        assert counts.replayed and not counts.eager


def test_layers_are_told_apart(compiled):
    compiled.with_options(Options())
    program, kinds = compiled.program, [type(block) for block in compiled.model.blocks]
    assert [layer.mixer.name for layer in program.mixers] == ["attention" if kind is Block else "toy" for kind in kinds]
    assert len(program.attention) == kinds.count(Block)
    assert [layer.index for layer in program.mixers] == list(range(len(kinds)))
    bytes_of = {Block: 2 * WIDTH // 2 * 8, ToyBlock: WIDTH * 8}  # two of four heads, keys and values; or all features
    assert program.joint.kv_bytes == sum(bytes_of[kind] for kind in kinds)


def test_explaining_names_the_mixer():
    torch._dynamo.reset()
    text = dta_compile.explain(MixedLM("tt"), torch.zeros(3, 5, dtype=torch.int64)).text
    assert "\nother mixers\n  2 layers: toy\n" in text


def test_the_self_check_finds_a_broken_mixer(monkeypatch):
    def broken(self, grad, results, x, above_grads, backward=ToyRuntime.backward):
        return tuple(1.01 * one for one in backward(self, grad, results, x, above_grads))

    monkeypatch.setattr(ToyRuntime, "backward", broken)
    compiled = Compiled("ta")
    with pytest.raises(VerificationError, match=r"the gradient of .*differs from the captured program"):
        compiled.function(make_case(fan(20), "none").ids).sum().backward()


def test_padding_that_only_attention_knows_of_is_refused():
    """The toy would mix padding into what follows it."""
    model = MixedLM("ta")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dta")
    real = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    with pytest.raises(RuntimeContractError, match="padding from different masks"):
        compiled(torch.tensor([[1, 2, 3, 4], [0, 1, 2, 3]]), real)


def test_operands_of_other_axes_are_refused():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Embedding(VOCABULARY, 8)

        def forward(self, ids):
            x = OPS.decayed_sum(self.inner(ids), 0.5)
            return OPS.decayed_sum(x.transpose(0, 1), 0.5).transpose(0, 1)

    torch._dynamo.reset()
    with pytest.raises(RefusalError, match=r"toy expects \[batch, tokens, features\]|different sizes|other tokens"):
        torch.compile(Transposed(), backend="dta")(torch.zeros(3, 5, dtype=torch.int64)).sum().backward()


def test_a_graph_with_the_toy_alone_is_for_the_tree(caplog):
    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, "dta_compile"):
        Compiled("t").check(make_case(fan(9), "none"), Options(chunk_size=3))
    assert not caplog.records
