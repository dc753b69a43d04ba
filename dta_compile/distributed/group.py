"""A process group as the rest of `distributed` sees it: few collectives, and none at all where there is one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dta_compile.errors import DTAError, OptionError, RuntimeContractError

GroupLike = dist.ProcessGroup | DeviceMesh | None
T = TypeVar("T")


class Group:
    """The ranks that share a batch.

    Without an initialised `torch.distributed` this is one rank alone, so that a script runs without a launcher, too.

    Attributes:
        rank: of this process in the group.
        size: number of ranks.
    """

    def __init__(self, group: GroupLike = None) -> None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise OptionError(
                    "rows are dealt out over one dimension of ranks",
                    expected="a process group or a one-dimensional DeviceMesh",
                    got=f"a mesh of {group.ndim} dimensions, {group.mesh_dim_names or tuple(group.shape)}",
                    hint="flatten its data-parallel dimensions, or pass None for all ranks",
                )
            group = group.get_group()
        self._group = group
        self._alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._alone else dist.get_rank(group)
        self.size = 1 if self._alone else dist.get_world_size(group)
        if self.rank < 0:
            raise OptionError("this process is not a member of the group that it was given")

    def gather(self, value: T) -> list[T]:
        """The (small, picklable) values of all ranks, on all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self._group)
        return values

    def gather_checked(self, make: Callable[[], T]) -> list[T]:
        """`make()` of all ranks; where it raises one of our errors on some of them, all ranks raise it.

        So a bad batch on one rank leaves no other waiting for it.
        """
        made: tuple[T | None, str] = None, ""
        try:
            made = make(), ""
        except DTAError as error:
            made = None, str(error)
        values = self.gather(made)
        for rank, (_, problem) in enumerate(values):
            if problem:
                raise RuntimeContractError(f"rank {rank} of {self.size}: {problem}")
        return [value for value, _ in values]  # type: ignore[misc]

    def from_first(self, make: Callable[[], T]) -> T:
        """`make()` of the first rank, on all of them; its errors of ours are raised on all of them, too."""
        found: list[Any] = [None, ""]
        if self.rank == 0:
            try:
                found = [make(), ""]
            except DTAError as error:
                found = [None, str(error)]
        if self.size > 1:
            first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
            dist.broadcast_object_list(found, first, self._group)
        value, problem = found
        if problem:
            raise RuntimeContractError(problem)
        return value  # type: ignore[no-any-return]

    def all_to_all(self, values: torch.Tensor, sizes: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send the first `sizes[0]` entries of `values [n, ...]` to the first rank, the next to the second, and so on.

        Returns what all ranks sent here, in their order; `received` says how many entries each.
        """
        if self.size == 1:
            return values
        entry = values.shape[1:]
        device = self._transport(values.device)
        # As bytes: every backend moves those, and no backend all of torch's dtypes.
        raw = values.contiguous().reshape(len(values), entry.numel()).view(torch.uint8).to(device)
        out = raw.new_empty((sum(received), raw.shape[1]))
        dist.all_to_all_single(out, raw, list(received), list(sizes), self._group)
        return out.to(values.device).view(values.dtype).reshape(-1, *entry)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; `value` stays as it is."""
        if self.size == 1:
            return value
        total = value.detach().to(self._transport(value.device), copy=True)
        dist.all_reduce(total, group=self._group)
        return total.to(value.device)

    def _transport(self, device: torch.device) -> torch.device:
        """Where tensors of this device must be for the group's backend to move them."""
        devices = [pair.split(":")[0] for pair in dist.get_backend_config(self._group).split(",")]
        if device.type in devices:
            return device
        other = devices[0]
        return torch.device(other, torch.accelerator.current_device_index()) if other != "cpu" else torch.device("cpu")


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
