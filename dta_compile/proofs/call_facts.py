"""Facts of a call that a mask depends on: numbers, and tables that are indexed by pairs of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import sympy
import torch

from dta_compile.proofs.pairs import Pairs
from dta_compile.proofs.terms import Leaf

MOST_RUNS = 64


@dataclasses.dataclass(frozen=True)
class Table:
    """Run-length encoding of a table `[n]`, or of a table `[n, m]` that depends only on row minus column.

    Attributes:
        shape: shape of the table, perhaps with leading dimensions of size 1.
        is_square: whether it is `[n, m]`.
        starts: start of each run: an index, or a value of row minus column.
        numbers: the number of each run.
    """

    shape: tuple[int, ...]
    is_square: bool
    starts: tuple[int, ...]
    numbers: tuple[bool | int | float, ...]


def read_table(values: torch.Tensor) -> Table | None:
    """Encode a table for proofs; return None if it has too many runs or depends on more than row minus column."""
    shape = tuple(values.shape)
    leading = next((i for i, size in enumerate(shape) if size != 1), max(len(shape) - 1, 0))
    rank = len(shape) - leading
    if 0 in shape or rank not in (1, 2):
        return None
    values, first = values.reshape(shape[leading:]), 0
    if rank == 2:
        along, first = torch.cat([values[0].flip(0), values[1:, 0]]), 1 - values.shape[1]
        if not torch.equal(values[1:, 1:], values[:-1, :-1]) or bool(along.isnan().any()):
            return None
        values = along
    starts = torch.cat([values.new_zeros(1, dtype=torch.int64), (values[1:] != values[:-1]).nonzero()[:, 0] + 1])
    if len(starts) > MOST_RUNS:
        return None
    return Table(shape, rank == 2, tuple((starts + first).tolist()), tuple(values[starts].tolist()))


@dataclasses.dataclass(frozen=True)
class Facts:
    """Known values of one call.

    Attributes:
        numbers: sizes and numbers of the call, by Dynamo's expression for them.
        scalars: values of tensors without dimensions.
        tables: contents of tables.
        pairs: for masks over pairs of tokens, their tested class and the sizes of the tensor.
    """

    numbers: Mapping[sympy.Expr, int | float] = dataclasses.field(default_factory=dict)
    scalars: Mapping[Leaf, bool | int | float] = dataclasses.field(default_factory=dict)
    tables: Mapping[Leaf, Table] = dataclasses.field(default_factory=dict)
    pairs: Mapping[Leaf, tuple[Pairs, tuple[sympy.Expr, ...]]] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a hashable key, equal for equal facts."""
        every: tuple[Mapping[Any, Any], ...] = (self.numbers, self.scalars, self.tables, self.pairs)
        return tuple(tuple(sorted((repr(k), repr(v)) for k, v in each.items())) for each in every)
