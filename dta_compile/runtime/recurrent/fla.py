"""Recurrences over a chunk by the kernels of flash-linear-attention (package `fla`, tested with 0.6), level by level.

    gated_delta_rule    chunk_gated_delta_rule with a decay by head, chunk_kda with one by channel
    linear_attention    chunk_simple_gla with a decay by head, chunk_gla with one by channel

The runs of a chunk are cut into pieces at every fork and at every kept state. The level of a piece is one more than
that of the piece it continues, so that a level is one varlen call, whose initial states are final states of the level
above. The backward reruns all levels under autograd: the kernels have gradients for initial and final states, and
autograd sums the gradients of states that several pieces begin with.

The kernels compute in blocks of 64 tokens, the first of which begins with the piece, and return states in float32.
They need as many heads of queries and keys as of values (from 0.6 on the delta rules take fewer), at most 256 channels
of keys for a delta rule, and widths divisible by 16. They multiply float32 inputs in TF32; so torch computes these.

Torch operators also compute selective scans, because mamba_ssm's `selective_scan_fn` takes no initial state and has no
gradient for the final one, and short convolutions: `causal_conv1d_fn` takes either states or several sequences in a
row, and fla's own convolution takes both, but torch operators compute all levels at once. For linear attention,
mamba_ssm's `mamba_chunk_scan_combined` takes an initial state per row of a batch, not per sequence of a row.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.recurrences.blocks import Runs, levels_of
from dta_compile.ops.recurrences.operators import Recurrence
from dta_compile.runtime.path.mixer_runtime import RecurrentInputs, Tensors
from dta_compile.runtime.recurrent.layer import runs_of
from dta_compile.runtime.rows.upload import upload

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

TYPES = (torch.bfloat16, torch.float16)
WIDTHS = 16  # widths of heads must be multiples of it
WIDEST_KEY = 256
KERNELS = {  # by recurrence and whether the decay is by channel: module and function
    ("gated_delta_rule", False): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    ("gated_delta_rule", True): ("fla.ops.kda", "chunk_kda"),
    ("linear_attention", False): ("fla.ops.simple_gla", "chunk_simple_gla"),
    ("linear_attention", True): ("fla.ops.gla", "chunk_gla"),
}
ARGUMENTS = {"query": "q", "key": "k", "value": "v", "decay": "g", "beta": "beta"}
OTHERS = {"scale", "initial_state", "output_final_state", "cu_seqlens", "cu_seqlens_cpu"}


@functools.cache
def installed() -> bool:
    """Return whether the package is installed."""
    return importlib.util.find_spec("fla") is not None


def has_kernel(recurrence: Recurrence) -> bool:
    """Return whether there is a kernel for a recurrence, with any decay."""
    return (recurrence.name, False) in KERNELS


def misfit(operands: Sequence[torch.Tensor]) -> str | None:
    """Return the requirement of the kernels that the operands do not meet; None if they fit."""
    _, key, value, *_ = operands
    if value.dtype not in TYPES:
        return "they take values in bfloat16 or float16"
    if key.shape[-1] % WIDTHS or value.shape[-1] % WIDTHS or key.shape[-1] > WIDEST_KEY:
        return f"they take widths of heads that divide by {WIDTHS}, of keys at most {WIDEST_KEY}"
    return None


@functools.cache
def kernel_for(recurrence: Recurrence, by_channel: bool) -> Kernel | str:
    """Import the kernel for a recurrence; return the reason if that fails."""
    module, name = KERNELS[recurrence.name, by_channel]
    try:
        kernel: Kernel = getattr(importlib.import_module(module), name)
    except Exception as error:  # raised by the package or by Triton
        return f"{module}.{name} cannot be imported: {error!r}"
    needed = {ARGUMENTS[operand.name] for operand in recurrence.operands} | OTHERS
    missing = needed - inspect.signature(kernel).parameters.keys()
    return f"{name} of this version does not have {', '.join(sorted(missing))}" if missing else kernel


@dataclasses.dataclass(frozen=True)
class FlaRuntime:
    """Runtime of a recurrent layer by a kernel of fla."""

    recurrence: Recurrence
    kernel: Kernel
    replayable = False
    key = None

    def forward(self, x: RecurrentInputs, depths: Sequence[int]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """See `RecurrentRuntime.forward`."""
        with torch.no_grad():
            out, states = self._run(x.operands, x.state, x.constants[0], Pieces.of(runs_of(x.chunk, depths)))
        return out.contiguous(), [state.clone() for state in states]

    def backward(
        self, grad: torch.Tensor, x: RecurrentInputs, state_grads: Mapping[int, torch.Tensor]
    ) -> tuple[Tensors, torch.Tensor]:
        """See `RecurrentRuntime.backward`."""
        leaves = [tensor.detach().requires_grad_() for tensor in (*x.operands, x.state)]
        pieces = Pieces.of(runs_of(x.chunk, list(state_grads)))
        with torch.enable_grad():
            out, states = self._run(tuple(leaves[:-1]), leaves[-1], x.constants[0], pieces)
            *grads, of_state = torch.autograd.grad((out, *states), leaves, (grad, *state_grads.values()))
        return tuple(grads), of_state

    def _run(
        self, operands: Tensors, initial: torch.Tensor, scale: float, pieces: Pieces
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run all levels; return the output `[1, c, H, V]` and the kept states."""
        levels, order = pieces.on(initial.device)
        pairs = zip(self.recurrence.operands, self._suited(operands), strict=True)
        parts = {ARGUMENTS[operand.name]: _split(tensor[0], order, levels) for operand, tensor in pairs}
        outs: list[torch.Tensor] = []
        finals: list[torch.Tensor] = []
        for number, level in enumerate(levels):
            out, final = self.kernel(
                **{name: tensors[number][None] for name, tensors in parts.items()},
                scale=scale,
                initial_state=initial.expand(level.pieces, *initial.shape)
                if level.entries is None
                else finals[-1].index_select(0, level.entries),
                output_final_state=level.continues,
                cu_seqlens=level.offsets,
                cu_seqlens_cpu=level.offsets_on_host,
            )
            outs.append(out[0])
            finals.append(final if final is not None else initial[None][:0])
        output = torch.cat(outs)
        if order is not None:
            output = torch.empty_like(output).index_copy_(0, order, output)
        return output[None], [finals[number][place] for number, place in pieces.kept]

    def _suited(self, operands: Tensors) -> list[torch.Tensor]:
        """Repeat heads and cast queries and keys to match values; cast decays to a dtype wide enough for sums."""
        query, key, value, decay, *others = operands
        query, key = query.to(value.dtype), key.to(value.dtype)  # normalised ones are in float32
        share = value.shape[2] // key.shape[2]
        if share > 1:
            query, key = (tensor.repeat_interleave(share, 2) for tensor in (query, key))
        return [query, key, value, decay.to(statistics_dtype(decay.dtype)), *others]


class Level(NamedTuple):
    """Pieces of one level, which one varlen call computes.

    Attributes:
        pieces, tokens: number of pieces and of their tokens.
        offsets, offsets_on_host: `[pieces + 1]` cumulative lengths (`cu_seqlens`).
        entries: `[pieces]` index in the level above of the piece that each continues; None: they begin with the
            initial state.
        continues: whether final states are needed.
    """

    pieces: int
    tokens: int
    offsets: torch.Tensor
    offsets_on_host: torch.Tensor
    entries: torch.Tensor | None
    continues: bool


class Pieces:
    """Runs of a chunk, cut into pieces at forks and kept states.

    Attributes:
        count: number of pieces.
        kept: for every kept state its level and the index in it of the piece that ends there.
    """

    def __init__(self, runs: Runs) -> None:
        bounds = [(piece.first, piece.last, piece.parent) for piece in runs.apart(()).segments]
        starts, ends, above = np.array(bounds, np.int64).reshape(-1, 3).T
        level = levels_of(above, np.ones_like(above))
        order = np.argsort(level, kind="stable")
        self.count = len(ends)
        self._bounds = np.searchsorted(level[order], np.arange(level.max(initial=0) + 2))
        places = np.empty(self.count, np.int64)
        places[order] = np.arange(self.count) - self._bounds[level[order]]
        of_kept = np.searchsorted(ends, np.asarray(runs.kept, np.int64))
        self.kept = list(zip(level[of_kept].tolist(), places[of_kept].tolist(), strict=True))
        self._lengths, self._entries = (ends - starts)[order], places[above[order]]
        self._order = np.concatenate([np.arange(starts[piece], ends[piece]) for piece in order])
        self._tables: dict[torch.device, tuple[list[Level], torch.Tensor | None]] = {}

    @classmethod
    def of(cls, runs: Runs) -> Pieces:
        """Return the pieces of some runs, cut once."""
        return runs.derive(Pieces, lambda: cls(runs))

    def on(self, device: torch.device) -> tuple[list[Level], torch.Tensor | None]:
        """Return the levels and the order of tokens by level (None: already in order), uploaded once per device."""
        if device not in self._tables:
            in_order = (np.diff(self._order) > 0).all()
            levels = [self._level(number, device) for number in range(len(self._bounds) - 1)]
            self._tables[device] = levels, None if in_order else upload(self._order, device)
        return self._tables[device]

    def _level(self, number: int, device: torch.device) -> Level:
        some = slice(*self._bounds[number : number + 2].tolist())
        offsets = np.concatenate([[0], np.cumsum(self._lengths[some])])
        return Level(
            some.stop - some.start,
            int(offsets[-1]),
            upload(offsets, device),
            torch.from_numpy(offsets),
            upload(self._entries[some], device) if number else None,
            number + 2 < len(self._bounds) or any(level == number for level, _ in self.kept),
        )


def _split(tensor: torch.Tensor, order: torch.Tensor | None, levels: Sequence[Level]) -> Sequence[torch.Tensor]:
    """Split a tensor over tokens by level."""
    ordered = tensor if order is None else tensor.index_select(0, order)
    parts: Any = ordered.split([level.tokens for level in levels])
    return parts
