"""Layouts: which dimensions of a tensor run over sequences and tokens; and the kinds of inputs of a call."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from typing import Any

import sympy


class Axis(enum.Enum):
    """Meaning of a tensor dimension: sequences of the batch, tokens of a sequence, or both flattened.

    `ROWS` is flattened sequence by sequence, `TOKEN_ROWS` token by token.
    """

    BATCH = "B"
    TOKEN = "T"
    ROWS = "BT"
    TOKEN_ROWS = "TB"

    @property
    def is_over_tokens(self) -> bool:
        """Return whether the axis runs over tokens, of one sequence or of several."""
        return self is not Axis.BATCH

    @property
    def is_over_sequences(self) -> bool:
        """Return whether the axis runs over sequences, alone or flattened with their tokens."""
        return self is not Axis.TOKEN


@dataclasses.dataclass(frozen=True)
class Flat:
    """Dimension that flattens sequences and tokens with features: `(BATCH, TOKEN, 4)` is `[B * T * 4]`.

    Only values inside of the token region have such dimensions. Equal ones are one object (`flat`), like axes.
    """

    factors: tuple[Axis | int, ...]

    @property
    def is_over_tokens(self) -> bool:
        """Return whether one of the factors runs over tokens."""
        return Axis.TOKEN in self.factors

    @property
    def is_over_sequences(self) -> bool:
        """Return whether one of the factors runs over sequences."""
        return Axis.BATCH in self.factors

    @property
    def features(self) -> int:
        """Return the number of entries per token, or per sequence if there are no tokens."""
        return math.prod(factor for factor in self.factors if isinstance(factor, int))

    @property
    def value(self) -> str:
        """Return the factors as text."""
        return "*".join(str(factor.value if isinstance(factor, Axis) else factor) for factor in self.factors)


@functools.cache
def flat(factors: tuple[Axis | int, ...]) -> Flat:
    """Return the one `Flat` with these factors."""
    return Flat(factors)


@dataclasses.dataclass(frozen=True)
class Frame:
    """Token positions that a token axis covers: `[start, start + length)`; a start of None is not known yet."""

    start: sympy.Expr | None
    length: sympy.Expr


@dataclasses.dataclass(frozen=True)
class Layout:
    """The axis of each dimension of a tensor (None: features), and the frame of its token axis."""

    dims: tuple[Axis | Flat | None, ...]
    frame: Frame | None = None

    @functools.cached_property
    def token_dim(self) -> int | None:
        """Return the dimension that runs over tokens (also of several sequences), or None."""
        return next((i for i, axis in enumerate(self.dims) if axis is not None and axis.is_over_tokens), None)

    @functools.cached_property
    def row_dim(self) -> int | None:
        """Return the dimension that runs over a chunk's rows: the token dimension, else the batch dimension."""
        return self.batch_dim if self.token_dim is None else self.token_dim

    @functools.cached_property
    def batch_dim(self) -> int | None:
        """Return the dimension that runs over sequences alone, or None."""
        return self.dims.index(Axis.BATCH) if Axis.BATCH in self.dims else None

    @functools.cached_property
    def is_over_sequences(self) -> bool:
        """Return whether a dimension runs over sequences, alone or flattened with their tokens."""
        return any(axis is not None and axis.is_over_sequences for axis in self.dims)

    @functools.cached_property
    def has_flat(self) -> bool:
        """Return whether a dimension flattens sequences or tokens with features."""
        return any(isinstance(axis, Flat) for axis in self.dims)

    @functools.cached_property
    def labelled(self) -> bool:
        """Return whether any dimension runs over sequences or tokens."""
        return self.dims.count(None) < len(self.dims)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.frame))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.dims, self.frame)  # without what is cached: hashes differ between processes

    def __str__(self) -> str:
        return "[" + ", ".join("-" if axis is None else axis.value for axis in self.dims) + "]"


class InputKind(enum.Enum):
    """Kind of a graph input."""

    PARAMETER = "parameter"  # trained or frozen, without batch or token axis
    DATA = "data"  # any other tensor that needs no gradient
    DIFFERENTIABLE_DATA = "differentiable data"  # has a batch or token axis and requires grad
    SIZE = "size"  # a SymInt or a plain number


@dataclasses.dataclass(frozen=True)
class Input:
    """One positional input of the captured graph."""

    index: int
    name: str
    kind: InputKind
    requires_grad: bool
