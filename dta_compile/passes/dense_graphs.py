"""dense_graphs: prologue and epilogue as executable graphs over the whole batch.

The prologue takes all inputs of the call and returns what the other parts need; the epilogue takes all inputs, the
dense frontier values and those prologue values, and returns the outputs of the call under ordinary autograd.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from dta_compile.passes.program import Axis, Layout, Mixed, Program, Value, ancestors, has_tensor
from dta_compile.passes.token_axis import apply_rule


def dense_graphs(program: Program) -> None:
    """Fill `program.prologue`, `.epilogue`, what passes between them, and `.mixes_sequences`."""
    frontier = {value.node for value in program.frontier}
    outputs = [node for node in program.outputs if isinstance(node, fx.Node)]
    needed = ancestors(outputs, stop=lambda node: node in frontier or _is_dense_tensor(program, node))
    program.epilogue_dense_inputs = [
        node
        for node in program.graph.nodes
        if node in needed and _is_dense_tensor(program, node) and node.op != "placeholder"
    ]
    program.prologue_nodes = prologue_nodes(program)
    program.prologue = graph_of(program, [], program.prologue_nodes)
    received = [value.node for value in program.frontier] + program.epilogue_dense_inputs
    program.epilogue = graph_of(program, received, program.outputs)
    epilogue_nodes = [node for node in program.graph.nodes if node in needed - frontier]
    program.mixes_sequences = _mixes_sequences(program, epilogue_nodes)


def _is_dense_tensor(program: Program, node: fx.Node) -> bool:
    return has_tensor(node) and node not in program.parameter_dependent and node.op != "output"


def prologue_nodes(program: Program) -> list[fx.Node]:
    chunk_inputs = program.trunk_inputs + program.head_inputs + program.trunk_keys + program.head_keys
    nodes: dict[fx.Node, None] = dict.fromkeys(item.node for item in chunk_inputs)
    nodes.update(dict.fromkeys(program.constant_inputs))
    nodes.update(dict.fromkeys(condition.node for condition in program.conditions))
    for layer in program.attention:
        nodes.update(dict.fromkeys(node for node in (layer.mask.valid, *layer.mask.positions) if node is not None))
    nodes.update(dict.fromkeys(program.epilogue_dense_inputs))
    return list(nodes)


def graph_of(program: Program, received: list[fx.Node], outputs: Iterable[Any]) -> fx.GraphModule:
    """A graph from the call's inputs (and `received` values) to `outputs`, with just the nodes that they need."""
    outputs = list(outputs)
    graph, copies = fx.Graph(), {}
    for node in program.placeholders:
        copies[node] = graph.placeholder(node.name)
    for node in received:
        copies[node] = graph.placeholder(f"received_{node.name}")
    needed = ancestors([node for node in outputs if isinstance(node, fx.Node)], stop=lambda node: node in copies)
    for node in program.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, lambda arg: copies[arg])
    graph.output(tuple(copies[node] if isinstance(node, fx.Node) else node for node in outputs))
    return fx.GraphModule(program.module, graph)


def _mixes_sequences(program: Program, nodes: list[fx.Node]) -> str | None:
    """Why the epilogue cannot run one sequence at a time (None: it can): the same analysis, blind to the token axis."""
    values: dict[fx.Node, Value] = {}
    for node in program.graph.nodes:
        if has_tensor(node) and node not in set(nodes):
            values[node] = _batch_only(program.values.get(node))
    for node in nodes:
        if node.op == "placeholder" or not has_tensor(node):
            values.setdefault(node, _batch_only(program.values.get(node)))
            continue
        values[node] = apply_rule(program, node, values, adopted=None)
        if isinstance(mixed := values[node], Mixed):
            return mixed.reason
    for node in program.outputs:
        value = values.get(node) if isinstance(node, fx.Node) else None
        if not isinstance(value, Layout) or value.batch_dim != 0:
            return f"the output {node} has no batch axis in front"
    return None


def _batch_only(value: Value) -> Value:
    if isinstance(value, tuple):
        return tuple(_batch_only(item) for item in value)  # type: ignore[misc]
    if isinstance(value, Layout):
        if Axis.ROWS in value.dims:
            return value
        return Layout(tuple(axis if axis is Axis.BATCH else None for axis in value.dims))
    return value
