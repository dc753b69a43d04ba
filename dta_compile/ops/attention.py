"""The opaque attention operator of chunk graphs: `dta::attention`, and the operator its gradient calls.

The operators exist to be traced: they carry the layer's number, and the `joint` pass turns each into a call on the
runtime's path stack, which holds the keys and values of the tokens before the chunk. They have no implementation.
"""

from __future__ import annotations

from typing import Any

import torch

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.library import LIBRARY

LIBRARY.define("attention(Tensor query, Tensor key, Tensor value, int layer, float scale) -> (Tensor, Tensor)")
LIBRARY.define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
    " int layer, float scale) -> (Tensor, Tensor, Tensor)"
)
ATTENTION = torch.ops.dta.attention.default
ATTENTION_BACKWARD = torch.ops.dta.attention_backward.default


@torch.library.register_fake("dta::attention", lib=LIBRARY)
def _attention_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=statistics_dtype(query.dtype))


@torch.library.register_fake("dta::attention_backward", lib=LIBRARY)
def _attention_backward_fake(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    layer: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ctx.layer, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    grads = ATTENTION_BACKWARD(grad, *ctx.saved_tensors, ctx.layer, ctx.scale)
    return (*grads, None, None, None)


torch.library.register_autograd("dta::attention", _backward, setup_context=_save, lib=LIBRARY)
