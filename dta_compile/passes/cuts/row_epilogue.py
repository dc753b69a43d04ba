"""Build the epilogue as a graph of one row of the batch, for streaming mode, which evaluates losses row by row.

Where the batch size is part of a shape, it becomes one; where it is a number in a formula (`log_prob / ids.shape[0]`),
it stays the size of the batch. The operator tells which: reshapes and expansions take the shape of their result, whose
batch axis is known; all others take numbers. Called by `dense_graphs`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
from torch import fx

from dta_compile.executable.layouts import Axis, Layout
from dta_compile.passes.axes.shape_rules import reshape_groups
from dta_compile.passes.axes.token_axis import apply_rule, axis_of_size, is_labelled, layout_by_shape
from dta_compile.passes.graphs.arguments import operand_dims
from dta_compile.passes.graphs.operators import TAKE_A_SHAPE, aten
from dta_compile.passes.graphs.subgraph import Subgraph
from dta_compile.passes.program import Mixed, Program, Value, has_tensor
from dta_compile.passes.symbols import sizes

PER_ROW = tuple(axis for axis in Axis if axis.is_over_sequences)


def row_epilogue(program: Program, nodes: Sequence[fx.Node], received: Sequence[fx.Node]) -> fx.GraphModule | Mixed:
    """Return the graph `(batch, *inputs, *received) -> outputs` of a row; `Mixed` with the reason if there is none.

    Args:
        nodes: the nodes of the epilogue, in order, without those that it receives.
        received: values that the graph gets besides the inputs of the call, cut to one row.
    """
    values = _layouts(program, nodes)
    if isinstance(values, Mixed):
        return values
    subgraph = Subgraph()
    batch = subgraph.graph.placeholder("batch")
    subgraph.add_inputs(program.placeholders)
    subgraph.add_inputs(received, "received_")
    for node in nodes:
        if node in subgraph.copies:
            continue
        copy = subgraph.copied(node)
        if node.target in TAKE_A_SHAPE:
            _take_shape_of_row(copy, values[node], batch)
        elif not has_tensor(node) and _counts_rows(node, values):
            subgraph.copies[node] = subgraph.graph.call_function(operator.mul, (copy, batch))
    return subgraph.module(program.module, program.outputs)


def _layouts(program: Program, nodes: Sequence[fx.Node]) -> dict[fx.Node, Value] | Mixed:
    """Return the batch axes of every value, by the token rules, but with token axes as features."""
    own = {node for node in nodes if node.op != "placeholder"}
    outputs = [node for node in program.outputs if isinstance(node, fx.Node)]
    read = dict.fromkeys(arg for node in own for arg in node.all_input_nodes)
    values = {node: row_layout(program, node) for node in [*read, *outputs] if node not in own}
    for node in nodes:
        if node not in own:
            continue
        if not has_tensor(node):
            if node.target in (aten.sym_stride.int, aten.sym_storage_offset.default) and _reads_rows(node, values):
                return Mixed(f"{node.target} depends on how the batch lies in memory", node)
            continue
        values[node] = _of_call(program, node, values)
        if isinstance(mixed := values[node], Mixed):
            return mixed
    for node in outputs:
        if node in program.parameter_dependent and not _has_rows(program, node, values):
            return Mixed("an output has no batch axis in front", node)
    return values


def _of_call(program: Program, node: fx.Node, values: dict[fx.Node, Value]) -> Value:
    operands = [values.get(arg) for arg in node.all_input_nodes if has_tensor(arg)]
    if program.batch is None or not any(isinstance(value, Mixed) or is_labelled(value) for value in operands):
        shaped = _without_tokens(layout_by_shape(program, node))
        if is_labelled(shaped):
            return Mixed(f"{node.target} gives a weight a batch axis", node)
        return Layout((None,) * node.meta["val"].dim()) if isinstance(shaped, Mixed) else shaped
    if node.target is aten.expand.default and isinstance(layout := values[node.args[0]], Layout):
        return _expanded(program, node, layout)
    if node.target in TAKE_A_SHAPE and isinstance(layout := values[node.args[0]], Layout):
        return _reshaped(program, node, layout)
    return _without_tokens(apply_rule(program, node, values, adopted=None))


def _expanded(program: Program, node: fx.Node, layout: Layout) -> Value:
    """Return the layout of an expansion, which must not be along the batch (the token rule refuses tokens, too)."""
    dims = operand_dims(node)
    assert dims is not None
    if any(dim is None and _depends_on_batch(program, size) for dim, size in zip(dims, sizes(node), strict=True)):
        return Mixed(f"{node.target} repeats a value along the batch axis", node)
    return Layout(tuple(None if dim is None else layout.dims[dim] for dim in dims))


def _reshaped(program: Program, node: fx.Node, layout: Layout) -> Value:
    """Return the layout of a reshape within rows: dimensions merged with the batch axis must follow it."""
    before, after = sizes(node.args[0]), sizes(node)
    dims: list[Axis | None] = [None] * len(after)
    for group_in, group_out in reshape_groups(before, after):
        merged = [layout.dims[i] for i in group_in if before[i] != 1]
        if not any(merged):
            continue
        first = next(j for j in group_out if after[j] != 1)
        entries = sympy.cancel(after[first] / program.batch)  # per row
        whole = entries.as_numer_denom()[1] == 1 and not _depends_on_batch(program, entries)
        if merged[0] is None or any(merged[1:]) or not whole:
            return Mixed(f"{node.target} reshapes {before} to {after}, across the batch axis", node)
        dims[first] = Axis.BATCH if entries == 1 else Axis.ROWS
    return Layout(tuple(dims))


def row_layout(program: Program, node: fx.Node) -> Value:
    """Return the batch axes of a value that the epilogue receives, or of an input of the call."""
    value = program.values.get(node)
    if isinstance(value, Mixed) and node not in program.parameter_dependent and program.batch is not None:
        # A value with two token axes is `Mixed`, but its batch axis is known by its size.
        axes = [axis_of_size(program, size, dim)[0] for dim, size in enumerate(node.meta["val"].shape)]
        value = Layout(tuple(axes))
    return _without_tokens(value)


def row_dim(layout: Value) -> int | None:
    """Return the dimension along which a value is cut to one row: BATCH, or ROWS with several entries per row."""
    dims = layout.dims if isinstance(layout, Layout) else ()
    return next((dims.index(axis) for axis in PER_ROW if axis in dims), None)


def _without_tokens(value: Value) -> Value:
    if isinstance(value, tuple):
        return tuple(_without_tokens(item) for item in value)  # type: ignore[misc]
    if isinstance(value, Layout):
        return Layout(tuple(axis if axis in PER_ROW else None for axis in value.dims))
    return value


def _depends_on_batch(program: Program, size: sympy.Expr) -> bool:
    return program.batch is not None and bool(program.batch.free_symbols & size.free_symbols)


def _has_rows(program: Program, node: fx.Node, values: dict[fx.Node, Value]) -> bool:
    """Return whether a value's first dimension is the batch, or of size 1 in a graph of a single row."""
    if program.batch is None:
        return sizes(node)[:1] == (1,)
    value = values.get(node)
    return isinstance(value, Layout) and value.batch_dim == 0


def _reads_rows(node: fx.Node, values: dict[fx.Node, Value]) -> bool:
    return any(is_labelled(values.get(arg)) for arg in node.all_input_nodes)


def _counts_rows(node: fx.Node, values: dict[fx.Node, Value]) -> bool:
    """Return whether a size is that of a value that is cut to one row."""
    if node.target is aten.sym_numel.default:
        return _reads_rows(node, values)
    if node.target is not aten.sym_size.int:
        return False
    source, dim = node.args
    return row_dim(values.get(source)) == dim % source.meta["val"].dim()


def _take_shape_of_row(copy: fx.Node, layout: Value, batch: fx.Node) -> None:
    """Replace the shape that an operator takes by that of one row of its result."""
    assert isinstance(layout, Layout)
    source, shape, *others = copy.args
    with copy.graph.inserting_before(copy):
        new = [_size_of_row(size, axis, batch) for size, axis in zip(shape, layout.dims, strict=True)]
    copy.args = (source, new, *others)


def _size_of_row(size: Any, axis: Any, batch: fx.Node) -> Any:
    if axis is Axis.BATCH:
        return 1
    if axis in PER_ROW and size != -1:
        return batch.graph.call_function(operator.floordiv, (size, batch))
    return size
