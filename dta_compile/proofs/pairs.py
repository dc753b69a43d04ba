"""Test the values of masks over pairs of tokens that are inputs of a call; proofs use the resulting class."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
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
    def at(cls, where: Sequence[int], reason: str) -> UnlikePair:
        """Return the error with row, query and key of an entry."""
        row, query, key = where
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
    if len(values) > 1 and values.stride(0) == 0:  # one mask, expanded over the batch
        pairs, sequences = read_pairs(values[0])
        return Tested(pairs, sequences.expand(len(values), size))
    last = values[:, : max(size - 1, 1), -1].flatten()
    hidden = last.double().median().to(values.dtype).item()  # the last key is hidden from most queries
    itself = values.diagonal(dim1=1, dim2=2).flatten()
    if values.is_floating_point() and bool((lowest := values.amin()) <= FORBIDDEN):
        return _Reader(values, 0.0, lowest.item(), is_bias=True).tested()
    shown = not hidden if values.dtype is torch.bool else _other_number([itself, values.flatten()], hidden)
    try:
        return _Reader(values, shown, hidden).tested()
    except UnlikePair as unlike:
        if 2 * int((itself == hidden).sum()) <= itself.numel():
            raise
        try:
            return _Reader(values, hidden, shown).tested()  # one sequence per row, not causal: no key is hidden
        except UnlikePair:
            raise unlike from None


def _other_number(entries: list[torch.Tensor], hidden: float) -> float:
    """Return the first number that is not `hidden`; `hidden` if there is none."""
    first = (some[(some != hidden).view(torch.uint8).argmax()].item() for some in entries)
    return next((number for number in first if number != hidden), hidden)


class _Reader:
    """Compares a mask `[R, S, S]`, block by block, with masks of the supported classes.

    Attributes:
        real: `[R, S]` tokens that may attend to themselves.
        first: `[R, S]` the first key of a real query; S at padding. Found by bisection, it is right for the masks that
            models have.
        filler: largest entry of a pair that a bias hides.
    """

    def __init__(
        self, values: torch.Tensor, shown: bool | float, hidden: bool | float, *, is_bias: bool = False
    ) -> None:
        self.values, self.shown, self.is_bias = values, shown, is_bias
        self.hidden: bool | float | None = hidden
        self.lowest = hidden
        self.filler = float(hidden) if is_bias else -math.inf
        self.tokens = torch.arange(values.shape[-1], device=values.device)
        self.real = self._allowed(values.diagonal(dim1=1, dim2=2))

    def tested(self) -> Tested:
        """Return the class of the mask. Raises `UnlikePair`."""
        if not bool(self.real.any()):
            raise UnlikePair("a mask that hides every token from itself")
        where: tuple[int, int, int] | None = None
        for find_first in (self._first_by_bisection, self._first_by_scan):
            self.first = find_first()
            where = self._pair_unlike(self._causal)
            if where is None:
                return self._as_causal()
            if self._pair_unlike(self._within_sequence) is None:
                begin = self.first.gather(1, self.real.view(torch.uint8).argmax(-1, keepdim=True))
                is_packed = bool((self.real & (self.first != begin)).any())
                return Tested(Pairs(self.shown, self.hidden, False, None, is_packed, self.filler), self.first)
        assert where is not None
        _, query, key = where
        way = "hides earlier tokens in another way than padding, sequences or a sliding window"
        raise UnlikePair.at(where, f"a mask that {'lets tokens attend to later ones' if key > query else way}")

    def _as_causal(self) -> Tested:
        begins = self.real & (self.first == self.tokens)
        sequences = torch.where(begins, self.tokens, 0).cummax(-1).values
        window, is_packed = _window(self.real, self.first, sequences), bool((begins.sum(-1) > 1).any())
        return Tested(Pairs(self.shown, self.hidden, True, window, is_packed, self.filler), sequences)

    def _allowed(self, values: torch.Tensor) -> torch.Tensor:
        if values.dtype is torch.bool:
            return values if self.shown else ~values
        return values == self.shown

    def _blocks(self) -> Iterator[tuple[int, slice]]:
        """Yield rows of the batch with slices of queries.

        Blocks fit the caches of CPUs, and are small enough for torch to run each operator in one thread: with as many
        short parallel loops, threads would wait for one another. Elsewhere few kernels are needed.
        """
        size = self.values.shape[-1]
        step = max(1, ((1 << 15) - 1 if self.values.device.type == "cpu" else 1 << 26) // size)
        for row in range(len(self.values)):
            yield from ((row, slice(start, start + step)) for start in range(0, size, step))

    def _pair_unlike(self, expected: Callable[[int, slice], torch.Tensor]) -> tuple[int, int, int] | None:
        """Return row, query and key of a real query's pair that is not as expected. Raises `UnlikePair`."""
        has_padding = not bool(self.real.all())
        for row, queries in self._blocks():
            values = self.values[row, queries]
            allowed = self._allowed(values)
            if values.dtype is not torch.bool:
                self._require_numbers(values, allowed, row, queries.start)
            wrong = expected(row, queries).logical_xor_(allowed)
            if has_padding:
                wrong &= self.real[row, queries, None]
            if bool(wrong.count_nonzero()):
                query, key = wrong.nonzero()[0].tolist()
                return row, queries.start + query, key
        return None

    def _require_numbers(self, values: torch.Tensor, allowed: torch.Tensor, row: int, start: int) -> None:
        others = (values == self.lowest).logical_or_(allowed).logical_not_()
        if not bool(others.count_nonzero()):
            return
        if self.is_bias:
            self.hidden, hides = None, values <= FORBIDDEN
            self.filler = max(self.filler, values.masked_fill((others & hides).logical_not_(), -math.inf).amax().item())
            others &= ~hides
            if not bool(others.any()):
                return
        query, key = others.nonzero()[0].tolist()
        two = f"more than two numbers, {self.shown} and {self.hidden}"
        reason = f"a bias of {values[query, key]}" if self.is_bias else two
        raise UnlikePair.at((row, start + query, key), reason)

    def _causal(self, row: int, queries: slice) -> torch.Tensor:
        keys = torch.where(self.real[row], self.tokens, -1)
        return (keys >= self.first[row, queries, None]).logical_and_(self.tokens <= self.tokens[queries, None])

    def _within_sequence(self, row: int, queries: slice) -> torch.Tensor:
        return (self.first[row] == self.first[row, queries, None]).logical_and_(self.real[row])

    def _first_by_bisection(self) -> torch.Tensor:
        """Find the first keys if, of the real keys before a query, it attends to all from some key on."""
        order = torch.argsort(~self.real, dim=-1, stable=True)  # real tokens in front
        low, high = torch.zeros_like(order), (self.real.cumsum(-1) - 1).clamp(min=0)
        for _ in range(order.shape[-1].bit_length()):
            middle = (low + high) // 2
            allowed = self._allowed(self.values.gather(2, order.gather(1, middle)[..., None])[..., 0])
            low, high = torch.where(allowed, low, middle + 1), torch.where(allowed, middle, high)
        return torch.where(self.real, order.gather(1, high), order.shape[-1])

    def _first_by_scan(self) -> torch.Tensor:
        blocks = [self._allowed(self.values[row, queries]) for row, queries in self._blocks()]
        first = torch.cat([allowed.view(torch.uint8).argmax(-1) for allowed in blocks]).view_as(self.real)
        return torch.where(self.real, first, first.shape[-1])


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
        row, query = wrong.nonzero()[0].tolist()
        key = int(torch.minimum(first, expected)[row, query])
        raise UnlikePair.at((row, query, key), f"a window other than of {window} tokens")
    return window
