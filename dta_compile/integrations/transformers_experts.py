"""`experts_implementation="dta"` for transformers, and its other implementations in graphs for this backend.

A class of experts in transformers declares its computation: up projection, gate or activation, down projection, and
optional biases and norm. All implementations compute this. Graphs for the tree contain `ops.experts`, with the model's
own gate, activation and norm between them, because a Python loop over experts breaks the graph, and sorting slots by
expert hides that they are independent. So the function that selects an implementation is wrapped. Importing this module
does that and registers ours; `registration` imports it with transformers.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from dta_compile.integrations.tracing import in_our_graphs
from dta_compile.ops.experts.operators import expert_linear, expert_sum

logger = logging.getLogger("dta_compile")

NAME = "dta"
PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")  # parameters that adapters are supported for
# Implementations that compute the same in full precision; others round to fewer bits.
EXACT = ("eager", "batched_mm", "grouped_mm", NAME)


class LowRank(NamedTuple):
    """Low-rank update of a parameter by an adapter: `scaling * left @ right`, `[E, a, r]` and `[E, r, b]`."""

    left: torch.Tensor
    right: torch.Tensor
    scaling: float


Adapters = Mapping[str, Sequence[LowRank]]  # by name of the parameter


def experts_forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    adapters: Adapters | None = None,
) -> torch.Tensor:
    """Compute the experts of `self`, an instance of a transformers class with `use_experts_implementation`.

    Args:
        hidden_states: `[T, D]`.
        top_k_index: `[T, k]` expert ids; slots with an invalid id add nothing.
        top_k_weights: `[T, k]`.
        adapters: rows are multiplied by one of their factors after the other, not by merged weights.

    Returns:
        `[T, D]` in the dtype of `hidden_states`.
    """
    adapters = adapters or {}
    if self.config._experts_implementation != "grouped_mm":
        return _forward(self, hidden_states, top_k_index, top_k_weights, adapters)
    # "grouped_mm" computes in the dtype of the weights, even under autocast.
    with torch.autocast(hidden_states.device.type, enabled=False):
        rows = hidden_states.to(self.down_proj.dtype)
        return _forward(self, rows, top_k_index, top_k_weights, adapters).to(hidden_states.dtype)


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, adapters: Adapters
) -> torch.Tensor:
    up = "gate_up_proj" if self.has_gate else "up_proj"
    rows = _linear(self, up, hidden_states, top_k_index, adapters)
    rows = _on_each_slot(self._apply_gate if self.has_gate else self.act_fn, rows)
    if getattr(self, "has_post_expert_norm", False):  # missing in older transformers
        rows = _on_each_slot(self.post_expert_norm, _linear(self, "down_proj", rows, top_k_index, adapters))
        out = (rows * top_k_weights[..., None]).sum(-2)
    else:
        weight, bias, transposed = _parameters(self, "down_proj")
        out = expert_sum(rows, top_k_index, top_k_weights, weight, bias, transposed=transposed)
        for inner, outer, scaling in _factors(self, "down_proj", adapters):
            narrow = expert_linear(rows, top_k_index, inner, transposed=transposed)
            out = out + expert_sum(narrow, top_k_index, top_k_weights, outer, transposed=transposed) * scaling
    return out.to(hidden_states.dtype)


def _on_each_slot(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Apply a gate, activation or norm to slots `[T, k, F]`; functions of other packages may expect rows `[n, F]`."""
    if _is_of_transformers(function):
        return function(rows)
    return torch.stack([function(row) for row in rows.unbind(1)], 1)


def _linear(self: Any, name: str, rows: torch.Tensor, expert: torch.Tensor, adapters: Adapters) -> torch.Tensor:
    weight, bias, transposed = _parameters(self, name)
    out = expert_linear(rows, expert, weight, bias, transposed=transposed)
    for inner, outer, scaling in _factors(self, name, adapters):
        narrow = expert_linear(rows, expert, inner, transposed=transposed)
        out = out + expert_linear(narrow, expert, outer, transposed=transposed) * scaling
    return out


def _parameters(self: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    return getattr(self, name), getattr(self, f"{name}_bias") if self.has_bias else None, self.is_transposed


def _factors(self: Any, name: str, adapters: Adapters) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """Return the factors of adapters in the order in which rows are multiplied by them."""
    return [
        (left, right, scaling) if self.is_transposed else (right, left, scaling)
        for left, right, scaling in adapters.get(name, ())
    ]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def computes_as_declared(forward: Callable[..., Any], implementation: str) -> bool:
    """Return whether a class of experts with this loop (`forward` of "eager") computes what it declares.

    transformers' own loops do. A loop of another package may compute something else; then the declaration only holds
    for the other implementations.
    """
    return implementation in EXACT and (implementation != "eager" or _is_of_transformers(forward))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_declared(cls: Any, implementation: str | None) -> bool:
    """Return whether instances of a class are called through transformers' interface and compute what it declares."""
    code = getattr(cls.forward, "__code__", None)
    if implementation is None or code is None or code.co_filename != moe.__file__:
        return False
    known = inspect.getclosurevars(cls.forward).nonlocals
    is_usual = type(known["experts_interface"]) is ExpertsInterface
    return is_usual and bool(computes_as_declared(known["original_forward"], implementation))


def _is_of_transformers(function: Callable[..., Any]) -> bool:
    return str(function.__module__).split(".")[0] in ("torch", "transformers")


def get_interface(self: ExpertsInterface, experts_implementation: str, default: Callable[..., Any]) -> Any:
    """Return our function in place of an implementation's that computes the same, else `NotImplemented`."""
    is_usual = type(self) is ExpertsInterface  # not the subclass for 8-bit weights
    return experts_forward if is_usual and computes_as_declared(default, experts_implementation) else NotImplemented


# All known declarations of a class of experts; with others it may compute something else than `experts_forward`.
KNOWN = {"experts_class", "experts_interface", "is_concatenated", "is_transposed", "has_bias", "has_gate"}
KNOWN |= {"has_post_expert_norm"}
_unknown = inspect.signature(moe.use_experts_implementation).parameters.keys() - KNOWN
if _unknown:
    logger.warning("dta: transformers' experts run as they are, as they may declare what is not known: %s", _unknown)
else:
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
if hasattr(ExpertsInterface, "get_interface") and not _unknown:  # missing in early transformers 5
    ExpertsInterface.get_interface = in_our_graphs(get_interface, ExpertsInterface.get_interface)
