"""Launch the Triton kernels of `kernels`, which process a block of logits after its matrix product in one pass.

With torch's operators every step would read and write the whole block in float32; the kernels read it once in the dtype
of the product, and the backward overwrites it with the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dta_compile.ops import triton_use
from dta_compile.ops.lm_head.operators import Backward, Further, Head

COLUMNS, WARPS = 4096, 8  # of a row at a time


def fits(head: Head, dtype: torch.dtype) -> bool:
    """Return whether the kernels support a head with statistics in `dtype`; its tensors may be FakeTensors."""
    hidden, scales = head.hidden, (head.temperature, head.inverse_cap)
    takes_scales = all(by is None or (by.device == hidden.device and by.dtype is torch.float32) for by in scales)
    return takes_scales and dtype is torch.float32 and triton_use.runs_kernels(hidden)


def with_dense_rows(head: Head) -> Head:
    """Return the head with contiguous labels and scales."""
    return head._replace(
        temperature=_dense(head.temperature), labels=_dense(head.labels), inverse_cap=_dense(head.inverse_cap)
    )


def gradient_operands(call: Backward) -> Backward:
    """Return the call with contiguous labels, scales, statistics and gradients."""
    dense: dict[str, Any] = {
        name: _dense(value) for name, value in call._asdict().items() if name not in ("head", "wanted")
    }
    return call._replace(head=with_dense_rows(call.head), **dense)


def update_(logits: torch.Tensor, start: int, head: Head, running: Sequence[torch.Tensor], further: Further) -> None:
    """Update the statistics of each row, in the order of `blocks`, with a block of logits.

    Args:
        logits: `[rows, columns]`.
        start: the first of its columns in the vocabulary.
    """
    from dta_compile.ops.lm_head.kernels import update_kernel

    tensors = (logits, *_or(running[0], head.temperature, head.inverse_cap, head.labels), *running)
    flags = {"TOTAL": further.total, "BEST": further.best}
    update_kernel[(len(logits),)](*tensors, *_numbers(logits, start, head), **_constants(head, further.mean), **flags)


def gradient_(logits: torch.Tensor, start: int, call: Backward) -> None:
    """Overwrite the logits of a block with their gradient."""
    from dta_compile.ops.lm_head.kernels import gradient_kernel

    head, needs_mean = call.head, call.mean is not None and call.of_mean is not None
    head = head if call.of_labels is not None else head._replace(labels=None)
    operands = (head.temperature, head.inverse_cap, head.labels, call.of_labels, call.log_sum, call.mean, call.largest)
    tensors = (logits, *_or(call.largest, *operands, call.of_log_sum, call.of_mean, call.of_total))
    constants = {**_constants(head, needs_mean), "TOTAL": call.of_total is not None}
    gradient_kernel[(len(logits),)](*tensors, *_numbers(logits, start, head), **constants)


def _numbers(logits: torch.Tensor, start: int, head: Head) -> tuple[int, ...]:
    by_row = (0 if by is None or by.numel() == 1 else 1 for by in (head.temperature, head.inverse_cap))
    return logits.stride(0), logits.shape[1], start, *by_row


def _constants(head: Head, wants_mean: bool) -> dict[str, Any]:
    chosen = 0 if head.labels is None else head.labels.shape[1]
    return {
        "SCALED": head.temperature is not None,
        "CAPPED": head.inverse_cap is not None,
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
