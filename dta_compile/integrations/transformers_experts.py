"""`experts_implementation="dta"` for transformers, and its other implementations where Dynamo traces for this backend.

A class of experts in transformers declares what it computes: up projection, gate or activation, down projection, and
which of biases and norms it has; its implementations differ in how. What stands in graphs for the tree are
`ops.experts`, with the model's own gate, activation and norm between them. Python's loop over experts ends a graph, and
what sorts tokens by expert hides that they are computed one by one: so the function that chooses between
implementations is wrapped. Importing the module does both; `registration` does when transformers is there.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from dta_compile.integrations.tracing import traces_for_this_backend
from dta_compile.ops.experts import expert_linear, expert_sum

logger = logging.getLogger("dta_compile")

NAME = "dta"
# Those that compute the same in full precision; others round to fewer bits.
PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")  # which adapters are understood of
EXACT = ("eager", "batched_mm", "grouped_mm", NAME)


class LowRank(NamedTuple):
    """What an adapter adds to a parameter: `scaling * left @ right`, `[E, a, r]` and `[E, r, b]`."""

    left: torch.Tensor
    right: torch.Tensor
    scaling: float


Adapters = Mapping[str, Sequence[LowRank]]  # by name of the parameter


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
    return forward_with_adapters(self, hidden_states, top_k_index, top_k_weights, {})


def forward_with_adapters(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    adapters: Adapters,
) -> torch.Tensor:
    """The same for weights with adapters, which are multiplied one after the other: no weight is made of them."""
    if self.config._experts_implementation != "grouped_mm":
        return _forward(self, hidden_states, top_k_index, top_k_weights, adapters)
    # That one computes in the dtype of the weights, whatever autocast says.
    with torch.autocast(hidden_states.device.type, enabled=False):
        rows = hidden_states.to(self.down_proj.dtype)
        return _forward(self, rows, top_k_index, top_k_weights, adapters).to(hidden_states.dtype)


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    adapters: Adapters,
) -> torch.Tensor:
    up = "gate_up_proj" if self.has_gate else "up_proj"
    rows = _linear(self, up, hidden_states, top_k_index, adapters)
    rows = _each_place(self._apply_gate if self.has_gate else self.act_fn, rows)
    if getattr(self, "has_post_expert_norm", False):  # older transformers have none
        rows = _each_place(self.post_expert_norm, _linear(self, "down_proj", rows, top_k_index, adapters))
        out = (rows * top_k_weights[..., None]).sum(-2)
    else:
        weight, bias, transposed = _parameters(self, "down_proj")
        out = expert_sum(rows, top_k_index, top_k_weights, weight, bias, transposed=transposed)
        for inner, outer, scaling in _factors(self, "down_proj", adapters):
            narrow = expert_linear(rows, top_k_index, inner, transposed=transposed)
            out = out + expert_sum(narrow, top_k_index, top_k_weights, outer, transposed=transposed) * scaling
    result: torch.Tensor = out.to(hidden_states.dtype)
    return result


def _each_place(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """A gate, activation or norm of rows `[T, k, F]`; those of other packages may count on rows `[n, F]`."""
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
    """The factors of adapters in the order in which rows are multiplied by them."""
    return [
        (left, right, scaling) if self.is_transposed else (right, left, scaling)
        for left, right, scaling in adapters.get(name, ())
    ]


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def computes_as_declared(forward: Callable[..., Any], implementation: str) -> bool:
    """Whether a class of experts with this loop (`forward` of "eager") computes what its declaration says.

    transformers' own loops do. Another package's may do something else in its loop; what it declares is what it says
    that the other implementations compute.
    """
    return implementation in EXACT and (implementation != "eager" or _is_of_transformers(forward))


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def is_declared(cls: Any, implementation: str | None) -> bool:
    """Whether instances of a class are called through transformers' interface, and compute what it declares."""
    code = getattr(cls.forward, "__code__", None)
    if implementation is None or code is None or code.co_filename != moe.__file__:
        return False
    known = inspect.getclosurevars(cls.forward).nonlocals
    is_usual = type(known["experts_interface"]) is ExpertsInterface
    return is_usual and bool(computes_as_declared(known["original_forward"], implementation))


def _is_of_transformers(function: Callable[..., Any]) -> bool:
    return str(function.__module__).split(".")[0] in ("torch", "transformers")


_chosen = getattr(ExpertsInterface, "get_interface", None)  # early releases of transformers 5 have none


def get_interface(self: ExpertsInterface, experts_implementation: str, default: Callable[..., Any]) -> Any:
    """The function of an implementation; ours in a graph for this backend, if it computes the same."""
    is_ours = torch.compiler.is_compiling() and traces_for_this_backend()
    is_usual = type(self) is ExpertsInterface  # not that of weights in eight bits
    if is_ours and is_usual and computes_as_declared(default, experts_implementation):
        return experts_forward
    assert _chosen is not None
    return _chosen(self, experts_implementation, default)


# All that a class of experts can declare; with more, it may compute something else than `experts_forward`.
UNDERSTOOD = {"experts_class", "experts_interface", "is_concatenated", "is_transposed", "has_bias", "has_gate"}
UNDERSTOOD |= {"has_post_expert_norm"}
_beyond = inspect.signature(moe.use_experts_implementation).parameters.keys() - UNDERSTOOD
if _beyond:
    logger.warning("dta: transformers' experts run as they are, as they may declare what is not known: %s", _beyond)
else:
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
if _chosen is not None and not _beyond:
    ExpertsInterface.get_interface = functools.wraps(_chosen)(get_interface)
