"""Derive what calls of a user's `torch.autograd.Function` may do over a tree from the operators of both directions.

Chunks give a function the gradients of a shared value as parts or sums of what eager execution gives it, call by call:
backward has to be linear in them. On values of tokens, both directions have to treat every entry by itself, too, or
every token: operators along features, products with weights that all tokens share, views that merge the axes of tokens,
and sums of the weights' gradients over all tokens.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.attributes import attribute_set
from dta_compile.executable.layouts import Layout
from dta_compile.ops.autograd_function import AutogradFunctionCall, custom_function
from dta_compile.ops.library import is_random
from dta_compile.passes.axes.layouts import Arguments, MixesTokens, broadcast
from dta_compile.passes.axes.tokenwise_operators import pointwise, rule_for
from dta_compile.passes.graphs.operators import RESHAPES, SAME_ENTRIES, TRANSPOSITIONS, aten
from dta_compile.passes.program import Program, name_of, tensors_of
from dta_compile.passes.symbols import SYMBOLIC, expression, sizes
from dta_compile.passes.tracing import tracing
from dta_compile.torch_compat.tensors import TorchDispatchMode, pytree

Shape = tuple[sympy.Expr, ...]

# Linear in the first argument, if no other one depends on the gradient.
OF_FIRST = SAME_ENTRIES | {
    *(aten.neg.default, aten.div.Tensor, aten.tril.default, aten.triu.default),
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.dim),
}
# Linear in either of two arguments, if the other one does not depend on the gradient.
OF_EITHER = frozenset({aten.mul.Tensor, aten.mm.default, aten.bmm.default, aten.mv.default})
# Linear in their tensors together; `where` has a condition in front.
OF_ALL = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default, aten.where.self})
WRITES_ZERO = frozenset({aten.masked_fill.Scalar, aten.masked_fill_.Scalar})
ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})
NUMBERS = frozenset({aten.scalar_tensor.default, aten.full.default, aten.full_like.default})

# Along the argument `dim`, which they keep if asked to.
ALONG = frozenset(
    {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.linalg_vector_norm.default}
)
SOFTMAXES = frozenset({aten._softmax.default, aten._log_softmax.default})
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
            call.over_tokens = derivation.over_tokens if derivation.has_features else None
            node.args = (node.args[0], [])


def over_tokens(node: fx.Node, arguments: Arguments) -> tuple[Layout, ...]:
    """Token rule of a function whose operators work along features, or with weights."""
    call = custom_function(node)
    assert call is not None and call.over_tokens is not None
    lead, are_of_tokens = call.over_tokens
    tensors = list(node.args[0])
    if [arguments[tensor].labelled for tensor in tensors] != are_of_tokens:
        raise MixesTokens("its weights are along the batch or token axis")
    joined = broadcast(node, arguments, list(itertools.compress(tensors, are_of_tokens)), at_left=True)
    shapes = [sizes(tensor) for tensor in itertools.compress(tensors, are_of_tokens)]
    constant = {i for shape in shapes for i, size in enumerate(shape) if i >= lead or not size.free_symbols}
    if any(joined.dims[i] is not None for i in constant if i < len(joined.dims)):
        raise MixesTokens("its features are along the batch or token axis")
    ranks = [result.dim() for result in node.meta["val"]]
    return tuple(Layout((*joined.dims[:lead], *[None] * (rank - lead)), joined.frame) for rank in ranks)


@torch.no_grad()
def _derive(call: AutogradFunctionCall, node: fx.Node) -> _Derivation:
    tensors, numbers = pytree.tree_map_only(fx.Node, lambda arg: arg.meta["val"], node.args)
    shapes = [tuple(map(expression, tensor.shape)) for tensor in tensors]
    derivation, mode = _Derivation(max(shapes, key=lambda shape: (_symbolic(shape), len(shape)))), tensors[0].fake_mode
    with tracing(mode), attribute_set(mode, "allow_non_fake_inputs", True):
        call.forward_graph = _without_views(call.forward_graph, call.arguments(tensors, numbers))
        with derivation:
            outputs, saved = call.outputs(tensors, numbers)
        gradients = [output.clone() if isinstance(output, torch.Tensor) else output for output in outputs]
        call.backward_graph = _without_views(call.backward_graph, [*gradients, *saved])
        derivation.follow(tensors_of(gradients))
        with derivation:
            results = call.gradients(gradients, saved)
        derivation.finish(tensors, outputs, results)
        both = (call.forward_graph, call.arguments(tensors, numbers)), (call.backward_graph, [*gradients, *saved])
        if derivation.has_views and any(_reads_sizes(graph, arguments) for graph, arguments in both):
            derivation.mixing = derivation.mixing or "it takes the numbers of sequences or tokens as arguments"
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


def _reads_sizes(module: fx.GraphModule, arguments: Iterable[Any]) -> bool:
    """Return whether anything is computed from a symbolic size, which chunks would have to replace."""
    graph = copy.deepcopy(module.graph)
    graph.eliminate_dead_code()
    interpreter = _Writes(fx.GraphModule(module, graph), garbage_collect_values=False)
    interpreter.run(*arguments)
    return interpreter.reads_sizes


class _Writes(fx.Interpreter):
    """Interpreter that notes whether any operator writes to its arguments, or reads a symbolic size."""

    writes = reads_sizes = False

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and compare the versions of its arguments."""
        arguments = tensors_of([self.env[arg] for arg in n.all_input_nodes])
        versions = [value._version for value in arguments]
        result = super().run_node(n)
        self.writes |= versions != [value._version for value in arguments]
        numbers = tuple(result) if isinstance(result, torch.Size) else (result,)
        # The output hands sizes from forward to backward; an item of a shape may be a constant.
        passed_on = {"output", operator.getitem} if isinstance(result, torch.Size) else {"output"}
        is_read = any(user.target not in passed_on for user in n.users)
        self.reads_sizes |= is_read and any(isinstance(number, SYMBOLIC) for number in numbers)
        return result


def _place(value: torch.Tensor) -> tuple[Any, ...]:
    """Return a key of where the entries of a value are in memory, and of how they are read."""
    shape = tuple(map(expression, value.shape))
    strides = tuple(expression(stride) for stride, size in zip(value.stride(), shape, strict=True) if size != 1)
    storage = value.untyped_storage()._cdata
    return storage, expression(value.storage_offset()), shape, strides, value.dtype, value.is_conj(), value.is_neg()


def _symbolic(shape: Shape) -> int:
    """Return the number of dimensions up to the last one whose size is no constant."""
    return max((i for i, size in enumerate(shape, 1) if size.free_symbols), default=0)


class _Derivation(TorchDispatchMode):
    """Mode that follows the operators of a function over fake tensors.

    Values of tokens begin with the dimensions of one argument up to its last symbolic size, or with one that merges
    these, and have features behind. Weights have constant sizes.

    Attributes:
        over_tokens: number of dimensions of an argument in front of features, and which arguments are of tokens.
        has_features: whether values differ in their features, or there are weights; else only entries count.
        has_views: whether axes of tokens are merged.
        mixing: why not all operators treat every token by itself with constant numbers; None if it is so.
        nonlinear: why not all that depends on the followed gradients is linear in them; None if it is so.
        summed: gradients summed over all tokens.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = shape[: _symbolic(shape)]
        self.over_tokens: tuple[int, list[bool]] | None = None
        self.has_features = self.has_views = False
        self.mixing: str | None = None
        self.nonlinear: str | None = None
        self.linear: dict[int, torch.Tensor] = {}
        self.zero: dict[int, torch.Tensor] = {}
        self.summed: dict[int, torch.Tensor] = {}
        self.transposed: dict[int, torch.Tensor] = {}

    def follow(self, gradients: list[torch.Tensor]) -> None:
        """Begin with the backward of these gradients."""
        self.linear = {id(gradient): gradient for gradient in gradients}

    def finish(self, arguments: Sequence[Any], outputs: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Take arguments and outputs of forward, and the results of backward, into account."""
        results = tensors_of(gradients)
        if not all(map(self._is_linear, results)):
            self._is_nonlinear("it gives one that does not depend on those it gets")
        tensors = tensors_of(arguments)
        are_of_tokens = [*map(self._is_of_tokens, tensors)]
        self.over_tokens = len(self.tokens), are_of_tokens
        self.has_features |= not all(are_of_tokens)
        own = [*itertools.compress(tensors, are_of_tokens), *tensors_of(outputs)]
        others = [tensor for tensor in tensors if not self._is_of_tokens(tensor)]
        of_others = [tensor for tensor in results if not self._is_of_tokens(tensor)]
        are_whole = all(self._lead(tensor) == len(self.tokens) for tensor in own) and all(map(self._is_weight, others))
        if not are_whole or not all(id(t) in self.summed or (others and id(t) in self.zero) for t in of_others):
            self.mixing = self.mixing or "its results are not those of tokens, or a gradient is no sum over all of them"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:  # what dispatch itself asks
            return result
        values = pytree.tree_leaves((args, kwargs, result))
        if self._sums_tokens(func, args, result):
            self.summed |= {id(result): result}
        elif any(id(value) in self.summed for value in values):
            self.summed |= {id(tensor): tensor for tensor in tensors_of(result)}
            if any(map(self._is_of_tokens, tensors_of(values))):
                self.mixing = self.mixing or f"its backward gives tokens a sum over all of them: {func}"
            if any(isinstance(value, SYMBOLIC) for value in values):
                self.mixing = self.mixing or f"its backward scales a sum over all tokens by their number: {func}"
        elif not self._is_by_token(func, args, values):
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

    def _is_by_token(self, func: Any, args: Any, values: list[Any]) -> bool:
        """Return whether an operator treats every token by itself."""
        tensors = tensors_of(values)
        if func._schema.is_mutable or not tensors:
            return False
        *operands, result = tensors
        of_tokens = [tensor for tensor in tensors if self._is_of_tokens(tensor)]
        self.has_features |= any(self._sizes(t) != self.shape for t in of_tokens)
        self.has_features |= any(tensor.dim() > 0 and not self._is_of_tokens(tensor) for tensor in tensors)
        if func in RESHAPES and self._is_of_tokens(args[0]):
            self.has_views = True
            return self._is_of_tokens(result)
        if func in TRANSPOSITIONS and self._is_of_rows(args[0]) and self._sizes(result) == self._sizes(args[0])[::-1]:
            self.transposed |= {id(result): result}
            return True
        if any(isinstance(value, SYMBOLIC) for value in values):
            return False
        if not all(self._is_of_tokens(tensor) or self._is_weight(tensor) for tensor in tensors):
            return False
        if func in CONSTANTS or rule_for(func) is pointwise:
            return self._are_aligned(tensors, of_tokens)
        self.has_features = True  # even if it keeps the shape, as a softmax
        if not of_tokens:
            return not is_random(func)
        if func in (aten.mm.default, aten.addmm.default):
            *added, left, right = operands
            return self._is_of_rows(left) and not any(map(self._is_of_tokens, [*added, right]))
        along = self._along(func, args)
        return bool(along) and along.isdisjoint(self._axes(args[0]))

    def _are_aligned(self, tensors: list[torch.Tensor], of_tokens: list[torch.Tensor]) -> bool:
        """Return whether entries that are combined are of one token, or one of them of a weight's feature."""
        if not of_tokens:
            return True
        rank, lead, axes = of_tokens[0].dim(), self._lead(of_tokens[0]), self._axes(of_tokens[0])
        same = all(self._lead(tensor) == lead and tensor.dim() == rank for tensor in of_tokens)
        weights = [tensor.shape for tensor in tensors if not self._is_of_tokens(tensor)]
        places = {rank - len(shape) + i for shape in weights for i, size in enumerate(shape) if size != 1}
        return same and axes.isdisjoint(places)

    def _sums_tokens(self, func: Any, args: Any, result: Any) -> bool:
        """Return whether an operator sums a gradient of tokens over all of them."""
        if not any(id(value) in self.linear and id(value) not in self.summed for value in tensors_of(args)):
            return False
        if func is aten.mm.default:
            return id(args[0]) in self.transposed and self._is_of_rows(args[1])
        if func not in (aten.sum.default, aten.sum.dim_IntList) or not self._is_of_tokens(args[0]):
            return False
        return self._axes(args[0]) <= self._along(func, args) and self._is_weight(result)

    def _along(self, func: Any, args: Any) -> set[int]:
        """Return the dimensions of tokens' values along which an operator works; none if that is not known."""
        if func not in ALONG | SOFTMAXES | {aten.sum.default} or not self._is_of_tokens(args[0]):
            return set()
        position, rank = 2 if func is aten.linalg_vector_norm.default else 1, args[0].dim()
        dims = args[position] if len(args) > position else None
        dims = [dims] if isinstance(dims, int) else dims or range(rank)
        return {dim % rank for dim in dims}

    def _lead(self, tensor: torch.Tensor) -> int | None:
        """Return how many dimensions of a value of tokens are in front of features; None for other values."""
        shape = self._sizes(tensor)
        if not self.tokens:
            return 0 if shape == self.shape else None
        if shape[: len(self.tokens)] == self.tokens:
            return len(self.tokens)
        return 1 if shape[:1] == (sympy.Mul(*self.tokens),) else None

    def _axes(self, tensor: torch.Tensor) -> set[int]:
        """Return the dimensions of a value of tokens that are over sequences or tokens, not heads between these."""
        return {i for i, size in enumerate(self._sizes(tensor)[: self._lead(tensor)]) if size.free_symbols}

    def _is_of_tokens(self, tensor: torch.Tensor) -> bool:
        return self._lead(tensor) is not None

    def _is_of_rows(self, tensor: torch.Tensor) -> bool:
        """Return whether a value is a matrix with a row per token."""
        return tensor.dim() == 2 and self._lead(tensor) == 1

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        return not self._is_of_tokens(tensor) and not any(size.free_symbols for size in self._sizes(tensor))

    @staticmethod
    def _sizes(tensor: torch.Tensor) -> Shape:
        return tuple(map(expression, tensor.shape))

    def _is_nonlinear(self, why: str) -> None:
        reason = f"its backward is not linear in the gradients, which it gets chunk by chunk: {why}"
        self.nonlinear = self.nonlinear or reason

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
