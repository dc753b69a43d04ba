"""Buffers that a schedule, or a half of it, reads and writes besides the path stack.

Rows of frontier values and of their gradients, sums of parameter gradients, and boundary values between parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from dta_compile.executable.chunk import ChunkGraphs
from dta_compile.executable.executable import FrontierValue
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.products import AnySum, Sum
from dta_compile.plan.tree.chunk import Chunk
from dta_compile.runtime.cuda_graphs.arenas import Lease
from dta_compile.runtime.rows.buffers import AllRows, RowBuffer, Rows, next_to_zero


@dataclasses.dataclass(frozen=True)
class ScheduleBuffers:
    """Buffers of a half of a schedule; buffers that none of its ops reads or writes may be left out.

    Attributes:
        outputs: by frontier value, its rows, written by ops with `out`; None: the value is not wanted.
        gradients: by frontier value, the rows of its gradient; None: the value is unused, its gradient is zero.
        accumulators: sums for the parameters with a gradient, see `accumulators`.
        active: `[H]` head rows with a gradient; None: not known before the ops run.
        received, sent: by chunk, values from earlier parts and for later parts.
        gradients_of_received, gradients_of_sent: their gradients; None: the value is unused.
    """

    outputs: Sequence[RowBuffer | None] = ()
    gradients: Sequence[RowBuffer | None] = ()
    accumulators: Sequence[AnySum] = ()
    active: npt.NDArray[np.bool_] | None = None
    received: Mapping[Chunk, Sequence[torch.Tensor]] = dataclasses.field(default_factory=dict)
    sent: dict[Chunk, Sequence[torch.Tensor]] = dataclasses.field(default_factory=dict)
    gradients_of_received: dict[Chunk, Sequence[torch.Tensor | None]] = dataclasses.field(default_factory=dict)
    gradients_of_sent: Mapping[Chunk, Sequence[torch.Tensor | None]] = dataclasses.field(default_factory=dict)

    def write(self, chunk: Chunk, heads: Rows, sent: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Store frontier values `[rows, *features]` of head rows and a chunk's values for later parts.

        Also acquires the rows of the gradient buffers.
        """
        if sent:
            self.sent[chunk] = sent
        for output, result in zip(self.outputs, results, strict=True):
            if output is not None:
                output.acquire(heads)
                output.write(heads, result)
        for gradient in self.gradients:
            if gradient is not None:
                gradient.acquire(heads)

    def backpropagated(self, chunk: Chunk, heads: Rows, gradients: Sequence[torch.Tensor | None]) -> None:
        """Store the gradients of a chunk's received values and release its head rows, after its backward."""
        if gradients:
            self.gradients_of_received[chunk] = gradients
        for buffer in (*self.outputs, *self.gradients):
            if buffer is not None:
                buffer.release(heads)


def output_buffers(
    kind: type[RowBuffer],
    frontier: Sequence[FrontierValue],
    wanted: Sequence[bool],
    head_rows: int,
    device: torch.device,
    training: bool,
) -> list[RowBuffer | None]:
    """Allocate buffers for the wanted frontier values; None for the others."""
    buffers = [
        kind(head_rows, value.features, value.dtype, device) if is_wanted else None
        for value, is_wanted in zip(frontier, wanted, strict=True)
    ]
    for buffer in buffers if training else ():
        if buffer is not None:
            next_to_zero(buffer.padding)
    return buffers


def gradient_buffer(kind: type[RowBuffer], value: FrontierValue, head_rows: int, device: torch.device) -> RowBuffer:
    """Allocate a buffer for sums of a frontier value's gradient, in at least float32."""
    return kind(head_rows, value.features, statistics_dtype(value.dtype), device)


def accumulators(
    joint: ChunkGraphs,
    parameters: Sequence[torch.Tensor],
    lease: Lease | None,
    begun: Sequence[AnySum | None] | None = None,
) -> list[AnySum]:
    """Return sums for the parameters with a gradient; zeroed tensors if their addresses have to stay.

    Args:
        joint: graphs whose first inputs are `parameters`.
        begun: sums to go on with, None for those that begin at zero.
    """
    if lease is not None:
        return [*lease.accumulators(parameters, joint.grad_parameters)]
    return [
        Sum(parameters[i]) if sums is None else sums
        for i, sums in zip(joint.grad_parameters, begun or [None] * len(joint.grad_parameters), strict=True)
    ]


def rows_with_gradient(
    gradients: Sequence[RowBuffer | None], head_rows: int, device: torch.device
) -> npt.NDArray[np.bool_]:
    """Return `[H]` head rows with a gradient of any frontier value. Synchronises once, instead of per chunk."""
    active = torch.zeros(head_rows, dtype=torch.bool, device=device)
    for buffer in gradients:
        if isinstance(buffer, AllRows) and buffer.values.numel():
            values = buffer.heads.unsqueeze(-1)
            values = (torch.view_as_real(values) if values.is_complex() else values).flatten(1)
            # Two reductions take a fifth of the time of comparisons with zero, and no memory.
            active |= (values.amax(1) != 0) | (values.amin(1) != 0)
    on_host: npt.NDArray[np.bool_] = active.cpu().numpy()
    return on_host


def finished_gradients(
    joint: ChunkGraphs, totals: list[AnySum], parameters: Sequence[torch.Tensor], used: set[int]
) -> list[torch.Tensor | None]:
    """Cast the sums to the gradients of all parameters; None, not zero, if no `used` result depends on the parameter.

    Args:
        totals: accumulators; the list is emptied, so that each is freed before the next one is cast.
    """
    gradients: list[torch.Tensor | None] = [None] * len(parameters)
    totals.reverse()
    for i, sources in zip(joint.grad_parameters, joint.grad_sources, strict=True):
        total = totals.pop()
        if sources & used:
            # Tensors are copied, because their memory is reused.
            gradients[i] = total.taken() if isinstance(total, Sum) else total.to(parameters[i].dtype, copy=True)
    return gradients
