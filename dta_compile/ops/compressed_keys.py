"""Attention to compressed keys over a batch, and the check that windows of a row are windows of a sequence."""

from __future__ import annotations

from typing import Any

import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.ops.chosen_keys import are_chosen
from dta_compile.ops.dense_attention import dense_mask
from dta_compile.ops.library import define


def _tokens_of_rows(positions: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
    """Return the real tokens, bool `[B or 1, S]`, which are the first of each row; positions number them from 0.

    Args:
        positions: `[B or 1, S]`.
        segments: `[B or 1, S]` numbers of sequences, 0 at padding, or bool; None: all tokens are real.

    Raises:
        RuntimeContractError: a row is no single sequence with padding after it, or positions are others.
    """
    column = torch.arange(positions.shape[1], device=positions.device)
    real = torch.ones_like(positions, dtype=torch.bool) if segments is None else segments != 0
    is_counted = (positions == column) | ~real
    is_first = real == (column < real.sum(1, keepdim=True))
    if segments is not None:
        is_first = is_first & ((segments == segments[:, :1]) | ~real)
    wrong = ~(is_counted & is_first)
    if bool(wrong.any()):
        row, token = (int(number) for number in wrong.nonzero()[0])
        raise RuntimeContractError(
            "windows of compressed keys are windows of a row, whose tokens are not those of one sequence",
            expected="one sequence a row, padded on the right, with positions from 0",
            got=f"position {int(positions.expand(wrong.shape)[row, token])} at row {row}, token {token}"
            + (", which is padding" if not bool(real.expand(wrong.shape)[row, token]) else ""),
            hint="pass one sequence per row, padded on the right, and no position_ids",
        )
    return real


TOKENS_OF_ROWS = define(
    "tokens_of_rows(Tensor positions, Tensor? segments) -> Tensor",
    lambda positions, segments: torch.empty_like(positions if segments is None else segments, dtype=torch.bool),
    _tokens_of_rows,
)


def with_compressed(
    states: tuple[torch.Tensor, ...],
    compressed: tuple[torch.Tensor, ...],
    choice: torch.Tensor | None,
    masking: Any,
    stride: int,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return query, key and value with the compressed keys of whole windows after those of tokens, and their mask.

    Args:
        states: query `[B, Hq, S, D]`, key and value `[B, Hkv, S, D]`.
        compressed: keys and values `[B, Hkv, S, D]` of the windows that end at each token.
        choice: `[B, 1, S, count]` tokens whose compressed keys are read; None: all.
        masking: an `ops.attention.Masking` for the keys of tokens.
    """
    (query, *own), ends = states, slice(stride - 1, None, stride)
    number, mask = torch.arange(query.shape[2], device=query.device), masking.mask
    if mask is None:
        mask = dense_mask(query.shape[2], query.device, masking.segments, masking.window)
    read = (number[ends] <= number[:, None]).expand(len(query), 1, -1, -1)
    if choice is not None:
        read = read & are_chosen(choice, query.shape[2])[..., ends]
    if mask.dtype is not torch.bool:
        read = torch.where(read, mask.new_zeros(()), float("-inf"))
    both = (torch.cat([value, further[:, :, ends]], 2) for value, further in zip(own, compressed, strict=True))
    return (query, *both), torch.cat([mask.expand(*read.shape[:-1], query.shape[2]), read], -1)


def to_compressed(grad: torch.Tensor, like: torch.Tensor, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the gradient of keys, or of values, of `with_compressed` to those of tokens and of compressed ones."""
    tokens = like.shape[2]
    of_compressed = grad.new_zeros((*grad.shape[:2], tokens, grad.shape[3]))
    of_compressed[:, :, stride - 1 :: stride] = grad[:, :, tokens:]
    return grad[:, :, :tokens], of_compressed
