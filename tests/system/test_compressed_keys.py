"""Attention to compressed keys, one for every window of tokens: over the tree as over a sequence (DeepSeek-V4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import dta_compile
from benchmarks.zoo import toy_config
from dta_compile.errors import RefusalError, RuntimeContractError
from dta_compile.ops.attention import CHOSEN_COMPRESSED_CALL, COMPRESSED_CALL, Masking
from dta_compile.ops.chosen_keys import CHOOSE_KEYS_CALL, CHOSEN, Choosing
from dta_compile.ops.scoring import UNSCALED, Scoring
from dta_compile.runtime.attention import chosen_keys
from tests.support.helpers import (
    EXACT,
    FLOAT32_ISLANDS,
    Batch,
    assert_equal,
    ids_only,
    logits_at_positions,
    make_batch,
    measure,
    random_loss,
    reference,
    rollouts,
)

V, WIDTH, HEADS, WINDOW, KEYS = 31, 16, 2, 3, 2
NEVER = float("-inf")


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(chosen_keys, "MOST_PAIRS", 2 * HEADS * 17)  # blocks of a few queries


class Compressed(nn.Module):
    """Layers that read the last `WINDOW` keys, and the mean of each window of `stride` keys that is complete.

    Args:
        chooses: whether a query reads `KEYS` of these means, which an index chooses.
        by_operators: whether means are computed at every token, for our operators.
    """

    def __init__(self, stride: int, chooses: bool, by_operators: bool, layers: int = 2) -> None:
        super().__init__()
        self.stride, self.chooses, self.by_operators = stride, chooses, by_operators
        self.segments: torch.Tensor | None = None
        self.embedding, self.out = nn.Embedding(V, WIDTH), nn.Linear(WIDTH, V)
        self.query, self.index = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers)) for _ in range(2))
        self.key = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(layers))
        self.sinks = nn.ParameterList(torch.randn(HEADS) for _ in range(layers))
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for query, key, index, sinks in zip(self.query, self.key, self.index, self.sinks, strict=True):
            q, k = query(x).unflatten(-1, (HEADS, 8)).transpose(1, 2), key(x)[:, None]
            attend = self._by_operators if self.by_operators else self._by_definition
            i = index(x).unflatten(-1, (HEADS, 8)).transpose(1, 2)
            x = x + attend(q, k, i, sinks).transpose(1, 2).flatten(2)
        return self.out(x)

    def _by_operators(self, q: torch.Tensor, k: torch.Tensor, i: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        segments = None if self.segments is None else self.segments.expand(k.shape[0], -1)
        means = dta_compile.attention(torch.zeros_like(k), k, k, window=self.stride, segments=segments)
        masking = Masking(None, True, segments, WINDOW, Scoring(0.5))
        if not self.chooses:
            return COMPRESSED_CALL(q, k, k, sinks, means, means, *masking.arguments, self.stride)
        causal = Masking.causal(UNSCALED).arguments
        operands = (one.detach() for one in (i, torch.ones_like(i[..., :1]), means))
        choice = CHOOSE_KEYS_CALL(*operands, *causal, *Choosing(KEYS, 1, True, False, False, self.stride), None)
        return CHOSEN_COMPRESSED_CALL(q, k, k, sinks, means, means, choice, *masking.arguments, self.stride)

    def _by_definition(self, q: torch.Tensor, k: torch.Tensor, i: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        tokens, windows = k.shape[2], k.shape[2] // self.stride
        means = k[:, :, : windows * self.stride].unflatten(2, (windows, self.stride)).mean(3)
        number = torch.arange(tokens)
        steps = number[:, None] - number
        complete = torch.arange(windows) < (number[:, None] + 1) // self.stride
        bias = torch.where(complete, 0.0, NEVER).expand(len(k), 1, -1, -1)
        if self.chooses:
            scores = (i @ means.mT).relu().sum(1, keepdim=True).masked_fill(~complete, NEVER)
            chosen = scores.topk(min(KEYS, windows)).indices
            bias = bias + torch.full_like(scores, NEVER).scatter(-1, chosen, 0.0)
        own = torch.where((steps >= 0) & (steps < WINDOW), 0.0, NEVER).expand(len(k), 1, -1, -1)
        keys = torch.cat([k, means], 2)
        scores = q @ keys.mT * 0.5 + torch.cat([own, bias], -1)
        scores = torch.cat([scores, sinks[:, None, None].expand(len(k), -1, tokens, 1)], -1)
        return scores.softmax(-1)[..., :-1] @ keys


def pair(stride: int, chooses: bool) -> tuple[Compressed, Compressed]:
    """Return a model by our operators and the same by definition."""
    torch.manual_seed(0)
    ours, exact = (Compressed(stride, chooses, by_operators) for by_operators in (True, False))
    exact.load_state_dict(ours.state_dict())
    return ours, exact


@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize("stride", [1, 2, 3, 40])
def test_operators_without_a_tree(stride, chooses):
    ours, exact = pair(stride, chooses)
    batch = make_batch([[5, 3, 8, 2, 9, 5, 5, 3, 1], [4, 3, 2, 1, 7, 7, 7, 2, 0]])
    loss = random_loss(batch, V)
    assert_equal(measure(ours, ours, batch, loss, ids_only), measure(exact, exact, batch, loss, ids_only), EXACT)


@pytest.mark.parametrize(
    ("stride", "chooses", "options"),
    [
        (2, True, {"chunk_size": 3, "memory_budget": 0}),
        (3, False, {"chunk_size": 1}),
        (3, True, {"chunk_size": 4, "attention": "reference"}),
        (40, True, {"chunk_size": 100}),
    ],
)
@pytest.mark.sample(1)
def test_operators_over_a_tree(stride, chooses, options):
    ours, exact = pair(stride, chooses)
    batch = make_batch(rollouts(V))
    loss = random_loss(batch, V)
    expected = measure(exact, exact, batch, loss, ids_only)  # padded alike, since few heads often score zero
    compiled = torch.compile(ours, backend="dta", options=options)
    assert_equal(measure(compiled, ours, batch, loss, ids_only), expected, EXACT)


class Blocks(nn.Module):
    """Layers that read the `KEYS` blocks of `stride` keys with the best means, and the last one if it is not whole."""

    def __init__(self, stride: int, by_operators: bool) -> None:
        super().__init__()
        self.stride, self.by_operators = stride, by_operators
        self.embedding, self.out = nn.Embedding(V, WIDTH), nn.Linear(WIDTH, V)
        self.query, self.index, self.key = (
            nn.ModuleList(nn.Linear(WIDTH, width) for _ in range(2)) for width in (WIDTH, WIDTH, 8)
        )
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, columns = self.embedding(ids), torch.arange(ids.shape[1])
        for query, key, index in zip(self.query, self.key, self.index, strict=True):
            q, i = (one(x).unflatten(-1, (HEADS, 8)).transpose(1, 2) for one in (query, index))
            k, choose = key(x)[:, None], self._by_operators if self.by_operators else self._by_definition
            mask = choose(k.detach(), i.detach())[..., columns // self.stride] & (columns <= columns[:, None])
            k = k.expand(-1, HEADS, -1, -1)
            x = x + nn.functional.scaled_dot_product_attention(q, k, k, mask).transpose(1, 2).flatten(2)
        return self.out(x)

    def _by_operators(self, k: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        means = dta_compile.attention(torch.zeros_like(k), k, k, window=self.stride)
        how = Choosing(KEYS + 1, self.stride, True, False, False, self.stride)
        operands = (i, torch.ones_like(i[..., :1]), means, *Masking.causal(UNSCALED).arguments)
        return CHOSEN(CHOOSE_KEYS_CALL(*operands, *how, None), -(-k.shape[2] // self.stride))

    def _by_definition(self, k: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        tokens, size = k.shape[2], self.stride
        chosen = torch.zeros(len(k), 1, tokens, -(-tokens // size), dtype=torch.bool)
        for row in range(len(k)):
            for token in range(tokens):
                whole = (token + 1) // size
                means = k[row, 0, : whole * size].unflatten(0, (whole, size)).mean(1)
                best = (means @ i[row, :, token].mT).relu().sum(1).topk(min(KEYS, whole)).indices
                chosen[row, 0, token, best] = True
                chosen[row, 0, token, whole:] = True  # causal attention reads no later one
        return chosen


@pytest.mark.sample(1)
@pytest.mark.parametrize(("stride", "options"), [(2, {"chunk_size": 3, "memory_budget": 0}), (3, {"chunk_size": 1})])
def test_windows_as_blocks(stride, options):
    torch.manual_seed(0)
    ours, exact = (Blocks(stride, by_operators) for by_operators in (True, False))
    exact.load_state_dict(ours.state_dict())
    batch = make_batch(rollouts(V))
    loss = random_loss(batch, V)
    compiled = torch.compile(ours, backend="dta", options=options)
    assert_equal(measure(compiled, ours, batch, loss, ids_only), reference(exact, batch, loss, ids_only), EXACT)


def test_packed_rows_are_refused():
    ours, _ = pair(3, False)
    ours.segments = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2]])
    batch = make_batch([[5, 3, 8, 2, 9, 5, 5, 3], [5, 3, 8, 2, 9, 5, 5, 1]])
    with pytest.raises(RefusalError, match="counts the tokens of a row"):
        torch.compile(ours, backend="dta")(batch.ids)


def deepseek(implementation: str) -> Any:
    """Return a DeepSeek-V4 of two layers, one of each kind with compressed keys."""
    config = toy_config("deepseek_v4")
    config.layer_types = ["heavily_compressed_attention", "compressed_sparse_attention"]
    config.num_hidden_layers, config.hc_sinkhorn_iters = 2, 1
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double().train()
    for name, parameter in model.named_parameters():
        if name.endswith(("position_bias", "sinks")):  # zeros at first
            nn.init.normal_(parameter)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["dta", "eager"])
def test_deepseek(implementation):
    model, dense, exact = deepseek(implementation), deepseek("dta"), deepseek("eager")
    for one in (dense, exact):
        one.set_experts_implementation("eager")
        one.load_state_dict(model.state_dict())
    batch = make_batch(rollouts(V))
    loss = random_loss(batch, model.config.vocab_size)
    if implementation == "dta":
        without = measure(dense, dense, batch, loss)
        assert_equal(without, measure(exact, exact, batch, loss), 20 * FLOAT32_ISLANDS)
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 4})
    measured = measure(compiled, model, batch, loss, logits_at_positions)
    assert_equal(measured, reference(exact, batch, loss), 20 * FLOAT32_ISLANDS)
    for wrong in (make_batch(rollouts(V), "left"), Batch(batch.ids, 1 - batch.mask)):
        with pytest.raises(RuntimeContractError, match="windows of compressed keys are windows of a row"):
            logits_at_positions(compiled, wrong)
    if implementation == "eager":
        with pytest.raises(RefusalError, match="use_cache=False"):
            compiled(batch.ids)
