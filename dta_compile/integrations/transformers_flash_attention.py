"""transformers' attn_implementation="flash_attention_2" and its variants in graphs for this backend.

Their mask and attention functions read tensors to choose between kernels, which breaks the graph. For our operator all
of these choices are causal attention within segments. So both functions are wrapped: in a graph for this backend masks
are passed on unchanged, and causal self-attention of a batch calls our operator. All other calls run the original
functions, and are refused by name in a graph for the tree. Importing this module wraps the functions; `registration`
imports it with transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import flash_attention, hub_kernels

from dta_compile.integrations import transformers_attention
from dta_compile.integrations.keywords import refuse_unknown
from dta_compile.integrations.tracing import in_our_graphs
from dta_compile.integrations.transformers_attention import CausalMask
from dta_compile.ops.causal_attention import segments_by_ends

ENDS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
OF_BATCH = {"position_ids", "cache", "block_table"}  # read by `_is_over_itself`


def flash_attention_mask(*args: Any, **kwargs: Any) -> Any:
    """Return the padding mask `[B, S]` unchanged, without testing it for padding; `NotImplemented` with a KV cache."""
    mask, length = kwargs.get("attention_mask"), kwargs.get("kv_length")
    is_of_batch = mask is not None and length is not None and mask.shape[1] == length
    return mask if is_of_batch else NotImplemented


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
) -> Any:
    """Compute attention of a layer with query `[B, Hq, S, D]`; return `[B, S, Hq, Dv]` and None.

    `NotImplemented` for what is no causal self-attention of a batch.
    """
    causal = is_causal if is_causal is not None else module.is_causal
    if not causal or dropout or not _is_over_itself(query, key, attention_mask, kwargs):
        return NotImplemented
    query = refuse_unknown(query, "flash attention", kwargs, ENDS | OF_BATCH)
    dtype = flash_attention.get_target_dtype(query.transpose(1, 2), module)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    mask = CausalMask(_segments(query, attention_mask, kwargs), sliding_window, is_told=True)
    return transformers_attention.attention_forward(
        module, query, key, value, mask, scaling=scaling, is_causal=True, softcap=softcap, s_aux=s_aux
    )


def _is_over_itself(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Return whether a call is self-attention of a batch with supported arguments."""
    if query.shape[2] != key.shape[2] or kwargs.get("cache") is not None or kwargs.get("block_table") is not None:
        return False
    if _has_ends(kwargs) and query.shape[0] != 1:
        return False  # sequences may span several rows
    positions = kwargs.get("position_ids")
    return (mask is None or (mask.dim() == 2 and mask.shape[1] == key.shape[2])) and (
        positions is None or positions.dim() == 2
    )


def _has_ends(kwargs: dict[str, Any]) -> bool:
    return all(kwargs.get(name) is not None for name in ENDS)


def _segments(query: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return segments `[B, S]` from padding if there is any, else from boundaries, else from positions of a single row.

    As in transformers' flash attention, a sequence starts wherever a position is zero; in its masks one starts wherever
    positions do not grow by one. A mask without padding is ignored.
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
    attention = flash_attention.flash_attention_forward
    mask = AttentionMaskInterface._global_mapping["flash_attention_2"]
    replaced = in_our_graphs(flash_attention_forward, attention)
    for interface, original, replacement in (
        (AttentionInterface, attention, replaced),
        (AttentionMaskInterface, mask, in_our_graphs(flash_attention_mask, mask)),
    ):
        for name, function in list(interface._global_mapping.items()):
            if function is original:
                interface.register(name, replacement)
    hub_kernels.flash_attention_forward = replaced  # for kernels from the hub, registered later


_register()
