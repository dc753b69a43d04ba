"""Learned sparse attention: every query reads the keys that an index chooses, over the tree as in eager mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dta_compile.errors import RefusalError, RuntimeContractError
from tests.support.helpers import EXACT, assert_equal, make_batch, measure, random_loss, reference, rollouts

V, WIDTH, HEADS, KEYS = 31, 16, 4, 4  # sequences have up to 17 tokens


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


class Index(nn.Module):
    """Index of `heads` heads, in one of the ways in which models write it: hidden states to the mask of attention."""

    def __init__(self, spelling: str, heads: int) -> None:
        super().__init__()
        self.spelling, self.heads = spelling, heads
        self.query, self.key = nn.Linear(WIDTH, heads * 8), nn.Linear(WIDTH, 8)
        self.weights = nn.Linear(WIDTH, heads)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.spelling != "matmul" and torch.is_grad_enabled()):
            query, key = self.query(x).view(*x.shape[:2], self.heads, 8), self.key(x)
            weights = self.weights(x)
            if self.spelling in ("matmul", "softmax"):  # transformers
                scores = torch.matmul(query, key.mT.unsqueeze(1)) * 8**-0.5
                scores = scores.softmax(-1) if self.spelling == "softmax" else F.relu(scores)
                scores = torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2).masked_fill(~mask[:, 0], float("-inf"))
            else:  # by DeepSeek
                scores = torch.einsum("bshd,btd->bsht", query, key).relu()
                scores = (scores * weights[..., None]).sum(2) + torch.where(mask[:, 0], 0.0, float("-inf"))
            index = scores.topk(min(KEYS, x.shape[1]), -1).indices
        if self.spelling == "einsum":
            chosen = torch.full_like(scores, float("-inf")).scatter(-1, index, 0.0)
            return chosen[:, None] + torch.where(mask, 0.0, float("-inf"))
        others = index.new_ones(scores.shape, dtype=torch.bool).scatter(-1, index, False)[:, None]
        if self.spelling == "and its own key":
            return mask & (~others | torch.eye(x.shape[1], dtype=torch.bool))
        return mask & ~others


class Sparse(nn.Module):
    """Two layers; with `shared`, the second reads the keys that the index of the first has chosen."""

    def __init__(self, spelling: str = "matmul", heads: int = 24, shared: bool = False, blocks: bool = False) -> None:
        super().__init__()
        self.blocks = blocks
        torch.manual_seed(1)
        self.embedding, self.position = nn.Embedding(V, WIDTH), nn.Embedding(32, WIDTH)
        self.indices = nn.ModuleList(Index(spelling, heads) for _ in range(1 if shared else 2))
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, V)
        self.double()

    def forward(self, ids: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None]
        if self.blocks:
            pairs = torch.arange(ids.shape[1]) // 2
            mask = mask | (pairs[:, None] == pairs)
        mask = mask.expand(len(ids), -1, -1, -1) if real is None else mask & real[:, None, None]
        for layer, project in enumerate(self.projections):
            if layer < len(self.indices):
                chosen = self.indices[layer](F.layer_norm(x, (WIDTH,)), mask)
            query, key, value = project(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(query, key, value, chosen)
            x = x + y.transpose(1, 2).flatten(2)
        return self.head(x.tanh())


def ids_and_mask(model, batch):
    return model(batch.ids, None if batch.mask is None else batch.mask.bool())


def compiled_with(model, **options):
    return torch.compile(model, backend="dta", options={"chunk_size": 3, **options})


@pytest.mark.parametrize(
    ("spelling", "shared", "options"),
    [
        ("matmul", False, {}),
        ("einsum", False, {"memory_budget": 0}),
        ("matmul", True, {"sweep": "stages", "memory_budget": 0}),
    ],
)
def test_every_query_reads_the_keys_chosen_for_it(spelling, shared, options):
    model, batch = Sparse(spelling, shared=shared), make_batch(rollouts(V))
    loss = random_loss(batch, V)
    expected = reference(model, batch, loss, ids_and_mask)
    assert not any("indices" in name for name in expected.gradients)
    compiled = compiled_with(model, **options)
    assert_equal(measure(compiled, model, batch, loss, ids_and_mask), expected, EXACT)
    model.indices[0].weights.weight.data.neg_()  # other keys
    other = reference(model, batch, loss, ids_and_mask)
    assert (other.outputs - expected.outputs).abs().max() > 1e-3
    assert_equal(measure(compiled, model, batch, loss, ids_and_mask), other, EXACT)


def test_equal_scores():
    """With one index head most scores are zero; `topk` takes some of these by its row, which is that of eager mode."""
    model, batch = Sparse(heads=1), make_batch(rollouts(V))
    loss, compiled = random_loss(batch, V), compiled_with(model)
    assert_equal(
        measure(compiled, model, batch, loss, ids_and_mask), measure(model, model, batch, loss, ids_and_mask), EXACT
    )
    with pytest.raises(RuntimeContractError, match="the same score") as caught:
        ids_and_mask(compiled, make_batch(rollouts(V), "left"))
    assert "topk" in caught.value.where


def test_sequences_that_begin_anywhere():
    model, batch = Sparse(), make_batch(rollouts(V), "left")
    loss = random_loss(batch, V)
    expected = measure(model, model, batch, loss, ids_and_mask)
    assert_equal(measure(compiled_with(model), model, batch, loss, ids_and_mask), expected, EXACT)


def test_a_key_that_is_not_read():
    """A NaN reaches neither other sequences nor earlier tokens, through an index or through attention."""
    model, sequences = Sparse(), rollouts(V - 1)
    sequences[0][12] = sequences[2][13] = V - 1  # both below forks
    batch = make_batch(sequences)
    good = ((batch.ids == V - 1).cumsum(1) == 0) & batch.valid
    with torch.no_grad():
        expected = ids_and_mask(model, batch)[good]
        model.embedding.weight[V - 1] = float("nan")
        actual = ids_and_mask(compiled_with(model), batch)
    assert (actual[good] - expected).abs().max() < EXACT
    assert actual[~good & batch.valid].isnan().all()


@pytest.mark.parametrize(
    ("spelling", "reason"),
    [
        ("softmax", "no weighted sum of relu"),
        ("and its own key", "keys besides those chosen"),
    ],
)
def test_other_choices_are_refused(spelling, reason):
    batch = make_batch(rollouts(V))
    with pytest.raises(RefusalError, match=reason):
        ids_and_mask(compiled_with(Sparse(spelling)), batch)


def test_blocks_of_tokens_that_attend_to_each_other_are_refused():
    with pytest.raises(RuntimeContractError, match="attend to later ones of their block"):
        compiled_with(Sparse(blocks=True))(torch.arange(24).view(2, 12))
