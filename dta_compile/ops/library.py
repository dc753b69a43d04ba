"""The library `dta` of operators, and those that lowering leaves in a graph: attention, and gradients that stop."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("dta", "DEF")
LIBRARY.define(
    "attention_call(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale) -> Tensor"
)
LIBRARY.define("stop_gradient(Tensor value) -> Tensor")
STOP_GRADIENT = torch.ops.dta.stop_gradient.default
ATTENTION_CALL = torch.ops.dta.attention_call.default


@torch.library.register_fake("dta::stop_gradient", lib=LIBRARY)
def _stop_gradient_fake(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


@torch.library.register_fake("dta::attention_call", lib=LIBRARY)
def _attention_call_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))
