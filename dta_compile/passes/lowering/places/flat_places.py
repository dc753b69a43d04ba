"""Values of the k places of all tokens in one dimension, `[N * k, D]`, as k values `[N, D]`, one beside the other.

What treats each place by itself is done for the first places of all tokens, for the second ones, and so on: then each
is a value with a row a token, which is what the rules of `token_rules` are about. Values that are used otherwise stay
as they are, beside those.
"""

from __future__ import annotations

import contextlib

import sympy
import torch
from torch import fx

from dta_compile.passes.axes.shape_rules import reshape_groups
from dta_compile.passes.graphs.nodes import call
from dta_compile.passes.graphs.operators import DIFFERENTIABLE_COPIES, RESHAPES
from dta_compile.passes.lowering.places.row_operators import RowOperators, Rows, Unproven
from dta_compile.passes.symbols import depends_on_data, expression, sizes

aten = torch.ops.aten
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
