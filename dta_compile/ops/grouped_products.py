"""How products with the weights of experts are computed: places sorted by expert, then a matrix product a group.

Where the host may know the sizes of groups (a CPU, or a device that is asked), each group is a product of its own, a
block of rows at a time, so that next to nothing is held beside the results. Inside of a CUDA graph it may not: there
torch's grouped product does all groups at once, or every expert goes over all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from dta_compile.ops.add_product import add_product
from dta_compile.ops.dtypes import statistics_dtype

__all__ = ["BLOCK_ROWS", "add", "linear", "weighted_sum"]

BLOCK_ROWS = 1024  # of a group, at a time


class _Group(NamedTuple):
    """Places of one expert, `[n]` numbers into the flat `expert`."""

    expert: int
    places: torch.Tensor


class _Places:
    """All places of a call, `n` of them, by expert."""

    def __init__(self, expert: torch.Tensor, experts: int) -> None:
        self.experts, self.chosen = experts, expert.shape[-1] if expert.dim() else 1
        self.shape, self.dims, self.expert = expert.shape, expert.dim(), expert.reshape(-1)

    def sorted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Places `[n]` in the order of their experts, and `[E + 1]` where in it each expert begins."""
        numbers, order = self.expert.sort(stable=True)
        bounds = torch.searchsorted(numbers, torch.arange(self.experts + 1, device=numbers.device, dtype=numbers.dtype))
        return order, bounds

    def groups(self) -> Iterator[_Group]:
        """Experts that were hit, in blocks of places; waits for the device."""
        order, bounds = self.sorted()
        ends = bounds.tolist()
        for expert, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
            for begin in range(first, last, BLOCK_ROWS):
                yield _Group(expert, order[begin : min(begin + BLOCK_ROWS, last)])

    def rows(self, tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The rows `[n, D]` of a value at places, or of one that is the same for all experts of a token."""
        return _flat(tensor).index_select(0, self.rows_of(tensor, places))

    def rows_of(self, tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Which rows of a flattened value belong to places."""
        return places if tensor.dim() > self.dims else self.tokens(places)

    def tokens(self, places: torch.Tensor) -> torch.Tensor:
        """Which tokens places are of."""
        return places // self.chosen

    @property
    def exist(self) -> torch.Tensor:
        """`[n]` bool: the places that have an expert."""
        return (self.expert >= 0) & (self.expert < self.experts)


def linear(rows: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """`dta::expert_linear`."""
    weight = weight if transposed else weight.transpose(1, 2)
    places = _Places(expert, weight.shape[0])
    width = weight.shape[2]
    if rows.is_cuda and (_is_grouped_by_torch(rows, weight) or torch.cuda.is_current_stream_capturing()):
        out = _all_at_once(places, rows, weight)
    else:
        out = rows.new_zeros((places.expert.numel(), width))
        for number, group in places.groups():
            out.index_copy_(0, group, places.rows(rows, group) @ weight[number])
    return out.view((*expert.shape, width))


def weighted_sum(
    rows: torch.Tensor, expert: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """`dta::expert_sum`."""
    weight = weight if transposed else weight.transpose(1, 2)
    places = _Places(expert, weight.shape[0])
    dtype = torch.promote_types(rows.dtype, scale.dtype)
    scale = scale.reshape(-1, 1)
    if rows.device.type == "cpu":
        shape = (places.expert.numel() // max(places.chosen, 1), weight.shape[2])
        out = rows.new_zeros(shape, dtype=statistics_dtype(dtype))
        for number, group in places.groups():
            product = places.rows(rows, group) @ weight[number] * scale.index_select(0, group)
            out.index_add_(0, places.tokens(group), product.to(out.dtype))
    else:  # added in the order of places: atomics of `index_add_` would add in any
        out = linear(rows, expert, weight, True).flatten(0, -2) * scale
        out = out.view((*_flat(expert).shape, -1)).sum(1)
    return out.to(dtype).view((*expert.shape[:-1], weight.shape[2]))


def add(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, expert: torch.Tensor) -> None:
    """`dta::expert_products_`: `total[e] += sum of left[p] x right[p]` over the places of e; `total` is `[E, L, R]`."""
    places = _Places(expert, total.shape[0])
    if left.is_cuda and torch.cuda.is_current_stream_capturing():
        everywhere = torch.arange(places.expert.numel(), device=left.device)
        for number in range(places.experts):
            mine = (places.expert == number)[:, None]
            kept = (torch.where(mine, places.rows(side, everywhere), 0) for side in (left, right))
            add_product(total[number], next(kept).t(), next(kept))
        return
    for number, group in places.groups():
        add_product(total[number], places.rows(left, group).t(), places.rows(right, group))


def _all_at_once(places: _Places, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[n, O]` without the host knowing how many places an expert has; `weight` is `[E, D, O]`."""
    if _is_grouped_by_torch(rows, weight):
        order, bounds = places.sorted()
        # What is before the first expert or behind the last one is computed with another, or not written at all.
        found = torch.nn.functional.grouped_mm(places.rows(rows, order), weight, offs=bounds[1:].to(torch.int32))
        out = torch.empty_like(found).index_copy_(0, order, found)
        return torch.where(places.exist[:, None], out, 0)
    everywhere = places.rows(rows, torch.arange(places.expert.numel(), device=rows.device))
    out = rows.new_zeros((everywhere.shape[0], weight.shape[2]))
    for number in range(places.experts):
        out = torch.where((places.expert == number)[:, None], everywhere @ weight[number], out)
    return out


def _is_grouped_by_torch(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch has one kernel for all groups, which needs rows of 16 bytes or a multiple."""
    return (
        rows.dtype is weight.dtype is torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        and all(size % 8 == 0 for size in weight.shape[1:])
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
