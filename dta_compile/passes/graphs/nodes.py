"""Predicates of the nodes of traced graphs, and constructors of new nodes with `meta["val"]`.

`sizes_from_inputs` turns sizes of intermediate values into arithmetic on sizes of inputs, so that `sym_size` keeps no
value alive. A reshape of sliced logits, for example, reads its number of tokens from the slice; left as it is, this
would make the slice a frontier value of `[B, S, V]`, or pull the model into the epilogue.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.graphs.operators import (
    ASSEMBLIES,
    DIFFERENTIABLE_COPIES,
    FILL_ARGUMENTS,
    FILL_NUMBERS,
    FILLS,
    FINITE,
    MASKED_FILLS,
    RESHAPES,
    aten,
    is_tagged_pointwise,
)
from dta_compile.passes.program import has_tensor, writes_in_place
from dta_compile.passes.symbols import expression, sizes, symbol_sources
from dta_compile.torch_compat.sizes import FloorDiv, Mod, PythonMod
from dta_compile.torch_compat.tensors import enable_python_dispatcher


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call at the insertion point; its value is computed from the values of its arguments."""
    node = graph.call_function(target, args, kwargs)
    with enable_python_dispatcher():  # some operators accept symbolic sizes only with it (expand inside baddbmm)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda arg: arg.meta["val"]), **kwargs)
    return node


def replace_nodes(graph: fx.Graph, rule: Callable[[fx.Node], fx.Node | None]) -> None:
    """Replace the nodes that a rule returns another one for, in graph order, so that arguments come before their users.

    The rule inserts nodes right before its argument. A call that it returns takes what it lacks of the node's `meta`.
    """
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            new = rule(node)
        if new is not None:
            if new.op != "placeholder":
                new.meta = {**node.meta, **new.meta}
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def erase_unused(graph: fx.Graph, has_effects: Callable[[fx.Node], bool] = fx.Node.is_impure) -> None:
    """Erase nodes without users and side effects; random ops have such, whatever inductor's configuration says.

    Torch's `eliminate_dead_code` asks all nodes for side effects, not only the unused ones, which takes most of its
    time, and checks the order of nodes.
    """
    for node in reversed(graph.nodes):
        if not node.users and not has_effects(node):
            graph.erase_node(node)


def full_for(node: fx.Node, shape: list[Any], number: Any) -> fx.Node:
    """Insert a constructor of a value with the dtype and device of a node's, filled with one number."""
    value = node.meta["val"]
    kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    full = node.graph.call_function(aten.full.default, (shape, number), kwargs)
    full.meta = dict(node.meta)
    return full


def constructed(graph: fx.Graph, target: Any, *args: Any, like: torch.Tensor) -> fx.Node:
    """Insert a constructor of a value with the dtype and device of `like`."""
    with like.fake_mode:  # type: ignore[attr-defined]
        return call(graph, target, *args, dtype=like.dtype, device=like.device, pin_memory=False)


def raised(value: fx.Node, count: int, dim: int = 0) -> fx.Node:
    """Add dimensions of size 1, in front or (with `dim` -1) at the end."""
    for _ in range(count):
        value = call(value.graph, aten.unsqueeze.default, value, dim)
    return value


def column(value: fx.Node, number: float, dim: int = -1) -> fx.Node:
    """Insert a value like one entry of another along a dimension, filled with a number."""
    first = call(value.graph, aten.slice.Tensor, value, dim, 0, 1)
    return call(value.graph, aten.full_like.default, first, number)


def regrouped(value: fx.Node, shape: list[Any], dims: int = 1) -> fx.Node:
    """Reshape the first dimensions of a value to `shape`; the sizes of the others are numbers."""
    rest = [int(size) for size in value.meta["val"].shape[dims:]]
    return call(value.graph, aten.reshape.default, value, [*shape, *rest])


def of_rows(value: fx.Node, dim: int, apply: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Apply a function of `[B, S, features]` to a value of sequences along the first, tokens along dimension `dim`.

    The sizes of the other dimensions are numbers.
    """
    rank = value.meta["val"].dim()
    order = [0, dim, *(i for i in range(1, rank) if i != dim)]
    rows = value if dim == 1 else call(value.graph, aten.permute.default, value, order)
    shape = rows.meta["val"].shape
    if rank == 3:
        rows = apply(rows)
    else:
        lead = [call(value.graph, aten.sym_size.int, rows, i) for i in (0, 1)]
        rows = apply(call(value.graph, aten.reshape.default, rows, [*lead, shape[2:].numel()]))
        rows = call(value.graph, aten.reshape.default, rows, [*lead, *shape[2:]])
    return rows if dim == 1 else call(value.graph, aten.permute.default, rows, [order.index(i) for i in range(rank)])


def repeated(value: fx.Node, times: Any) -> fx.Node:
    """Repeat each row of `[N, ...]` in place, `[N * times, ...]`; `times` is a number, or the node of one."""
    wide = call(value.graph, aten.unsqueeze.default, value, 1)
    wide = call(value.graph, aten.expand.default, wide, [-1, times, *[-1] * (value.meta["val"].dim() - 1)])
    return regrouped(wide, [-1], 2)


class First:
    """Common subexpressions: `ids.eq(1).cumsum(1)` may be written once for each layer. `draws` are never common."""

    def __init__(self, draws: Collection[fx.Node]) -> None:
        self._draws = set(draws)
        self._known: dict[fx.Node, fx.Node] = {}
        self._computed: dict[tuple[Any, str], fx.Node] = {}

    def like(self, node: fx.Node) -> fx.Node:
        """Return the first node passed to `like` that computes the same as this one."""
        if node.op != "call_function" or node in self._draws:
            return node
        if node not in self._known:
            same = fx.node.map_arg((node.args, node.kwargs), self.like)
            self._known[node] = self._computed.setdefault((node.target, repr(same)), node)
        return self._known[node]


def is_item(node: fx.Node) -> bool:
    """Return whether a node picks one of several results of an operator."""
    return bool(node.target is operator.getitem)


def is_float(node: fx.Node) -> bool:
    """Return whether a node's value is a floating-point tensor."""
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def may_have_gradient(node: fx.Node) -> bool:
    """Return whether a node's value is a floating-point or complex tensor."""
    value = node.meta["val"]
    return is_float(node) or (isinstance(value, torch.Tensor) and value.is_complex())


def is_pointwise(node: fx.Node) -> bool:
    """Return whether an operator is pointwise, functional and deterministic."""
    return is_tagged_pointwise(node.target) and not writes_in_place(node)


def is_finite(node: fx.Node) -> bool:
    """Return whether an operator with these numbers has finite values and derivatives for all finite tensors."""
    numbers = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, (int, float))]
    if not all(map(math.isfinite, numbers)):
        return False
    match node.target:
        case aten.native_layer_norm.default:
            return bool(node.args[4] > 0)
        case aten._fused_rms_norm.default:
            return node.args[3] is None or bool(node.args[3] > 0)
        case aten.pow.Tensor_Scalar:
            return isinstance(node.args[1], int) and node.args[1] > 0
        case aten.div.Tensor | aten.div.Scalar:
            return bool(numbers) and numbers[0] != 0 and isinstance(node.args[0], fx.Node)
    return node.target in FILLS | ASSEMBLIES | MASKED_FILLS or node.target.overloadpacket in FINITE


def filled_with(node: fx.Node) -> Any:
    """Return the number, or the node of one, that a constructor fills its result with; None: it is not in `FILLS`."""
    position = FILL_ARGUMENTS.get(node.target)
    return FILL_NUMBERS.get(node.target) if position is None else node.args[position]


def is_uniform(node: fx.Node) -> bool:
    """Return whether a value has one constant in every entry; chunks make such values anew, in their own size."""
    return node.target is aten.full.default and not isinstance(node.args[1], fx.Node)


def descendants(graph: fx.Graph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `nodes` and everything computed from them (the opposite of `program.ancestors`)."""
    reached = set(nodes)
    for node in graph.nodes:
        if node.op != "output" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return reached


def behind(node: fx.Node, operators: Collection[Any]) -> fx.Node:
    """Follow operators back to the value that they are applied to, one to the first argument of the next."""
    while node.target in operators:
        node = node.args[0]
    return node


def repeated_from(node: fx.Node, dim: int, times: int | None = None) -> fx.Node | None:
    """Return the value whose entries along a dimension a node repeats, each so many times in a row; None: it is none.

    That is the `x` of `x[:, :, None].expand(B, H, times, S, D).reshape(B, H * times, S, D)`.
    """
    wide = behind(node.args[0], DIFFERENTIABLE_COPIES) if node.target in RESHAPES else node
    raised = behind(wide.args[0], DIFFERENTIABLE_COPIES) if wide.target is aten.expand.default else node
    if wide is node or raised.target is not aten.unsqueeze.default:
        return None
    source = behind(raised.args[0], DIFFERENTIABLE_COPIES)
    before, between, after = sizes(source), list(sizes(wide)), sizes(node)
    if len(between) != len(before) + 1 or raised.args[1] % len(between) != dim + 1:
        return None
    number = between.pop(dim + 1)
    repeats_others = any(own == 1 != other for own, other in zip(before, between, strict=True))
    is_merged = len(after) == len(before) and after[:dim] + after[dim + 1 :] == before[:dim] + before[dim + 1 :]
    return source if is_merged and not repeats_others and times in (None, number) else None


def swaps(node: fx.Node) -> bool:
    """Return whether a transposition of a matrix exchanges its dimensions: it may name one twice, or keep the order."""
    if node.target is aten.t.default:
        return True
    first, second = node.args[1:] if node.target is aten.transpose.int else (0, node.args[1][0])
    return bool((first - second) % 2)


def sizes_from_inputs(graph: fx.Graph) -> None:
    """Replace every size of an intermediate value that is a polynomial of sizes of inputs by arithmetic on those."""
    builder = SizeNodes(graph)

    def from_inputs(node: fx.Node) -> fx.Node | None:
        value = node.meta.get("val")
        asks_a_tensor = any(has_tensor(arg) and arg.op != "placeholder" for arg in node.all_input_nodes)
        if node.op != "call_function" or not isinstance(value, torch.SymInt) or not asks_a_tensor:
            return None
        replacement = builder.build(expression(value))
        return replacement if isinstance(replacement, fx.Node) else None

    replace_nodes(graph, from_inputs)


def is_polynomial(value: Any) -> bool:
    """Return whether a size is a sum of products of symbols and integers, which `SizeNodes` can compute."""
    return isinstance(value, (int, torch.SymInt)) and all(
        isinstance(part, (sympy.Integer, sympy.Symbol, sympy.Add, sympy.Mul))
        for part in sympy.preorder_traversal(expression(value))
    )


ARITHMETIC = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
}


class SizeNodes:
    """Nodes of a graph that compute sizes from sizes of the inputs that it has at construction."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.inputs = list(graph.find_nodes(op="placeholder"))
        self.sources = symbol_sources(node.meta.get("val") for node in self.inputs)
        self.built: dict[sympy.Expr, fx.Node] = {}

    def build(self, expr: sympy.Expr) -> fx.Node | int | None:
        """Compute a polynomial of sizes, quotients and remainders before the insertion point; None for others.

        Insertion points must come in graph order, so that nodes built earlier can be reused.
        """
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if expr not in self.built:
            node = self._build(expr)
            if node is None:
                return None
            self.built[expr] = node
        return self.built[expr]

    def _build(self, expr: sympy.Expr) -> fx.Node | None:
        if isinstance(expr, sympy.Symbol) and expr in self.sources:
            index, dim = self.sources[expr]
            node = self.inputs[index]
            return node if dim is None else call(self.graph, aten.sym_size.int, node, dim)
        joined = ARITHMETIC.get(expr.func)
        parts = [self.build(part) for part in expr.args]
        if joined is None or any(part is None for part in parts):
            return None
        return functools.reduce(lambda a, b: call(self.graph, joined, a, b), parts)
