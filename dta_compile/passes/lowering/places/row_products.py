"""Rewrite products of a matrix with several rows (slots) per token as a batched product, with slots as the batch.

Part of `lower`. `F.linear` on `[B, S, H, D]` or on `[B, H, S, D]`, and an einsum over any dimension, are traced as a
product with `[B * S * H, D]`, in which no dimension counts tokens. An equal product is that of `[H, B * S, D]` with the
matrix expanded to `H`.
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
    """Operands of a product with one matrix.

    Attributes:
        source: the left operand before it was flattened.
        leading: the number of its leading dimensions, which count rows.
        slots: those of them that count the rows of one token.
        matrix: the right operand, `[D, E]`, possibly with leading dimensions of size 1.
    """

    source: fx.Node
    leading: int
    slots: tuple[int, ...]
    matrix: fx.Node


def batch_row_products(graph: fx.Graph) -> None:
    """Rewrite products that are only read by reshapes, to `[B, S, H, E]` say.

    `B` may be a constant, too: a loop over sequences makes it one.
    """
    batches = {batch_and_tokens(mixer)[0] for mixer in mixer_calls(graph)}
    for node in list(graph.nodes):
        if node.target in PRODUCTS and (rows := _rows(node, batches)) is not None:
            mode = node.meta["val"].fake_mode
            with graph.inserting_before(node), mode, torch.no_grad():
                _batch(graph, node, rows)
    graph.eliminate_dead_code(fx.Node.is_impure)


def _rows(product: fx.Node, batches: Container[sympy.Expr]) -> _Rows | None:
    """Return the operands of a product that has several rows per token."""
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
    slots = tuple(dim for dim in range(first, leading) if not before[dim].free_symbols and before[dim] != 1)
    counts_tokens = any(before[dim].free_symbols for dim in range(leading))
    return _Rows(flat.args[0], leading, slots, matrix) if slots and counts_tokens else None


def _repeated(matrix: fx.Node) -> fx.Node:
    """Return the matrix that a batch of matrices is expanded from; the batch itself if it is not."""
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

    others = [dim for dim in range(rows.leading) if dim not in rows.slots]
    order = [*rows.slots, *others]
    count, (width, out) = int(math.prod(before[dim] for dim in rows.slots)), map(int, sizes(rows.matrix)[-2:])
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
    value = new(aten.clone.default, value, memory_format=torch.contiguous_format)  # views of it need contiguous memory
    for user in list(product.users):
        with graph.inserting_before(user):
            user.replace_all_uses_with(new(aten.reshape.default, value, user.args[1]))
