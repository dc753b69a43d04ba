"""Multiply by the weights that each row of the batch chooses as by those of experts.

    torch.bmm(x, lora[adapter])         x [B, S, D], lora [E, D, R], adapter [B]

A chunk has tokens of several rows, so a product by row is none of its tokens. As `dta::expert_linear` it is: every
token has the number that its row chose, and tokens of rows with different ones are different tokens.
"""

from __future__ import annotations

import torch
from torch import fx

from dta_compile.ops.experts.operators import EXPERT_LINEAR
from dta_compile.passes.graphs.arguments import indices_of
from dta_compile.passes.graphs.nodes import call
from dta_compile.passes.graphs.operators import aten
from dta_compile.passes.lowering.attention.distances import cast, positions
from dta_compile.passes.lowering.attention.factors import (
    Arranged,
    Arranger,
    Factor,
    Mismatch,
    leaves,
    product,
    product_dims,
    rewrite_products,
    whole,
)
from dta_compile.passes.symbols import sizes


def multiply_by_experts(graph: fx.Graph) -> None:
    """Rewrite the batched products of a graph, one operand of which is chosen for each row out of a table."""
    rewrite_products(graph, _multiply)


def _multiply(arranger: Arranger, node: fx.Node) -> None:
    """Replace a batched product of tokens `[B, S, k]` and weights `[B, k, n]`, or one of both transposed."""
    left, right = map(Arranged.of, node.args)
    is_left = _is_chosen(left.base)
    weights, tokens = (left, right) if is_left else (right, left)
    if not _is_chosen(weights.base) or _is_chosen(tokens.base):
        raise Mismatch("no weights that rows choose")
    (batch,), *others = product_dims(left, right)
    batch, rows, depth, columns = map(leaves, (batch, *others))
    rows, columns = (columns, rows) if is_left else (rows, columns)
    if leaves(weights.own[0]) != batch or not product(rows).free_symbols:
        raise Mismatch("products of other values than all tokens of a row")
    table = weights.base.args[0]
    experts = whole(table)[0]
    of_experts = [experts, *weights.own[1:]]
    weight = arranger.arrange(Arranged(table, of_experts, of_experts), [leaves(experts), depth, columns])
    slots = [batch, rows, list[Factor]()]
    number = _numbers(arranger, weights.base)
    expert = arranger.arrange(Arranged(number, [batch], [batch]), slots)
    value = arranger.arrange(tokens, [batch, rows, depth])
    new = call(arranger.graph, EXPERT_LINEAR, value, expert, weight, True)
    new = call(arranger.graph, aten.select.int, new, 2, 0)
    node.replace_all_uses_with(call(arranger.graph, aten.transpose.int, new, 1, 2) if is_left else new)


def _is_chosen(node: fx.Node) -> bool:
    """Return whether a value is the entries of a table that one number for each row selects."""
    numbers = _chosen_by(node)
    if numbers is None or numbers.meta["val"].dtype not in (torch.int64, torch.int32):
        return False
    shape, is_here = sizes(numbers), numbers.meta["val"].device == node.meta["val"].device
    return is_here and len(shape) == 1 and bool(shape[0].free_symbols)


def _chosen_by(node: fx.Node) -> fx.Node | None:
    """Return the numbers by which a value is selected along the first dimension of a table; None if it is not."""
    # An entry for padding gets no gradient, and scaled ones another; `padding_idx` is -1 where there is none.
    is_plain = node.target is aten.embedding.default and node.args[2:3] in ((), (-1,)) and not any(node.args[3:])
    if not is_plain and node.target not in (aten.index.Tensor, aten.index_select.default):
        return None
    indices = indices_of(node)
    return indices[0] if indices.keys() == {0} else None


def _numbers(arranger: Arranger, chosen: fx.Node) -> fx.Node:
    """Return the number `[B]` of the entry that each row chose, by the operator that chose it, which counts negative
    numbers from the end, or refuses them as it does those that are too large."""
    graph, numbers = arranger.graph, _chosen_by(chosen)
    assert numbers is not None
    every = positions(graph, arranger.size(whole(chosen.args[0])[0]), numbers.meta["val"])
    if chosen.target is aten.embedding.default:
        own = call(graph, chosen.target, call(graph, aten.unsqueeze.default, every, 1), numbers)
        own = call(graph, aten.select.int, own, 1, 0)
    else:
        indices = [0, numbers] if chosen.target is aten.index_select.default else [[numbers]]
        own = call(graph, chosen.target, every, *indices)
    return cast(own, torch.int64)
