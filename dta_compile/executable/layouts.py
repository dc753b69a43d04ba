"""Which dimensions of a tensor count sequences and tokens, and what the inputs of a call are."""

from __future__ import annotations

import dataclasses
import enum

import sympy


class Axis(enum.Enum):
    """What a tensor dimension counts: sequences of the batch, tokens of a sequence, or both flattened: all tokens of a
    sequence and then the next, or a token of all sequences and then the next."""

    BATCH = "B"
    TOKEN = "T"
    ROWS = "BT"
    TOKEN_ROWS = "TB"

    @property
    def is_over_tokens(self) -> bool:
        """Whether neighbours along the axis are tokens, of one sequence or of several."""
        return self is not Axis.BATCH

    @property
    def is_over_sequences(self) -> bool:
        """Whether the axis runs over sequences, alone or with their tokens."""
        return self is not Axis.TOKEN


@dataclasses.dataclass(frozen=True)
class Frame:
    """The token positions a token axis covers: `[start, start + length)`; start None means not known yet."""

    start: sympy.Expr | None
    length: sympy.Expr


@dataclasses.dataclass(frozen=True)
class Layout:
    """The axes of one tensor, a dimension each (None: a feature dimension), and the frame of its token axis."""

    dims: tuple[Axis | None, ...]
    frame: Frame | None = None

    @property
    def token_dim(self) -> int | None:
        """The dimension that runs over tokens (also of several sequences), or None."""
        return next((i for i, axis in enumerate(self.dims) if axis is not None and axis.is_over_tokens), None)

    @property
    def row_dim(self) -> int | None:
        """The dimension that runs over a chunk's rows: that of tokens, or of sequences in a value without tokens."""
        return self.batch_dim if self.token_dim is None else self.token_dim

    @property
    def batch_dim(self) -> int | None:
        """The dimension that runs over sequences alone, or None."""
        return self.dims.index(Axis.BATCH) if Axis.BATCH in self.dims else None

    @property
    def is_over_sequences(self) -> bool:
        """Whether a dimension runs over sequences (also over their tokens)."""
        return any(axis is not None and axis.is_over_sequences for axis in self.dims)

    @property
    def labelled(self) -> bool:
        """Whether any dimension runs over sequences or tokens."""
        return self.dims.count(None) < len(self.dims)

    def __str__(self) -> str:
        return "[" + ", ".join("-" if axis is None else axis.value for axis in self.dims) + "]"


class InputKind(enum.Enum):
    """Where a graph input comes from and whether gradients flow to it."""

    PARAMETER = "parameter"  # trained or frozen, without batch or token axis
    DATA = "data"  # everything else that carries no gradient
    DIFFERENTIABLE_DATA = "differentiable data"  # has a batch or token axis and requires grad
    SIZE = "size"  # a SymInt or a plain number


@dataclasses.dataclass(frozen=True)
class Input:
    """One positional input of the captured graph."""

    index: int
    name: str
    kind: InputKind
    requires_grad: bool
