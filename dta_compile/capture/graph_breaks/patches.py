"""Avoid unnecessary graph breaks of Dynamo: a symbolic `is_causal`, `requires_grad_()` of a result, `tolist()`,
`assert x.item() < n`, `type(weight).__module__`, a comparison with a causal mask in `torch.nn.TransformerEncoder`, and
branches that are skipped where no rows are selected. And a graph for every size, by `take_along_dim` and `one_hot`.

`backend.py` patches Dynamo once, on import; only traces for this backend are affected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from dta_compile.attributes import attribute_set
from dta_compile.capture.dynamo import restarts
from dta_compile.capture.graph_breaks import hit_loops, selected_branches, selections
from dta_compile.integrations.tracing import in_our_graphs
from dta_compile.passes.program import name_of
from dta_compile.torch_compat import as_wrapper, frames, wrap_once
from dta_compile.torch_compat.autograd import get_inplace_requires_grad_allowed, set_inplace_requires_grad_allowed
from dta_compile.torch_compat.dynamo import (
    ConstantVariable,
    GetAttrVariable,
    InstructionTranslatorBase,
    OutputGraph,
    SideEffects,
    SliceVariable,
    SymNodeVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    VariableTracker,
)

# Instructions that compare a number with another.
COMPARING = {
    *("LOAD_FAST", "LOAD_CONST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_ATTR", "COMPARE_OP", "TO_BOOL", "CACHE"),
    *("BINARY_SUBSCR", "BINARY_OP"),
}


def avoid() -> None:
    """Patch Dynamo to trace these calls in graphs for this backend."""
    for owner, name, patched in (
        (TorchInGraphFunctionVariable, "call_function", _specialising_bools),
        (TensorVariable, "method_requires_grad_", _tracing_requires_grad),
        (TensorVariable, "method_tolist", _tracing_tolist),
        (TensorVariable, "method_item", _tracing_item),
        (TensorVariable, "call_method", _tracing_sizes),
        (GetAttrVariable, "call_method", _naming_modules),
        (TorchInGraphFunctionVariable, "call_function", _function_of_sizes),
        (TensorVariable, "call_method", _method_along_dim),
        (InstructionTranslatorBase, "step", selected_branches.taking_branches),
        (SideEffects, "mutation", selected_branches.noting_mutations),
        (OutputGraph, "compile_subgraph", selected_branches.refusing_open_branches),
        (torch.nn.modules.transformer, "_detect_is_causal_mask", _comparing_no_masks),
    ):
        wrap_once(owner, name, patched)


def _comparing_no_masks(original: Callable[..., bool]) -> Callable[..., bool]:
    """Trace `TransformerEncoder` without a comparison of its mask's values, which may choose a faster kernel."""

    def is_hinted(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    return in_our_graphs(is_hinted, original)


@as_wrapper
def _specialising_bools(call: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Specialise symbolic bools among attention's arguments, as in `is_causal=tokens > 1`, under a guard."""
    if self.value is torch.nn.functional.scaled_dot_product_attention and frames.is_ours(tx.output.compiler_fn):
        args, kwargs = [*map(_as_bool, args)], {name: _as_bool(value) for name, value in kwargs.items()}
    return call(self, tx, args, kwargs)


def _as_bool(value: Any) -> Any:
    if isinstance(value, SymNodeVariable) and isinstance(value.sym_num, torch.SymBool):
        return ConstantVariable.create(value.evaluate_expr())
    return value


@as_wrapper
def _naming_modules(call: Callable[..., Any], self: Any, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Trace `type(weight).__module__.startswith(...)`, by which PEFT asks whether a weight is quantised."""
    is_class = isinstance(self.obj, TorchInGraphFunctionVariable) and isinstance(self.obj.value, type)
    if is_class and self.name == "__module__" and frames.is_ours(tx.output.compiler_fn):
        return ConstantVariable.create(self.obj.value.__module__).call_method(tx, name, args, kwargs)
    return call(self, tx, name, args, kwargs)


@as_wrapper
def _function_of_sizes(call: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Trace `torch.take_along_dim`, and `one_hot` with a symbolic number of classes, by our definitions."""
    given = [*args, *kwargs.values()]
    is_along_dim = self.value is torch.take_along_dim and "out" not in kwargs
    is_of_tokens = self.value is torch.nn.functional.one_hot and any(isinstance(arg, SymNodeVariable) for arg in given)
    if (is_along_dim or is_of_tokens) and frames.is_ours(tx.output.compiler_fn):
        return VariableTracker.build(tx, _take_along_dim if is_along_dim else _one_hot).call_function(tx, args, kwargs)
    return call(self, tx, args, kwargs)


@as_wrapper
def _method_along_dim(
    call: Callable[..., Any], self: Any, tx: Any, name: str, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Trace `Tensor.take_along_dim` by our definition."""
    if name == "take_along_dim" and frames.is_ours(tx.output.compiler_fn):
        return VariableTracker.build(tx, _take_along_dim).call_function(tx, [self, *args], kwargs)
    return call(self, tx, name, args, kwargs)


def _take_along_dim(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Compute `torch.take_along_dim`, which makes sizes constants of a trace. Indices are taken modulo the size."""
    if dim is None:
        input, indices, dim = input.reshape(-1), indices.reshape(-1), 0
    axis, both = range(input.dim())[dim], zip(input.shape, indices.shape, strict=True)
    shared = [own if other == 1 else other for own, other in both]
    input = input.expand(*shared[:axis], input.shape[axis], *shared[axis + 1 :])
    indices = indices.expand(*shared[:axis], indices.shape[axis], *shared[axis + 1 :])
    return input.gather(axis, indices % input.shape[axis])


def _one_hot(input: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Compute `torch.nn.functional.one_hot` as torch traces it, but for its argument, which is a constant there."""
    return (input[..., None] == torch.arange(num_classes, device=input.device)).long()


@as_wrapper
def _tracing_requires_grad(method: Callable[..., Any], self: Any, tx: Any, requires_grad: Any = True) -> Any:
    """Trace `requires_grad_()` of a computed value, which PEFT's hook for checkpoints calls on embeddings.

    It changes no gradient of a parameter, so the graph only records that the value requires a gradient. One that is
    returned has a gradient of its own in eager mode: then the graph ends here.
    """
    asked = requires_grad is True or (requires_grad is not False and requires_grad.as_python_constant())
    value = self.as_proxy().node.meta["example_value"]
    if not asked or self.source or value.requires_grad or not restarts.traces_requires_grad(tx.output):
        return method(self, tx, requires_grad)
    before = get_inplace_requires_grad_allowed()
    set_inplace_requires_grad_allowed(True)
    try:
        value.requires_grad_()
    finally:
        set_inplace_requires_grad_allowed(before)
    self.requires_grad = self.as_proxy().node.meta[restarts.ASKED] = True
    return self


@as_wrapper
def _tracing_tolist(method: Callable[..., Any], self: Any, tx: Any) -> Any:
    """Trace `counts.tolist()` as unbacked SymInts: sizes of groups of slots, which `lower` does without.

    The numbers of `bincount(experts, minlength=E)` are E if all are places along an axis of that size.
    """
    if not restarts.traces_selections(tx.output):
        return method(self, tx)
    node = self.as_proxy().node
    is_loop = self.ndim == 1 and tx.instructions[tx.instruction_pointer].opname == "GET_ITER"
    iterates = is_loop and restarts.takes_branches(tx.output)
    if iterates and (iterator := hit_loops.hit_iterator(tx, self, as_integers=True)) is not None:
        return iterator
    least = node.kwargs.get("minlength") if name_of(node) == "bincount" else None
    if type(least) is int and (number := selections.places(node.args[0])) is not None and number <= least:
        first = SliceVariable([ConstantVariable.create(i) for i in (None, least, None)], tx)
        self = self.call_method(tx, "__getitem__", [first], {})
    with _sizes_of_data(tx.output):
        return method(self, tx)


@as_wrapper
def _tracing_sizes(call: Callable[..., Any], self: Any, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Trace `x.new_zeros(mask.sum(), n)`, which has a row for each selected token."""
    if name != "new_zeros" or not restarts.traces_selections(tx.output):
        return call(self, tx, name, args, kwargs)
    with _sizes_of_data(tx.output):
        return call(self, tx, name, args, kwargs)


def _sizes_of_data(output_graph: Any) -> contextlib.AbstractContextManager[None]:
    """Let torch trace numbers of a tensor as unbacked symbols for the length of a block."""
    return attribute_set(output_graph.fake_mode, "allow_scalar_outputs", True)


@as_wrapper
def _tracing_item(method: Callable[..., Any], self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Trace `item()` of a number that is known, and in `assert x.max().item() < n`, which asks about a tensor as well.

    Dynamo keeps an assertion about a tensor in the captured graph. The self-check runs it; the tree does not, since
    no output depends on it.
    """
    if not restarts.traces_selections(tx.output):
        return method(self, tx, *args, **kwargs)
    if (number := hit_loops.known_index(self)) is not None:
        return ConstantVariable.create(number)
    is_integer = self.ndim == 0 and self.dtype in (torch.int64, torch.int32)
    return self if is_integer and _is_asserted(tx) else method(self, tx, *args, **kwargs)


def _is_asserted(translator: Any) -> bool:
    """Return whether a number on the stack is compared next, and the result asserted."""
    following = translator.instructions[translator.instruction_pointer :]
    names = [instruction.opname for instruction in following[:12]]
    while names and names[0] in COMPARING:
        names.pop(0)
    return len(names) > 1 and names[0].startswith("POP_JUMP") and names[1] == "LOAD_ASSERTION_ERROR"
