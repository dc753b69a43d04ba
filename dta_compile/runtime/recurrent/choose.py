"""Choose the runtime of a recurrent layer: torch operators, or on CUDA the kernels of `fla` where they fit.

A kernel is compared once per kind of operands with torch operators on a small chunk, and rejected if it is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence

import torch

from dta_compile.executable.layers import MixerLayer
from dta_compile.ops.recurrences.operators import RECURRENCES, Recurrence
from dta_compile.plan.tree.segments import Segment
from dta_compile.runtime.path.chunk_shape import ChunkShape
from dta_compile.runtime.path.mixer_runtime import RecurrentInputs, RecurrentRuntime, Tensors
from dta_compile.runtime.recurrent import fla
from dta_compile.runtime.recurrent.layer import RecurrentLayerRuntime, runs_of

logger = logging.getLogger("dta_compile")

MOST_STATES = 2**27  # most elements of the initial states of a chunk's pieces, which are all in memory at once
LARGEST_ERROR = 0.1  # relative error by norms: bfloat16 has a few hundredths, a wrong kernel about one

Kind = tuple[tuple[torch.device, torch.dtype, tuple[int, ...]], ...]


def runtime_of(layer: MixerLayer, device: torch.device) -> RecurrentRuntime:
    """Return the runtime of a recurrent layer."""
    recurrence = RECURRENCES[layer.mixer]
    if device.type == "cuda" and fla.installed() and fla.has_kernel(recurrence):
        return ChosenRuntime(recurrence)
    return RecurrentLayerRuntime(recurrence)


@dataclasses.dataclass(frozen=True)
class ChosenRuntime:
    """Runtime of a recurrent layer by a kernel of `fla` where that takes the operands and the chunk, else by torch."""

    recurrence: Recurrence
    replayable = False
    key = None

    def forward(self, x: RecurrentInputs, depths: Sequence[int]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """See `RecurrentRuntime.forward`."""
        return self.choose(x, depths).forward(x, depths)

    def backward(
        self, grad: torch.Tensor, x: RecurrentInputs, state_grads: Mapping[int, torch.Tensor]
    ) -> tuple[Tensors, torch.Tensor]:
        """See `RecurrentRuntime.backward`."""
        return self.choose(x, list(state_grads)).backward(grad, x, state_grads)

    def choose(self, x: RecurrentInputs, depths: Sequence[int]) -> RecurrentRuntime:
        """Return the runtime for a chunk that keeps states at `depths`."""
        kind = tuple((tensor.device, tensor.dtype, tuple(tensor.shape[2:])) for tensor in x.operands)
        chosen = _chosen(self.recurrence, kind)
        if isinstance(chosen, RecurrentLayerRuntime):
            return chosen
        pieces = fla.Pieces.of(runs_of(x.chunk, depths))
        fits = pieces.count * x.state.numel() <= MOST_STATES
        return chosen if fits else RecurrentLayerRuntime(self.recurrence)


@functools.cache
def _chosen(recurrence: Recurrence, kind: Kind) -> RecurrentRuntime:
    """Return the runtime for operands of a kind; log once if it is not the kernel."""
    runtime = _by_kernel(recurrence, _example(recurrence, kind))
    if not isinstance(runtime, str):
        return runtime
    logger.warning("%s runs by torch's operators, not by the kernels of fla: %s", recurrence.name, runtime)
    return RecurrentLayerRuntime(recurrence)


def _by_kernel(recurrence: Recurrence, operands: Tensors) -> RecurrentRuntime | str:
    """Return the runtime by a kernel for operands of this kind, or the reason against it."""
    if (reason := fla.misfit(operands)) is not None:
        return reason
    kernel = fla.kernel_for(recurrence, by_channel=operands[3].dim() == 4)
    if isinstance(kernel, str):
        return kernel
    runtime = fla.FlaRuntime(recurrence, kernel)
    return _difference(runtime, RecurrentLayerRuntime(recurrence), operands, recurrence) or runtime


CHUNK = ChunkShape.of(8, 70, [Segment(0, 70, 80, 8, -1), Segment(70, 80, 80, 8 + 66, 0)])
DEPTH = 48  # depth at which its state is kept


def _example(recurrence: Recurrence, kind: Kind) -> Tensors:
    """Draw operands of a kind for `CHUNK`: unit vectors, weak decays, and betas below one."""
    operands: list[torch.Tensor] = []
    for operand, (device, dtype, shape) in zip(recurrence.operands, kind, strict=True):
        noise = torch.rand((1, CHUNK.tokens, *shape), generator=torch.Generator().manual_seed(len(operands)))
        if operand.name == "decay":
            noise = -noise / 8
        elif operand.name != "beta":
            noise = torch.nn.functional.normalize(noise - 0.5, dim=-1)
        operands.append(noise.to(device, dtype))
    return tuple(operands)


def _difference(
    one: RecurrentRuntime, other: RecurrentRuntime, operands: Tensors, recurrence: Recurrence
) -> str | None:
    """Return how runtime `one` fails or differs from the reference `other`; None if it agrees.

    Some combinations of Triton and GPUs miscompile kernels; fla raises errors for some of them.
    """
    state = recurrence.initial(operands) + 0.1
    x = RecurrentInputs(operands, (1.0,), state, CHUNK)
    try:
        results, expected = (_results(runtime, x) for runtime in (one, other))
    except Exception as error:
        return f"they fail with {error!r}"
    pairs = zip(results, expected, strict=True)
    errors = [((mine.float() - right).norm() / right.norm()).item() for mine, right in pairs]
    return None if all(error < LARGEST_ERROR for error in errors) else f"their errors are {errors}"


def _results(runtime: RecurrentRuntime, x: RecurrentInputs) -> Tensors:
    """Run forward and backward on `CHUNK`; return output, kept state and gradients."""
    out, states = runtime.forward(x, [DEPTH])
    grads, of_state = runtime.backward(torch.ones_like(out), x, {DEPTH: torch.ones_like(x.state)})
    return out, *states, *grads, of_state
