"""Kernels of the operators in `experts`: sort (token, expert) slots by expert, then one matrix product per group.

Torch's `grouped_mm` computes all groups at once where it is supported. Otherwise, on a CPU, each group is a matrix
product of its own. On a GPU the host must not wait for the group sizes (in a CUDA graph it cannot): Triton kernels read
them from device memory, and without Triton every expert is multiplied with all rows.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.products import add_product
from dta_compile.ops.triton_use import is_interpreted, runs_kernels

LINEAR_BLOCKS = {"SLOTS": 64, "OUT_BLOCK": 64, "WIDTH_BLOCK": 32}
ADD_BLOCKS = {"LEFT_BLOCK": 64, "RIGHT_BLOCK": 64, "SLOTS": 32}
ALIGNED = 16  # alignment of rows in bytes that torch's `grouped_mm` requires


class _Slots:
    """The `n` (token, expert) slots of a call, grouped by expert.

    Attributes:
        order: `[n]` the slots, sorted by expert.
        bounds: `[E + 1]` start of each expert in `order`; slots before the first start and from the last on have no
            expert.
        chosen: slots per token.
    """

    def __init__(self, expert: torch.Tensor, experts: int) -> None:
        self.experts, self.chosen, self.dims = experts, expert.shape[-1], expert.dim()
        self.expert = expert.reshape(-1)
        numbers, self.order = self.expert.sort(stable=True)
        firsts = torch.arange(experts + 1, device=numbers.device, dtype=numbers.dtype)
        self.bounds = torch.searchsorted(numbers, firsts)

    def shared(self, tensor: torch.Tensor) -> int:
        """Return how many consecutive slots share a row of a value: all slots of a token, or one."""
        return 1 if tensor.dim() > self.dims else self.chosen

    def sorted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather the rows of a value in sorted order: `[n, D]`."""
        shared = self.shared(tensor)
        return _flat(tensor).index_select(0, self.order if shared == 1 else self.order // shared)

    def everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of a value in slot order: `[n, D]`."""
        return _flat(tensor).repeat_interleave(self.shared(tensor), 0)

    def unsorted(self, rows: torch.Tensor) -> torch.Tensor:
        """Bring rows from sorted order back to slot order."""
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


def linear(rows: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Implement `dta::expert_linear`."""
    weight = weight if transposed else weight.transpose(1, 2)
    slots = _Slots(expert, weight.shape[0])
    if _runs_grouped(rows, weight) or _on_host(rows):
        out = slots.unsorted(_sorted_products(slots, rows, weight))
    elif runs_kernels(rows):
        out = rows.new_zeros((len(slots.expert), weight.shape[2]))
        _linear_by_kernel(slots, out, rows, weight)
    else:
        out, everywhere = rows.new_zeros((len(slots.expert), weight.shape[2])), slots.everywhere(rows)
        for number in range(slots.experts):
            out = torch.where((slots.expert == number)[:, None], everywhere @ weight[number], out)
    return out.view((*expert.shape, weight.shape[2]))


def weighted_sum(
    rows: torch.Tensor, expert: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Implement `dta::expert_sum`."""
    weight = weight if transposed else weight.transpose(1, 2)
    dtype, tokens, width = torch.promote_types(rows.dtype, scale.dtype), expert.shape[:-1], weight.shape[2]
    if _on_host(rows):
        slots = _Slots(expert, weight.shape[0])
        scaled = _sorted_products(slots, rows, weight) * scale.reshape(-1, 1).index_select(0, slots.order)
        out = scaled.new_zeros((tokens.numel(), width), dtype=statistics_dtype(dtype))
        out.index_add_(0, slots.order // max(slots.chosen, 1), scaled.to(out.dtype))
    else:  # summed in slot order: the atomics of `index_add_` would not be deterministic
        products = linear(rows, expert, weight, True) * scale[..., None]
        out = products.view((tokens.numel(), expert.shape[-1], width)).sum(1)
    return out.to(dtype).view((*tokens, width))


def add(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, expert: torch.Tensor) -> None:
    """Implement `dta::expert_products_`: `total[e] += sum of left[s] x right[s]` over slots s of e; `[E, L, R]`."""
    slots = _Slots(expert, total.shape[0])
    if _on_host(left):
        sides = slots.sorted(left), slots.sorted(right)
        for number, group in _groups(slots):
            a, b = (side[group] for side in sides)
            add_product(total[number], a.t(), b)
    elif runs_kernels(left) and total.dtype is torch.float32:
        _add_by_kernel(slots, total, left, right)
    else:
        sides = slots.everywhere(left), slots.everywhere(right)
        for number in range(slots.experts):
            a, b = (torch.where((slots.expert == number)[:, None], side, 0) for side in sides)
            add_product(total[number], a.t(), b)


def _sorted_products(slots: _Slots, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return products `[n, O]` in sorted order, zeros at slots without an expert; `weight` is `[E, D, O]`."""
    rows, bounds = slots.sorted(rows), slots.bounds
    if not _on_host(rows):
        out = torch.nn.functional.grouped_mm(rows, weight, offs=bounds[1:].to(torch.int32))
        # Rows before the first expert were multiplied with the wrong weight; rows after the last one are undefined.
        numbers = torch.arange(len(rows), device=rows.device)
        return torch.where(((numbers >= bounds[0]) & (numbers < bounds[-1]))[:, None], out, 0)
    first, last = bounds[[0, -1]].tolist()
    if _runs_grouped(rows, weight) and last > first:
        ends = (bounds[1:] - first).to(torch.int32)
        out = torch.nn.functional.grouped_mm(rows[first:last], weight, offs=ends)
        return out if len(out) == len(rows) else torch.constant_pad_nd(out, (0, 0, first, len(rows) - last))
    out = rows.new_empty((len(rows), weight.shape[2]))
    for number, group in _groups(slots):
        torch.mm(rows[group], weight[number], out=out[group])
    out[:first] = out[last:] = 0
    return out


def _groups(slots: _Slots) -> list[tuple[int, slice]]:
    """Return the experts that have slots, each with its slice of the sorted slots."""
    ends = slots.bounds.tolist()
    return [(number, slice(*part)) for number, part in enumerate(pairwise(ends)) if part[0] < part[1]]


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not is_interpreted()


def _runs_grouped(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether torch's `grouped_mm` supports these operands."""
    if rows.dtype is not weight.dtype or weight.shape[1] * rows.itemsize % ALIGNED or not _is_laid_out(weight):
        return False
    if rows.is_cuda:
        return rows.dtype is torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    return _on_host(rows) and rows.dtype in (torch.bfloat16, torch.float32)


def _is_laid_out(weight: torch.Tensor) -> bool:
    """Return whether the matrices of `[E, D, O]` have rows or columns aligned to 16 bytes."""
    (_, width, columns), (_, row, column) = weight.shape, weight.stride()
    step = row if column == 1 and row >= columns else column if row == 1 and column >= width else 0
    return step > 0 and step * weight.itemsize % ALIGNED == 0 and weight.shape[2] * weight.itemsize % ALIGNED == 0


def _linear_by_kernel(slots: _Slots, out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
    from dta_compile.ops.experts.kernels import linear_kernel

    flat, (width, columns) = _flat(rows).contiguous(), weight.shape[1:]
    grid = (_blocks(columns, LINEAR_BLOCKS["OUT_BLOCK"]), slots.experts)
    strides = (out.stride(0), flat.stride(0), *weight.stride(), slots.shared(rows))
    constants = {"WIDTH": width, "OUT": columns, **LINEAR_BLOCKS, "PRECISION": _precision(rows)}
    linear_kernel[grid](out, flat, weight, slots.order, slots.bounds, *strides, **constants)


def _add_by_kernel(slots: _Slots, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    from dta_compile.ops.experts.kernels import add_kernel

    a, b = _flat(left).contiguous(), _flat(right).contiguous()
    blocks = (_blocks(a.shape[1], ADD_BLOCKS["LEFT_BLOCK"]), _blocks(b.shape[1], ADD_BLOCKS["RIGHT_BLOCK"]))
    strides = (*total.stride(), a.stride(0), b.stride(0), slots.shared(left), slots.shared(right))
    constants = {"LEFT": a.shape[1], "RIGHT": b.shape[1], **ADD_BLOCKS, "PRECISION": _precision(left)}
    add_kernel[(*blocks, slots.experts)](total, a, b, slots.order, slots.bounds, *strides, **constants)


def _precision(tensor: torch.Tensor) -> str:
    """Return Triton's input precision for torch's float32 matmul precision; it only affects float32."""
    exact = tensor.dtype is torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
