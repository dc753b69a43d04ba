"""How products with the weights of experts are computed: places sorted by expert, then a matrix product a group.

Torch's grouped product does all groups at once where it can. Else, where the host may know the sizes of groups (a CPU),
each group is a product of its own; on a GPU nothing waits for them, as inside of a CUDA graph nothing may: Triton's
kernels read the sizes from memory, and without them every expert goes over all rows.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.products import add_product
from dta_compile.ops.triton_use import is_interpreted, runs_kernels

LINEAR_BLOCKS = {"PLACES": 64, "OUT_BLOCK": 64, "WIDTH_BLOCK": 32}
ADD_BLOCKS = {"LEFT_BLOCK": 64, "RIGHT_BLOCK": 64, "PLACES": 32}
ALIGNED = 16  # bytes that rows have to begin at multiples of, for torch's grouped product


class _Places:
    """All `n` places of a call, by expert.

    Attributes:
        order: `[n]` the places, sorted by their experts.
        bounds: `[E + 1]` where in that order each expert begins; places before the first and from the last on have no
            expert.
        chosen: places of a token.
    """

    def __init__(self, expert: torch.Tensor, experts: int) -> None:
        self.experts, self.chosen, self.dims = experts, expert.shape[-1], expert.dim()
        self.expert = expert.reshape(-1)
        numbers, self.order = self.expert.sort(stable=True)
        firsts = torch.arange(experts + 1, device=numbers.device, dtype=numbers.dtype)
        self.bounds = torch.searchsorted(numbers, firsts)

    def shared(self, tensor: torch.Tensor) -> int:
        """How many places in a row have the same row of a value: all of a token's, or one."""
        return 1 if tensor.dim() > self.dims else self.chosen

    def sorted(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[n, D]` of a value, sorted."""
        shared = self.shared(tensor)
        return _flat(tensor).index_select(0, self.order if shared == 1 else self.order // shared)

    def everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[n, D]` of a value, in the order of places."""
        return _flat(tensor).repeat_interleave(self.shared(tensor), 0)

    def unsorted(self, rows: torch.Tensor) -> torch.Tensor:
        """The reverse of `sorted`."""
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


def linear(rows: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """`dta::expert_linear`."""
    weight = weight if transposed else weight.transpose(1, 2)
    places = _Places(expert, weight.shape[0])
    if _runs_grouped(rows, weight) or _on_host(rows):
        out = places.unsorted(_sorted_products(places, rows, weight))
    elif runs_kernels(rows):
        out = rows.new_zeros((len(places.expert), weight.shape[2]))
        _linear_by_kernel(places, out, rows, weight)
    else:
        out, everywhere = rows.new_zeros((len(places.expert), weight.shape[2])), places.everywhere(rows)
        for number in range(places.experts):
            out = torch.where((places.expert == number)[:, None], everywhere @ weight[number], out)
    return out.view((*expert.shape, weight.shape[2]))


def weighted_sum(
    rows: torch.Tensor, expert: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """`dta::expert_sum`."""
    weight = weight if transposed else weight.transpose(1, 2)
    dtype, tokens, width = torch.promote_types(rows.dtype, scale.dtype), expert.shape[:-1], weight.shape[2]
    if _on_host(rows):
        places = _Places(expert, weight.shape[0])
        found = _sorted_products(places, rows, weight) * scale.reshape(-1, 1).index_select(0, places.order)
        out = found.new_zeros((tokens.numel(), width), dtype=statistics_dtype(dtype))
        out.index_add_(0, places.order // max(places.chosen, 1), found.to(out.dtype))
    else:  # in the order of places: atomics of `index_add_` would add in any
        products = linear(rows, expert, weight, True) * scale[..., None]
        out = products.view((tokens.numel(), expert.shape[-1], width)).sum(1)
    return out.to(dtype).view((*tokens, width))


def add(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, expert: torch.Tensor) -> None:
    """`dta::expert_products_`: `total[e] += sum of left[p] x right[p]` over the places of e; `total` is `[E, L, R]`."""
    places = _Places(expert, total.shape[0])
    if _on_host(left):
        sides = places.sorted(left), places.sorted(right)
        for number, group in _groups(places):
            a, b = (side[group] for side in sides)
            add_product(total[number], a.t(), b)
    elif runs_kernels(left) and total.dtype is torch.float32:
        _add_by_kernel(places, total, left, right)
    else:
        sides = places.everywhere(left), places.everywhere(right)
        for number in range(places.experts):
            a, b = (torch.where((places.expert == number)[:, None], side, 0) for side in sides)
            add_product(total[number], a.t(), b)


def _sorted_products(places: _Places, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[n, O]` in the order of experts, zeros at places without one; `weight` is `[E, D, O]`."""
    rows, bounds = places.sorted(rows), places.bounds
    if not _on_host(rows):
        found = torch.nn.functional.grouped_mm(rows, weight, offs=bounds[1:].to(torch.int32))
        # Before the first expert it has products with another, and behind the last one nothing at all.
        numbers = torch.arange(len(rows), device=rows.device)
        return torch.where(((numbers >= bounds[0]) & (numbers < bounds[-1]))[:, None], found, 0)
    first, last = bounds[[0, -1]].tolist()
    if _runs_grouped(rows, weight) and last > first:
        ends = (bounds[1:] - first).to(torch.int32)
        found = torch.nn.functional.grouped_mm(rows[first:last], weight, offs=ends)
        return found if len(found) == len(rows) else torch.constant_pad_nd(found, (0, 0, first, len(rows) - last))
    found = rows.new_empty((len(rows), weight.shape[2]))
    for number, group in _groups(places):
        torch.mm(rows[group], weight[number], out=found[group])
    found[:first] = found[last:] = 0
    return found


def _groups(places: _Places) -> list[tuple[int, slice]]:
    """Experts that were hit, and their part of the sorted places."""
    ends = places.bounds.tolist()
    return [(number, slice(*part)) for number, part in enumerate(pairwise(ends)) if part[0] < part[1]]


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not is_interpreted()


def _runs_grouped(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch's grouped product takes these."""
    if rows.dtype is not weight.dtype or weight.shape[1] * rows.itemsize % ALIGNED or not _is_laid_out(weight):
        return False
    if rows.is_cuda:
        return rows.dtype is torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    return _on_host(rows) and rows.dtype in (torch.bfloat16, torch.float32)


def _is_laid_out(weight: torch.Tensor) -> bool:
    """Whether every matrix of `[E, D, O]` lies in rows or columns that begin at multiples of 16 bytes."""
    (_, width, columns), (_, row, column) = weight.shape, weight.stride()
    step = row if column == 1 and row >= columns else column if row == 1 and column >= width else 0
    return step > 0 and step * weight.itemsize % ALIGNED == 0 and weight.shape[2] * weight.itemsize % ALIGNED == 0


def _linear_by_kernel(places: _Places, out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
    from dta_compile.ops.grouped_kernels import linear_kernel

    flat, (width, columns) = _flat(rows).contiguous(), weight.shape[1:]
    grid = (_blocks(columns, LINEAR_BLOCKS["OUT_BLOCK"]), places.experts)
    strides = (out.stride(0), flat.stride(0), *weight.stride(), places.shared(rows))
    constants = {"WIDTH": width, "OUT": columns, **LINEAR_BLOCKS, "PRECISION": _precision(rows)}
    linear_kernel[grid](out, flat, weight, places.order, places.bounds, *strides, **constants)


def _add_by_kernel(places: _Places, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    from dta_compile.ops.grouped_kernels import add_kernel

    a, b = _flat(left).contiguous(), _flat(right).contiguous()
    blocks = (_blocks(a.shape[1], ADD_BLOCKS["LEFT_BLOCK"]), _blocks(b.shape[1], ADD_BLOCKS["RIGHT_BLOCK"]))
    strides = (*total.stride(), a.stride(0), b.stride(0), places.shared(left), places.shared(right))
    constants = {"LEFT": a.shape[1], "RIGHT": b.shape[1], **ADD_BLOCKS, "PRECISION": _precision(left)}
    add_kernel[(*blocks, places.experts)](total, a, b, places.order, places.bounds, *strides, **constants)


def _precision(tensor: torch.Tensor) -> str:
    """As torch is told to multiply float32; it has no say in narrower types."""
    exact = tensor.dtype is torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
