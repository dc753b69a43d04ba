"""PEFT's adapters of expert weights (`target_parameters`) in graphs for this backend.

PEFT's wrapper parametrises the module again in every call, which breaks the graph, and materialises the product of the
adapters' factors. In a graph for the tree, rows are multiplied by one factor after the other, as in a linear layer with
an adapter. Importing this module patches the wrapper's forward; `registration` imports it with PEFT.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper

from dta_compile.integrations.tracing import in_our_graphs
from dta_compile.integrations.transformers_experts import PARAMETERS, LowRank, experts_forward, is_declared


def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the experts under one or several wrappers, with their active adapters; `NotImplemented` for other calls."""
    wrappers = _wrappers(self)
    if kwargs or len(args) != 2 or not _is_understood(wrappers):
        return NotImplemented
    return experts_forward(wrappers[-1].base_layer, x, *args, _adapters(wrappers))


def _wrappers(outer: Any) -> list[Any]:
    """Return a wrapper and the wrappers inside it, outermost first."""
    wrappers = [outer]
    while isinstance(wrappers[-1].base_layer, ParamWrapper):
        wrappers.append(wrappers[-1].base_layer)
    return wrappers


def _is_understood(wrappers: list[Any]) -> bool:
    """Return whether a call only computes the experts as declared with adapters of weights, without hooks or merges."""
    experts = wrappers[-1].base_layer
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    if not is_declared(type(experts), implementation):
        return False
    are_weights = all(module.parameter_name in PARAMETERS and not module.merged for module in wrappers)
    return are_weights and not any(_has_hooks(module) for module in (*wrappers[1:], experts))


def _has_hooks(module: torch.nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(len(each) > 0 for each in hooks)


def _adapters(wrappers: list[Any]) -> dict[str, list[LowRank]]:
    factors: dict[str, list[LowRank]] = {}
    for wrapper in wrappers:
        if wrapper.disable_adapters:
            continue
        for name in wrapper.active_adapters:
            if name in wrapper.lora_A:
                factors.setdefault(wrapper.parameter_name, []).append(LowRank(*wrapper.get_delta_factors(name)))
    return factors


if hasattr(ParamWrapper, "get_delta_factors"):  # older releases have none
    ParamWrapper.forward = in_our_graphs(forward, ParamWrapper.forward)
