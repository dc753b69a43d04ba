"""Launch the Triton kernels of `kernels`, which process a block of logits after its matrix product in one pass.

With torch's operators every step would read and write the whole block in float32; the kernels read it once in the dtype
of the product, and the backward overwrites it with the gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from dta_compile.ops import triton_use
from dta_compile.ops.lm_head.operators import Backward, Head

COLUMNS, WARPS = 4096, 8  # of a row at a time


def fits(head: Head, dtype: torch.dtype) -> bool:
    """Return whether the kernels support a head with statistics in `dtype`; its tensors may be FakeTensors."""
    hidden, by = head.hidden, head.temperature
    takes_temperature = by is None or (by.device == hidden.device and by.dtype is torch.float32)
    return takes_temperature and dtype is torch.float32 and triton_use.runs_kernels(hidden)


def with_dense_rows(head: Head) -> Head:
    """Return the head with contiguous labels and temperatures."""
    return head._replace(temperature=_dense(head.temperature), labels=_dense(head.labels))


def gradient_operands(call: Backward) -> Backward:
    """Return the call with contiguous labels, temperatures, statistics and gradients."""
    dense: dict[str, Any] = {
        name: _dense(value) for name, value in call._asdict().items() if name not in ("head", "wanted")
    }
    return call._replace(head=with_dense_rows(call.head), **dense)


def update_(
    logits: torch.Tensor,
    start: int,
    head: Head,
    logit: torch.Tensor,
    largest: torch.Tensor,
    exps: torch.Tensor,
    products: torch.Tensor,
    wants_mean: bool,
) -> None:
    """Update the statistics of each row with the block of logits `[rows, columns]` that starts at column `start`."""
    from dta_compile.ops.lm_head.kernels import update_kernel

    tensors = (logits, *_or(largest, head.temperature, head.labels), logit, largest, exps, products)
    update_kernel[(len(logits),)](*tensors, *_numbers(logits, start, head), **_constants(head, wants_mean))


def gradient_(logits: torch.Tensor, start: int, call: Backward) -> None:
    """Overwrite the logits of a block with their gradient."""
    from dta_compile.ops.lm_head.kernels import gradient_kernel

    head, needs_mean = call.head, call.mean is not None and call.of_mean is not None
    head = head if call.of_labels is not None else head._replace(labels=None)
    operands = (head.temperature, head.labels, call.of_labels, call.log_sum, call.mean, call.largest)
    tensors = (logits, *_or(call.largest, *operands, call.of_log_sum, call.of_mean))
    gradient_kernel[(len(logits),)](*tensors, *_numbers(logits, start, head), **_constants(head, needs_mean))


def _numbers(logits: torch.Tensor, start: int, head: Head) -> tuple[int, ...]:
    is_one = head.temperature is None or head.temperature.numel() == 1
    return logits.stride(0), logits.shape[1], start, 0 if is_one else 1


def _constants(head: Head, wants_mean: bool) -> dict[str, Any]:
    chosen = 0 if head.labels is None else head.labels.shape[1]
    return {
        "SCALED": head.temperature is not None,
        "MEAN": wants_mean,
        "CHOSEN": chosen,
        "LABELS": 1 << (chosen - 1).bit_length() if chosen else 0,
        "COLUMNS": COLUMNS,
        "num_warps": WARPS,
    }


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _or(stand_in: torch.Tensor, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Replace None by `stand_in`: kernels need tensors even where they do not read them."""
    return tuple(stand_in if tensor is None else tensor for tensor in tensors)
