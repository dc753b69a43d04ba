"""Embeddings that a caller gives with a gradient: `model(inputs_embeds=embeds)` where `embeds.requires_grad`.

Each given row has a gradient of its own, and a token that rows share in the tree has one, the sum over them. So given
embeddings become a table with a row per *given* vector, which the rest of the graph reads as it reads features of
images (see `graph_encoders`):

    x [B, S, D]     table [B * S, D], a view of x, and rows [B, S] of it: embedding(rows, table)

The row number belongs to the prefix key, so that tokens share in front of given embeddings, and not from there on.
That is so wherever x comes from: if an embedding made it, its derivative adds copies of a vector up, but whoever has a
hook on x, or on its node of autograd, reads their gradients one by one, and such hooks cannot be seen from here.

`classify` calls this.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from dta_compile.capture.dynamo.breaks import given_up, resumes_after_a_break
from dta_compile.capture.flex_attention import eliminate_dead_code
from dta_compile.capture.media.feature_cut import table_inputs
from dta_compile.passes.program import ancestors
from dta_compile.passes.symbols import expression

UNSHARED = (
    "embeddings with a gradient are given, which each row has of its own, and tokens that rows share have one: so "
    "nothing is shared from them on (compute them inside of the compiled function to share them)"
)


@dataclasses.dataclass(frozen=True)
class GivenEmbeddings:
    """Captured graph that reads given embeddings from tables.

    Attributes:
        module: the graph; its inputs are those of the captured graph, then a table and its rows for each.
        inputs: numbers of the given embeddings among the inputs, by how many dimensions they are counted, and whether
            the first one counts rows.
    """

    module: fx.GraphModule
    inputs: Sequence[tuple[int, int, bool]]

    def call(self, run: Callable[..., Sequence[Any]], note_unshared: Callable[[], None], *args: Any) -> Sequence[Any]:
        """Call a callable of the graph with the inputs of the captured graph.

        `note_unshared` is called after calls in which rows share nothing from given embeddings on.
        """
        tables = [_table_of(args[i], counted) for i, counted, _ in self.inputs]
        given = {i: args[i].data for i, _, _ in self.inputs}  # of which nothing is read: no reference to the tensor
        args = tuple(given.get(i, value) for i, value in enumerate(args))
        results = run(*args, *(value for table in tables for value in table))
        if any(of_rows for _, _, of_rows in self.inputs):
            note_unshared()
        return results


def _table_of(given: torch.Tensor, counted: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table `[R, D]` of given vectors `[*counts, ...]`, and the row of each, int64 `[*counts]`; `counted`
    dimensions count vectors."""
    leading = given.shape[:counted]
    number = math.prod(leading)
    return given.reshape(number, -1), torch.arange(number, device=given.device).view(leading)


def with_given_embeddings(
    module: fx.GraphModule, mixing: Collection[fx.Node], counting: Set[sympy.Symbol], of_rows: Set[sympy.Expr]
) -> GivenEmbeddings | None:
    """Read the embeddings that attention depends on, and that are given with a gradient, from tables.

    Args:
        mixing: nodes of the graph that mix tokens.
        counting: symbols of sizes that count rows or tokens.
        of_rows: sizes that count rows.

    Returns:
        None if there are none, and after a graph break, which is refused.
    """
    needed = ancestors(mixing)
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    given = [(i, node) for i, node in enumerate(placeholders) if node in needed and _is_given(node, counting)]
    if not given or not torch.is_grad_enabled() or resumes_after_a_break() or given_up():
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    result = fx.GraphModule(module, graph)
    result.meta = module.meta
    inputs = []
    for i, node in given:
        value = node.meta["example_value"]
        counted = 1 if value.dim() == 2 and not _counts(value.shape[1], counting) else min(value.dim(), 2)
        features = [*map(int, value.shape[counted:])]
        with value.fake_mode:
            traced = torch.empty(value.shape[:counted], dtype=torch.int64, device=value.device)
        table, rows = table_inputs(graph, value, math.prod(features), traced)
        with graph.inserting_before(next(part for part in graph.nodes if part.op != "placeholder")):
            vectors = graph.call_function(F.embedding, (rows, table))
            read = graph.call_method("unflatten", (vectors, -1, features) if features else (vectors, -1, (1,)))
            read = read if features else graph.call_method("squeeze", (vectors, -1))
        copies[node].replace_all_uses_with(read)
        inputs.append((i, counted, expression(value.shape[0]) in of_rows))
    eliminate_dead_code(graph)
    result.recompile()
    return GivenEmbeddings(result, inputs)


def _is_given(node: fx.Node, counting: Set[sympy.Symbol]) -> bool:
    """Return whether an input is data with a gradient, of rows or tokens."""
    value, grapharg = node.meta.get("example_value"), node.meta.get("grapharg")
    if not isinstance(value, torch.Tensor) or grapharg is None or isinstance(grapharg.example, torch.nn.Parameter):
        return False
    return (
        value.requires_grad and value.is_floating_point() and any(_counts(size, counting) for size in value.shape[:2])
    )


def _counts(size: int | torch.SymInt, counting: Set[sympy.Symbol]) -> bool:
    return not counting.isdisjoint(expression(size).free_symbols)
