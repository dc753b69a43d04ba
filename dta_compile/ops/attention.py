"""Attention as a mixer: operators over a batch, which compute, and operators over a chunk, which are only traced.

Over a batch (`attention_call`, or `sink_attention_call` with sinks) an operator takes all arguments of `Masking`, and
`ops.dense_attention` computes it. Over a chunk it takes the layer's number, and the `joint` pass turns it into a call
on the runtime's path stack, which holds the keys and values of the tokens before the chunk.

A *sink* is, for each head, the score of an additional key in the softmax, whose value is zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dta_compile.ops.dense_attention import attend, attend_backward
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.library import LIBRARY
from dta_compile.ops.mixer import BATCH, TOKENS, Mixer, Operand, register_mixer

OPERANDS = "Tensor query, Tensor key, Tensor value"
MASKING = "Tensor? mask, bool is_causal, Tensor? segments, int window, float scale, float softcap"
SCORING = "float scale, float softcap"


class Masking(NamedTuple):
    """The arguments of an operator over a batch after its operands.

    Attributes:
        mask: broadcastable to `[B, 1, S, S]`: bool, True where attention is allowed, or a bias added to the scores.
        is_causal: tokens attend to no later token.
        segments: `[B, S]` integers or bool: tokens attend only to tokens of their own number, and to none of number 0.
        window: number of tokens attended to, including the token itself; 0: unlimited.
        scale: factor of the scores, positive.
        softcap: scaled scores `s` become `softcap * tanh(s / softcap)`; 0: no soft cap.
    """

    mask: Any
    is_causal: Any
    segments: Any
    window: Any
    scale: Any
    softcap: Any

    @classmethod
    def causal(cls, scale: Any, softcap: Any) -> Masking:
        """Return the arguments of plain causal attention."""
        return cls(None, True, None, 0, scale, softcap)


LIBRARY.define(f"attention_call({OPERANDS}, {MASKING}) -> Tensor")
LIBRARY.define(f"sink_attention_call({OPERANDS}, Tensor sinks, {MASKING}) -> Tensor")
LIBRARY.define(
    f"dense_attention_backward(Tensor grad, {OPERANDS}, Tensor? sinks, {MASKING}) -> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(f"attention(int layer, {OPERANDS}, {SCORING}) -> (Tensor, Tensor)")
LIBRARY.define(f"sink_attention(int layer, {OPERANDS}, Tensor sinks, {SCORING}) -> (Tensor, Tensor)")
LIBRARY.define(
    f"attention_backward(int layer, Tensor grad, {OPERANDS}, Tensor out, Tensor logsumexp, {SCORING})"
    " -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    f"sink_attention_backward(int layer, Tensor grad, {OPERANDS}, Tensor sinks, Tensor out, Tensor logsumexp,"
    f" {SCORING}) -> (Tensor, Tensor, Tensor, Tensor)"
)
ATTENTION_CALL = torch.ops.dta.attention_call.default
SINK_ATTENTION_CALL = torch.ops.dta.sink_attention_call.default
DENSE_ATTENTION_BACKWARD = torch.ops.dta.dense_attention_backward.default
ATTENTION = torch.ops.dta.attention.default
SINK_ATTENTION = torch.ops.dta.sink_attention.default
ATTENTION_BACKWARD = torch.ops.dta.attention_backward.default
SINK_ATTENTION_BACKWARD = torch.ops.dta.sink_attention_backward.default

_OPERANDS = (Operand("query", "queries"), Operand("key", "keys", True), Operand("value", "values", True))
_DIMS = (BATCH, "heads", TOKENS, "head_dim")

ATTENTION_MIXER = register_mixer(
    Mixer(
        name="attention",
        functions=(F.scaled_dot_product_attention, torch.ops.dta.attention_call, ATTENTION_CALL),
        call=ATTENTION_CALL,
        chunk=ATTENTION,
        backward=ATTENTION_BACKWARD,
        operands=_OPERANDS,
        dims=_DIMS,
        constants=(7, 8),  # scale and soft cap
    )
)
SINK_ATTENTION_MIXER = register_mixer(
    Mixer(
        name="attention with sinks",
        functions=(torch.ops.dta.sink_attention_call, SINK_ATTENTION_CALL),
        call=SINK_ATTENTION_CALL,
        chunk=SINK_ATTENTION,
        backward=SINK_ATTENTION_BACKWARD,
        operands=(*_OPERANDS, Operand("sinks", "sinks", has_tokens=False)),
        dims=_DIMS,
        constants=(8, 9),
    )
)
ATTENTION_MIXERS = (ATTENTION_MIXER, SINK_ATTENTION_MIXER)


# Over a batch


def _attention_call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *masking: Any) -> torch.Tensor:
    return attend(query, key, value, None, *masking)


LIBRARY.impl("attention_call", _attention_call, "CompositeExplicitAutograd")
LIBRARY.impl("sink_attention_call", attend, "CompositeExplicitAutograd")
LIBRARY.impl("dense_attention_backward", attend_backward, "CompositeExplicitAutograd")


def _call_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.register_fake("dta::dense_attention_backward", lib=LIBRARY)
def _dense_backward_fake(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    *masking: Any,
) -> tuple[torch.Tensor, ...]:
    of_sinks = query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return (*(tensor.new_empty(tensor.shape) for tensor in (query, key, value)), of_sinks)


def _save_call(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    operands, masking = inputs[: -len(Masking._fields)], Masking(*inputs[-len(Masking._fields) :])
    ctx.save_for_backward(*operands, masking.mask, masking.segments)
    ctx.masking = masking._replace(mask=None, segments=None)


def _call_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    *operands, mask, segments = ctx.saved_tensors
    sinks = operands[3] if len(operands) > 3 else None
    masking = ctx.masking._replace(mask=mask, segments=segments)
    grads = DENSE_ATTENTION_BACKWARD(grad, *operands[:3], sinks, *masking)
    return (*grads[: len(operands)], *[None] * len(masking))


for _name in ("attention_call", "sink_attention_call"):
    torch.library.register_fake(f"dta::{_name}", _call_fake, lib=LIBRARY)
    torch.library.register_autograd(f"dta::{_name}", _call_backward, setup_context=_save_call, lib=LIBRARY)


# Over a chunk


def empty_by_tokens(like: torch.Tensor, width: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Allocate a tensor in the layout of `by_tokens`, with the sizes and dtype of `like` or those given."""
    batch, heads, tokens, features = like.shape
    shape = (batch, tokens, heads, features if width is None else width)
    return like.new_empty(shape, dtype=dtype or like.dtype).transpose(1, 2)


def by_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """Return `[1, H, c, D]` with the heads of a token adjacent in memory, copied if necessary.

    Attention of a chunk returns all tensors in this layout, since products around it take `[c, H * D]`.
    """
    (_, heads, _, width), (_, of_head, of_token, of_feature) = tensor.shape, tensor.stride()
    if of_feature == 1 and of_head == width and of_token == heads * width:
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _chunk_fake(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> Any:
    out = empty_by_tokens(query, value.shape[-1])
    return out, query.new_empty(query.shape[:-1], dtype=statistics_dtype(query.dtype))


def _backward_fake(layer: int, grad: torch.Tensor, *arguments: Any) -> Any:
    operands = [arg for arg in arguments if isinstance(arg, torch.Tensor)][:-2]
    return (*map(empty_by_tokens, operands[:3]), *(sinks.new_empty(sinks.shape) for sinks in operands[3:]))


def _save_chunk(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.layer, *operands, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(*operands, *output)
    ctx.mark_non_differentiable(output[1])


def _chunk_backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    backward = ATTENTION_BACKWARD if len(ctx.saved_tensors) == 5 else SINK_ATTENTION_BACKWARD
    return (None, *backward(ctx.layer, grad, *ctx.saved_tensors, ctx.scale, ctx.softcap), None, None)


for _name in ("attention", "sink_attention"):
    torch.library.register_fake(f"dta::{_name}", _chunk_fake, lib=LIBRARY)
    torch.library.register_fake(f"dta::{_name}_backward", _backward_fake, lib=LIBRARY)
    torch.library.register_autograd(f"dta::{_name}", _chunk_backward, setup_context=_save_chunk, lib=LIBRARY)
