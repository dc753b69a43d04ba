"""Recurrences as mixers: operators over a batch, which compute, and operators over a chunk, which are only traced.

    short_convolution   out = sum over j < k of weight[:, k - 1 - j] * value[t - j]                 (channel by channel)
    token_shift         out = value[t - j] for weight [D, j + 1]
    gated_delta_rule    S = exp(decay) S;  u = beta (value - key^T S);  S = S + key u^T;  out = scale query^T S
    linear_attention    S = exp(decay) S;  S = S + key value^T;  out = scale query^T S
    selective_scan      h = exp(step A) h + (step value) B^T;  out = h C
    linear_recurrence   h = factor h + value;  out = h                                            (channel by channel)
    cumulative_sum      the same with factors of one

Shapes with H heads, of which H // G consecutive ones share queries and keys: query and key `[B, S, G, K]`, value
`[B, S, H, V]`, log decay `[B, S, H]` or by channel `[B, S, H, K]` (at most zero), beta `[B, S, H]`. Shapes with D
channels: value, step and factor `[B, S, D]`, weight `[D, k]`, A `[D, N]` (negative), B and C `[B, S, N]`. The result
has the shape of value. States: the last `k - 1` inputs of a convolution `[k - 1, D]`, S `[H, K, V]`, h `[D, N]` or
`[D]`.

Sources: "Gated Delta Networks" (arXiv 2412.06464), "Kimi Linear" (2510.26692), "Mamba-2" (2405.21060), "Mamba"
(2312.00752).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.library import define
from dta_compile.ops.mixer import BATCH, TOKENS, Mixer, Operand, register_mixer
from dta_compile.ops.products import are_bounded
from dta_compile.ops.recurrences import (
    linear_attention,
    linear_recurrence,
    selective_scan,
    short_convolution,
    token_shift,
)
from dta_compile.ops.recurrences.blocks import Blocks, Runs, choose_size
from dta_compile.ops.recurrences.short_convolution import Ancestors

Tensors = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """A recurrence over a forest of runs, without a batch dimension: operands with tokens are `[c, ...]`.

    Attributes:
        like: position of the operand that the result has the shape and dtype of.
        state: returns shape and dtype of the state for the operands.
        kernel: a module with functions `forward` and `backward`.
        arguments: returns the arguments of the kernel without the initial state, which comes before the last one, given
            operands, numbers, runs, and in the backward the gradients of the result and of the kept states.
        dims, silent, scratch, may_restart: see `Mixer`.
        numbers: names of constants, all of them floats.
    """

    name: str
    operands: tuple[Operand, ...]
    like: int
    state: Callable[[Sequence[torch.Tensor]], tuple[Sequence[int], torch.dtype]]
    kernel: Any
    arguments: Callable[[Tensors, tuple[float, ...], Runs, Tensors], tuple[Any, ...]]
    dims: tuple[str, ...]
    silent: tuple[int, ...]
    scratch: Callable[[Sequence[torch.Tensor]], tuple[float, float]]
    numbers: tuple[str, ...] = ()
    may_restart: bool = True

    @property
    def mixer(self) -> Mixer:
        """Return the mixer with the operators that `_define` has defined."""
        count = len(self.operands)
        call, chunk, backward = (
            getattr(torch.ops.dta, f"{self.name}{suffix}") for suffix in ("", "_chunk", "_chunk_backward")
        )
        return Mixer(
            name=self.name.replace("_", " "),
            functions=(call, call.default),
            call=call.default,
            chunk=chunk.default,
            backward=backward.default,
            operands=self.operands,
            dims=self.dims,
            constants=tuple(range(count + 1, count + 1 + len(self.numbers))),
            running_state=self.state,
            silent=self.silent,
            segments=count,
            may_restart=self.may_restart,
            scratch=self.scratch,
        )

    def forward(
        self, operands: Tensors, numbers: tuple[float, ...], initial: torch.Tensor, runs: Runs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result, and the kept states `[n, ...]`."""
        *arguments, tables = self.arguments(operands, numbers, runs, ())
        return self.kernel.forward(*arguments, initial, tables)

    def backward(self, grad: torch.Tensor, of_kept: torch.Tensor, *forwarded: Any) -> tuple[Tensors, torch.Tensor]:
        """Return gradients of the operands and of the initial state; `forwarded` are the arguments of `forward`."""
        operands, numbers, initial, runs = forwarded
        grads = grad, of_kept
        *arguments, tables = self.arguments(operands, numbers, runs, grads)
        *of_operands, of_state = self.kernel.backward(*grads, *arguments, initial, tables)
        return tuple(gradient for gradient in of_operands if gradient is not None), of_state

    def initial(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the state before the first token: zeros."""
        shape, dtype = self.state(operands)
        return torch.zeros(tuple(shape), dtype=dtype, device=operands[0].device)

    def flat(self, operands: Sequence[torch.Tensor]) -> Tensors:
        """Flatten the batch and token dimensions of operands to one."""
        both = zip(self.operands, operands, strict=True)
        return tuple(value.flatten(0, 1) if operand.has_tokens else value for operand, value in both)


def _define(recurrence: Recurrence) -> None:
    """Define a recurrence's operators with implementations, fake implementations and derivatives."""
    name, count = recurrence.name, len(recurrence.operands)
    operands = ", ".join(f"Tensor {operand.name}" for operand in recurrence.operands)
    numbers = "".join(f", float {number}" for number in recurrence.numbers)
    over_batch, over_chunk = f"{operands}, Tensor? segments{numbers}", f"{operands}{numbers}"
    gradients = f"({', '.join(['Tensor'] * count)})"

    def runs(values: Sequence[torch.Tensor], segments: torch.Tensor | None) -> Runs:
        batch, tokens = values[recurrence.like].shape[:2]
        return Runs.of_rows(batch, tokens, segments)

    def call(*arguments: Any) -> torch.Tensor:
        values, segments, constants = arguments[:count], arguments[count], arguments[count + 1 :]
        flat = recurrence.flat(values)
        with torch.autocast(flat[0].device.type, enabled=False):
            out, _ = recurrence.forward(flat, constants, recurrence.initial(values), runs(values, segments))
        return out.reshape(values[recurrence.like].shape).contiguous()

    def call_backward(grad: torch.Tensor, *arguments: Any) -> Tensors:
        values, segments, constants = arguments[:count], arguments[count], arguments[count + 1 :]
        flat, initial = recurrence.flat(values), recurrence.initial(values)
        of_kept = initial.new_zeros((0, *initial.shape))
        over = runs(values, segments)
        with torch.autocast(flat[0].device.type, enabled=False):
            grads, _ = recurrence.backward(grad.flatten(0, 1), of_kept, flat, constants, initial, over)
        return tuple(
            gradient.to(value.dtype).reshape(value.shape).contiguous()
            for gradient, value in zip(grads, values, strict=True)
        )

    def like_value(*arguments: Any) -> torch.Tensor:
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        return tensors[recurrence.like].new_empty(tensors[recurrence.like].shape)

    def like_operands(*arguments: Any) -> Tensors:
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        return tuple(value.new_empty(value.shape) for value in tensors[1 : count + 1])

    def save_call(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[: count + 1])
        ctx.numbers = inputs[count + 1 :]

    def derive_call(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grads = of_call(grad, *ctx.saved_tensors, *ctx.numbers)
        return (*grads, None, *[None] * len(ctx.numbers))

    def save_chunk(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.layer, ctx.numbers = inputs[0], inputs[count + 1 :]
        ctx.save_for_backward(*inputs[1 : count + 1])

    def derive_chunk(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grads = of_chunk(ctx.layer, grad, *ctx.saved_tensors, *ctx.numbers)
        return (None, *grads, *[None] * len(ctx.numbers))

    def refuse_second(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError(f"dta::{name} has no second derivative")

    define(f"{name}({over_batch}) -> Tensor", like_value, call, save_call, derive_call)
    define(f"{name}_chunk(int layer, {over_chunk}) -> Tensor", like_value, None, save_chunk, derive_chunk)
    of_call = define(
        f"{name}_backward(Tensor grad, {over_batch}) -> {gradients}", like_operands, call_backward, None, refuse_second
    )
    of_chunk = define(
        f"{name}_chunk_backward(int layer, Tensor grad, {over_chunk}) -> {gradients}",
        like_operands,
        backward=refuse_second,
    )


def _convolution_state(operands: Sequence[torch.Tensor]) -> tuple[Sequence[int], torch.dtype]:
    value, weight = operands
    return (weight.shape[1] - 1, value.shape[-1]), value.dtype


def _matrix_state(operands: Sequence[torch.Tensor]) -> tuple[Sequence[int], torch.dtype]:
    _, key, value, *_ = operands
    return (value.shape[-2], key.shape[-1], value.shape[-1]), statistics_dtype(value.dtype)


def _scan_state(operands: Sequence[torch.Tensor]) -> tuple[Sequence[int], torch.dtype]:
    value, _, matrix, *_ = operands
    return tuple(matrix.shape), statistics_dtype(value.dtype)


def _recurrence_state(operands: Sequence[torch.Tensor]) -> tuple[Sequence[int], torch.dtype]:
    value, _ = operands
    return value.shape[-1:], statistics_dtype(value.dtype)


_QUERY_KEY_VALUE = (Operand("query", "queries"), Operand("key", "keys"), Operand("value", "values"))
_DECAY = Operand("decay", "decays")
_HEADS = (BATCH, TOKENS, "heads", "head_dim")
_CHANNELS = (BATCH, TOKENS, "channels")


def _blocks(runs: Runs, most: int) -> Blocks:
    """Cut the runs into blocks of the cheapest size, at most `most`."""
    segments, kept = runs.segments, runs.kept
    return runs.derive((Blocks, most), lambda: Blocks(segments, kept, min(choose_size(segments), most)))


def _blocks_apart(runs: Runs, most: int, of_tokens: Tensors, of_kept: Tensors = ()) -> Blocks:
    """Return `_blocks`, but on a CPU with unbounded tokens in blocks of their own.

    Within a block, masks multiply values that a token does not read by zero, and 0 * NaN is NaN. On a GPU looking for
    such tokens would synchronise with the device.
    """
    if of_tokens[0].device.type != "cpu" or are_bounded(*of_tokens, *of_kept):
        return _blocks(runs, most)
    others = [number for number in range(runs.tokens) if not are_bounded(*(tensor[number] for tensor in of_tokens))]
    parts = runs.apart(others)
    return Blocks(parts.segments, parts.kept, min(choose_size(parts.segments), most))


def _of_attention(operands: Tensors, numbers: tuple[float, ...], runs: Runs, grads: Tensors) -> tuple[Any, ...]:
    query, key, value, decay, *betas = operands
    beta = betas[0] if betas else None
    blocks = _blocks_apart(runs, linear_attention.longest_block(key, beta), (*operands, *grads[:1]), grads[1:])
    return query, key, value, decay, beta, numbers[0], blocks


def _of_convolution(operands: Tensors, numbers: tuple[float, ...], runs: Runs, grads: Tensors) -> tuple[Any, ...]:
    width = operands[1].shape[1]
    return *operands, runs.derive((Ancestors, width), lambda: Ancestors(runs.segments, width, runs.kept))


# Bytes per token that forward and backward allocate, measured on chains.


def _matrix_scratch(operands: Sequence[torch.Tensor]) -> tuple[float, float]:
    _, key, value, decay, *beta = operands
    heads, width, out = value.shape[-2], key.shape[-1], value.shape[-1]
    states = width * out / 64
    forward, backward = 4.5 * width + 7.5 * out + 128 + 2 * states, 11.5 * width + 9 * out + 320 + 4 * states
    share = heads * _itemsize(value) * (1.0 if beta else 0.75) * (4.0 if decay.dim() == 4 else 1.0)
    return forward * share, backward * share


def _values_by_channel(forward: float, backward: float) -> Callable[[Sequence[torch.Tensor]], tuple[float, float]]:
    """Return the `scratch` of recurrences that allocate so many values per channel of the first operand."""

    def scratch(operands: Sequence[torch.Tensor]) -> tuple[float, float]:
        channels = operands[0].shape[-1] * _itemsize(operands[0])
        return forward * channels, backward * channels

    return scratch


def _itemsize(value: torch.Tensor) -> int:
    return statistics_dtype(value.dtype).itemsize


SHORT_CONVOLUTION = Recurrence(
    name="short_convolution",
    operands=(Operand("value", "values"), Operand("weight", "weights", has_tokens=False)),
    like=0,
    state=_convolution_state,
    kernel=short_convolution,
    arguments=_of_convolution,
    dims=_CHANNELS,
    silent=(0,),
    scratch=_values_by_channel(2.0, 4.0),
)
TOKEN_SHIFT = dataclasses.replace(SHORT_CONVOLUTION, name="token_shift", kernel=token_shift, may_restart=False)
GATED_DELTA_RULE = Recurrence(
    name="gated_delta_rule",
    operands=(*_QUERY_KEY_VALUE, _DECAY, Operand("beta", "betas")),
    like=2,
    state=_matrix_state,
    kernel=linear_attention,
    arguments=_of_attention,
    dims=_HEADS,
    silent=(1, 2),
    numbers=("scale",),
    scratch=_matrix_scratch,
)
LINEAR_ATTENTION = dataclasses.replace(GATED_DELTA_RULE, name="linear_attention", operands=(*_QUERY_KEY_VALUE, _DECAY))
SELECTIVE_SCAN = Recurrence(
    name="selective_scan",
    operands=(
        Operand("value", "values"),
        Operand("step", "steps"),
        Operand("matrix", "matrices", has_tokens=False),
        Operand("entry", "entries"),
        Operand("reading", "readings"),
    ),
    like=0,
    state=_scan_state,
    kernel=selective_scan,
    arguments=lambda operands, numbers, runs, grads: (*operands, _blocks(runs, 16)),
    dims=_CHANNELS,
    silent=(0, 3),
    scratch=_values_by_channel(13.0, 19.0),
)
LINEAR_RECURRENCE = Recurrence(
    name="linear_recurrence",
    operands=(Operand("value", "values"), Operand("factor", "factors")),
    like=0,
    state=_recurrence_state,
    kernel=linear_recurrence,
    arguments=lambda operands, numbers, runs, grads: (*operands, _blocks(runs, 64)),
    dims=_CHANNELS,
    silent=(0,),
    scratch=_values_by_channel(3.0, 6.0),
)
CUMULATIVE_SUM = dataclasses.replace(LINEAR_RECURRENCE, name="cumulative_sum", may_restart=False)

RECURRENCES: dict[Mixer, Recurrence] = {}
for _recurrence in (
    SHORT_CONVOLUTION,
    TOKEN_SHIFT,
    GATED_DELTA_RULE,
    LINEAR_ATTENTION,
    SELECTIVE_SCAN,
    LINEAR_RECURRENCE,
    CUMULATIVE_SUM,
):
    _define(_recurrence)
    RECURRENCES[register_mixer(_recurrence.mixer)] = _recurrence
