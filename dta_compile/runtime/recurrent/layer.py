"""Runtime of recurrent layers by torch operators, called by the path stack."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from dta_compile.ops.recurrences.blocks import Runs
from dta_compile.ops.recurrences.operators import Recurrence
from dta_compile.runtime.path.chunk_shape import ChunkShape
from dta_compile.runtime.path.mixer_runtime import RecurrentInputs, Tensors


@dataclasses.dataclass(frozen=True)
class RecurrentLayerRuntime:
    """Runtime of a recurrent layer by torch operators. Not replayable: tables are made on the host for each chunk."""

    recurrence: Recurrence
    replayable = False
    key = None

    def forward(self, x: RecurrentInputs, depths: Sequence[int]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """See `RecurrentRuntime.forward`."""
        operands = self.recurrence.flat(x.operands)
        out, states = self.recurrence.forward(operands, x.constants, x.state, runs_of(x.chunk, depths))
        return out.reshape(x.operands[self.recurrence.like].shape).contiguous(), [state.clone() for state in states]

    def backward(
        self, grad: torch.Tensor, x: RecurrentInputs, state_grads: Mapping[int, torch.Tensor]
    ) -> tuple[Tensors, torch.Tensor]:
        """See `RecurrentRuntime.backward`."""
        operands = self.recurrence.flat(x.operands)
        of_kept = torch.stack([*state_grads.values()]) if state_grads else x.state.new_zeros((0, *x.state.shape))
        runs = runs_of(x.chunk, list(state_grads))
        grads, of_state = self.recurrence.backward(grad.flatten(0, 1), of_kept, operands, x.constants, x.state, runs)
        pairs = zip(grads, x.operands, strict=True)
        # Cloned, because it lives long and would keep the storage of all states alive.
        return tuple(gradient.reshape(operand.shape).contiguous() for gradient, operand in pairs), of_state.clone()


def runs_of(chunk: ChunkShape, depths: Sequence[int]) -> Runs:
    """Return the runs of a chunk that keep the states at `depths`; made once per chunk shape."""
    kept = tuple(depth - chunk.start for depth in depths)
    if (Runs, kept) not in chunk.derived:
        chunk.derived[Runs, kept] = Runs(chunk.segments, kept)
    runs: Runs = chunk.derived[Runs, kept]
    return runs
