"""Unflatten values `[B * S * k, D]`, with k slots per token: heads, experts or streams of the model.

`keep_places` computes them as `[B, S, k, D]`. Recurrent models normalise heads as flattened rows:
`norm(x.reshape(-1, D)).reshape(B, S, -1)`. Entries and their order are the same either way, and row-wise operators take
as many nodes for forty heads as for one. Values with other readers are kept beside the new ones.

`unflatten_places` computes `[N * k, D]` as k values `[N, D]`: operators that treat each slot by itself are applied to
the first slots of all tokens, then to the second ones, and so on. Each value has one row per token then, as
`token_rules` needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from dta_compile.ops.experts import EXPERT_LINEAR
from dta_compile.passes.axes.layouts import is_tensor
from dta_compile.passes.axes.shape_rules import reshape_groups
from dta_compile.passes.graphs.nodes import call, is_pointwise, is_uniform, sizes_from_inputs
from dta_compile.passes.graphs.operators import (
    CASTS,
    COPIES,
    DIFFERENTIABLE_COPIES,
    FILLS,
    RESHAPES,
    UNTAGGED_POINTWISE,
)
from dta_compile.passes.lowering.places.row_operators import RowOperators, Rows, Unproven
from dta_compile.passes.symbols import depends_on_data, expression, free_symbols, sizes

aten = torch.ops.aten
NORMS = frozenset({aten.native_layer_norm.default, aten._fused_rms_norm.default})
# Operators whose `dim` is a dimension of the result.
INSERTIONS = frozenset({aten.stack.default, aten.unsqueeze.default})
# Operators that treat each row by itself, unless an argument named in `DIMENSIONS` is the dimension of rows.
ALONG_DIMENSIONS = INSERTIONS | {
    aten._log_softmax.default,
    aten._softmax.default,
    aten.amax.default,
    aten.amin.default,
    aten.cat.default,
    aten.cumsum.default,
    aten.linalg_vector_norm.default,
    aten.logsumexp.default,
    aten.mean.dim,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.sum.dim_IntList,
    aten.transpose.int,
    aten.unbind.int,
    aten.var.correction,
    aten.var_mean.correction,
}
DIMENSIONS = ("dim", "dim0", "dim1")


Shape = tuple[sympy.Expr, ...]


class _Mixed(Exception):
    """A node does not treat each row by itself."""


@dataclasses.dataclass(frozen=True)
class _Unflattened:
    """Replacement of a value `[N * k, ...]`, or of a tuple of such values.

    Attributes:
        node: the value as `[*tokens, k, ...]`.
        shape: the sizes `[*tokens, k]`; the product of `tokens` is N.
    """

    node: fx.Node
    shape: Shape

    @property
    def tokens(self) -> int:
        return len(self.shape) - 1


def keep_places(graph: fx.Graph) -> None:
    """Compute values between a flatten of `[N, k, ...]` and its reverse with a dimension for the slots."""
    modes = [node.meta["val"].fake_mode for node in graph.nodes if node.target in RESHAPES]
    slots = _FlatSlots(graph)
    for node in list(graph.nodes) if modes else []:
        if node.op == "call_function" and (node.target in RESHAPES or slots.are_read_by(node)):
            with modes[0], torch.no_grad(), graph.inserting_before(node), contextlib.suppress(_Mixed):
                slots.visit(node)
    if slots.are_split:
        sizes_from_inputs(graph)  # reading sizes of flattened values would keep these alive
    if slots.unflattened:
        graph.eliminate_dead_code(fx.Node.is_impure)


class _FlatSlots:
    """Values computed from flattened slots.

    Attributes:
        unflattened: by node, its replacement with a dimension for the slots.
        counts: the sizes that tokens and slots have together in one dimension.
        are_split: whether a reshape splits flattened slots again, so that the graph has changed.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.unflattened: dict[fx.Node, _Unflattened] = {}
        self.counts: set[sympy.Expr] = set()
        self.are_split = False

    def are_read_by(self, node: fx.Node) -> bool:
        """Return whether a node reads a value of flattened slots."""
        return any(arg in self.unflattened for arg in node.all_input_nodes)

    def visit(self, node: fx.Node) -> None:
        """Insert a copy of a node with a dimension for the slots before it; raise `_Mixed` if that is not possible."""
        if node.target in RESHAPES:
            self._reshape(node)
            return
        first = next(self.unflattened[arg] for arg in node.all_input_nodes if arg in self.unflattened)
        if node.target is aten.slice.Tensor and sizes(node) == sizes(node.args[0]):
            self.unflattened[node] = first  # a slice of all rows, from `x[:, 0]` say
            return
        args, kwargs = self._arguments(node, first)
        new = self._call(node, node.target, *args, **kwargs)
        if _shapes(new) != [(*first.shape, *shape[1:]) for shape in _shapes(node)]:
            raise _Mixed
        self.unflattened[node] = _Unflattened(new, first.shape)

    def _call(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call that takes over the metadata of `node`."""
        new = call(self.graph, target, *args, **kwargs)
        new.meta = {**node.meta, "val": new.meta["val"]}
        return new

    # ---- Reshapes

    def _reshape(self, node: fx.Node) -> None:
        """Record the slots that a reshape flattens, or replace a reshape that splits recorded ones off the tokens."""
        flat, shape = node.args
        source = self.unflattened[flat].node if flat in self.unflattened else flat
        before, after = sizes(source), sizes(node)
        tokens = _tokens(before)
        if (slots := _merged(before, after, tokens)) is not None:
            prefix = (*before[:tokens], sympy.Integer(slots))
            if source is flat and before[0] in self.counts:
                raise _Mixed  # the rows are flattened slots themselves, which an operator has mixed
            self.counts.add(after[0])
            self.unflattened[node] = _Unflattened(self._split(node, source, source, prefix, after[1:]), prefix)
        elif source is not flat and _begins_with(after, sympy.prod(before[:tokens])):
            self.are_split = True
            known = [size if of.free_symbols else int(of) for size, of in zip(shape, after, strict=True)]
            node.replace_all_uses_with(self._call(node, aten.reshape.default, source, known))

    def _split(self, node: fx.Node, source: fx.Node, like: fx.Node, prefix: Shape, rest: Shape) -> fx.Node:
        """Reshape a value to `[*tokens, k, *rest]`, with the sizes of tokens read from `like`."""
        if sizes(source) == (*prefix, *rest):
            return source
        if free_symbols(rest):
            raise _Mixed
        counts = [call(self.graph, aten.sym_size.int, like, dim) for dim in range(len(prefix) - 1)]
        return self._call(node, aten.reshape.default, source, [*counts, *map(int, (prefix[-1], *rest))])

    # ---- Arguments

    def _arguments(self, node: fx.Node, first: _Unflattened) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments for which an operator computes the same with a dimension for the slots."""
        if node.target is operator.getitem:
            return [first.node, node.args[1]], {}
        if node.target is EXPERT_LINEAR:
            rows, expert, *weights = node.args
            rows, expert = self._argument(node, rows, first, 2, False), self._argument(node, expert, first, 1, False)
            return [rows, expert, *weights], {}
        rank = max(len(sizes(arg)) for arg in node.all_input_nodes if is_tensor(arg))
        is_entrywise = is_pointwise(node) or node.target in UNTAGGED_POINTWISE | COPIES | CASTS | FILLS

        def mapped(arg: fx.Node) -> fx.Node:
            return self._argument(node, arg, first, rank, is_entrywise)

        args, kwargs = list(node.args), dict(node.kwargs)
        if node.target in ALONG_DIMENSIONS:
            _move_dimensions(node, args, kwargs, rank, first.tokens)
        elif node.target is aten.permute.default:
            order = [dim % rank for dim in node.args[1]]
            if order[0] != 0:
                raise _Mixed
            args[1] = [*range(first.tokens), *(dim + first.tokens for dim in order)]
        elif node.target is aten.expand.default and len(node.args[1]) == rank:
            args[1] = [-1] * len(first.shape) + node.args[1][1:]
        elif not (is_entrywise or (node.target in NORMS and len(node.args[1]) < rank)):
            raise _Mixed
        return fx.node.map_arg((args, kwargs), mapped)

    def _argument(self, node: fx.Node, arg: fx.Node, first: _Unflattened, rank: int, is_entrywise: bool) -> fx.Node:
        """Return the replacement of an argument of an operator whose values have at most `rank` dimensions."""
        if not is_tensor(arg) or (arg not in self.unflattened and len(sizes(arg)) < rank):
            return arg
        if is_entrywise and is_uniform(arg):
            return self._call(node, arg.target, [1] * rank, *arg.args[1:], **arg.kwargs)
        if arg not in self.unflattened:
            if is_entrywise and sizes(arg)[0] == 1:
                return arg
            raise _Mixed
        value, rest = self.unflattened[arg], sizes(arg)[1:]
        if len(rest) + 1 != rank:
            raise _Mixed
        if value.shape[-1] != first.shape[-1]:
            raise _Mixed  # equal numbers of rows, but of other tokens and slots
        return self._split(node, value.node, first.node, first.shape, rest)


def _move_dimensions(node: fx.Node, args: list[Any], kwargs: dict[str, Any], rank: int, added: int) -> None:
    """Move the dimensions that a node names behind `added` new ones; raise `_Mixed` if one is the dimension of rows."""
    rank += node.target in INSERTIONS

    def moved(dim: int) -> int:
        if dim % rank == 0:
            raise _Mixed
        return dim + added if dim > 0 else dim

    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name not in DIMENSIONS:
            continue
        dims = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        if dims is None or dims == []:
            raise _Mixed  # a reduction over all dimensions
        new = moved(dims) if isinstance(dims, int) else [moved(dim) for dim in dims]
        if position < len(args):
            args[position] = new
        elif argument.name in kwargs:
            kwargs[argument.name] = new


def _tokens(shape: Shape) -> int:
    """Return the number of leading dimensions that count tokens: symbolic ones, and sizes of 1 before them."""
    count = 0
    while count < len(shape) and (shape[count].free_symbols or shape[count] == 1):
        count += 1
    while count and not shape[count - 1].free_symbols:
        count -= 1
    return count


def _merged(before: Shape, after: Shape, tokens: int) -> int | None:
    """Return the number of slots per token that a reshape flattens into its first dimension; None: it flattens none."""
    if not tokens or not after or free_symbols([*before[tokens:], *after[1:]]) or any(map(depends_on_data, before)):
        return None
    slots = sympy.cancel(after[0] / sympy.prod(before[:tokens]))
    return int(slots) if slots.is_Integer and slots > 1 else None


def _begins_with(shape: Shape, count: sympy.Expr) -> bool:
    """Return whether some leading dimensions of a shape have `count` entries, so that they are tokens alone."""
    return any(sympy.expand(sympy.prod(shape[:dim]) - count) == 0 for dim in range(1, len(shape) + 1))


def _shapes(node: fx.Node) -> list[Shape]:
    """Return the shapes of all results of a node."""
    return [tuple(map(expression, value.shape)) for value in pytree.tree_leaves(node.meta["val"])]


MOST_SLOTS = 16  # every slot has nodes of its own


def unflatten_places(graph: fx.Graph) -> None:
    """Compute values between a flatten of `[N, k, ...]` and its reverse for one slot of each token at a time."""
    spaces: dict[tuple[sympy.Expr, int], list[fx.Node]] = {}
    for node in graph.nodes:
        if (dims := _flattened(node)) is not None:
            spaces.setdefault((sizes(node)[dims[1]], int(sizes(node.args[0])[dims[0]])), []).append(node)
    for (count, slots), entries in spaces.items():
        mode = entries[0].meta["val"].fake_mode
        with mode, torch.no_grad():
            _unflatten(graph, entries, count, slots)
    if spaces:
        graph.eliminate_dead_code(fx.Node.is_impure)


def _flattened(node: fx.Node) -> tuple[int, int] | None:
    """Return the dimension of slots that a reshape merges with the tokens before it, and the resulting dimension."""
    if node.target not in RESHAPES:
        return None
    before, after = sizes(node.args[0]), sizes(node)
    for merged, result in reshape_groups(before, after):
        *tokens, last = merged or [0]
        are_tokens = tokens and all(before[dim].free_symbols for dim in tokens) and not before[last].free_symbols
        if are_tokens and 1 < before[last] <= MOST_SLOTS and len(result) == 1 and not any(map(depends_on_data, before)):
            return last, result[0]
    return None


def _unflatten(graph: fx.Graph, entries: list[fx.Node], count: sympy.Expr, slots: int) -> None:
    rows = RowOperators(graph, None, [], lambda size: bool(size == count))
    counts = [node for node in graph.nodes if _is_number(node, count)]
    for node in list(graph.nodes):
        reads = any(map(rows.knows, node.all_input_nodes))
        if node.op != "call_function" or not (reads or node in entries):
            continue
        with graph.inserting_before(node), contextlib.suppress(Unproven):  # unproven nodes stay as they are
            if node in entries:
                entry = _by_slot(node, slots)
                rows.enter(node, entry)
                if not rows.sizes:
                    rows.sizes |= dict.fromkeys(counts, call(graph, aten.sym_size.int, entry.values[0], entry.place))
            elif node.target in RESHAPES and rows.is_rows(node.args[0]) and count not in sizes(node):
                whole = _together(rows.of(node.args[0]), slots)
                new = call(graph, aten.reshape.default, whole, node.args[1])
                new.meta = {**node.meta, "val": new.meta["val"]}
                node.replace_all_uses_with(new)
            else:
                rows.visit(node)


def _is_number(node: fx.Node, count: sympy.Expr) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and bool(expression(value) == count)


def _by_slot(node: fx.Node, slots: int) -> Rows:
    """Return a flattened value as one value per slot, or as a single one if all slots repeat it."""
    source = node.args[0]
    dim, place = _flattened(node) or (0, 0)
    shape = [-1 if i == place else size for i, size in enumerate(sizes(node))]
    if any(not isinstance(size, int) and size.free_symbols for size in shape):
        raise Unproven(f"{node.target}: more than one dimension depends on the call", node)
    repeated = source
    while repeated.target in DIFFERENTIABLE_COPIES:
        repeated = repeated.args[0]
    if repeated.target is aten.expand.default and _is_repeated_along(repeated, dim):
        selected = [call(node.graph, aten.select.int, repeated.args[0], dim, 0)]
    else:
        selected = [call(node.graph, aten.select.int, source, dim, number) for number in range(slots)]
    shape = [int(size) for size in shape]
    values = [call(node.graph, aten.reshape.default, value, shape) for value in selected]
    return Rows(values, place, is_masked=True)


def _is_repeated_along(node: fx.Node, dim: int) -> bool:
    before, after = sizes(node.args[0]), sizes(node)
    return len(before) == len(after) and all(
        size == 1 if i == dim else size == after[i] for i, size in enumerate(before)
    )


def _together(rows: Rows, slots: int) -> fx.Node:
    """Stack the values of all slots to `[..., N, k, ...]`."""
    values = rows.values if len(rows.values) == slots else rows.values * slots
    return call(values[0].graph, aten.stack.default, values, rows.place + 1)
