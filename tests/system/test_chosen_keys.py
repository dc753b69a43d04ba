"""Learned sparse attention: every query reads the keys that an index chooses, over the tree as in eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dta_compile.errors import RefusalError, RuntimeContractError
from dta_compile.ops.chosen_keys import NONE
from dta_compile.runtime.attention import chosen_keys
from tests.support.helpers import EXACT, assert_equal, make_batch, measure, random_loss, reference, rollouts

V, WIDTH, HEADS, KEYS = 31, 16, 4, 4  # sequences have up to 17 tokens
BLOCK = 3
NEVER = float("-inf")


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(chosen_keys, "MOST_PAIRS", 2 * HEADS * 17)  # blocks of a few queries


def products(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return products [B, H, S, S] of queries [B, S, H, D] and keys [B, S, H or 1, D]."""
    return query.transpose(1, 2) @ key.permute(0, 2, 3, 1)


def deepseek(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (torch.einsum("bshd,btd->bsht", query, key[:, :, 0]).relu() * weights[..., None]).sum(2)


def choose(scores: torch.Tensor, **how: bool | int) -> torch.Tensor:
    return scores.topk(min(KEYS, scores.shape[-1]), **how).indices


def choose_or_take_all(scores: torch.Tensor) -> torch.Tensor:
    return scores.topk(scores.shape[-1] if scores.shape[-1] < KEYS else KEYS).indices


def chosen(scores: torch.Tensor, dim: int = -1, **how: bool | int) -> torch.Tensor:
    return torch.zeros_like(scores, dtype=torch.bool).scatter(dim, choose(scores, **how), True)


def of_blocks(scores: torch.Tensor) -> torch.Tensor:
    """Return the best score of each block of `BLOCK` keys."""
    keys = scores.shape[-1]
    padded = F.pad(scores, (0, -(-keys // BLOCK) * BLOCK - keys), value=NEVER)
    return padded.unflatten(-1, (-1, BLOCK)).amax(-1)


def in_blocks(best: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mask of the keys of the two best blocks, given the scores of blocks of each head or group of heads."""
    read = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(min(2, best.shape[-1])).indices, True)
    keys = read.repeat_interleave(BLOCK, -1)[..., : mask.shape[-1]]
    return mask & (keys.repeat_interleave(HEADS // keys.shape[1], 1) if keys.dim() == 4 else keys)


def minimax(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a mask as in MiniMax-M3: the query's own block and the one before are always read."""
    best, own = of_blocks(scores), torch.arange(scores.shape[-1])[:, None] // BLOCK
    local = (own - torch.arange(2)).clamp(min=0).expand(*best.shape[:-1], -1)
    values, index = best.scatter(-1, local, float("inf")).topk(min(3, best.shape[-1]))
    index = index.masked_fill(values == NEVER, -1)
    index = index.masked_fill(index < 0, best.shape[-1])
    bias = best.new_full((*best.shape[:-1], best.shape[-1] + 1), NEVER).scatter(-1, index, 0.0)[..., :-1]
    keys = (bias == 0).repeat_interleave(BLOCK, -1)[..., : scores.shape[-1]]
    return mask & keys.repeat_interleave(HEADS // keys.shape[1], 1)


def first_for_none(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a mask that also has the first key where fewer keys than are chosen may be read."""
    values, index = scores.topk(min(KEYS, scores.shape[-1]))
    return mask & torch.zeros_like(mask).scatter(-1, index.masked_fill(values == NEVER, 0.0), True)


def first_block(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a mask of the first block and of the best of the others."""
    best = of_blocks(scores)
    best = torch.where(torch.arange(best.shape[-1]) == 0, 1e9, best)
    read = torch.zeros_like(best).scatter(-1, best.topk(min(2, best.shape[-1]), sorted=False).indices, 1) > 0
    return mask & read[..., torch.arange(scores.shape[-1]).div(BLOCK, rounding_mode="floor")]


def hidden(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), NEVER)


Scores = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Spellings of an index: queries [B, S, H, D], keys [B, S, 1, D] and weights [B, S, H] to scores [B, S, S] or
# [B, 1, S, S].
SCORES: dict[str, Scores] = {
    "transformers": lambda q, k, w: (w.unsqueeze(2) @ (q @ k.permute(0, 2, 3, 1) * 8**-0.5).relu()).squeeze(2),
    "deepseek": deepseek,
    "keys by head": lambda q, k, w: (products(q, k * q).relu() * w.mT[..., None]).sum(1, keepdim=True),
    "no weights": lambda q, k, w: products(q, k).relu().sum(1),
    "one head": lambda q, k, w: (q[:, :, 0] @ k[:, :, 0].mT).relu() * w[..., :1],
    "for each head": lambda q, k, w: products(q, k) / 3,
    "relu for each head": lambda q, k, w: products(q, k).relu(),
    # Other functions, which are refused:
    "of keys alone": lambda q, k, w: k.sum((2, 3)).exp()[:, None].expand(-1, k.shape[1], -1),
    "softmax": lambda q, k, w: (products(q, k).softmax(-1) * w.mT[..., None]).sum(1),
    "relu of the sum": lambda q, k, w: deepseek(q, k, w).relu(),
    "relu of the weighed": lambda q, k, w: (products(q, k).relu() * w.mT[..., None]).relu().sum(1),
    "relu after the weights": lambda q, k, w: (products(q, k) * w.mT[..., None]).relu().sum(1),
    "relu after one sum": lambda q, k, w: products(q, k).sum(1).relu() * w[..., :1],
    "relu of the masked": lambda q, k, w: (hidden(products(q, k)).relu() * w.mT[..., None]).sum(1),
    "weights of the masked": lambda q, k, w: (hidden(products(q, k).relu()) * w.mT[..., None]).sum(1),
    "masked product": lambda q, k, w: (w.unsqueeze(2) @ hidden(products(q, k).relu()).transpose(1, 2)).squeeze(2),
    "negative": lambda q, k, w: deepseek(q, k, w) * -1,
    "weighed twice": lambda q, k, w: (products(q, k).relu() * w.mT[..., None] * w.exp().mT[..., None]).sum(1),
    "weighed before the product": lambda q, k, w: (
        w.unsqueeze(2) @ (products(q, k).relu() * w.mT[..., None]).transpose(1, 2)
    ).squeeze(2),
    "weighed after the product": lambda q, k, w: SCORES["transformers"](q, k, w) * w[..., :1],
    "weights of one query": lambda q, k, w: (products(q[:, :, :1], k).relu() * w.mT[..., None]).sum(1),
    "divided": lambda q, k, w: (products(q, k).relu() / w.mT[..., None]).sum(1),
    "groups of heads": lambda q, k, w: (
        torch.einsum("bshgd,bthd->bhgst", q.unflatten(2, (-1, 2)), q[:, :, ::2] * k).relu().sum((1, 2))
    ),
}

# Spellings of a mask of attention, of scores and of the keys that may be read.
MASKS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "transformers": lambda s, m: m & ~torch.ones_like(s, dtype=torch.bool).scatter(-1, choose(s).int().long(), False),
    "deepseek": lambda s, m: (
        torch.full_like(s, NEVER).scatter(-1, choose_or_take_all(s), 0.0) + torch.where(m, 0.0, NEVER)
    ),
    "finite": lambda s, m: torch.where(m & chosen(s), 0.0, -1e9).to(s),
    "blocks": lambda s, m: in_blocks(of_blocks(s), m),
    "minimax": minimax,
    "first block": first_block,
    "first keys": lambda s, m: m & chosen(s.masked_fill(torch.arange(s.shape[-1]) < 2, float("inf"))),
    "finite for others": lambda s, m: torch.full_like(s, -1e4).scatter(-1, choose(s), 0.0) + torch.where(m, 0.0, NEVER),
    # Others, which are refused:
    "and its own key": lambda s, m: m & (chosen(s) | torch.eye(s.shape[1], dtype=torch.bool)),
    "the smallest": lambda s, m: m & chosen(s, largest=False),
    "every second key": lambda s, m: m & chosen(s[..., ::2]).repeat_interleave(2, -1)[..., : s.shape[1]],
    "means of blocks": lambda s, m: in_blocks(
        F.pad(s, (0, -s.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).mean(-1), m
    ),
    "strided blocks": lambda s, m: in_blocks(
        F.pad(s, (0, -s.shape[-1] % BLOCK), value=NEVER).unflatten(-1, (BLOCK, -1)).amax(-2), m
    ),
    "a block more": lambda s, m: in_blocks(
        F.pad(s, (0, BLOCK - s.shape[-1] % BLOCK), value=NEVER).unflatten(-1, (-1, BLOCK)).amax(-1), m
    ),
    "forced by padding": lambda s, m: in_blocks(of_blocks(s).masked_fill(~m[..., -1:], float("inf")), m),
    "first for none": first_for_none,
    "later blocks": lambda s, m: in_blocks(
        of_blocks(s).masked_fill(torch.arange(s.shape[-1])[:, None] < BLOCK, float("inf")), m
    ),
    "the block after": lambda s, m: in_blocks(of_blocks(s), m.roll(1, -1)).roll(-1, -1) & m,
    "queries of a key": lambda s, m: m & torch.zeros_like(m).scatter(-1, choose(s, dim=1), True),
    "keys for queries": lambda s, m: m & chosen(s, dim=1),
}


class Index(nn.Module):
    """Index of `heads` heads: hidden states and two masks, of the index and of attention, to the mask of attention."""

    def __init__(self, scores: str, mask: str, heads: int, filler: float) -> None:
        super().__init__()
        self.scores, self.mask, self.heads, self.filler = SCORES[scores], MASKS[mask], heads, filler
        self.adds, self.trains = mask == "deepseek", scores != "transformers"
        self.query, self.key = nn.Linear(WIDTH, heads * 8), nn.Linear(WIDTH, 8)
        self.weights = nn.Linear(WIDTH, heads)

    def forward(self, x: torch.Tensor, own: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.trains and torch.is_grad_enabled()):
            query, key = self.query(x).unflatten(-1, (self.heads, 8)), self.key(x)[:, :, None]
            scores = self.scores(query, key, self.weights(x))
            if scores.dim() == 4:
                own, mask = own[:, None], mask[:, None]
            if self.adds:
                return self.mask(scores + torch.where(own, 0.0, self.filler), mask)
            return self.mask(scores.masked_fill(~own, self.filler), mask)


class Sparse(nn.Module):
    """Two layers of learned sparse attention.

    Args:
        shared: the second layer reads the keys that the index of the first has chosen.
        windows: of the index, and of attention.
        filler: what hides keys from the index.
        sinks: attention has sinks.
        scale: of attention.
        blocks: every two tokens attend to each other.
        over_padding: the index does not know of padding, as in MiniMax-M3.
    """

    def __init__(
        self,
        scores: str = "transformers",
        mask: str = "transformers",
        heads: int = 24,
        shared: bool = False,
        windows: tuple[int | None, int | None] = (None, None),
        filler: float = NEVER,
        sinks: bool = False,
        scale: float = 0.5,
        blocks: bool = False,
        over_padding: bool = False,
    ) -> None:
        super().__init__()
        self.blocks, self.over_padding = blocks, over_padding
        torch.manual_seed(1)
        self.windows, self.scale = windows, scale
        self.embedding, self.position = nn.Embedding(V, WIDTH), nn.Embedding(32, WIDTH)
        self.indices = nn.ModuleList(Index(scores, mask, heads, filler) for _ in range(1 if shared else 2))
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, V)
        self.sinks = nn.Parameter(torch.randn(HEADS)) if sinks else None
        self.double()

    def forward(self, ids: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        of_index, mask = (self._causal(ids, real, window) for window in self.windows)
        if self.over_padding:
            of_index = self._causal(ids, None, self.windows[0])
        for layer, project in enumerate(self.projections):
            if layer < len(self.indices):
                read = self.indices[layer](F.layer_norm(x, (WIDTH,)), of_index, mask)
                read = read[:, None] if read.dim() == 3 else read
            query, key, value = project(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            y = self._attend(query, key, value, read)
            x = x + y.transpose(1, 2).flatten(2)
        return self.head(x.tanh())

    def _causal(self, ids: torch.Tensor, real: torch.Tensor | None, window: int | None) -> torch.Tensor:
        distance = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
        mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        if self.blocks:
            pairs = torch.arange(ids.shape[1]) // 2
            mask = mask | (pairs[:, None] == pairs)
        return mask.expand(len(ids), -1, -1) if real is None else mask & real[:, None]

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.sinks is None:
            return F.scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        scores = (query @ key.mT * self.scale).masked_fill(~mask, NEVER)
        sinks = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value


def ids_and_mask(model, batch):
    return model(batch.ids, None if batch.mask is None else batch.mask.bool())


def compiled_with(model, **options):
    return torch.compile(model, backend="dta", options={"chunk_size": 3, **options})


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {}),
        ({"scores": "deepseek", "mask": "deepseek"}, {"memory_budget": 0}),
        ({"shared": True}, {"sweep": "stages", "memory_budget": 0}),
        ({"scores": "keys by head"}, {"chunk_size": 64}),
        ({"scores": "no weights", "mask": "finite", "filler": -1e38}, {}),
        ({"windows": (6, 6), "sinks": True}, {}),
        ({"mask": "finite for others"}, {"chunk_size": 64}),
        ({"windows": (None, 3)}, {}),  # some queries read nothing
        ({"scores": "for each head", "heads": 2, "mask": "minimax"}, {"memory_budget": 0}),
        ({"scores": "for each head", "heads": 2, "mask": "blocks", "windows": (5, 5)}, {"chunk_size": 1}),
        ({"mask": "first block"}, {"chunk_size": 64}),
        ({"mask": "first keys", "shared": True}, {}),
        ({"over_padding": True}, {}),
    ],
    ids=str,
)
@pytest.mark.sample(2)
def test_every_query_reads_the_keys_chosen_for_it(model, options):
    model, batch = Sparse(**model), make_batch(rollouts(V))
    loss = random_loss(batch, V)
    expected = reference(model, batch, loss, ids_and_mask)
    assert not any("indices" in name for name in expected.gradients)
    compiled = compiled_with(model, **options)
    assert_equal(measure(compiled, model, batch, loss, ids_and_mask), expected, EXACT)
    model.indices[0].query.weight.data.neg_()  # other keys
    other = reference(model, batch, loss, ids_and_mask)
    assert (other.outputs - expected.outputs).abs().max() > 1e-3
    assert_equal(measure(compiled, model, batch, loss, ids_and_mask), other, EXACT)


def test_groups_of_subtrees_keep_gradients_of_what_an_index_reads_too():
    """The index has none, and goes backward after attention."""
    model, batch = Sparse(), make_batch(rollouts(V))
    loss, options = random_loss(batch, V), {"sweep": "stages", "groups": 2, "memory_budget": 0}
    expected = reference(model, batch, loss, ids_and_mask)
    assert_equal(measure(compiled_with(model, **options), model, batch, loss, ids_and_mask), expected, EXACT)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("chunk_size", "window"), [(3, None), (64, None), (64, KEYS - 1)])
def test_branches_of_the_tree_choose_keys_of_their_own(monkeypatch, chunk_size, window):
    model, batch, by_tree, by_rows = Sparse(shared=True, windows=(window,) * 2), make_batch(rollouts(V)), set(), set()
    forward = chosen_keys.ChoiceRuntime.forward

    def spy(runtime, x):
        (choice,) = forward(runtime, x)
        keys = ({key for key in row if key != NONE} for row in choice[0, 0].tolist())
        by_tree.update(zip(x.table().depths.tolist(), map(frozenset, keys), strict=True))
        return (choice,)

    def note(index, inputs, mask):
        by_rows.update((depth, frozenset(keys.nonzero()[:, 0].tolist())) for depth, keys in enumerate(mask[0]))

    monkeypatch.setattr(chosen_keys.ChoiceRuntime, "forward", spy)
    with torch.no_grad():
        for row in range(len(batch.ids)):
            with model.indices[0].register_forward_hook(note):
                ids_and_mask(model, batch.row(row))
        ids_and_mask(compiled_with(model, chunk_size=chunk_size, verify="off"), batch)
    assert by_tree == by_rows
    assert window or len({keys for depth, keys in by_tree if depth == 14}) > 1  # below the last fork


@pytest.mark.parametrize("mask", ["transformers", pytest.param("deepseek", marks=pytest.mark.slow)])
def test_rows_of_fewer_tokens_than_an_index_chooses(mask):
    model = Sparse(mask=mask)
    compiled = compiled_with(model)
    for length in (KEYS - 1, KEYS + 1):
        batch = make_batch([row[:length] for row in rollouts(V)])
        loss = random_loss(batch, V)
        expected = reference(model, batch, loss, ids_and_mask)
        assert_equal(measure(compiled, model, batch, loss, ids_and_mask), expected, EXACT)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("scores", "heads", "mask"),
    [
        ("transformers", 1, "transformers"),
        pytest.param("one head", 1, "transformers", marks=pytest.mark.slow),
        pytest.param("relu for each head", HEADS, "transformers", marks=pytest.mark.slow),
        ("relu for each head", 2, "blocks"),
    ],
)
def test_equal_scores(scores, heads, mask):
    """With one index head most scores are zero; `topk` takes some of these by its row, which is that of eager mode."""
    model, batch = Sparse(scores, mask, heads), make_batch(rollouts(V))
    loss, compiled = random_loss(batch, V), compiled_with(model)
    assert_equal(
        measure(compiled, model, batch, loss, ids_and_mask), measure(model, model, batch, loss, ids_and_mask), EXACT
    )
    refused = "the same score" if mask == "transformers" else "by their numbers in a row"
    with pytest.raises(RuntimeContractError, match=refused) as caught:
        ids_and_mask(compiled, make_batch(rollouts(V), "left"))
    assert "topk" in caught.value.where


@pytest.mark.parametrize(
    ("model", "side", "reason"),
    [
        ({"mask": "later blocks"}, "right", "no key that a query may read"),
        ({"over_padding": True}, "left", "padding from different masks"),
    ],
)
def test_choices_that_are_refused_by_a_call(model, side, reason):
    with pytest.raises(RuntimeContractError, match=reason):
        ids_and_mask(compiled_with(Sparse(**model)), make_batch(rollouts(V), side))


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


REFUSED = [
    ({"scores": "softmax"}, "no weighted sum of relu"),
    ({"scores": "of keys alone"}, "equal tokens have equal ones"),
    ({"scores": "relu of the sum"}, "a relu of scores that are weighed"),
    ({"scores": "relu of the weighed"}, "a relu of scores that are weighed"),
    ({"scores": "relu after the weights"}, "a relu of scores that are weighed"),
    ({"scores": "relu after one sum"}, "may be negative"),
    ({"scores": "relu of the masked"}, "a relu of scores that are weighed"),
    ({"scores": "weights of the masked"}, "weights of masked ones"),
    ({"scores": "masked product"}, "weighed or masked already"),
    ({"scores": "negative"}, "of index scores"),
    ({"scores": "weighed twice"}, "several weights"),
    ({"scores": "weighed before the product"}, "weighed or masked already"),
    ({"scores": "weighed after the product"}, "several weights"),
    ({"scores": "weights of one query"}, "scores that are repeated"),
    ({"scores": "divided"}, "of index scores"),
    ({"scores": "groups of heads"}, "index keys that several heads share"),
    ({"mask": "and its own key"}, "keys besides those chosen"),
    ({"mask": "every second key"}, "a part of a dimension"),
    ({"mask": "means of blocks"}, "no query @ key"),
    ({"mask": "strided blocks"}, "and not the best one"),
    ({"mask": "a block more"}, "more blocks than those"),
    ({"mask": "forced by padding"}, "numbers of query and block alone"),
    ({"mask": "the block after"}, "the model chooses keys"),
    ({"mask": "the smallest"}, "the model chooses keys"),
    ({"mask": "queries of a key"}, "the model chooses keys"),
    ({"mask": "keys for queries"}, "the model chooses keys"),
    ({"windows": (3, None)}, "a window of 3 in the index, and all keys in attention"),
    ({"windows": (8, 5)}, "a window of 8 in the index, and a window of 5 in attention"),
    ({"windows": (None, 5), "mask": "finite"}, "all keys in the index, and a window of 5 in attention"),
    ({"filler": -1e9}, "-1e[+]09 in the mask of the index"),
    ({"mask": "first for none"}, "indices of scores of -inf that are other ones"),
    ({"mask": "finite for others", "scale": 1e6}, "scores so large"),
]


@pytest.mark.parametrize(
    ("model", "reason"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (n % 3 > 0)) for n, case in enumerate(REFUSED)],
    ids=lambda value: str(value) if isinstance(value, dict) else value,
)
@pytest.mark.sample(2)
def test_other_choices_are_refused(model, reason):
    with pytest.raises(RefusalError, match=reason):
        ids_and_mask(compiled_with(Sparse(**model)), make_batch(rollouts(V)))


def test_blocks_of_tokens_that_attend_to_each_other_are_refused():
    with pytest.raises(RuntimeContractError, match="attend to later ones of their block"):
        compiled_with(Sparse(blocks=True))(torch.arange(24).view(2, 12))
