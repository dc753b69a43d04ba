"""transformers' classes of experts that declare no computation, in graphs for this backend.

They loop over the experts that have tokens. How many these are depends on data, so the loop breaks the graph, whereas
`ops.experts` computes the same of all experts. Importing this module replaces the loops in such graphs; `registration`
imports it with the first of these models.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from dta_compile.integrations.tracing import in_our_graphs
from dta_compile.ops.experts.operators import expert_linear, expert_sum
from dta_compile.registration import when_loaded

# Classes with a gate and without biases, by module.
LOOPS = {
    "transformers.models.longcat_flash.modeling_longcat_flash": "LongcatFlashExperts",
    "transformers.models.step3p7.modeling_step3p7": "Step3p7Experts",
}


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> Any:
    """Compute the experts of `self`; `NotImplemented` if they have no weights.

    Zero-computation experts, whose ids follow those of the experts with weights, return their tokens.

    Args:
        hidden_states: `[T, D]`.
        top_k_index: `[T, k]` expert ids.
        top_k_weights: `[T, k]`.

    Returns:
        `[T, D]` in the dtype of `hidden_states`.
    """
    if self.down_proj is None:
        return NotImplemented
    has_weights = top_k_index < self.down_proj.shape[0]
    expert = torch.where(has_weights, top_k_index, -1)
    rows = expert_linear(hidden_states, expert, self.gate_up_proj)
    if hasattr(self, "_apply_gate"):
        rows = self._apply_gate(rows)
    else:
        gate, up = rows.chunk(2, dim=-1)
        rows = self.act_fn(gate) * up
    out = expert_sum(rows, expert, top_k_weights, self.down_proj)
    if getattr(self, "zero_expert_num", 0):
        out = out + hidden_states * top_k_weights.masked_fill(has_weights, 0).sum(-1, keepdim=True)
    return out.to(hidden_states.dtype)


def _replace_loop(module: types.ModuleType) -> None:
    experts = getattr(module, LOOPS[module.__name__], None)
    if experts is None or hasattr(experts.forward, "__wrapped__"):  # missing, or declared by now
        return
    experts.forward = in_our_graphs(experts_forward, experts.forward)


for _name in LOOPS:
    when_loaded(_name, _replace_loop)
