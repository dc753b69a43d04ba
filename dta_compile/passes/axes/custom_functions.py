"""Derive what calls of a user's `torch.autograd.Function` may do over a tree from the operators of both directions.

Chunks give a function the gradients of a shared value as parts or sums of what eager execution gives it, call by call:
backward has to be linear in them. On values of tokens, both directions have to be pointwise, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.attributes import attribute_set
from dta_compile.ops.autograd_function import AutogradFunctionCall, custom_function
from dta_compile.passes.axes.tokenwise_operators import pointwise, rule_for
from dta_compile.passes.graphs.operators import SAME_ENTRIES, aten
from dta_compile.passes.program import Program, name_of, tensors_of
from dta_compile.passes.symbols import SYMBOLIC, expression
from dta_compile.passes.tracing import tracing
from dta_compile.torch_compat.tensors import TorchDispatchMode, pytree

Shape = tuple[sympy.Expr, ...]

# Linear in the first argument, if no other one depends on the gradient.
OF_FIRST = SAME_ENTRIES | {aten.neg.default, aten.div.Tensor, aten.sum.default, aten.sum.dim_IntList, aten.mean.dim}
# Linear in either of two arguments, if the other one does not depend on the gradient.
OF_EITHER = frozenset({aten.mul.Tensor, aten.mm.default, aten.bmm.default})
# Linear in their tensors together; `where` has a condition in front.
OF_ALL = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default, aten.where.self})
WRITES_ZERO = frozenset({aten.masked_fill.Scalar, aten.masked_fill_.Scalar})
ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})
NUMBERS = frozenset({aten.scalar_tensor.default, aten.full.default, aten.full_like.default})

CONSTANTS = ZEROS | NUMBERS | {aten.ones_like.default}


def mark_custom_functions(program: Program) -> None:
    """Mark calls of custom functions as linear and pointwise; pointwise ones get no sizes, on which nothing depends."""
    for node in program.graph.nodes:
        if (call := custom_function(node)) is None:
            continue
        derivation = _derive(call, node)
        call.is_linear = derivation.nonlinear is None
        call.reason = derivation.nonlinear or derivation.mixing or ("it draws random numbers" if call.draws else None)
        if call.reason is None:
            call.mark_pointwise()
            node.args = (node.args[0], [])


@torch.no_grad()
def _derive(call: AutogradFunctionCall, node: fx.Node) -> _Derivation:
    tensors, sizes = pytree.tree_map_only(fx.Node, lambda arg: arg.meta["val"], node.args)
    derivation, mode = _Derivation(tuple(map(expression, tensors[0].shape))), tensors[0].fake_mode
    with tracing(mode), attribute_set(mode, "allow_non_fake_inputs", True):
        call.forward_graph = _without_views(call.forward_graph, call.arguments(tensors, sizes))
        with derivation:
            outputs, saved = call.outputs(tensors, sizes)
        gradients = [output.clone() if isinstance(output, torch.Tensor) else output for output in outputs]
        call.backward_graph = _without_views(call.backward_graph, [*gradients, *saved])
        derivation.follow(tensors_of(gradients))
        with derivation:
            results = call.gradients(gradients, saved)
    derivation.finish([*tensors, *outputs], results)
    return derivation


def _without_views(module: fx.GraphModule, arguments: Iterable[Any]) -> fx.GraphModule:
    """Replace each value that is a view of all entries of an earlier one, in its shape, by that one's alias.

    The argument tensors have no gaps, or the program holds their entries so: then the same place in memory for all
    indices is the same entry, whatever strides the function gets in a chunk. Only `as_strided` counts by strides.
    """
    interpreter = _Writes(module, garbage_collect_values=False)
    interpreter.run(*arguments)
    graph = copy.deepcopy(module.graph)
    first: dict[tuple[Any, ...], fx.Node] = {}
    views: list[fx.Node] = []
    for node, copied in zip(module.graph.nodes, list(graph.nodes), strict=True):
        value = interpreter.env.get(node)
        if node.op in ("call_function", "call_method") and isinstance(value, torch.Tensor):
            if name_of(node) == "as_strided" or interpreter.writes:
                return module
            with graph.inserting_before(copied):
                if (source := first.get(_place(value))) is not None:
                    views.append(graph.call_function(aten.alias.default, (source,)))
                    copied.replace_all_uses_with(views[-1])
            if any(value.untyped_storage()._cdata == place[0] for place in first):
                views.append(copied)
        if isinstance(value, torch.Tensor):
            first.setdefault(_place(value), copied)
    for copied in reversed(views):
        if not copied.users:
            graph.erase_node(copied)
    return fx.GraphModule(module, graph) if views else module


class _Writes(fx.Interpreter):
    """Interpreter that notes whether any operator writes to its arguments."""

    writes = False

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and compare the versions of its arguments."""
        arguments = tensors_of([self.env[arg] for arg in n.all_input_nodes])
        versions = [value._version for value in arguments]
        result = super().run_node(n)
        self.writes |= versions != [value._version for value in arguments]
        return result


def _place(value: torch.Tensor) -> tuple[Any, ...]:
    """Return a key of where the entries of a value are in memory, and of how they are read."""
    shape = tuple(map(expression, value.shape))
    strides = tuple(expression(stride) for stride, size in zip(value.stride(), shape, strict=True) if size != 1)
    storage = value.untyped_storage()._cdata
    return storage, expression(value.storage_offset()), shape, strides, value.dtype, value.is_conj(), value.is_neg()


class _Derivation(TorchDispatchMode):
    """Mode that follows the operators of a function over fake tensors.

    Attributes:
        mixing: why not all tensors have one shape, or are scalars, and all operators are pointwise with constant
            numbers; None if it is so.
        nonlinear: why not all that depends on the followed gradients is linear in them; None if it is so.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.mixing: str | None = None
        self.nonlinear: str | None = None
        self.linear: dict[int, torch.Tensor] = {}
        self.zero: dict[int, torch.Tensor] = {}

    def follow(self, gradients: list[torch.Tensor]) -> None:
        """Begin with the backward of these gradients."""
        self.linear = {id(gradient): gradient for gradient in gradients}

    def finish(self, values: list[Any], gradients: list[Any]) -> None:
        """Take arguments and results of forward, and the results of backward, into account."""
        results = tensors_of(gradients)
        if not all(map(self._is_linear, results)):
            self._is_nonlinear("it gives one that does not depend on those it gets")
        every = [*tensors_of(values), *results]
        if any(tensor.dim() == 0 or self._is_other(tensor) for tensor in every):
            self.mixing = self.mixing or "its arguments, results and gradients are not all of one shape"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:  # what dispatch itself asks
            return result
        values = pytree.tree_leaves((args, kwargs, result))
        is_pure = func in CONSTANTS or (not func._schema.is_mutable and rule_for(func) is pointwise)
        if not is_pure or any(map(self._is_other, values)):
            self.mixing = self.mixing or f"its {'backward' if self.linear else 'forward'} is not pointwise: {func}"
        if any(id(value) in self.linear for value in values):
            if not (self._keeps_linear(func, args) and all(t.is_floating_point() for t in tensors_of(result))):
                self._is_nonlinear(str(func))
            self.linear |= {id(tensor): tensor for tensor in tensors_of(result)}
        elif func._schema.is_mutable:
            self.zero.clear()
        elif func in ZEROS or (func in NUMBERS and args[-1] == 0):
            self.zero |= {id(tensor): tensor for tensor in tensors_of(result)}
        return result

    def _is_nonlinear(self, why: str) -> None:
        reason = f"its backward is not linear in the gradients, which it gets chunk by chunk: {why}"
        self.nonlinear = self.nonlinear or reason

    def _is_other(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.dim() > 0 and tuple(map(expression, value.shape)) != self.shape
        return isinstance(value, SYMBOLIC)

    def _is_linear(self, value: Any) -> bool:
        return id(value) in self.linear or id(value) in self.zero

    def _keeps_linear(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether the results of an operator are linear in the gradients that some arguments depend on."""
        if func in OF_ALL:
            return all(map(self._is_linear, args[0] if isinstance(args[0], (list, tuple)) else args[-2:]))
        if sum(id(tensor) in self.linear for tensor in tensors_of(args)) != 1:
            return False
        is_first = id(args[0]) in self.linear
        return func in OF_EITHER or (is_first and (func in OF_FIRST or (func in WRITES_ZERO and args[2] == 0)))
