"""Values with the k places of all tokens in one dimension, `[B * S * k, D]`, with one of their own: `[B, S, k, D]`.

Recurrent models normalise every head so: `norm(x.reshape(-1, D)).reshape(B, S, -1)`. The entries and their order are
the same either way, and what treats rows alike takes as many nodes for forty heads as for one. Values that are used
otherwise stay as they are, beside those.

Some of these, `[N * k, D]`, become k values `[N, D]` (`unflatten_places`). What treats each place by itself is done for
the first places of all tokens, for the second ones, and so on: then each is a value with a row a token, which is what
the rules of `token_rules` are about.
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
# Their `dim` is one of the result.
INSERTIONS = frozenset({aten.stack.default, aten.unsqueeze.default})
# Each row by itself, unless an argument named in `DIMENSIONS` says that of rows.
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
    """A value is used in another way than row by row."""


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What stands for a value `[N * k, ...]`, or for a tuple of such values.

    Attributes:
        node: `[*tokens, k, ...]`, N tokens.
        shape: `[*tokens, k]`.
    """

    node: fx.Node
    shape: Shape

    @property
    def tokens(self) -> int:
        return len(self.shape) - 1


def keep_places(graph: fx.Graph) -> None:
    """Compute what is between `[N, k, ...]` flattened and split again with a dimension for the places."""
    modes = [node.meta["val"].fake_mode for node in graph.nodes if node.target in RESHAPES]
    places = _Places(graph)
    for node in list(graph.nodes) if modes else []:
        if node.op == "call_function" and (node.target in RESHAPES or places.are_read_by(node)):
            with modes[0], torch.no_grad(), graph.inserting_before(node), contextlib.suppress(_Mixed):
                places.visit(node)
    if places.are_split:
        sizes_from_inputs(graph)  # asking for their number keeps flattened values
    if places.kept:
        graph.eliminate_dead_code(fx.Node.is_impure)


class _Places:
    """What is computed from flattened places."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.kept: dict[fx.Node, _Kept] = {}
        self.counts: set[sympy.Expr] = set()
        self.are_split = False

    def are_read_by(self, node: fx.Node) -> bool:
        """Whether a node reads a value of flattened places."""
        return any(arg in self.kept for arg in node.all_input_nodes)

    def visit(self, node: fx.Node) -> None:
        """Compute a node with a dimension for the places, before the node itself; raises `_Mixed`."""
        if node.target in RESHAPES:
            self._reshape(node)
            return
        first = next(self.kept[arg] for arg in node.all_input_nodes if arg in self.kept)
        if node.target is aten.slice.Tensor and sizes(node) == sizes(node.args[0]):
            self.kept[node] = first  # all rows, as in `x[:, 0]`
            return
        args, kwargs = self._arguments(node, first)
        new = self._call(node, node.target, *args, **kwargs)
        if _shapes(new) != [(*first.shape, *shape[1:]) for shape in _shapes(node)]:
            raise _Mixed
        self.kept[node] = _Kept(new, first.shape)

    def _call(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node that is there for one of the graph."""
        new = call(self.graph, target, *args, **kwargs)
        new.meta = {**node.meta, "val": new.meta["val"]}
        return new

    # ---- Reshapes

    def _reshape(self, node: fx.Node) -> None:
        """Keep the places that a reshape flattens; read those kept before where one splits them off the tokens."""
        flat, shape = node.args
        source = self.kept[flat].node if flat in self.kept else flat
        before, after = sizes(source), sizes(node)
        tokens = _tokens(before)
        if (places := _merged(before, after, tokens)) is not None:
            prefix = (*before[:tokens], sympy.Integer(places))
            if source is flat and before[0] in self.counts:
                raise _Mixed  # no tokens, but flattened places that were mixed
            self.counts.add(after[0])
            self.kept[node] = _Kept(self._split(node, source, source, prefix, after[1:]), prefix)
        elif source is not flat and _begins_with(after, sympy.prod(before[:tokens])):
            self.are_split = True
            known = [size if of.free_symbols else int(of) for size, of in zip(shape, after, strict=True)]
            node.replace_all_uses_with(self._call(node, aten.reshape.default, source, known))

    def _split(self, node: fx.Node, source: fx.Node, like: fx.Node, prefix: Shape, rest: Shape) -> fx.Node:
        """A value as `[*tokens, k, *rest]`, with the tokens' dimensions of another."""
        if sizes(source) == (*prefix, *rest):
            return source
        if free_symbols(rest):
            raise _Mixed
        counts = [call(self.graph, aten.sym_size.int, like, dim) for dim in range(len(prefix) - 1)]
        return self._call(node, aten.reshape.default, source, [*counts, *map(int, (prefix[-1], *rest))])

    # ---- Arguments

    def _arguments(self, node: fx.Node, first: _Kept) -> tuple[list[Any], dict[str, Any]]:
        """Arguments for which an operator gives the same, with a dimension for the places."""
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

    def _argument(self, node: fx.Node, arg: fx.Node, first: _Kept, rank: int, is_entrywise: bool) -> fx.Node:
        """What stands for an argument of an operator whose values have at most `rank` dimensions."""
        if not is_tensor(arg) or (arg not in self.kept and len(sizes(arg)) < rank):
            return arg
        if is_entrywise and is_uniform(arg):
            return self._call(node, arg.target, [1] * rank, *arg.args[1:], **arg.kwargs)
        if arg not in self.kept:
            if is_entrywise and sizes(arg)[0] == 1:
                return arg
            raise _Mixed
        kept, rest = self.kept[arg], sizes(arg)[1:]
        if len(rest) + 1 != rank:
            raise _Mixed
        if kept.shape[-1] != first.shape[-1]:
            raise _Mixed  # as many in all, of others
        return self._split(node, kept.node, first.node, first.shape, rest)


def _move_dimensions(node: fx.Node, args: list[Any], kwargs: dict[str, Any], rank: int, added: int) -> None:
    """Name the same dimensions of values that have some more, `added`, before those that are not of rows."""
    rank += node.target in INSERTIONS

    def moved(dim: int) -> int:
        if dim % rank == 0:
            raise _Mixed
        return dim + added if dim > 0 else dim

    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name not in DIMENSIONS:
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        if given is None or given == []:
            raise _Mixed  # all of them
        new = moved(given) if isinstance(given, int) else [moved(dim) for dim in given]
        if position < len(args):
            args[position] = new
        elif argument.name in kwargs:
            kwargs[argument.name] = new


def _tokens(shape: Shape) -> int:
    """How many dimensions at the beginning are tokens: those before the last that depends on the call."""
    found = 0
    while found < len(shape) and (shape[found].free_symbols or shape[found] == 1):
        found += 1
    while found and not shape[found - 1].free_symbols:
        found -= 1
    return found


def _merged(before: Shape, after: Shape, tokens: int) -> int | None:
    """How many places of each token a reshape puts into the first dimension with the tokens; None: it does not."""
    if not tokens or not after or free_symbols([*before[tokens:], *after[1:]]) or any(map(depends_on_data, before)):
        return None
    places = sympy.cancel(after[0] / sympy.prod(before[:tokens]))
    return int(places) if places.is_Integer and places > 1 else None


def _begins_with(shape: Shape, count: sympy.Expr) -> bool:
    """Whether the tokens are dimensions of a shape, at its beginning, that nothing else is merged with."""
    return any(sympy.expand(sympy.prod(shape[:dim]) - count) == 0 for dim in range(1, len(shape) + 1))


def _shapes(node: fx.Node) -> list[Shape]:
    """The shapes of all results."""
    return [tuple(map(expression, value.shape)) for value in pytree.tree_leaves(node.meta["val"])]


MOST_PLACES = 16  # each has nodes of its own


def unflatten_places(graph: fx.Graph) -> None:
    """Compute what is between `[N, k, ...]` flattened and split again for one place of each token at a time."""
    spaces: dict[tuple[sympy.Expr, int], list[fx.Node]] = {}
    for node in graph.nodes:
        if (found := _flattened(node)) is not None:
            spaces.setdefault((sizes(node)[found[1]], int(sizes(node.args[0])[found[0]])), []).append(node)
    for (count, places), entries in spaces.items():
        mode = entries[0].meta["val"].fake_mode
        with mode, torch.no_grad():
            _unflatten(graph, entries, count, places)
    if spaces:
        graph.eliminate_dead_code(fx.Node.is_impure)


def _flattened(node: fx.Node) -> tuple[int, int] | None:
    """The dimension of places that a reshape merges into that of tokens before it, and the dimension that results."""
    if node.target not in RESHAPES:
        return None
    before, after = sizes(node.args[0]), sizes(node)
    for merged, result in reshape_groups(before, after):
        *tokens, last = merged or [0]
        are_tokens = tokens and all(before[dim].free_symbols for dim in tokens) and not before[last].free_symbols
        if (
            are_tokens
            and 1 < before[last] <= MOST_PLACES
            and len(result) == 1
            and not any(map(depends_on_data, before))
        ):
            return last, result[0]
    return None


def _unflatten(graph: fx.Graph, entries: list[fx.Node], count: sympy.Expr, places: int) -> None:
    rows = RowOperators(graph, None, [], lambda size: bool(size == count))
    counts = [node for node in graph.nodes if _is_number(node, count)]
    for node in list(graph.nodes):
        reads = any(map(rows.knows, node.all_input_nodes))
        if node.op != "call_function" or not (reads or node in entries):
            continue
        with graph.inserting_before(node), contextlib.suppress(Unproven):  # what is not proven stays as it is
            if node in entries:
                found = _places(node, places)
                rows.enter(node, found)
                if not rows.sizes:
                    rows.sizes |= dict.fromkeys(counts, call(graph, aten.sym_size.int, found.values[0], found.place))
            elif node.target in RESHAPES and rows.is_rows(node.args[0]) and count not in sizes(node):
                whole = _together(rows.of(node.args[0]), places)
                new = call(graph, aten.reshape.default, whole, node.args[1])
                new.meta = {**node.meta, "val": new.meta["val"]}
                node.replace_all_uses_with(new)
            else:
                rows.visit(node)


def _is_number(node: fx.Node, count: sympy.Expr) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and bool(expression(value) == count)


def _places(node: fx.Node, places: int) -> Rows:
    """A flattened value, for each place; one value for all, if that is what was repeated."""
    source = node.args[0]
    dim, place = _flattened(node) or (0, 0)
    shape = [-1 if i == place else size for i, size in enumerate(sizes(node))]
    if any(not isinstance(size, int) and size.free_symbols for size in shape):
        raise Unproven(f"{node.target}: more than one dimension depends on the call", node)
    repeated = source
    while repeated.target in DIFFERENTIABLE_COPIES:
        repeated = repeated.args[0]
    if repeated.target is aten.expand.default and _is_repeated_along(repeated, dim):
        found = [call(node.graph, aten.select.int, repeated.args[0], dim, 0)]
    else:
        found = [call(node.graph, aten.select.int, source, dim, number) for number in range(places)]
    shape = [int(size) for size in shape]
    values = [call(node.graph, aten.reshape.default, value, shape) for value in found]
    return Rows(values, place, is_masked=True)


def _is_repeated_along(node: fx.Node, dim: int) -> bool:
    before, after = sizes(node.args[0]), sizes(node)
    return len(before) == len(after) and all(
        size == 1 if i == dim else size == after[i] for i, size in enumerate(before)
    )


def _together(rows: Rows, places: int) -> fx.Node:
    """`[..., N, k, ...]` of the values at all places."""
    values = rows.values if len(rows.values) == places else rows.values * places
    return call(values[0].graph, aten.stack.default, values, rows.place + 1)
