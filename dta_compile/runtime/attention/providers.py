"""The providers of a chunk's attention, by name, and the choice of one: one `interface`, several implementations."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dta_compile.errors import OptionError
from dta_compile.runtime.attention import triton
from dta_compile.runtime.attention.cpu import FlashCPU
from dta_compile.runtime.attention.interface import Provider
from dta_compile.runtime.attention.reference import Reference

__all__ = ["PROVIDERS", "provider_for"]


def provider_for(choice: str, query: torch.Tensor, value: torch.Tensor, softcap: float = 0.0) -> Provider:
    """The provider named by `options={"attention": choice}`; for "auto" the fastest that takes tensors like these.

    Raises:
        OptionError: the named one does not take them.
    """
    if choice == "auto":
        return next(found for make in PROVIDERS.values() if not isinstance(found := make(query, value, softcap), str))
    found = PROVIDERS[choice](query, value, softcap)
    if isinstance(found, str):
        raise OptionError(
            f"attention={choice!r} cannot run this model here",
            expected=found,
            got=f"{query.dtype} on {query.device.type}, heads of {query.shape[-1]} and {value.shape[-1]}"
            + (", a soft cap" if softcap else ""),
            hint="attention='auto' picks one that can",
        )
    return found


def _reference(query: torch.Tensor, value: torch.Tensor, softcap: float) -> Provider | str:
    return Reference()


def _flash_cpu(query: torch.Tensor, value: torch.Tensor, softcap: float) -> Provider | str:
    types = (torch.float32, torch.float64, torch.bfloat16)
    if query.device.type == "cpu" and query.dtype in types and query.shape[-1] == value.shape[-1]:
        return FlashCPU()
    return "float32, float64 or bfloat16 on a CPU, keys and values of one size"


Make = Callable[[torch.Tensor, torch.Tensor, float], Provider | str]

# By name: how each is made for queries and values like these and a soft cap, or what it takes instead; "auto" tries
# them in turn.
PROVIDERS: dict[str, Make] = {
    "cpu": _flash_cpu,
    "triton": triton.make,
    "reference": _reference,
}
