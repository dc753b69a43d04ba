"""`experts_implementation="dta"` for transformers, and its other implementations where Dynamo traces for this backend.

A class of experts in transformers declares what it computes: up projection, gate or activation, down projection, and
which of biases and norms it has; its implementations differ in how. What stands in graphs for the tree are
`ops.experts`, with the model's own gate, activation and norm between them. Python's loop over experts ends a graph, and
what sorts tokens by expert hides that they are computed one by one: so the function that chooses between
implementations is wrapped. Importing the module does both; `registration` does when transformers is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from dta_compile.ops.experts import expert_linear, expert_sum
from dta_compile.tracing import traces_for_this_backend

__all__ = ["NAME", "experts_forward"]

NAME = "dta"
# Those that compute the same in full precision; others round to fewer bits.
EXACT = ("eager", "batched_mm", "grouped_mm", NAME)


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers' `use_experts_implementation` classes compute, `self` being one.

    Args:
        hidden_states: `[T, D]`.
        top_k_index: `[T, k]`; numbers that are no expert's count for nothing.
        top_k_weights: `[T, k]`.

    Returns:
        `[T, D]` in the dtype of `hidden_states`.
    """
    return _forward(self, hidden_states, top_k_index, top_k_weights)


def _grouped_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """As "grouped_mm" computes: in the dtype of the weights, whatever autocast says."""
    with torch.autocast(hidden_states.device.type, enabled=False):
        return _forward(self, hidden_states.to(self.down_proj.dtype), top_k_index, top_k_weights).to(
            hidden_states.dtype
        )


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    transposed = self.is_transposed
    name = "gate_up_proj" if self.has_gate else "up_proj"
    biases = [getattr(self, f"{one}_bias") if self.has_bias else None for one in (name, "down_proj")]
    rows = expert_linear(hidden_states, top_k_index, getattr(self, name), biases[0], transposed=transposed)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    if self.has_post_expert_norm:
        rows = expert_linear(rows, top_k_index, self.down_proj, biases[1], transposed=transposed)
        out = (self.post_expert_norm(rows) * top_k_weights[..., None]).sum(-2)
    else:
        out = expert_sum(rows, top_k_index, top_k_weights, self.down_proj, biases[1], transposed=transposed)
    result: torch.Tensor = out.to(hidden_states.dtype)
    return result


_chosen = ExpertsInterface.get_interface


@functools.wraps(_chosen)
def get_interface(
    self: ExpertsInterface, experts_implementation: str, default: Callable[..., Any]
) -> Callable[..., Any]:
    """The function of an implementation; ours in a graph for this backend, if it computes the same."""
    if experts_implementation in EXACT and torch.compiler.is_compiling() and traces_for_this_backend():
        return _grouped_forward if experts_implementation == "grouped_mm" else experts_forward
    found: Callable[..., Any] = _chosen(self, experts_implementation, default)
    return found


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
ExpertsInterface.get_interface = get_interface
