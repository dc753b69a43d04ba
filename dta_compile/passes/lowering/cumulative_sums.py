"""Replace sums over all earlier tokens, `x.cumsum(1)`, by the recurrence `h = h + x`, which runs over the tree.

Means of earlier tokens and linear attention are often written so. A sum of data alone, such as a mask's, is computed
before the tree, and one that only a loss reads, behind it; both stay.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy
import torch
from torch import fx

from dta_compile.passes.axes.layouts import batch_and_tokens, mixer_calls
from dta_compile.passes.graphs.arguments import argument, dim_of
from dta_compile.passes.graphs.nodes import call, descendants, erase_unused, is_float, of_rows
from dta_compile.passes.graphs.operators import aten
from dta_compile.passes.graphs.source_lines import copy_stack_trace
from dta_compile.passes.lowering.shifts import layers
from dta_compile.passes.program import ancestors, has_tensor
from dta_compile.passes.symbols import sizes


def sums_to_recurrences(graph: fx.Graph, parameters: Iterable[fx.Node]) -> None:
    """Replace cumulative sums over tokens that attention or a layer reads, in place."""
    sums, calls = graph.find_nodes(op="call_function", target=aten.cumsum.default), mixer_calls(graph)
    if not sums or not calls:
        return
    parameters, axes = list(parameters), set(map(batch_and_tokens, calls))
    data = [node for node in graph.find_nodes(op="placeholder") if node not in parameters and has_tensor(node)]
    with_gradient = descendants(graph, parameters)
    before = ancestors([*calls, *layers(graph, descendants(graph, data))])
    for node in sums:
        (batch, *others), dim = sizes(node), dim_of(node)
        tokens = others.pop(dim - 1) if dim > 0 else sympy.S.One
        is_over_tokens = tokens.free_symbols and (batch, tokens) in axes and all(size.is_Integer for size in others)
        if is_over_tokens and is_float(node) and node in before and node in with_gradient:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_recurrence(node, dim))
                copy_stack_trace(node)
    erase_unused(graph)


def _recurrence(node: fx.Node, dim: int) -> fx.Node:
    graph, value, dtype = node.graph, node.args[0], argument(node, "dtype")
    if dtype is not None:
        value = call(graph, aten._to_copy.default, value, dtype=dtype)

    def added(rows: fx.Node) -> fx.Node:
        ones = call(graph, aten.full_like.default, rows, 1.0)
        return call(graph, torch.ops.dta.cumulative_sum.default, rows, ones, None)

    result = of_rows(value, dim, added)
    if dim == 1:
        return result
    return call(graph, aten.clone.default, result, memory_format=torch.contiguous_format)  # as `cumsum` returns it
