"""Keys chosen for each query by a learned index (DeepSeek sparse attention), as a mixer whose result is the choice.

A token has index queries, index keys and weights. Key `t` scores `sum over heads of weight * relu(scale * query . key)`
for a query, which attends only to the `count` keys with the highest scores; or there is a choice for each head, by
scores that are not summed. Keys may be chosen by blocks of adjacent ones, the score of which is that of its best key
(MiniMax-M3). Attention reads the choice as an operand (`ops.attention`). A choice has no gradient.

Equal scores are common, since a product of zero for all heads gives a score of zero, and torch does not say which of
them `topk` returns. So a chunk calls `topk` on the row that it would be called on without a tree, as wide as the batch,
which returns the same. A near tie may be decided otherwise, as in eager mode with another batch size.

With a `stride` above one, the keys to choose from are those of the last tokens of whole windows of so many tokens. If
blocks have as many keys, a query chooses windows as blocks of keys, and also reads the last block if it is not whole
(Qwen4-Exp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dta_compile.ops.library import define
from dta_compile.ops.mixer import BATCH, TOKENS, Mixer, Operand, register_mixer
from dta_compile.ops.scoring import SCORING, Scoring

NONE = -1  # in a choice of fewer than `count` blocks


class Choosing(NamedTuple):
    """Constants of a choice.

    Attributes:
        most: most blocks of keys that a query reads.
        block: keys of a block, whose first one is at a multiple of it in the row.
        has_relu: negative scores count as zero.
        by_head: each head chooses, by its own scores without a weight.
        leaves_out: blocks of a score of -inf are not chosen.
        stride: the keys are those of whole windows of so many tokens, and a choice numbers the last tokens of these, or
            the windows if these are blocks; then `most` counts a query's own block.
    """

    most: int
    block: int
    has_relu: bool
    by_head: bool
    leaves_out: bool
    stride: int = 1

    @property
    def of_windows(self) -> bool:
        """Return whether windows are chosen as blocks of keys."""
        return self.block == self.stride > 1


OPERANDS = "Tensor query, Tensor weights, Tensor key"
MASKING = "Tensor? mask, bool is_causal, Tensor? segments, int window, " + SCORING
CHOOSING = "int count, int block, bool has_relu, bool by_head, bool leaves_out, int stride"
# `forced` `[S or 1, blocks]` has the scores that replace those of blocks, and is NaN elsewhere.
CHOOSE_KEYS_CALL = define(
    f"choose_keys_call({OPERANDS}, {MASKING}, {CHOOSING}, Tensor? forced) -> Tensor",
    lambda query, *others: _choice_fake(query, choosing_of(others)),
    lambda *arguments: _choice_of_batch(*arguments),
)
CHOOSE_KEYS = define(
    f"choose_keys(int layer, {OPERANDS}, float scale, {CHOOSING}) -> Tensor",
    lambda _, query, *others: _choice_fake(query, Choosing(*others[-len(Choosing._fields) :])),
)


def choosing_of(arguments: Sequence[Any]) -> Choosing:
    """Return the constants among the arguments of `CHOOSE_KEYS_CALL`, whose last one is `forced`."""
    return Choosing(*arguments[-1 - len(Choosing._fields) : -1])


_FIRST = 7 + len(Scoring._fields)  # the argument that `Choosing` begins with
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
        constants=(7, *range(_FIRST, _FIRST + len(Choosing._fields))),  # scale and `Choosing`
    )
)


def index_scores(
    query: torch.Tensor, weights: torch.Tensor, key: torch.Tensor, scale: float, how: Choosing
) -> torch.Tensor:
    """Return the scores `[B, H or 1, S, T]` of query `[B, H, S, D]`, weights `[B, H, S, 1]`, key `[B, H or 1, T, D]`.

    The weights are not used if each head chooses.
    """
    products = (query @ key.to(query.dtype).mT) * scale  # [B, H, S, T]
    products = F.relu(products) if how.has_relu else products
    if how.by_head:
        return products
    return (weights.permute(0, 2, 3, 1) @ products.to(weights.dtype).transpose(1, 2)).transpose(1, 2)


def padded_to(count: int, choice: torch.Tensor) -> torch.Tensor:
    """Return `[..., count]`, with `NONE` after the keys chosen."""
    return F.pad(choice, (0, count - choice.shape[-1]), value=NONE)


def are_chosen(choice: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return which of the blocks are chosen, bool `[..., blocks]`, for a choice `[..., count]`."""
    chosen = choice.new_zeros((*choice.shape[:-1], blocks + 1), dtype=torch.bool)
    return chosen.scatter_(-1, choice.masked_fill(choice == NONE, blocks), True)[..., :blocks]


def chosen_windows(scores: torch.Tensor, tokens: torch.Tensor, how: Choosing) -> torch.Tensor:
    """Choose blocks `[..., S, most]` by the scores `[..., S, windows]` of whole windows: the best, and the last block.

    `topk` is called on as many scores as a query has whole windows, as it is in eager mode.

    Args:
        tokens: `[S]`, the number of tokens up to each query.
    """
    whole = tokens // how.stride
    choice = whole.new_full((*scores.shape[:-1], how.most), NONE)
    for count in whole.unique().tolist():
        same, most = whole == count, min(how.most - 1, count)
        choice[..., same, :most] = scores[..., same, :count].topk(most).indices
    choice[..., -1] = torch.where(tokens % how.stride > 0, whole, NONE)
    return choice


def _choice_fake(query: torch.Tensor, how: Choosing) -> torch.Tensor:
    shape = (query.shape[0], query.shape[1] if how.by_head else 1, query.shape[2], how.most)
    return query.new_empty(shape, dtype=torch.int64)


def _choice_of_batch(query: torch.Tensor, weights: torch.Tensor, key: torch.Tensor, *others: Any) -> torch.Tensor:
    """Choose keys over a batch, for calls without a mask: padding after a sequence is not read by its tokens."""
    how, scale = choosing_of(others), others[4]
    scores = index_scores(query, weights, key[:, :, how.stride - 1 :: how.stride], scale, how)
    if how.of_windows:
        return chosen_windows(scores, torch.arange(query.shape[2], device=query.device) + 1, how)
    entries = torch.arange(scores.shape[-1], device=query.device)
    complete = (torch.arange(query.shape[2], device=query.device)[:, None] + 1) // how.stride
    scores = scores.masked_fill(entries >= complete, float("-inf"))
    choice = scores.topk(min(how.most, scores.shape[-1])).indices
    return padded_to(how.most, (choice * how.stride + how.stride - 1).masked_fill(choice >= complete, NONE))


CHOSEN = define(
    "chosen(Tensor choice, SymInt blocks) -> Tensor",
    lambda choice, blocks: choice.new_empty((*choice.shape[:-1], blocks), dtype=torch.bool),
    are_chosen,
)
