"""Pad rollouts into the arrays that a trainer feeds to a model (numpy only, no torch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dta_compile.data.rollouts import Rollout
from dta_compile.errors import PlanError


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Rollouts padded to a common length S, as numpy arrays for a trainer.

    Entry p of a row describes the prediction made *from* position p, so `labels`, `loss_mask` and per-token values such
    as log-probs line up.

    Attributes:
        input_ids: `[B, S]` int64, padded with `pad_id`.
        labels: `[B, S]` int64, the next token; `pad_id` where there is no next token.
        attention_mask: `[B, S]` int64, 1 on tokens and 0 on padding.
        loss_mask: `[B, S]` bool, true where `labels` is a trained token.
        advantages: `[B]` float32.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    advantages: NDArray[np.float32]


def pad_batch(
    rollouts: Sequence[Rollout], pad_id: int = 0, length: int | None = None, padding_side: str = "right"
) -> Batch:
    """Pad rollouts to `length` (default: the longest of them) on the right or the left.

    Raises:
        PlanError: a rollout is longer than `length`, or `padding_side` is neither "right" nor "left".
    """
    if padding_side not in ("right", "left"):
        raise PlanError("bad value for padding_side", expected="'right', 'left'", got=repr(padding_side))
    longest = max((len(rollout) for rollout in rollouts), default=0)
    width = longest if length is None else length
    if longest > width:
        raise PlanError("a rollout does not fit", expected=f"at most {width} tokens", got=f"{longest} tokens")
    shape = (len(rollouts), width)
    input_ids, labels = np.full(shape, pad_id, np.int64), np.full(shape, pad_id, np.int64)
    attention_mask, loss_mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for row, rollout in enumerate(rollouts):
        first = width - len(rollout) if padding_side == "left" else 0
        last = first + len(rollout)
        before_last = max(last - 1, first)  # an empty rollout has no last token
        input_ids[row, first:last] = rollout.tokens
        labels[row, first:before_last] = rollout.tokens[1:]
        attention_mask[row, first:last] = 1
        loss_mask[row, first:before_last] = rollout.loss_mask[1:]
    advantages = np.array([rollout.advantage for rollout in rollouts], np.float32)
    return Batch(input_ids, labels, attention_mask, loss_mask, advantages)
