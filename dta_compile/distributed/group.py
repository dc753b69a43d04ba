"""Process groups for the rest of `distributed`: a few collectives, which are skipped for a single rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dta_compile.errors import DTAError, OptionError, RuntimeContractError

GroupLike = dist.ProcessGroup | DeviceMesh | None
T = TypeVar("T")


def attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `make()`, or the error that it raised."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def described(error: Exception | None) -> str:
    """Return what other ranks are told of an error: "" if there is none."""
    if error is None or isinstance(error, DTAError):
        return str(error or "")
    return f"{type(error).__name__}: {error}"


Kind = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of a tensor."""


class Work(NamedTuple):
    """A message on its way, and its memory, which must live until `wait` returns."""

    handle: Any
    memory: torch.Tensor

    def wait(self) -> None:
        """Wait until the message is sent."""
        self.handle.wait()


class Swap:
    """Messages on their way to and from other ranks, and their memory, which must live until they are there."""

    def __init__(
        self,
        works: Sequence[Any],
        sent: Sequence[torch.Tensor],
        space: Mapping[int, torch.Tensor],
        kinds: Mapping[int, Kind],
        device: torch.device,
    ) -> None:
        """`works`: of each message, received ones first; or one of all, as some backends have."""
        count = len(space) if len(works) == len(space) + len(sent) else len(works)
        self._receiving, self._sending = list(works[:count]), list(works[count:])
        self._sent, self._space, self._kinds, self._device = sent, space, kinds, device

    def received(self) -> dict[int, torch.Tensor]:
        """Wait for the tensors from other ranks, and return them."""
        _wait(self._receiving)
        space, self._space = self._space, {}
        kinds = self._kinds.items()
        return {rank: space[rank].to(self._device).view(dtype).reshape(*shape) for rank, (shape, dtype) in kinds}

    def wait(self) -> None:
        """Wait until all messages are there."""
        _wait(self._receiving)
        _wait(self._sending)


def _wait(works: list[Any]) -> None:
    while works:  # a backend may not return from a second wait for the same message
        works.pop().wait()


class Group:
    """Ranks that share a batch.

    Without an initialised `torch.distributed` this is a single rank, so that a script also runs without a launcher.

    Attributes:
        rank: rank of this process in the group.
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
        elif not isinstance(group, (dist.ProcessGroup, type(None))) and group != dist.GroupMember.NON_GROUP_MEMBER:
            expected = "a process group, a one-dimensional DeviceMesh, or None for all ranks"
            raise OptionError("ranks are named by something else than a group", expected=expected, got=repr(group)[:80])
        self._group = group
        self._alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._alone else dist.get_rank(group)
        self.size = 1 if self._alone else dist.get_world_size(group)
        if self.rank < 0:
            raise OptionError("this process is not a member of the group that it was given")
        self._parts = {self.size: self}

    def part(self, size: int) -> Group:
        """Return the part that this rank is in, where every `size` ranks in turn are one; made at the first call.

        A collective of the ranks of a part.
        """
        if size not in self._parts:
            first = self.rank // size * size
            ranks, backend = [self._global(first + i) for i in range(size)], dist.get_backend_config(self._group)
            self._parts[size] = Group(dist.new_group(ranks, backend=backend, use_local_synchronization=True))
        return self._parts[size]

    def gather(self, value: T) -> list[T]:
        """Gather the (small, picklable) values of all ranks on all ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self._group)
        return values

    def gather_checked(self, make: Callable[[], T]) -> list[T]:
        """Gather the results of `make()` on all ranks; if it raises an error on any rank, all ranks raise it.

        So no rank waits for another one with a bad batch.
        """
        value, failed = attempt(make)
        values = self.gather((value, described(failed)))
        for rank, (_, problem) in enumerate(values):
            if problem:
                raise RuntimeContractError(f"rank {rank} of {self.size}: {problem}") from failed
        return [value for value, _ in values]  # type: ignore[misc]

    def from_first(self, make: Callable[[], T]) -> T:
        """Broadcast the result of `make()` on the first rank; an error there is raised on all ranks."""
        made, failed = attempt(make) if self.rank == 0 else (None, None)
        result: list[Any] = [made, described(failed)]
        if self.size > 1:
            dist.broadcast_object_list(result, self._global(0), self._group)
        value, problem = result
        if problem:
            raise RuntimeContractError(problem) from failed
        return value  # type: ignore[no-any-return]

    def all_to_all(self, values: torch.Tensor, sizes: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send the first `sizes[0]` entries of `values [n, ...]` to the first rank, the next to the second, and so on.

        Returns the entries from all ranks, in the order of ranks; `received` has their numbers.
        """
        if self.size == 1:
            return values
        entry = values.shape[1:]
        device = self._transport(values.device)
        # As bytes, since no backend supports all dtypes of torch.
        raw = values.contiguous().reshape(len(values), entry.numel()).view(torch.uint8).to(device)
        out = raw.new_empty((sum(received), raw.shape[1]))
        dist.all_to_all_single(out, raw, list(received), list(sizes), self._group)
        return out.to(values.device).view(values.dtype).reshape(len(out), *entry)

    def swap(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, Kind], device: torch.device) -> Swap:
        """Begin to send a tensor to each of some ranks, and to receive one of the given shape and dtype from others.

        The ranks call this together, each for its own messages.
        """
        raw = {rank: self._raw(value) for rank, value in sent.items()}
        space = {rank: self._space(*kind, device) for rank, kind in received.items()}
        messages = [dist.P2POp(dist.irecv, value, self._global(rank), self._group) for rank, value in space.items()]
        messages += [dist.P2POp(dist.isend, value, self._global(rank), self._group) for rank, value in raw.items()]
        works = dist.batch_isend_irecv(messages) if messages else []
        return Swap(works, list(raw.values()), space, received, device)

    def post(self, value: torch.Tensor, rank: int) -> Work:
        """Begin to send a tensor to another rank, which calls `receive`; messages to a rank keep their order."""
        raw = self._raw(value)
        return Work(dist.isend(raw, self._global(rank), self._group), raw)

    def receive(self, rank: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the tensor that another rank sends by `post`."""
        raw = self._space(shape, dtype, device)
        dist.recv(raw, self._global(rank), self._group)
        return raw.to(device).view(dtype).reshape(*shape)

    def broadcast(self, value: torch.Tensor, rank: int) -> Callable[[], torch.Tensor]:
        """Begin to send a rank's tensor to all, which give one of its kind; return a function that waits for it."""
        raw = self._raw(value)
        work = dist.broadcast(raw, self._global(rank), self._group, async_op=True)
        return lambda: (work.wait(), raw.to(value.device).view(value.dtype).reshape(value.shape))[1]

    def reduce(self, value: torch.Tensor, rank: int) -> Callable[[], torch.Tensor]:
        """Begin to sum a tensor, which is overwritten, on a rank; return a function that waits for it."""
        total = value.contiguous().to(self._transport(value.device))
        work = dist.reduce(total, self._global(rank), group=self._group, async_op=True)
        return lambda: (work.wait(), total.to(value.device))[1]

    def _raw(self, value: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a tensor where the group's backend can send them from."""
        return value.contiguous().reshape(-1).view(torch.uint8).to(self._transport(value.device))

    def _space(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=self._transport(device))

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; `value` is unchanged."""
        if self.size == 1:
            return value
        total = value.detach().to(self._transport(value.device), copy=True)
        dist.all_reduce(total, group=self._group)
        return total.to(value.device)

    def _transport(self, device: torch.device) -> torch.device:
        """Return the device from which the group's backend can send tensors of this device."""
        devices = [pair.split(":")[0] for pair in dist.get_backend_config(self._group).split(",")]
        if device.type in devices:
            return device
        other = devices[0]
        return torch.device(other, torch.accelerator.current_device_index()) if other != "cpu" else torch.device("cpu")


IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class RowLocations:
    """Locations of all rows of the group, the same arrays on every rank.

    In packed tensors, a row here is one of several sequences in a row of the tensors.

    Attributes:
        rank: `[N]` rank that has the row.
        row: `[N]` its row number in the tensors there.
        start: `[N]` column of its first token there.
        shapes: `[K]` (rows, columns) of each rank's tensors.
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
    """Move the rows of all ranks' `values` from `source` to `target`.

    Args:
        values: this rank's values `[rows, ...]`, or `[rows, columns, ...]` if `per_token`.
        source, target: current and new locations of the rows.
        lengths: `[N]` number of tokens of each row.
        fill: value of the entries that no token is moved to.

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


def _grouped_by(rank: IntArray, rows: IntArray) -> IntArray:
    """Sort rows by rank; rows of one rank stay in their common order."""
    return rows[np.argsort(rank[rows], kind="stable")]


def _per_rank(rank: IntArray, rows: IntArray, sizes: IntArray, count: int) -> list[int]:
    """Count the entries of these rows per rank."""
    totals: list[int] = np.bincount(rank[rows], weights=sizes[rows], minlength=count).astype(np.int64).tolist()
    return totals


def _entries(locations: RowLocations, rows: IntArray, sizes: IntArray, rank: int, per_token: bool) -> torch.Tensor:
    """Return the indices of the rows' entries in a rank's tensors, flattened over [row, column] if per token."""
    if not per_token:
        return torch.from_numpy(locations.row[rows])
    begin = locations.row[rows] * locations.shapes[rank][1] + locations.start[rows]
    ends = np.cumsum(sizes[rows])
    offsets = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes[rows], sizes[rows])
    return torch.from_numpy(np.repeat(begin, sizes[rows]) + offsets)
