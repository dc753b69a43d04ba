"""What a mask reads that is known only at a call: numbers, and tables that are looked up by pairs of tokens."""

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
    """A table `[n]`, or `[n, m]` that depends on the distance of row and column alone, by runs of equal numbers.

    Attributes:
        shape: of the table; dimensions of size 1 may come first.
        is_square: it is one of distances.
        starts: where each run begins: at an index, or at a distance of row and column.
        numbers: of the runs.
    """

    shape: tuple[int, ...]
    is_square: bool
    starts: tuple[int, ...]
    numbers: tuple[bool | int | float, ...]


def read_table(values: torch.Tensor) -> Table | None:
    """The contents of a table in the form that proofs can use; None if they have no such form."""
    shape = tuple(values.shape)
    leading = next((i for i, size in enumerate(shape) if size != 1), max(len(shape) - 1, 0))
    rank = len(shape) - leading
    if 0 in shape or rank not in (1, 2):
        return None
    values, first = values.reshape(shape[leading:]), 0
    if rank == 2:
        rows, columns = values.shape
        distance = torch.arange(rows, device=values.device)[:, None] - torch.arange(columns, device=values.device)
        along, first = torch.cat([values[0].flip(0), values[1:, 0]]), 1 - columns
        if not torch.equal(values, along[distance - first]):
            return None
        values = along
    starts = torch.cat([values.new_zeros(1, dtype=torch.int64), (values[1:] != values[:-1]).nonzero()[:, 0] + 1])
    if len(starts) > MOST_RUNS:
        return None
    return Table(shape, rank == 2, tuple((starts + first).tolist()), tuple(values[starts].tolist()))


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known for one call.

    Attributes:
        numbers: sizes and numbers of the call, by the expression that Dynamo knows them by.
        scalars: values of tensors without dimensions.
        tables: contents of tables.
        pairs: masks over pairs of tokens by what their values were tested to be, with the sizes of the tensor.
    """

    numbers: Mapping[sympy.Expr, int | float] = dataclasses.field(default_factory=dict)
    scalars: Mapping[Leaf, bool | int | float] = dataclasses.field(default_factory=dict)
    tables: Mapping[Leaf, Table] = dataclasses.field(default_factory=dict)
    pairs: Mapping[Leaf, tuple[Pairs, tuple[sympy.Expr, ...]]] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal facts."""
        every: tuple[Mapping[Any, Any], ...] = (self.numbers, self.scalars, self.tables, self.pairs)
        return tuple(tuple(sorted((repr(k), repr(v)) for k, v in each.items())) for each in every)
