"""Attention as a mixer: the opaque operator of chunk graphs, `dta::attention`, and the operator its gradient calls.

The operators exist to be traced: they carry the layer's number, and the `joint` pass turns each into a call on the
runtime's path stack, which holds the keys and values of the tokens before the chunk. They have no implementation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.library import ATTENTION_CALL, LIBRARY
from dta_compile.ops.mixer import BATCH, TOKENS, Mixer, Operand, register_mixer

LIBRARY.define("attention(int layer, Tensor query, Tensor key, Tensor value, float scale) -> (Tensor, Tensor)")
LIBRARY.define(
    "attention_backward(int layer, Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
    " float scale) -> (Tensor, Tensor, Tensor)"
)
ATTENTION = torch.ops.dta.attention.default
ATTENTION_BACKWARD = torch.ops.dta.attention_backward.default

ATTENTION_MIXER = register_mixer(
    Mixer(
        name="attention",
        functions=(F.scaled_dot_product_attention,),
        call=ATTENTION_CALL,
        chunk=ATTENTION,
        backward=ATTENTION_BACKWARD,
        operands=(Operand("query", "queries"), Operand("key", "keys", True), Operand("value", "values", True)),
        dims=(BATCH, "heads", TOKENS, "head_dim"),
        constants=(5,),  # the scale
    )
)


@torch.library.register_fake("dta::attention", lib=LIBRARY)
def _attention_fake(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=statistics_dtype(query.dtype))


@torch.library.register_fake("dta::attention_backward", lib=LIBRARY)
def _attention_backward_fake(
    layer: int,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.layer, query, key, value, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    grads = ATTENTION_BACKWARD(ctx.layer, grad, *ctx.saved_tensors, ctx.scale)
    return (None, *grads, None)


torch.library.register_autograd("dta::attention", _backward, setup_context=_save, lib=LIBRARY)
