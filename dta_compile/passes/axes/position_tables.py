"""Rewrite slices of learned position tables as `index_select` by an index that the prologue computes.

`table[a:b:c]`, `.flip`, `.roll` and `cat` along the positions only choose and order rows of a table. Applied to the row
numbers instead, they leave one `index_select` of the table, which works token by token. Called by `token_axis`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from dta_compile.executable.layouts import InputKind
from dta_compile.passes.axes.layouts import is_tensor
from dta_compile.passes.graphs.arguments import dim_of
from dta_compile.passes.graphs.nodes import erase_unused
from dta_compile.passes.graphs.operators import aten
from dta_compile.passes.program import Program, has_tensor
from dta_compile.passes.symbols import free_symbols, sizes


@dataclasses.dataclass(frozen=True)
class _Picked:
    """A value equal to `table.index_select(dim, index)`."""

    table: fx.Node
    dim: int
    index: fx.Node


def index_position_tables(program: Program) -> None:
    """Replace operators that pick rows of a table, in a number that depends on the sizes of the call, by an
    `index_select` of the table."""
    placeholders = zip(program.placeholders, program.inputs, strict=True)
    tables = {node for node, spec in placeholders if spec.kind is InputKind.PARAMETER}
    picked: dict[fx.Node, _Picked] = {}
    for node in list(program.graph.nodes):
        operands = node.all_input_nodes
        if operands and tables.issuperset(operands) and is_tensor(node) and not free_symbols(sizes(node)):
            tables.add(node)
            continue
        if looked_up := _rows_of_embedding(node, tables):
            picked[node] = looked_up
            continue
        if node.target is not aten.cat.default and _selected_dim(node) is None:
            continue
        with program.graph.inserting_before(node):
            source = _rows_of(node, tables, picked)
            if source is None:
                continue
            rows = program.graph.call_function(aten.index_select.default, (source.table, source.dim, source.index))
        rows.meta = dict(node.meta)
        picked[rows] = source
        node.replace_all_uses_with(rows)
        program.graph.erase_node(node)
    if picked:
        kept = {*program.draws, *program.asserted}
        erase_unused(program.graph, lambda node: node.op in ("placeholder", "output") or node in kept)


def _rows_of_embedding(node: fx.Node, tables: set[fx.Node]) -> _Picked | None:
    """Return the rows that an embedding picks; None if some rows (padding) have gradients of their own kind."""
    if node.target is not aten.embedding.default or node.args[0] not in tables or len(node.args) > 2:
        return None
    table, index = node.args
    return _Picked(table, 0, index) if len(sizes(index)) == 1 else None


def _rows_of(node: fx.Node, tables: set[fx.Node], picked: dict[fx.Node, _Picked]) -> _Picked | None:
    """Return the rows that a node picks from a table; None if it does anything else."""
    if node.target is aten.cat.default:
        return _concatenated(node, [picked.get(part) for part in node.args[0]])
    source, dim = node.args[0], _selected_dim(node)
    if dim is None or not has_tensor(node):
        return None
    if source in tables:
        count = source.meta["val"].shape[dim]
        index = _call(node, int(count), aten.arange.default, int(count), device=node.meta["val"].device)
        known = _Picked(source, dim, index)
    elif source not in picked or picked[source].dim != dim:
        return None
    else:
        known = picked[source]
    return dataclasses.replace(known, index=_apply_to_rows(node, known.index, dim))


def _concatenated(node: fx.Node, parts: list[_Picked | None]) -> _Picked | None:
    """Return the rows of a concatenation of rows of one table."""
    first = parts[0]
    if first is None or dim_of(node) != first.dim:
        return None
    if any(part is None or (part.table, part.dim) != (first.table, first.dim) for part in parts):
        return None
    indices = [part.index for part in parts if part is not None]
    return dataclasses.replace(first, index=_call(node, node.meta["val"].shape[first.dim], aten.cat.default, indices))


def _selected_dim(node: fx.Node) -> int | None:
    """Return the dimension along which a node picks entries; None if it does anything else."""
    if node.target is aten.flip.default and len(node.args[1]) == 1:
        return node.args[1][0] % node.meta["val"].dim()
    is_index = node.target is aten.index_select.default and len(sizes(node.args[2])) == 1
    return dim_of(node) if is_index or node.target is aten.slice.Tensor else None


def _apply_to_rows(node: fx.Node, index: fx.Node, dim: int) -> fx.Node:
    """Apply to the row numbers the operator that a node applies to a table along `dim`."""
    changed = [0] if node.target is aten.flip.default else 0
    return _call(node, node.meta["val"].shape[dim], node.target, index, changed, *node.args[2:])


def _call(node: fx.Node, size: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call before `node` that computes `size` row numbers."""
    indices = node.graph.call_function(target, args, kwargs)
    indices.meta = {**node.meta, "val": node.meta["val"].new_empty((size,), dtype=torch.int64)}
    return indices
