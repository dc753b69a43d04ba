"""Moving rows of rectangular tensors between ranks: from where rows lie to where they are to lie, or back."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from dta_compile.distributed.group import Group

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class RowLocations:
    """Where all rows of the group lie: the same arrays on every rank.

    Where rows of tensors are packed, a row is one sequence of several in the same row of the tensors.

    Attributes:
        rank: `[N]` the rank that has the row.
        row: `[N]` its number in the tensors there.
        start: `[N]` column of its first token there.
        shapes: `[K]` rows and columns of every rank's rectangle.
    """

    rank: IntArray
    row: IntArray
    start: IntArray
    shapes: list[tuple[int, int]]


def transfer(
    values: torch.Tensor,
    source: RowLocations,
    target: RowLocations,
    lengths: IntArray,
    group: Group,
    per_token: bool,
    fill: float,
) -> torch.Tensor:
    """Rows of all ranks' `values`, moved.

    Args:
        values: this rank's, `[rows, ...]`, or `[rows, columns, ...]` if `per_token`.
        source, target: where the rows are, and where they shall be.
        lengths: `[N]` tokens of every row.
        fill: what stands where no token is moved to.

    Returns:
        this rank's rows in the target's shape: `[rows, ...]` or `[rows, columns, ...]`.
    """
    sent = _grouped_by(target.rank, np.flatnonzero(source.rank == group.rank))
    received = _grouped_by(source.rank, np.flatnonzero(target.rank == group.rank))
    sizes = lengths if per_token else np.ones_like(lengths)
    shape = target.shapes[group.rank] if per_token else target.shapes[group.rank][:1]
    entries = values.flatten(0, 1) if per_token else values
    moved = group.all_to_all(
        entries.index_select(0, _entries(source, sent, sizes, group.rank, per_token).to(values.device)),
        _per_rank(target.rank, sent, sizes, group.size),
        _per_rank(source.rank, received, sizes, group.size),
    )
    out = values.new_full((int(np.prod(shape)), *entries.shape[1:]), fill)
    out[_entries(target, received, sizes, group.rank, per_token).to(values.device)] = moved
    return out.reshape(*shape, *entries.shape[1:])


def to_first(values: torch.Tensor, source: RowLocations, lengths: IntArray, group: Group) -> torch.Tensor:
    """The tokens of all rows on the first rank, one row after the other `[lengths.sum()]`; nothing on the others.

    Args:
        values: this rank's, `[rows, columns]`.
    """
    mine = np.flatnonzero(source.rank == group.rank)
    entries = values.flatten().index_select(0, _entries(source, mine, lengths, group.rank, True).to(values.device))
    received = _per_rank(source.rank, np.arange(len(lengths)), lengths, group.size)
    others = [0] * (group.size - 1)
    return group.all_to_all(entries, [len(entries), *others], received if group.rank == 0 else [0] * group.size)


def _grouped_by(rank: IntArray, rows: IntArray) -> IntArray:
    """Rows by rank; of one rank in the order that all ranks know them in."""
    return rows[np.argsort(rank[rows], kind="stable")]


def _per_rank(rank: IntArray, rows: IntArray, sizes: IntArray, count: int) -> list[int]:
    """Entries of these rows per rank."""
    totals: list[int] = np.bincount(rank[rows], weights=sizes[rows], minlength=count).astype(np.int64).tolist()
    return totals


def _entries(locations: RowLocations, rows: IntArray, sizes: IntArray, rank: int, per_token: bool) -> torch.Tensor:
    """Positions of the rows' entries in a rank's rectangle, flattened if per token."""
    if not per_token:
        return torch.from_numpy(locations.row[rows])
    begin = locations.row[rows] * locations.shapes[rank][1] + locations.start[rows]
    ends = np.cumsum(sizes[rows])
    offsets = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes[rows], sizes[rows])
    return torch.from_numpy(np.repeat(begin, sizes[rows]) + offsets)
