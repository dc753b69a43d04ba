"""Rows of learned position tables, picked by an index that the prologue computes.

`table[a:b:c]`, `.flip`, `.roll` and `cat` along the positions only say which rows of a table come in which order. Done
to the numbers of the rows instead, whatever they are, one `index_select` is left of it, which works token by
token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from dta_compile.executable.layouts import InputKind
from dta_compile.passes.axes.layouts import argument, is_tensor
from dta_compile.passes.program import Program, has_tensor
from dta_compile.passes.symbols import free_symbols, sizes

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class _Picked:
    """A value that is `table.index_select(dim, index)`."""

    table: fx.Node
    dim: int
    index: fx.Node


def index_position_tables(program: Program) -> None:
    """Replace what picks rows of a table, as many as the sizes of the call say, by an `index_select` of the table."""
    placeholders = zip(program.placeholders, program.inputs, strict=True)
    tables = {node for node, spec in placeholders if spec.kind is InputKind.PARAMETER}
    picked: dict[fx.Node, _Picked] = {}
    for node in list(program.graph.nodes):
        operands = node.all_input_nodes
        if operands and operands[0] in tables and tables.issuperset(operands) and _has_constant_sizes(node):
            tables.add(node)
            continue
        if looked_up := _looked_up(node, tables):
            picked[node] = looked_up
            continue
        with program.graph.inserting_before(node):
            found = _picked(node, tables, picked)
            if found is None:
                continue
            rows = program.graph.call_function(aten.index_select.default, (found.table, found.dim, found.index))
        rows.meta = dict(node.meta)
        picked[rows] = found
        node.replace_all_uses_with(rows)
        program.graph.erase_node(node)
    if picked:
        program.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node in program.draws)


def _has_constant_sizes(node: fx.Node) -> bool:
    return is_tensor(node) and not free_symbols(sizes(node))


def _looked_up(node: fx.Node, tables: set[fx.Node]) -> _Picked | None:
    """The rows that an embedding picks, unless some rows of it (its padding) have gradients of their own kind."""
    if node.target is not aten.embedding.default or node.args[0] not in tables or len(node.args) > 2:
        return None
    table, index = node.args
    return _Picked(table, 0, index) if len(sizes(index)) == 1 else None


def _picked(node: fx.Node, tables: set[fx.Node], picked: dict[fx.Node, _Picked]) -> _Picked | None:
    """Which rows of which table a node picks, if that is all it does."""
    if node.target is aten.cat.default:
        return _joined(node, [picked.get(part) for part in node.args[0]])
    moved = _moved_dim(node)
    if moved is None or not has_tensor(node):
        return None
    source, dim = node.args[0], moved % node.args[0].meta["val"].dim()
    if source in tables:
        count = source.meta["val"].shape[dim]
        index = _call(node, int(count), aten.arange.default, int(count), device=node.meta["val"].device)
        known = _Picked(source, dim, index)
    elif source not in picked or picked[source].dim != dim:
        return None
    else:
        known = picked[source]
    return dataclasses.replace(known, index=_same_done_to(node, known.index, dim))


def _joined(node: fx.Node, parts: list[_Picked | None]) -> _Picked | None:
    """Rows of one table after each other."""
    first, dim = parts[0], argument(node, 1, "dim") or 0
    if first is None or dim % node.meta["val"].dim() != first.dim:
        return None
    if any(part is None or (part.table, part.dim) != (first.table, first.dim) for part in parts):
        return None
    indices = [part.index for part in parts if part is not None]
    return dataclasses.replace(first, index=_call(node, node.meta["val"].shape[first.dim], aten.cat.default, indices))


def _moved_dim(node: fx.Node) -> int | None:
    """The dimension along which a node picks entries; None if it does anything else."""
    if node.target is aten.slice.Tensor:
        return argument(node, 1, "dim") or 0
    if node.target is aten.flip.default and len(node.args[1]) == 1:
        return node.args[1][0]
    if node.target is aten.index_select.default and len(sizes(node.args[2])) == 1:
        return node.args[1]
    return None


def _same_done_to(node: fx.Node, index: fx.Node, dim: int) -> fx.Node:
    """What a node does to a table along `dim`, done to the numbers of its rows."""
    changed = [0] if node.target is aten.flip.default else 0
    return _call(node, node.meta["val"].shape[dim], node.target, index, changed, *node.args[2:])


def _call(node: fx.Node, size: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node before `node` that gives `size` row numbers."""
    made = node.graph.call_function(target, args, kwargs)
    made.meta = {**node.meta, "val": node.meta["val"].new_empty((size,), dtype=torch.int64)}
    return made
