"""Sizes of traced values in bytes, as linear functions of a chunk's numbers of tokens and of head rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from dta_compile.passes.symbols import expression


class Bytes(NamedTuple):
    """Linear function of a chunk's size: `fixed + per_token * tokens + per_head_row * head_rows` bytes."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_head_row: float = 0.0

    def at(self, tokens: float, head_rows: float) -> float:
        """Return the bytes for these numbers of tokens and head rows."""
        return self.fixed + self.per_token * tokens + self.per_head_row * head_rows

    def times(self, factor: float) -> Bytes:
        """Return the function multiplied by a factor."""
        return Bytes(*(factor * number for number in self))

    def plus(self, other: Bytes) -> Bytes:
        """Return the sum of two functions."""
        return Bytes(self.fixed + other.fixed, self.per_token + other.per_token, self.per_head_row + other.per_head_row)

    def minus(self, other: Bytes) -> Bytes:
        """Return the difference of two functions."""
        return Bytes(self.fixed - other.fixed, self.per_token - other.per_token, self.per_head_row - other.per_head_row)


Peaks = tuple[Bytes, ...]
"""Bytes at a peak: the maximum of several linear functions."""


class ChunkSizes:
    """Sizes of traced values, given the symbols of the chunk's numbers of tokens and head rows."""

    def __init__(self, tokens: torch.SymInt, head_rows: torch.SymInt) -> None:
        self.symbols = (expression(tokens), expression(head_rows))
        self._known: dict[Any, Bytes] = {}

    def bytes(self, value: Any) -> Bytes:
        """Return the bytes of a tensor's elements, or of all tensors of a tuple together."""
        if isinstance(value, (tuple, list)):
            return total(self.bytes(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return Bytes()
        size = Bytes(fixed=value.element_size())
        for length in value.shape:
            size = _product(size, self._linear(length))
        return size

    def head_dim(self, value: torch.Tensor) -> int | None:
        """Return the dimension of a tensor that runs over head rows; None if there is none."""
        return next((i for i, size in enumerate(value.shape) if expression(size) == self.symbols[1]), None)

    def _linear(self, size: int | torch.SymInt) -> Bytes:
        expr = expression(size)
        if expr not in self._known:
            at = [expr.subs(dict(zip(self.symbols, point, strict=True))) for point in ((0, 0), (1, 0), (0, 1))]
            fixed, per_token, per_head_row = (float(number) for number in at)
            self._known[expr] = Bytes(fixed, per_token - fixed, per_head_row - fixed)
        return self._known[expr]


def total(parts: Iterable[Bytes]) -> Bytes:
    """Return the sum of some functions."""
    return functools.reduce(Bytes.plus, parts, Bytes())


def _product(left: Bytes, right: Bytes) -> Bytes:
    if left.per_token or left.per_head_row:
        left, right = right, left
    assert not (left.per_token or left.per_head_row), "tokens and head rows run along one dimension of a value"
    return right.times(left.fixed)
