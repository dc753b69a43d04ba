"""Products of a matrix with several rows of every token, as one product of all tokens for each of these rows.

`F.linear` on `[B, S, H, D]` or on `[B, H, S, D]`, and an einsum over whichever dimension, are written as a product of
`[B * S * H, D]`, in which no dimension counts tokens. The same products are those of `[H, B * S, D]` with `H` times the
same matrix.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.axes.layouts import batch_and_tokens, mixer_calls
from dta_compile.passes.graphs.nodes import call
from dta_compile.passes.graphs.operators import RESHAPES
from dta_compile.passes.symbols import depends_on_data, sizes

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1}  # the position of the rows


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A value `source` reshaped for a product with one matrix.

    Attributes:
        leading: how many of its dimensions count rows.
        places: those of them that count the rows of a token.
        matrix: with dimensions of one entry before its rows and columns, if any.
    """

    source: fx.Node
    leading: int
    places: tuple[int, ...]
    matrix: fx.Node


def batch_row_products(graph: fx.Graph) -> None:
    """Rewrite products that are read as `[B, S, H, E]` or the like only.

    `B` may be a number, too: a loop over sequences makes it one.
    """
    batches = {batch_and_tokens(mixer)[0] for mixer in mixer_calls(graph)}
    for node in list(graph.nodes):
        if node.target in PRODUCTS and (rows := _rows(node, batches)) is not None:
            mode = node.meta["val"].fake_mode
            with graph.inserting_before(node), mode, torch.no_grad():
                _batch(graph, node, rows)
    graph.eliminate_dead_code(fx.Node.is_impure)


def _rows(product: fx.Node, batches: Container[sympy.Expr]) -> _Rows | None:
    """What a product multiplies, if every token has several rows of it."""
    position = PRODUCTS[product.target]
    flat, matrix = product.args[position : position + 2]
    if flat.target not in RESHAPES or product.kwargs or any(user.target not in RESHAPES for user in product.users):
        return None
    matrix = _repeated(matrix)
    if math.prod(sizes(matrix)[:-2]) != 1 or (position and len(sizes(product.args[0])) != 1):
        return None
    before, (*count, width) = sizes(flat.args[0]), sizes(flat)
    if not all(size.is_Integer for size in sizes(matrix)) or 0 in before or any(map(depends_on_data, before)):
        return None
    leading = len(before)
    while leading and math.prod(before[leading:]) != width:
        leading -= 1
    if sympy.expand(math.prod(before[:leading]) - math.prod(count)) != 0:
        return None
    first = int(leading > 0 and before[0] in batches)
    places = tuple(dim for dim in range(first, leading) if not before[dim].free_symbols and before[dim] != 1)
    counts_tokens = any(before[dim].free_symbols for dim in range(leading))
    return _Rows(flat.args[0], leading, places, matrix) if places and counts_tokens else None


def _repeated(matrix: fx.Node) -> fx.Node:
    """What a batch of matrices is repeated from."""
    source = matrix
    while source.target in RESHAPES or source.target is aten.expand.default:
        source = source.args[0]
        if sizes(source)[-2:] != sizes(matrix)[-2:]:
            break
        if math.prod(sizes(source)[:-2]) == 1:
            return source
    return matrix


def _batch(graph: fx.Graph, product: fx.Node, rows: _Rows) -> None:
    before, position = sizes(rows.source), PRODUCTS[product.target]
    bias = product.args[:position]

    def new(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = call(graph, target, *args, **kwargs)
        node.meta = {**product.meta, "val": node.meta["val"]}
        return node

    others = [dim for dim in range(rows.leading) if dim not in rows.places]
    order = [*rows.places, *others]
    count, (width, out) = int(math.prod(before[dim] for dim in rows.places)), map(int, sizes(rows.matrix)[-2:])
    value = new(aten.permute.default, rows.source, [*order, *range(rows.leading, len(before))])
    value = new(aten.reshape.default, value, [count, -1, width])
    matrices = new(aten.expand.default, new(aten.reshape.default, rows.matrix, [1, width, out]), [count, width, out])
    value = new(aten.bmm.default, value, matrices)
    shape = [
        new(aten.sym_size.int, rows.source, dim) if before[dim].free_symbols else int(before[dim]) for dim in order
    ]
    value = new(aten.reshape.default, value, [*shape, out])
    value = new(aten.permute.default, value, [*(order.index(dim) for dim in range(rows.leading)), rows.leading])
    for term in bias:
        value = new(aten.add.Tensor, value, term)
    value = new(aten.clone.default, value, memory_format=torch.contiguous_format)  # others may view it
    for user in list(product.users):
        with graph.inserting_before(user):
            user.replace_all_uses_with(new(aten.reshape.default, value, user.args[1]))
