"""What a mask reads that is known only at a call: numbers, and tables that are looked up by pairs of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
import z3
from torch import fx

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

    def cases(self, index: Sequence[z3.ArithRef]) -> list[tuple[Any, z3.BoolRef]]:
        """The numbers that the table may have at an index within it, and where it has them."""
        at = index[-2] - index[-1] if self.is_square else index[-1]
        ends = (*self.starts[1:], None)
        return [
            (number, z3.And(at >= start, z3.BoolVal(True) if end is None else at < end))
            for number, start, end in zip(self.numbers, self.starts, ends, strict=True)
        ]


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
    """

    numbers: Mapping[sympy.Expr, int | float] = dataclasses.field(default_factory=dict)
    scalars: Mapping[fx.Node, bool | int | float] = dataclasses.field(default_factory=dict)
    tables: Mapping[fx.Node, Table] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal facts."""
        return tuple(tuple(sorted((str(k), repr(v)) for k, v in each.items())) for each in self._all)

    @property
    def _all(self) -> tuple[Mapping[Any, Any], ...]:
        return self.numbers, self.scalars, self.tables
