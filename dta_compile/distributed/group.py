"""A process group as the rest of `distributed` sees it: few collectives, and none at all where there is one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
