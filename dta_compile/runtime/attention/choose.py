"""Choose the provider of attention: the one that an option names, or the first that supports a layer's tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dta_compile.errors import OptionError
from dta_compile.executable.layers import AttentionLayer
from dta_compile.ops.scoring import UNSCALED, Scoring
from dta_compile.runtime.attention import cudnn, triton
from dta_compile.runtime.attention.cpu import FlashCPU
from dta_compile.runtime.attention.provider import Provider
from dta_compile.runtime.attention.reference import Reference


def provider_of(layer: AttentionLayer, device: torch.device, choice: str) -> Provider:
    """Return the provider of a layer under `options={"attention": choice}`."""
    key, value = (torch.empty(spec.of_tokens(0), dtype=spec.dtype, device=device) for spec in layer.states[:2])
    return provider_for(choice, key[:, :1], value[:, :1], layer.scoring)


def provider_for(choice: str, query: torch.Tensor, value: torch.Tensor, scoring: Scoring = UNSCALED) -> Provider:
    """Return the provider named `choice`; for "auto" the first of `PROVIDERS` that supports such tensors.

    Raises:
        OptionError: the named provider does not support them.
    """
    if choice == "auto":
        return next(
            provider for make in PROVIDERS.values() if not isinstance(provider := make(query, value, scoring), str)
        )
    provider = PROVIDERS[choice](query, value, scoring)
    if isinstance(provider, str):
        raise OptionError(
            f"attention={choice!r} cannot run this model here",
            expected=provider,
            got=f"{query.dtype} on {query.device.type}, heads of {query.shape[-1]} and {value.shape[-1]}"
            + ("" if scoring.is_linear else ", a soft cap"),
            hint="attention='auto' picks one that can",
        )
    return provider


def _flash_cpu(query: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> Provider | str:
    types = (torch.float32, torch.float64, torch.bfloat16)
    if query.device.type == "cpu" and query.dtype in types and query.shape[-1] == value.shape[-1]:
        return FlashCPU()
    return "float32, float64 or bfloat16 on a CPU, keys and values of one size"


Make = Callable[[torch.Tensor, torch.Tensor, Scoring], Provider | str]

# Factories by name: given an example query, value and scoring, each returns a provider, or its requirements as text.
# "auto" tries them in this order, the fastest first.
PROVIDERS: dict[str, Make] = {
    "cpu": _flash_cpu,
    "cudnn": cudnn.make,
    "triton": triton.make,
    "reference": lambda *_: Reference(),
}
