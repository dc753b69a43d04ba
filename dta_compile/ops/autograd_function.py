"""Opaque calls of a user's `torch.autograd.Function`, whose backward need not be the derivative of its forward.

Lowering traces such a call as one opaque operator over its tensors; afterwards a submodule of the graph runs the
function with the user's own backward. It has a token rule only if it is pointwise: else a call on values of tokens
lands in the epilogue, and a call on weights alone in the token region, like any other operator on weights.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.autograd import Function

from dta_compile.errors import RefusalError
from dta_compile.ops.library import DrawCapture

# The calls in the graph that is being lowered; the operator's `index` is a position in this list.
_calls: list[AutogradFunctionCall] = []

LIBRARY = torch.library.Library("dta_opaque", "DEF")
LIBRARY.define("call(Tensor[] tensors, SymInt[] sizes, int index) -> Tensor[]")
CALL = torch.ops.dta_opaque.call.default


class AutogradFunctionCall(torch.nn.Module):
    """One application of a custom autograd function, with the autocast state at its capture."""

    def __init__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.forward_graph, self.backward_graph, *self.template = arguments
        self.keywords = keywords
        device = next((arg.device.type for arg in self.template if isinstance(arg, torch.Tensor)), "cpu")
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.template = [_placeholder(arg) for arg in self.template]
        self.present: list[bool] = []
        self.returns_tuple = False
        self.is_pointwise = False  # by token in both directions, with a backward that is linear in the gradients
        # If features count: dimensions in front of them, and which arguments are of tokens.
        self.over_tokens: tuple[int, list[bool]] | None = None
        self.is_linear = False
        self.reason: str | None = None  # why it is not pointwise
        self.draws = self._is_impure = False  # FX keeps unused calls of modules with `_is_impure`

    def forward(self, tensors: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Run the function under ordinary autograd; return its tensor outputs."""
        device, dtype, enabled = self.autocast
        with torch.autocast(device, dtype, enabled):
            arguments = self.arguments(tensors, sizes)
            results = torch.ops.higher_order.autograd_function_apply(
                self.forward_graph, self.backward_graph, *arguments, **self.keywords
            )
        return [result for result in _as_tuple(results) if isinstance(result, torch.Tensor)]

    def shapes(self, tensors: list[torch.Tensor], sizes: list[Any]) -> list[torch.Tensor]:
        """Run the forward on fake tensors, and record which outputs are tensors and whether it is random."""
        with DrawCapture() as draws:
            results, _ = fx.Interpreter(self.forward_graph).run(*self.arguments(tensors, sizes))
        self.draws = self._is_impure = bool(draws.results)
        self.returns_tuple = isinstance(results, (tuple, list))
        self.present = [isinstance(result, torch.Tensor) for result in _as_tuple(results)]
        return [result.clone() for result in _as_tuple(results) if isinstance(result, torch.Tensor)]

    def outputs(self, tensors: list[torch.Tensor], sizes: list[Any]) -> tuple[list[Any], Any]:
        """Run the forward on fake tensors; return its outputs and what it saves."""
        results, saved = fx.Interpreter(self.forward_graph).run(*self.arguments(tensors, sizes))
        return list(_as_tuple(results)), saved

    def gradients(self, of_outputs: list[Any], saved: Any) -> list[Any]:
        """Run the backward on fake tensors."""
        return list(_as_tuple(fx.Interpreter(self.backward_graph).run(*of_outputs, *saved)))

    def mark_pointwise(self) -> None:
        """Take the function for pointwise; it gets no sizes, on which nothing depends."""
        self.is_pointwise = True
        self.template = [1 if arg is torch.SymInt else arg for arg in self.template]

    def arguments(self, tensors: list[torch.Tensor], sizes: list[Any]) -> Iterator[Any]:
        """Return the function's arguments, with these tensors and sizes among them."""
        tensor, size = iter(tensors), iter(sizes)
        kinds = {torch.Tensor: tensor, torch.SymInt: size}
        return (next(kinds[arg]) if isinstance(arg, type) else arg for arg in self.template)


def capture(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Trace one application as an opaque operator; return the function's results."""
    call = AutogradFunctionCall(arguments, keywords)
    _calls.append(call)
    tensors = [arg for arg in arguments if isinstance(arg, torch.Tensor)]
    sizes = [arg for arg in arguments if isinstance(arg, torch.SymInt)]
    tensor_results = iter(CALL(tensors, sizes, len(_calls) - 1))
    results = tuple(next(tensor_results) if present else None for present in call.present)
    return results if call.returns_tuple else results[0]


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """Scope for tracing a graph and embedding its calls; clears the calls also after a failure."""
    try:
        yield
    finally:
        _calls.clear()


@contextlib.contextmanager
def refused(place: str) -> Iterator[None]:
    """Scope for a call that Dynamo did not look into: a function applied there is traced without its own backward."""
    apply, thread = vars(Function)["apply"], threading.get_ident()

    def refuse(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return apply.__get__(None, cls)(*args, **kwargs)
        raise RefusalError(
            "a torch.autograd.Function is allowed in graphs, which hides its backward",
            where=place,
            expected="functions that Dynamo traces in both directions",
            got=f"{cls.__module__}.{cls.__qualname__}.apply",
            hint="remove torch.compiler.allow_in_graph, or compile what does not train through it",
        )

    with mock.patch.object(Function, "apply", classmethod(refuse)):
        yield


@torch.library.register_fake("dta_opaque::call", lib=LIBRARY)
def _call_fake(tensors: list[torch.Tensor], sizes: list[Any], index: int) -> list[torch.Tensor]:
    return _calls[index].shapes(tensors, sizes)


def embed(module: fx.GraphModule) -> None:
    """Replace the opaque operators of a lowered graph by calls of submodules."""
    for node in list(module.graph.nodes):
        if node.target is CALL:
            name = f"autograd_function_{node.args[2]}"
            module.add_submodule(name, _calls[node.args[2]])
            with module.graph.inserting_before(node):
                call = module.graph.call_module(name, node.args[:2])
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            module.graph.erase_node(node)


def custom_function(node: fx.Node) -> AutogradFunctionCall | None:
    """Return the call that a node stands for, if it is one of a custom function."""
    module = node.graph.owning_module.get_submodule(node.target) if node.op == "call_module" else None
    return module if isinstance(module, AutogradFunctionCall) else None


def _placeholder(arg: Any) -> Any:
    return torch.Tensor if isinstance(arg, torch.Tensor) else torch.SymInt if isinstance(arg, torch.SymInt) else arg


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)
