"""dense_graphs: prologue and epilogue as executable graphs over the whole batch.

The prologue takes all inputs of the call and returns what the other parts need; the epilogue takes all inputs, the
dense frontier values and those prologue values, and returns the outputs of the call under ordinary autograd.

other_batches: a function may run the model on batches of several sizes (chosen and rejected answers, say).

The regions so far are those of the first batch; attention over the others is left in the epilogue. Then that is taken
for a captured graph of its own, with the dense frontier values among its inputs: a `Program` over the next batch, with
a prefix tree of its own, whose epilogue may again be one. Ordinary autograd joins them.

The epilogue is also made as a graph of one row of the batch, for losses that are attached row by row.
The row has a batch axis of size one, wherever that is the shape of a value, and the batch has the size that it has,
wherever that is a number in a formula (`log_prob / ids.shape[0]`). Which of the two a size is in an operator follows
from what the operator takes: reshapes and expansions take the shape of their result, whose batch axis is known; all
others take numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.executable.layouts import Axis, Input, InputKind, Layout
from dta_compile.ops.library import is_random
from dta_compile.ops.mixer import MIXERS
from dta_compile.passes.axes.layouts import mixer_calls
from dta_compile.passes.axes.shape_rules import reshape_groups
from dta_compile.passes.axes.token_axis import apply_rule, axis_of_size, is_labelled, layout_by_shape
from dta_compile.passes.contracts import contract
from dta_compile.passes.graphs.operators import TAKE_A_SHAPE
from dta_compile.passes.graphs.subgraph import Subgraph, graph_module
from dta_compile.passes.lowering.lower import place_draws
from dta_compile.passes.masks.entries import leaves_of_masks
from dta_compile.passes.program import Mixed, Program, Value, ancestors, has_tensor, where
from dta_compile.passes.symbols import sizes


@contract(
    reads=[
        *("training", "module", "placeholders", "draws", "batch", "tokens", "values", "parameter_dependent"),
        *(
            "mixers",
            "region",
            "frontier",
            "trunk_inputs",
            "head_inputs",
            "constant_inputs",
            "trunk_keys",
            "head_keys",
        ),
    ],
    fills=["prologue_nodes", "prologue", "epilogue", "epilogue_dense_inputs", "row_epilogue"],
)
def dense_graphs(program: Program) -> None:
    """Fill `program.prologue`, `.epilogue`, what passes between them, and `.row_epilogue`."""
    frontier = {value.node for value in program.frontier}
    outputs = [node for node in program.outputs if isinstance(node, fx.Node)]
    draws = place_draws(program, _chunks_need(program))

    def is_dense(node: fx.Node) -> bool:
        return _is_dense_tensor(program, node) and node not in draws.late

    needed = ancestors([*outputs, *draws.epilogue], stop=lambda node: node in frontier or is_dense(node))
    program.epilogue_dense_inputs = [
        node for node in program.graph.nodes if node in needed and is_dense(node) and node.op != "placeholder"
    ]
    program.prologue_nodes = prologue_nodes(program)
    program.prologue = graph_of(program, [], program.prologue_nodes, draws.prologue)
    received = [*(value.node for value in program.frontier), *program.epilogue_dense_inputs]
    program.epilogue = graph_of(program, received, program.outputs, draws.epilogue)
    if program.training:
        outside = frontier | set(program.epilogue_dense_inputs)
        nodes = [node for node in program.graph.nodes if node in needed - outside]
        drawn = next(iter(draws.epilogue), None)
        program.row_epilogue = (
            row_epilogue(program, nodes, received)
            if drawn is None
            else Mixed(f"{drawn.target} draws random numbers for all sequences at once", drawn)
        )


def prologue_nodes(program: Program) -> list[fx.Node]:
    """What the prologue hands over: to chunks, and to the epilogue."""
    return list(dict.fromkeys([*_chunks_need(program), *program.epilogue_dense_inputs]))


def _is_dense_tensor(program: Program, node: fx.Node) -> bool:
    return has_tensor(node) and node not in program.parameter_dependent and node.op != "output"


def _chunks_need(program: Program) -> list[fx.Node]:
    chunk_inputs = [*program.trunk_inputs, *program.head_inputs, *program.trunk_keys, *program.head_keys]
    nodes: dict[fx.Node, None] = dict.fromkeys(item.node for item in chunk_inputs)
    nodes.update(dict.fromkeys(program.constant_inputs))
    nodes.update(dict.fromkeys(condition.node for condition in program.conditions))
    nodes.update(dict.fromkeys(leaves_of_masks(program)))
    return list(nodes)


def graph_of(
    program: Program, received: list[fx.Node], outputs: Iterable[Any], draws: Sequence[fx.Node] = ()
) -> fx.GraphModule:
    """A graph from the call's inputs (and `received` values) to `outputs`, with `draws` and what all of them need."""
    outputs, part = list(outputs), Subgraph()
    part.add_inputs(program.placeholders)
    part.add_inputs(received, "received_")
    wanted = [*draws, *(node for node in outputs if isinstance(node, fx.Node))]
    needed = ancestors(wanted, stop=part.copies.__contains__)
    for node in program.graph.nodes:
        if node in needed and node not in part.copies:
            part.copied(node)
    part.set_outputs(outputs)
    return graph_module(program.module, part.graph)


@contract(
    reads=[
        *("training", "codegen", "own_symbols", "inputs", "module", "placeholders", "other_batches", "mixers"),
        *("frontier", "epilogue", "trunk_inputs", "head_inputs", "constant_inputs", "trunk_keys", "head_keys"),
    ],
    fills=["rest"],
    rewrites=["prologue_nodes", "prologue", "epilogue_dense_inputs"],
)
def other_batches(program: Program) -> None:
    """Fill `program.rest` if there is attention left; it starts with what the pass `lower` fills."""
    left = mixer_calls(program.epilogue.graph)
    if not left:
        return
    others = [node for node in program.other_batches if node.target in MIXERS]
    if len(left) > len(others):
        raise RefusalError(
            "what follows attention would compute it again for all sequences",
            where=program.mixers[-1].where,
            expected="outputs that are computed from values of tokens",
            got=f"{len(left)} {MIXERS[left[0].target].name} calls after the token region",
            hint="please report the model",
        )
    _refuse_random_operators(program)
    # What needs no gradient is computed again: masks are proven on how they are made.
    received = [value.node for value in program.frontier]
    module = graph_of(program, received, program.outputs)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, source in zip(placeholders, (*program.placeholders, *received), strict=True):
        node.meta = dict(source.meta)
    inputs = list(program.inputs)
    for value in program.frontier:
        kind = InputKind.DIFFERENTIABLE_DATA if value.differentiable else InputKind.DATA
        inputs.append(Input(len(inputs), f"{value.node.name} of another batch", kind, value.differentiable))
    program.epilogue_dense_inputs = []
    program.prologue_nodes = prologue_nodes(program)
    program.prologue = graph_of(program, [], program.prologue_nodes)
    settings = program.training, program.codegen, program.own_symbols
    program.rest = Program.lowered(module, *settings, inputs, placeholders)


def _refuse_random_operators(program: Program) -> None:
    for node in program.graph.nodes:
        if is_random(node.target):
            raise RefusalError(
                "random numbers in a function that runs the model on batches of different sizes",
                where=where(node),
                expected="operators without random numbers",
                got=str(node.target),
                hint="draw them outside of the compiled function, or pad the batches to one size",
            )


def programs_of(program: Program) -> list[Program]:
    """A program and those of its further batches."""
    return [program] if program.rest is None else [program, *programs_of(program.rest)]


aten = torch.ops.aten

PER_ROW = tuple(axis for axis in Axis if axis.is_over_sequences)


def row_epilogue(program: Program, nodes: Sequence[fx.Node], received: Sequence[fx.Node]) -> fx.GraphModule | Mixed:
    """The graph `(batch, *inputs, *received) -> outputs` of a row, or why there is none.

    Args:
        nodes: those of the epilogue, in order, without what it receives.
        received: values that it gets besides the inputs of the call, cut to one row.
    """
    values = _layouts(program, nodes)
    if isinstance(values, Mixed):
        return values
    part = Subgraph()
    batch = part.graph.placeholder("batch")
    part.add_inputs(program.placeholders)
    part.add_inputs(received, "received_")
    for node in nodes:
        if node in part.copies:
            continue
        copy = part.copied(node)
        if node.target in TAKE_A_SHAPE:
            _take_shape_of_row(copy, values[node], batch)
        elif not has_tensor(node) and _counts_rows(node, values):
            part.copies[node] = part.graph.call_function(operator.mul, (copy, batch))
    part.set_outputs(program.outputs)
    return graph_module(program.module, part.graph)


def _layouts(program: Program, nodes: Sequence[fx.Node]) -> dict[fx.Node, Value] | Mixed:
    """Which dimensions of every value run over the batch, by the rules of the token axis, blind to tokens."""
    own = {node for node in nodes if node.op != "placeholder"}
    values = {node: row_layout(program, node) for node in program.graph.nodes if node not in own}
    for node in nodes:
        if node not in own:
            continue
        if not has_tensor(node):
            if node.target in (aten.sym_stride.int, aten.sym_storage_offset.default) and _of_rows(node, values):
                return Mixed(f"{node.target} depends on how the batch lies in memory", node)
            continue
        values[node] = _of_call(program, node, values)
        if isinstance(mixed := values[node], Mixed):
            return mixed
    for node in program.outputs:
        if isinstance(node, fx.Node) and node in program.parameter_dependent and not _has_rows(program, node, values):
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
    """Repeated along anything but the batch; the rule of the token axis refuses tokens, too."""
    after = sizes(node)
    before = (*(sympy.Integer(1),) * (len(after) - len(layout.dims)), *sizes(node.args[0]))
    dims = (*(None,) * (len(after) - len(layout.dims)), *layout.dims)
    for old, new in zip(before, after, strict=True):
        if old != new and _depends_on_batch(program, new):
            return Mixed(f"{node.target} repeats a value along the batch axis", node)
    return Layout(dims)


def _reshaped(program: Program, node: fx.Node, layout: Layout) -> Value:
    """Reshaped within rows: whatever is merged with the batch axis comes after it, and again when it is split off."""
    before, after = sizes(node.args[0]), sizes(node)
    dims: list[Axis | None] = [None] * len(after)
    for group_in, group_out in reshape_groups(before, after):
        merged = [layout.dims[i] for i in group_in if before[i] != 1]
        if not any(merged):
            continue
        first = next(j for j in group_out if after[j] != 1)
        entries = sympy.cancel(after[first] / program.batch)  # of every row
        whole = entries.as_numer_denom()[1] == 1 and not _depends_on_batch(program, entries)
        if merged[0] is None or any(merged[1:]) or not whole:
            return Mixed(f"{node.target} reshapes {before} to {after}, across the batch axis", node)
        dims[first] = Axis.BATCH if entries == 1 else Axis.ROWS
    return Layout(tuple(dims))


def row_layout(program: Program, node: fx.Node) -> Value:
    """The batch axes of a value that the epilogue receives, or of an input of the call."""
    value = program.values.get(node)
    if isinstance(value, Mixed) and node not in program.parameter_dependent and program.batch is not None:
        # Two token axes say nothing about the batch.
        axes = [axis_of_size(program, size, dim)[0] for dim, size in enumerate(node.meta["val"].shape)]
        value = Layout(tuple(axes))
    return _without_tokens(value)


def row_dim(layout: Value) -> int | None:
    """The dimension along which a value is cut to one row: BATCH, or ROWS if it holds several entries of every row."""
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
    """Whether a value's first dimension is the batch; that of a single row is 1."""
    if program.batch is None:
        return sizes(node)[:1] == (1,)
    value = values.get(node)
    return isinstance(value, Layout) and value.batch_dim == 0


def _of_rows(node: fx.Node, values: dict[fx.Node, Value]) -> bool:
    return any(is_labelled(values.get(arg)) for arg in node.all_input_nodes)


def _counts_rows(node: fx.Node, values: dict[fx.Node, Value]) -> bool:
    """Whether a size is read off a value that the row has only a part of."""
    if node.target is aten.sym_numel.default:
        return _of_rows(node, values)
    if node.target is not aten.sym_size.int:
        return False
    source, dim = node.args
    return row_dim(values.get(source)) == dim % source.meta["val"].dim()


def _take_shape_of_row(copy: fx.Node, layout: Value, batch: fx.Node) -> None:
    """Give an operator the shape of a row of its result."""
    assert isinstance(layout, Layout)
    shape = list(copy.args[1] if len(copy.args) > 1 else copy.kwargs["size"])
    with copy.graph.inserting_before(copy):
        new = tuple(_of_row(size, axis, batch) for size, axis in zip(shape, layout.dims, strict=True))
    if len(copy.args) > 1:
        copy.args = (copy.args[0], list(new), *copy.args[2:])
    else:
        copy.kwargs = {**copy.kwargs, "size": list(new)}


def _of_row(size: Any, axis: Axis | None, batch: fx.Node) -> Any:
    if axis is Axis.BATCH:
        return 1
    if axis in PER_ROW and size != -1:
        return batch.graph.call_function(operator.floordiv, (size, batch))
    return size
