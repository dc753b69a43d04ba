"""What a schedule, or a half of it, reads and writes besides the path: rows of the frontier, sums of gradients, and
what crosses from one part of a chunk's stages to another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from dta_compile.executable.chunk import ChunkGraphs
from dta_compile.executable.executable import FrontierValue
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.plan.tree.chunk import Chunk
from dta_compile.runtime.replay.lease import Lease
from dta_compile.runtime.rows.buffers import AllRows, RowBuffer, Rows, next_to_zero

__all__ = ["ScheduleBuffers", "accumulators", "finished_gradients", "output_buffers", "rows_with_gradient"]


@dataclasses.dataclass(frozen=True)
class ScheduleBuffers:
    """The buffers of a part of a schedule; those that none of its ops reads or writes may be left out.

    Attributes:
        outputs: rows of every frontier value, written by ops with `out`; None: it is not asked for.
        gradients: rows of every frontier value's gradient; None: nothing uses the value, its gradient is zero.
        accumulators: per parameter that receives a gradient, as `accumulators` makes them.
        active: `[H]` head rows with a gradient; None: not known before the ops run.
        received, sent: what a chunk gets from parts before, and has for those after.
        gradients_of_received, gradients_of_sent: of those; None: nothing uses the value.
    """

    outputs: Sequence[RowBuffer | None] = ()
    gradients: Sequence[RowBuffer | None] = ()
    accumulators: Sequence[torch.Tensor] = ()
    active: npt.NDArray[np.bool_] | None = None
    received: Mapping[Chunk, Sequence[torch.Tensor]] = dataclasses.field(default_factory=dict)
    sent: dict[Chunk, Sequence[torch.Tensor]] = dataclasses.field(default_factory=dict)
    gradients_of_received: dict[Chunk, Sequence[torch.Tensor | None]] = dataclasses.field(default_factory=dict)
    gradients_of_sent: Mapping[Chunk, Sequence[torch.Tensor | None]] = dataclasses.field(default_factory=dict)

    def write(self, chunk: Chunk, heads: Rows, sent: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Store the frontier values `[rows, *features]` of some head rows, and make room for their gradients; and what
        the chunk has for later parts."""
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
        """A chunk went backward: gradients of what it received; its head rows are not read any more."""
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
    """Empty buffers for the frontier values `wanted`."""
    buffers = [
        kind(head_rows, value.features, value.dtype, device) if is_wanted else None
        for value, is_wanted in zip(frontier, wanted, strict=True)
    ]
    for buffer in buffers if training else ():
        if buffer is not None:
            next_to_zero(buffer.padding)
    return buffers


def gradient_buffer(kind: type[RowBuffer], value: FrontierValue, head_rows: int, device: torch.device) -> RowBuffer:
    """An empty buffer for sums of a frontier value's gradient."""
    return kind(head_rows, value.features, statistics_dtype(value.dtype), device)


def accumulators(joint: ChunkGraphs, parameters: Sequence[torch.Tensor], lease: Lease | None) -> list[torch.Tensor]:
    """Zeroed sums for the gradients of the parameters that receive one, in at least float32.

    Args:
        joint: graphs whose first inputs are the `parameters`.
    """
    if lease is not None:
        return lease.accumulators(parameters, joint.grad_parameters)
    return [
        torch.zeros_like(parameters[i], dtype=statistics_dtype(parameters[i].dtype)).detach()
        for i in joint.grad_parameters
    ]


def rows_with_gradient(
    gradients: Sequence[RowBuffer | None], head_rows: int, device: torch.device
) -> npt.NDArray[np.bool_]:
    """`[H]` head rows with a gradient in any frontier value. Read once per backward: no chunk waits for the device."""
    active = torch.zeros(head_rows, dtype=torch.bool, device=device)
    for buffer in gradients:
        if isinstance(buffer, AllRows):
            active |= (buffer.values[:-1] != 0).unsqueeze(-1).flatten(1).any(1)
    found: npt.NDArray[np.bool_] = active.cpu().numpy()
    return found


def finished_gradients(
    joint: ChunkGraphs, totals: list[torch.Tensor], parameters: Sequence[torch.Tensor], used: set[int], copy: bool
) -> list[torch.Tensor | None]:
    """Gradients of all region parameters; None, not zero, where none of the frontier values `used` depends on one.

    Args:
        totals: the accumulators; the list is emptied, so that each is gone before the next is rounded to its
            parameter's dtype.
        copy: whether somebody goes on using them.
    """
    gradients: list[torch.Tensor | None] = [None] * len(parameters)
    totals.reverse()
    for i, sources in zip(joint.grad_parameters, joint.grad_sources, strict=True):
        total = totals.pop()
        if sources & used:
            gradients[i] = total.to(parameters[i].dtype, copy=copy)
    return gradients
