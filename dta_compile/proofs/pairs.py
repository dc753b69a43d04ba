"""Test the values of masks over pairs of tokens that are inputs of a call; proofs use the resulting class."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from dta_compile.proofs.mask_class import FORBIDDEN
from dta_compile.proofs.terms import Leaf


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Tested class of a mask `[..., S, S]`.

    A token that may attend to itself is real. A real query attends to the real keys of its own sequence; with
    `is_causal` only to those that are not after it, and with `window` only within so many tokens. Nothing is said about
    padding queries.

    Attributes:
        allowed: the entry of allowed pairs.
        hidden: the entry of all other pairs; None if they differ and are all at most `FORBIDDEN`.
        is_causal, window: restrictions on the keys of a sequence.
        is_packed: whether some row has several sequences.
        filler: with `hidden` None, the largest entry of a hidden pair.
    """

    allowed: bool | float
    hidden: bool | float | None
    is_causal: bool
    window: int | None
    is_packed: bool
    filler: float = -math.inf


class Tested(NamedTuple):
    """The class of a mask, and `sequences` `[R, S]`, one number for all tokens of a sequence."""

    pairs: Pairs
    sequences: torch.Tensor


def sequences_of(mask: Leaf) -> Leaf:
    """Return the leaf for the sequence numbers `[R, S]` that the test of a mask over pairs gives."""
    return dataclasses.replace(mask, name=f"{mask.name}.sequences", source=f"{mask}.sequences", dtype=torch.int64)


class UnlikePair(Exception):
    """The values of a mask belong to no supported class; the message says why."""

    @classmethod
    def at(cls, where: torch.Tensor, reason: str) -> UnlikePair:
        """Return the error with row, query and key of an entry."""
        row, query, key = (int(number) for number in where)
        return cls(f"{reason}: row {row}, query {query} and key {key}")


@torch.no_grad()
def read_pairs(values: torch.Tensor) -> Tested:
    """Test the values of a mask `[S, S]`, `[B, S, S]` or `[B, 1, S, S]` on their device.

    Raises:
        UnlikePair: they are neither causal (with padding, contiguous sequences and at most one window), nor allow
            exactly the pairs within a sequence.
    """
    size = values.shape[-1]
    if values.shape[-2] != size or not values.numel():
        raise UnlikePair(f"which has {values.shape[-2]} queries and {size} keys")
    values = values.reshape(-1, size, size)
    last = values[:, : max(size - 1, 1), -1].flatten()
    hidden = last.double().median().to(values.dtype)  # the last key is hidden from most queries
    if values.is_floating_point() and bool((values <= FORBIDDEN).any()):
        tested = _tested(*_allowed_by_bias(values, hidden))
        filler = values[values <= FORBIDDEN].max().item()
        return tested._replace(pairs=dataclasses.replace(tested.pairs, filler=filler))
    allowed, shown = _allowed_by_number(values, hidden)
    numbers = shown.item(), hidden.item()
    try:
        return _tested(allowed, numbers)
    except UnlikePair as unlike:
        itself = values.diagonal(dim1=1, dim2=2)
        if 2 * int((itself == hidden).sum()) <= itself.numel():
            raise
        try:
            return _tested(~allowed, numbers[::-1])  # one sequence per row, not causal: no key is hidden
        except UnlikePair:
            raise unlike from None


def _tested(allowed: torch.Tensor, numbers: tuple[bool | float, bool | float | None]) -> Tested:
    """Return the class of a mask that allows the pairs `allowed` `[R, S, S]`; `numbers` are `allowed` and `hidden` of
    `Pairs`."""
    tokens = torch.arange(allowed.shape[-1], device=allowed.device)
    real = allowed.diagonal(dim1=1, dim2=2)
    if not bool(real.any()):
        raise UnlikePair("a mask that hides every token from itself")
    first = allowed.view(torch.uint8).argmax(-1)
    keys = torch.where(real, tokens, -1)
    wrong = ((keys[:, None] >= first[..., None]) & (tokens <= tokens[:, None])).bitwise_xor_(allowed)
    if bool((wrong.any(-1) & real).any()):
        if (blocks := _as_blocks(allowed, numbers, real, first)) is not None:
            return blocks
        _require_none(wrong & real[..., None], _wrong_pair)
    begins = real & (first == tokens)
    sequences = torch.where(begins, tokens, 0).cummax(-1).values
    is_packed = bool((begins.sum(-1) > 1).any())
    return Tested(Pairs(*numbers, True, _window(real, first, sequences), is_packed), sequences)


def _as_blocks(
    allowed: torch.Tensor, numbers: tuple[bool | float, bool | float | None], real: torch.Tensor, first: torch.Tensor
) -> Tested | None:
    """Return the class of a mask that allows all pairs within a sequence; None if it is not such a mask."""
    same = (first[..., None] == first[:, None]) & real[:, None]
    if bool(((same ^ allowed) & real[..., None]).any()):
        return None
    begin = first.gather(1, real.view(torch.uint8).argmax(-1, keepdim=True))
    return Tested(Pairs(*numbers, False, None, bool((real & (first != begin)).any())), first)


def _require_none(wrong: torch.Tensor, reason: Callable[[int, int, int], str]) -> None:
    if bool(wrong.any()):
        where = wrong.nonzero()[0]
        raise UnlikePair.at(where, reason(*map(int, where)))


def _allowed_by_number(values: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where a mask of two numbers does not have the number `hidden`, and its other number."""
    allowed = values != hidden
    if values.dtype is torch.bool:
        return allowed, ~hidden
    shown = values.flatten()[allowed.flatten().view(torch.uint8).argmax()]
    _require_none(allowed & (values != shown), lambda *_: f"more than two numbers, {shown} and {hidden}")
    return allowed, shown


def _allowed_by_bias(
    values: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, tuple[bool | float, bool | float | None]]:
    """Return where an additive mask allows, and its entries there and elsewhere (see `Pairs`)."""
    allowed = ~(values <= FORBIDDEN)
    _require_none(allowed & (values != 0), lambda row, query, key: f"a bias of {values[row, query, key]}")
    is_same = bool(hidden <= FORBIDDEN) and bool((allowed | (values == hidden)).all())
    return allowed, (0.0, hidden.item() if is_same else None)


def _window(real: torch.Tensor, first: torch.Tensor, sequences: torch.Tensor) -> int | None:
    """Return the window that hides the first keys of a sequence from its last queries; None if there is none."""
    size = real.shape[1]
    tokens = torch.arange(size, device=real.device)
    limited = real & (first != sequences)
    if not bool(limited.any()):
        return None
    window = int((tokens - first)[limited].max()) + 1
    next_real = torch.where(real, tokens, size).flip(1).cummin(1).values.flip(1)
    expected = next_real.gather(1, torch.maximum(sequences, tokens - window + 1))
    wrong = real & (first != expected)
    if bool(wrong.any()):
        row, query = wrong.nonzero()[0]
        key = torch.minimum(first, expected)[row, query]
        raise UnlikePair.at(torch.stack([row, query, key]), f"a window other than of {window} tokens")
    return window


def _wrong_pair(row: int, query: int, key: int) -> str:
    if key > query:
        return "a mask that lets tokens attend to later ones"
    return "a mask that hides earlier tokens in another way than padding, sequences or a sliding window"
