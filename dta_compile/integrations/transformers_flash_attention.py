"""transformers' attn_implementation="flash_attention_2", and its relatives, where Dynamo traces for this backend.

Their masks and attention functions look into tensors to choose between kernels, which ends a graph. What they choose
between is one thing to our operator: causal attention within segments. So the two functions are wrapped: they compute
as ever, but in a graph for this backend masks stay as they are, and attention is ours, where it is causal attention of
a batch over itself. Anything else goes on to the kernels, and is refused by name if it is for the tree. Importing the
module wraps them; `registration` does when transformers is there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import flash_attention, hub_kernels

from dta_compile.integrations import transformers_attention
from dta_compile.integrations.keywords import refuse_unknown
from dta_compile.integrations.tracing import traces_for_this_backend
from dta_compile.integrations.transformers_attention import CausalMask
from dta_compile.ops.causal_attention import segments_by_ends

ENDS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
OF_BATCH = {"position_ids", "cache", "block_table"}  # which `_is_over_itself` looks at
_attention, _mask = flash_attention.flash_attention_forward, AttentionMaskInterface._global_mapping["flash_attention_2"]


@functools.wraps(_mask)
def flash_attention_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask `[B, S]` of a batch without a KV cache as it is, also if it has no padding."""
    if torch.compiler.is_compiling() and traces_for_this_backend():
        mask: torch.Tensor | None = kwargs.get("attention_mask")
        length = kwargs.get("kv_length")
        if mask is not None and length is not None and mask.shape[1] == length:
            return mask
    found: torch.Tensor | None = _mask(*args, **kwargs)
    return found


@functools.wraps(_attention)
def flash_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer, query `[B, Hq, S, D]`; the result is `[B, S, Hq, Dv]`."""
    ours = torch.compiler.is_compiling() and traces_for_this_backend()
    causal = is_causal if is_causal is not None else module.is_causal
    if not ours or not causal or dropout or not _is_over_itself(query, key, attention_mask, kwargs):
        found: tuple[torch.Tensor, None] = _attention(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            is_causal=is_causal,
            s_aux=s_aux,
            **kwargs,
        )
        return found
    query = refuse_unknown(query, "flash attention", kwargs, ENDS | OF_BATCH)
    dtype = flash_attention.get_target_dtype(query.transpose(1, 2), module)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    mask = CausalMask(_segments(query, attention_mask, kwargs), sliding_window, is_told=True)
    return transformers_attention.attention_forward(
        module, query, key, value, mask, scaling=scaling, is_causal=True, softcap=softcap, s_aux=s_aux
    )


def _is_over_itself(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether a call is attention of a batch over itself, by arguments that are understood."""
    if query.shape[2] != key.shape[2] or kwargs.get("cache") is not None or kwargs.get("block_table") is not None:
        return False
    if _has_ends(kwargs) and query.shape[0] != 1:
        return False  # sequences may go on over the ends of rows
    positions = kwargs.get("position_ids")
    return (mask is None or (mask.dim() == 2 and mask.shape[1] == key.shape[2])) and (
        positions is None or positions.dim() == 2
    )


def _has_ends(kwargs: dict[str, Any]) -> bool:
    return all(kwargs.get(name) is not None for name in ENDS)


def _segments(query: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """`[B, S]` by padding if there is some, else by where sequences end, else by positions of a single row.

    transformers lets a sequence begin wherever a position is zero, here; by its masks, wherever positions do not grow
    by one. A mask without padding counts as none.
    """
    batch, _, tokens, _ = query.shape
    positions: torch.Tensor | None = kwargs.get("position_ids")
    packed = None
    if _has_ends(kwargs):
        packed = segments_by_ends(kwargs["cu_seq_lens_q"], batch, tokens)
    elif positions is not None and batch == 1 and tokens > 1:
        packed = (positions == 0).cumsum(-1) + 1
    if mask is None:
        return packed
    real = mask != 0
    return real if packed is None else torch.where(real.all(), packed, real.to(packed.dtype))


def _register() -> None:
    for interface, before, now in (
        (AttentionInterface, _attention, flash_attention_forward),
        (AttentionMaskInterface, _mask, flash_attention_mask),
    ):
        for name, function in list(interface._global_mapping.items()):
            if function is before:
                interface.register(name, now)
    hub_kernels.flash_attention_forward = flash_attention_forward  # what kernels from the hub are registered with


_register()
