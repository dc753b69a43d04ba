"""How many bytes values take for a chunk of any size: linear functions of its numbers of tokens and of head rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from dta_compile.passes.symbols import expression


class Bytes(NamedTuple):
    """Bytes for a chunk: `fixed + per_token * tokens + per_head_row * head_rows`."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_head_row: float = 0.0

    def at(self, tokens: float, head_rows: float) -> float:
        """Bytes for so many tokens and head rows."""
        return self.fixed + self.per_token * tokens + self.per_head_row * head_rows

    def times(self, factor: float) -> Bytes:
        """All three parts multiplied."""
        return Bytes(*(factor * number for number in self))

    def plus(self, other: Bytes) -> Bytes:
        """The sum of two functions."""
        return Bytes(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Bytes) -> Bytes:
        """The difference of two functions."""
        return Bytes(*(a - b for a, b in zip(self, other, strict=True)))


Peaks = tuple[Bytes, ...]
"""Bytes at a peak: the maximum of several functions."""


class ChunkSizes:
    """Sizes of traced values in terms of the chunk's number of tokens and of head rows."""

    def __init__(self, tokens: torch.SymInt, head_rows: torch.SymInt) -> None:
        self.symbols = (expression(tokens), expression(head_rows))
        self._known: dict[Any, Bytes] = {}

    def bytes(self, value: Any) -> Bytes:
        """Bytes of the elements of a tensor, or of all tensors of a tuple."""
        if isinstance(value, (tuple, list)):
            return total(self.bytes(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return Bytes()
        size = Bytes(fixed=value.element_size())
        for length in value.shape:
            size = _product(size, self._linear(length))
        return size

    def head_dim(self, value: torch.Tensor) -> int | None:
        """The dimension of a tensor that runs over head rows."""
        return next((i for i, size in enumerate(value.shape) if expression(size) == self.symbols[1]), None)

    def _linear(self, size: int | torch.SymInt) -> Bytes:
        expr = expression(size)
        if expr not in self._known:
            at = [expr.subs(dict(zip(self.symbols, point, strict=True))) for point in ((0, 0), (1, 0), (0, 1))]
            fixed, per_token, per_head_row = (float(number) for number in at)
            self._known[expr] = Bytes(fixed, per_token - fixed, per_head_row - fixed)
        return self._known[expr]


def total(parts: Iterable[Bytes]) -> Bytes:
    """The sum of all."""
    return functools.reduce(Bytes.plus, parts, Bytes())


def _product(left: Bytes, right: Bytes) -> Bytes:
    if left.per_token or left.per_head_row:
        left, right = right, left
    assert not (left.per_token or left.per_head_row), "tokens and head rows run along one dimension of a value"
    return right.times(left.fixed)
