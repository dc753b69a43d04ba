"""Rewrite batched products with weights that are repeated for every sequence, or that each row of the batch chooses.

    w[:, None] @ x                      w [H, E, D], x [H, B, D, S]: a layer per head
    torch.bmm(w.expand(B, -1, -1), x)
    torch.bmm(x, lora[adapter])         x [B, S, D], lora [E, D, R], adapter [B]

Torch expands what it broadcasts and merges the dimensions: `[H * B, E, D]` times `[H * B, D, S]`. A product with a
repeated operand is one with the operand itself, of which the other operand's repetitions are further rows or columns.

A chunk has tokens of several rows, so a product by row is none of its tokens. As `dta::expert_linear` it is: every
token has the number that its row chose, and tokens of rows with different ones are different tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import fx

from dta_compile.ops.experts.operators import EXPERT_LINEAR
from dta_compile.passes.graphs.arguments import indices_of
from dta_compile.passes.graphs.nodes import call, erase_unused
from dta_compile.passes.graphs.operators import aten
from dta_compile.passes.graphs.source_lines import copy_stack_trace
from dta_compile.passes.lowering.attention.distances import cast, positions
from dta_compile.passes.lowering.attention.factors import (
    MOVES,
    Arranged,
    Arranger,
    Dim,
    Factor,
    Mismatch,
    leaves,
    product,
    product_dims,
    whole,
)
from dta_compile.passes.symbols import sizes

# Replaces a product of two operands, given its dimensions: outer, rows, summed, columns; or raises `Mismatch`.
Rewriting = Callable[[Arranger, fx.Node, tuple[Arranged, Arranged], list[Dim]], None]


def multiply_unrepeated(graph: fx.Graph) -> None:
    """Rewrite the batched products of a graph, one operand of which is repeated as often as there are sequences."""
    _rewrite(graph, _multiply_unrepeated)


def multiply_by_experts(graph: fx.Graph) -> None:
    """Rewrite the batched products of a graph, one operand of which is chosen for each row out of a table."""
    _rewrite(graph, _multiply_by_experts)


def _rewrite(graph: fx.Graph, rewriting: Rewriting) -> None:
    """Apply a rewriting to the batched products of a graph; those for which it raises `Mismatch` are left."""
    arranger = Arranger(graph)
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        with graph.inserting_before(node), contextlib.suppress(Mismatch):
            left, right = map(Arranged.of, node.args)
            (batch,), *others = product_dims(left, right)
            rewriting(arranger, node, (left, right), [leaves(dim) for dim in (batch, *others)])
            copy_stack_trace(node)
    erase_unused(graph)


def _multiply_unrepeated(
    arranger: Arranger, node: fx.Node, operands: tuple[Arranged, Arranged], dims: list[Dim]
) -> None:
    """Replace a batched product `[N, m, k] @ [N, k, n]`."""
    if not any(map(_is_repeated, node.args)):
        raise Mismatch("no operand that is repeated")
    (left, right), (batch, rows, depth, columns) = operands, dims
    shared, of_left, of_right = Dim(), Dim(), Dim()
    for factor in batch:
        is_rows, is_columns = (factor.size.free_symbols and not other.has(factor) for other in (right, left))
        (of_left if is_rows else of_right if is_columns else shared).append(factor)
    if not of_left and not of_right:
        return
    outer, upper, lower = [shared] * bool(shared), [*of_left, *rows], [*of_right, *columns]
    operator = aten.bmm.default if shared else aten.mm.default
    first = arranger.arrange(left, [*outer, upper, depth])
    second = arranger.arrange(right, [*outer, depth, lower])
    own = [*outer, upper, lower]
    result = Arranged(call(node.graph, operator, first, second), own, own)
    node.replace_all_uses_with(arranger.arrange(result, [batch, rows, columns]))


def _is_repeated(node: fx.Node) -> bool:
    """Return whether moves of entries repeat a value a number of times that depends on the call."""
    while node.target in MOVES:
        before, after = sizes(node.args[0]), sizes(node)
        if node.target is aten.expand.default:
            known = (*(1,) * (len(after) - len(before)), *before)
            if any(size.free_symbols and own == 1 for own, size in zip(known, after, strict=True)):
                return True
        node = node.args[0]
    return False


def _multiply_by_experts(
    arranger: Arranger, node: fx.Node, operands: tuple[Arranged, Arranged], dims: list[Dim]
) -> None:
    """Replace a batched product of tokens `[B, S, k]` and weights `[B, k, n]`, or one of both transposed."""
    is_left = _is_chosen(operands[0].base)
    weights, tokens = operands if is_left else operands[::-1]
    if not _is_chosen(weights.base) or _is_chosen(tokens.base):
        raise Mismatch("no weights that rows choose")
    batch, rows, depth, columns = dims
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
