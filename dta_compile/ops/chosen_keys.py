"""Keys chosen for each query by a learned index (DeepSeek sparse attention), as a mixer whose result is the choice.

A token has index queries, index keys and weights. Key `t` scores `sum over heads of weight * relu(scale * query . key)`
for a query, which attends only to the `count` keys with the highest scores. Attention reads the choice as an operand
(`ops.attention`). A choice has no gradient.

Equal scores are common, since a product of zero for all heads gives a score of zero, and torch does not say which of
them `topk` returns. So a chunk calls `topk` on the row that it would be called on without a tree, as wide as the batch,
which returns the same. A near tie may be decided otherwise, as in eager mode with another batch size.

With a `stride` above one, the keys to choose from are those of the last tokens of whole windows of so many tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dta_compile.ops.library import LIBRARY
from dta_compile.ops.mixer import BATCH, TOKENS, Mixer, Operand, register_mixer

NONE = -1  # in a choice of fewer than `count` keys

OPERANDS = "Tensor query, Tensor weights, Tensor key"
MASKING = "Tensor? mask, bool is_causal, Tensor? segments, int window, float scale, float softcap"
LIBRARY.define(f"choose_keys_call({OPERANDS}, {MASKING}, int count, int stride) -> Tensor")
LIBRARY.define(f"choose_keys(int layer, {OPERANDS}, float scale, int count, int stride) -> Tensor")
LIBRARY.define("chosen(Tensor choice) -> Tensor")
CHOOSE_KEYS_CALL = torch.ops.dta.choose_keys_call.default
CHOOSE_KEYS = torch.ops.dta.choose_keys.default
CHOSEN = torch.ops.dta.chosen.default

CHOICE_MIXER = register_mixer(
    Mixer(
        name="choice of keys",
        functions=(torch.ops.dta.choose_keys_call, CHOOSE_KEYS_CALL),
        call=CHOOSE_KEYS_CALL,
        chunk=CHOOSE_KEYS,
        backward=None,
        operands=(
            Operand("query", "index queries"),
            Operand("weights", "index weights"),
            Operand("key", "index keys", is_state=True),
        ),
        dims=(BATCH, "heads", TOKENS, "head_dim"),
        constants=(7, 9, 10),  # scale, count and stride
    )
)


def index_scores(query: torch.Tensor, weights: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the scores `[B, S, T]` of query `[B, H, S, D]`, weights `[B, H, S, 1]` and key `[B, H or 1, T, D]`."""
    products = F.relu((query @ key.to(query.dtype).mT) * scale).to(weights.dtype)  # [B, H, S, T]
    return (weights.permute(0, 2, 3, 1) @ products.transpose(1, 2)).squeeze(2)


def padded_to(count: int, choice: torch.Tensor) -> torch.Tensor:
    """Return `[..., count]`, with `NONE` after the keys chosen."""
    return F.pad(choice, (0, count - choice.shape[-1]), value=NONE)


def are_chosen(choice: torch.Tensor, keys: int) -> torch.Tensor:
    """Return which of the keys are chosen, bool `[..., keys]`, for a choice `[..., count]`."""
    chosen = choice.new_zeros((*choice.shape[:-1], keys + 1), dtype=torch.bool)
    return chosen.scatter_(-1, choice.masked_fill(choice == NONE, keys), True)[..., :keys]


def _choice_fake(query: torch.Tensor, count: int) -> torch.Tensor:
    return query.new_empty((query.shape[0], 1, query.shape[2], count), dtype=torch.int64)


@torch.library.impl("dta::choose_keys_call", "CompositeExplicitAutograd", lib=LIBRARY)
def _call(query: torch.Tensor, weights: torch.Tensor, key: torch.Tensor, *others: Any) -> torch.Tensor:
    """Choose keys over a batch, for calls without a mask: padding after a sequence is not read by its tokens."""
    *_, scale, _, count, stride = others
    scores = index_scores(query, weights, key[:, :, stride - 1 :: stride], scale)
    entries = torch.arange(scores.shape[-1], device=query.device)
    complete = (torch.arange(query.shape[2], device=query.device)[:, None] + 1) // stride
    scores = scores.masked_fill(entries >= complete, float("-inf"))
    choice = scores.topk(min(count, scores.shape[-1])).indices
    return padded_to(count, (choice * stride + stride - 1).masked_fill(choice >= complete, NONE))[:, None]


@torch.library.register_fake("dta::choose_keys_call", lib=LIBRARY)
def _call_fake(query: torch.Tensor, *others: Any) -> torch.Tensor:
    return _choice_fake(query, others[-2])


@torch.library.register_fake("dta::choose_keys", lib=LIBRARY)
def _chunk_fake(layer: int, query: torch.Tensor, *others: Any) -> torch.Tensor:
    return _choice_fake(query, others[-2])


@torch.library.register_fake("dta::chosen", lib=LIBRARY)
def _chosen_fake(choice: torch.Tensor) -> torch.Tensor:
    return choice.new_empty((*choice.shape[:-1], choice.shape[2]), dtype=torch.bool)
