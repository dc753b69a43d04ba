"""Sequences side by side in one row, which only attention treats separately, by torch's kernels for varying lengths."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from benchmarks.methods.baselines import attention_per_sequence

IMPLEMENTATION = "varlen"  # name in transformers' registry of attention functions
CAUSAL = (-1, 0)  # window: all keys before a query, none behind it


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    sequence_lengths: list[int],
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within every sequence of a row `[1, heads, T, D]`; returns `[1, T, heads, D]`."""
    if query.device.type != "cuda":
        lengths = {"sequence_lengths": sequence_lengths, "scaling": scaling}
        return attention_per_sequence(module, query, key, value, None, **lengths)
    ends = torch.tensor([0, *itertools.accumulate(sequence_lengths)], dtype=torch.int32).to(query.device)
    longest = max(sequence_lengths)
    own = {"scale": scaling, "window_size": CAUSAL}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        own["enable_gqa"] = key.shape[1] != query.shape[1]
    else:  # torch 2.11
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return varlen_attn(*rows, ends, ends, longest, longest, **own)[None], None


AttentionInterface.register(IMPLEMENTATION, attention)
