"""PEFT's adapters of expert weights (`target_parameters`), where Dynamo traces for this backend.

PEFT's wrapper parametrises the module anew in every call, which ends a graph, and makes whole weights of the adapters'
factors. In a graph for the tree rows are multiplied by one factor after the other, as in a linear layer with an
adapter. Importing the module wraps the wrapper's forward; `registration` does when PEFT is there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper

from dta_compile.integrations.tracing import traces_for_this_backend
from dta_compile.integrations.transformers_experts import EXACT, LowRank, forward_with_adapters

__all__: list[str] = []

_forward = ParamWrapper.forward


@functools.wraps(_forward)
def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The experts under one or several wrappers, with their active adapters."""
    if torch.compiler.is_compiling() and traces_for_this_backend() and not kwargs and len(args) == 2:
        wrappers = _wrappers(self)
        experts = wrappers[-1].base_layer
        if _is_understood(experts) and not any(wrapper.merged for wrapper in wrappers):
            index, weights = args
            return forward_with_adapters(experts, x, index, weights, _adapters(wrappers))
    found: torch.Tensor = _forward(self, x, *args, **kwargs)
    return found


def _wrappers(outer: Any) -> list[Any]:
    """A wrapper and those that it wraps."""
    found = [outer]
    while isinstance(found[-1].base_layer, ParamWrapper):
        found.append(found[-1].base_layer)
    return found


def _is_understood(experts: Any) -> bool:
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return hasattr(experts, "has_post_expert_norm") and implementation in EXACT


def _adapters(wrappers: list[Any]) -> dict[str, list[LowRank]]:
    found: dict[str, list[LowRank]] = {}
    for wrapper in wrappers:
        if wrapper.disable_adapters:
            continue
        for name in wrapper.active_adapters:
            if name in wrapper.lora_A:
                found.setdefault(wrapper.parameter_name, []).append(LowRank(*wrapper.get_delta_factors(name)))
    return found


ParamWrapper.forward = forward
