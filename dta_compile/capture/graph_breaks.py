"""Three calls that Dynamo ends a graph at, although nothing in them keeps a model from being one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, TensorVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from dta_compile.capture import dynamo


def avoid() -> None:
    """Trace them in graphs of this backend, from now on."""
    for owner, name, kept in (
        (TorchInGraphFunctionVariable, "call_function", _with_bools),
        (TensorVariable, "method_requires_grad_", _of_results),
        (TensorVariable, "method_tolist", _as_sizes),
    ):
        method = getattr(owner, name, None)
        if method is not None and not hasattr(method, "of_dta"):
            setattr(owner, name, kept(method))


def _with_bools(call: Callable[..., Any]) -> Callable[..., Any]:
    """`is_causal=query.shape[2] == key.shape[2]`, or `tokens > 1`, is a bool for attention: a guard says which."""

    @functools.wraps(call)
    def call_function(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.value is torch.nn.functional.scaled_dot_product_attention and dynamo.is_ours(tx.output.compiler_fn):
            args, kwargs = [*map(_as_bool, args)], {name: _as_bool(value) for name, value in kwargs.items()}
        return call(self, tx, args, kwargs)

    call_function.of_dta = True  # type: ignore[attr-defined]
    return call_function


def _as_bool(value: Any) -> Any:
    if isinstance(value, SymNodeVariable) and isinstance(value.sym_num, torch.SymBool):
        return ConstantVariable.create(value.evaluate_expr())
    return value


def _of_results(method: Callable[..., Any]) -> Callable[..., Any]:
    """`embeddings.requires_grad_()` of a value that the graph computes, as PEFT's hook has it for checkpoints, changes
    no gradient of a parameter: in a graph it only says so."""

    @functools.wraps(method)
    def method_requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        asked = requires_grad is True or (requires_grad is not False and requires_grad.as_python_constant())
        value = self.as_proxy().node.meta["example_value"]
        if not asked or self.source or value.requires_grad or not dynamo.is_ours(tx.output.compiler_fn):
            return method(self, tx, requires_grad)
        before = torch._C._functorch.get_inplace_requires_grad_allowed()
        torch._C._functorch.set_inplace_requires_grad_allowed(True)
        try:
            value.requires_grad_()
        finally:
            torch._C._functorch.set_inplace_requires_grad_allowed(before)
        self.requires_grad = True
        return self

    method_requires_grad_.of_dta = True  # type: ignore[attr-defined]
    return method_requires_grad_


def _as_sizes(method: Callable[..., Any]) -> Callable[..., Any]:
    """`counts.tolist()` gives numbers that a graph computes: as sizes of groups, which `lower` does without."""

    @functools.wraps(method)
    def method_tolist(self: Any, tx: Any) -> Any:
        if not dynamo.traces_selections(tx.output):
            return method(self, tx)
        mode = tx.output.fake_mode
        before, mode.allow_scalar_outputs = mode.allow_scalar_outputs, True
        try:
            return method(self, tx)
        finally:
            mode.allow_scalar_outputs = before

    method_tolist.of_dta = True  # type: ignore[attr-defined]
    return method_tolist
