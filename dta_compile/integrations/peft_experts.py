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
from dta_compile.integrations.transformers_experts import (
    PARAMETERS,
    LowRank,
    forward_with_adapters,
    is_declared,
)

__all__: list[str] = []

_forward_of_peft = ParamWrapper.forward


@functools.wraps(_forward_of_peft)
def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The experts under one or several wrappers, with their active adapters."""
    if torch.compiler.is_compiling() and traces_for_this_backend() and not kwargs and len(args) == 2:
        wrappers = _wrappers(self)
        if _is_understood(wrappers):
            return forward_with_adapters(wrappers[-1].base_layer, x, *args, _adapters(wrappers))
    found: torch.Tensor = _forward_of_peft(self, x, *args, **kwargs)
    return found


def _wrappers(outer: Any) -> list[Any]:
    """A wrapper and those that it wraps."""
    found = [outer]
    while isinstance(found[-1].base_layer, ParamWrapper):
        found.append(found[-1].base_layer)
    return found


def _is_understood(wrappers: list[Any]) -> bool:
    """Whether all that a call of the experts would do is to compute what they declare, with adapters of weights."""
    experts = wrappers[-1].base_layer
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    if not is_declared(type(experts), implementation):
        return False
    are_weights = all(one.parameter_name in PARAMETERS and not one.merged for one in wrappers)
    return are_weights and not any(_has_hooks(one) for one in (*wrappers[1:], experts))


def _has_hooks(module: torch.nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(len(one) > 0 for one in hooks)


def _adapters(wrappers: list[Any]) -> dict[str, list[LowRank]]:
    found: dict[str, list[LowRank]] = {}
    for wrapper in wrappers:
        if wrapper.disable_adapters:
            continue
        for name in wrapper.active_adapters:
            if name in wrapper.lora_A:
                found.setdefault(wrapper.parameter_name, []).append(LowRank(*wrapper.get_delta_factors(name)))
    return found


if hasattr(ParamWrapper, "get_delta_factors"):  # older releases have none
    ParamWrapper.forward = forward
