"""Operators whose entries for a query and a key are made of entries of operands for the same query and key.

A dimension of a value runs over queries "q", keys "k", pairs of both ("qk" or "kq"), or neither (None).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import sympy
import torch
from torch import fx

from dta_compile.passes.axes.shape_rules import Labels, labelled_source, labels_in, reshape_groups
from dta_compile.passes.graphs.arguments import argument, dim_of, slice_of
from dta_compile.passes.graphs.nodes import is_pointwise
from dta_compile.passes.graphs.operators import (
    CASTS,
    MATRIX_PRODUCTS,
    RANGES,
    RESHAPES,
    SQUEEZES,
    UNTAGGED_POINTWISE,
    aten,
)
from dta_compile.passes.lowering.experts.slots import counts_from_zero
from dta_compile.passes.program import has_tensor
from dta_compile.passes.symbols import expression, sizes, value_of
from dta_compile.torch_compat.sizes import FloorDiv

Operands = list[tuple[fx.Node, Labels]]
TOTALS = (aten.sum.dim_IntList, aten.mean.dim)


def over(labels: Labels) -> str:
    """Return which of queries and keys some dimensions run over."""
    return "".join(label for label in labels if label)


def operands_of(node: fx.Node, labels: Labels) -> Operands | None:
    """Return the operands of a node with their labels; None for operators that are none of these."""
    if node.op != "call_function" or not node.args:
        return None
    source = node.args[0]
    if node.target in CASTS:
        return [(source, labels)]
    if (moved := labelled_source(node, labels) or _regrouped(node, labels)) is not None:
        return [moved]
    if is_pointwise(node) or node.target in UNTAGGED_POINTWISE:
        return [(arg, labels_in(arg, labels)) for arg in node.all_input_nodes if has_tensor(arg)]
    if node.target in MATRIX_PRODUCTS:
        *added, left, right = node.args
        of_left, of_right = (*labels[:-1], None), (*labels[:-2], None, labels[-1])
        return [*((arg, labels_in(arg, labels)) for arg in added), (left, of_left), (right, of_right)]
    if node.target in TOTALS or node.target in SQUEEZES:
        return _without_dims(node, labels)
    if node.target is aten.embedding.default and labels[-1] is None:
        return [(source, (None, None)), (node.args[1], labels[:-1])]
    if node.target is aten.index.Tensor:
        return _indexed(node, labels)
    if node.target is aten.select.int:
        return [(source, _spread(labels, [node.args[1]], len(labels) + 1))]
    if node.target in (aten.slice.Tensor, aten.cat.default) and labels[dim_of(node)] is None:
        return [(part, labels) for part in (source if node.target is aten.cat.default else [source])]
    return None


def cut_from(node: fx.Node, labels: Labels) -> tuple[fx.Node, Labels] | None:
    """Return the value over more tokens of which a node takes the first queries or keys, and its labels; or as many
    further ones of both, whose pairs are as far apart. None for other nodes."""
    if node.op != "call_function" or node.target not in (aten.slice.Tensor, aten.index_select.default):
        return None
    source, dim = node.args[0], dim_of(node)
    if labels[dim] not in ("q", "k"):
        return None
    if node.target is aten.index_select.default:
        is_first = node.args[2].target in RANGES and counts_from_zero(node.args[2])
        return (source, labels) if is_first else None
    start = _start(node)
    if start == 0:
        return source, labels
    if source.target is not aten.slice.Tensor or start is None or _start(source) != start:
        return None
    dims, shape = {dim, dim_of(source)}, sizes(source.args[0])
    are_both = {labels[dim] for dim in dims} == {"q", "k"} and len({shape[dim] for dim in dims}) == 1
    return (source.args[0], labels) if are_both else None


def _start(node: fx.Node) -> sympy.Expr | None:
    """Return the first index of a slice of adjacent entries, as it is written."""
    part = slice_of(node)
    return None if part is None else expression(value_of(part.start))


def _spread(labels: Labels, dims: Collection[int], rank: int) -> Labels:
    """Return the labels of `rank` dimensions of which some, without a label, are gone in a result."""
    left: Iterator[str | None] = iter(labels)
    gone = {dim % rank for dim in dims}
    return tuple(None if dim in gone else next(left) for dim in range(rank))


def _without_dims(node: fx.Node, labels: Labels) -> Operands | None:
    """Return the operand of a sum, mean or squeeze of dimensions without a label."""
    source, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
    shape, dims = sizes(source), [dims] if isinstance(dims, int) else dims
    if not dims:
        return None
    if node.target in SQUEEZES:
        dims = [dim for dim in dims if shape[dim] == 1]
    elif argument(node, "keepdim"):
        return None if any(labels[dim] for dim in dims) else [(source, labels)]
    return [(source, _spread(labels, dims, len(shape)))]


def _indexed(node: fx.Node, labels: Labels) -> Operands | None:
    """Return the operands of `x[..., index]`, if neither depends on the index that the other one does."""
    source, indices = node.args[:2]
    picks = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.meta["val"].dtype in (torch.bool, torch.uint8) for _, index in picks):
        return None
    first, last, rank = picks[0][0], picks[-1][0], max(len(sizes(index)) for _, index in picks)
    if last - first + 1 != len(picks) or any(labels[:first] + labels[first + rank :]):
        return None
    picked = labels[first : first + rank]
    return [(source, (None,) * len(sizes(source))), *((index, labels_in(index, picked)) for _, index in picks)]


def _regrouped(node: fx.Node, labels: Labels) -> tuple[fx.Node, Labels] | None:
    """Return the operand of a reshape that merges queries with keys or takes them apart, and its labels."""
    if node.target not in RESHAPES:
        return None
    source = node.args[0]
    before, after = (tuple(map(_divided, sizes(value))) for value in (source, node))
    own: list[str | None] = [None] * len(before)
    for group_in, group_out in reshape_groups(before, after):
        ins, names = [i for i in group_in if before[i] != 1], over(tuple(labels[j] for j in group_out))
        if not names:
            continue
        outs = [j for j in group_out if after[j] != 1]
        if len(ins) == 1 and all(labels[j] for j in outs):
            own[ins[0]] = names
        elif len(ins) == len(names) == 2 and len(outs) == 1 and before[ins[0]] == before[ins[1]]:
            own[ins[0]], own[ins[1]] = names[0], names[1]
        else:
            return None
    return source, tuple(own)


def _divided(size: sympy.Expr) -> sympy.Expr:
    """Return a size whose quotients by factors are carried out: a view of `[S * S]` as `[S, -1]` has `S**2 // S`."""
    quotients = {part: sympy.cancel(part.args[0] / part.args[1]) for part in size.atoms(FloorDiv)}
    return size.subs({part: exact for part, exact in quotients.items() if exact.as_numer_denom()[1] == 1})
