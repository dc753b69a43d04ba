"""partition: a chunk's joint trace cut into forward and backward graphs at the values that the forward saves.

Every attention operator becomes a call on `path`, the runtime's stack, which each graph takes as its first input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from dta_compile.ops.attention import ATTENTION, ATTENTION_BACKWARD
from dta_compile.passes.chunk_sizes import ChunkSizes
from dta_compile.passes.gradients.saved_values import saved_values
from dta_compile.passes.graphs.nodes import call, descendants, is_item
from dta_compile.passes.graphs.storage import owner, view_source
from dta_compile.passes.graphs.subgraph import Subgraph, missing
from dta_compile.passes.program import ancestors

aten = torch.ops.aten


@dataclasses.dataclass
class JointTrace:
    """The joint graph of a chunk: from chunk inputs and gradients of frontier values to frontier values and gradients.

    Attributes:
        primals: the chunk graph's inputs.
        head_inputs: those of them that count head rows.
        outputs: the frontier values.
        tangents: gradients of the frontier values that are differentiated, by position.
        gradients: per parameter; None where it gets none.
    """

    module: fx.GraphModule
    sizes: ChunkSizes
    primals: list[fx.Node]
    head_inputs: list[fx.Node]
    outputs: list[fx.Node]
    tangents: dict[int, fx.Node]
    gradients: list[fx.Node | None]

    @property
    def attention(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.target is ATTENTION]

    @property
    def keys_and_values(self) -> list[fx.Node]:
        return list(dict.fromkeys(arg for node in self.attention for arg in node.args[1:3]))

    @property
    def backward_results(self) -> list[fx.Node]:
        """Gradients of parameters, and the calls that leave gradients of keys and values on the path."""
        attention = [node for node in self.module.graph.nodes if node.target is ATTENTION_BACKWARD]
        return [*(gradient for gradient in self.gradients if gradient is not None), *attention]

    def per_token(self) -> set[fx.Node]:
        """What depends on the chunk's inputs or their number; the rest is made of parameters alone."""
        return self.depending_on(
            node for node in self.primals if any(not isinstance(size, int) for size in node.meta["val"].shape)
        )

    def depending_on(self, sources: Iterable[fx.Node]) -> set[fx.Node]:
        return descendants(self.module.graph, sources)


def choose_saved(trace: JointTrace) -> list[fx.Node]:
    """The values to save: keys and values of all layers, then others. Copies of views may be added to the trace.

    No weights: what depends on parameters alone is cheap to redo, and would be kept once per chunk.
    """
    forward = ancestors([*trace.outputs, *trace.attention]) & trace.per_token()
    forward |= {node for node in trace.module.graph.nodes if is_item(node) and node.args[0] in forward}
    backward = [node for node in ancestors(trace.backward_results) if node not in forward]
    read = dict.fromkeys(arg for node in _in_order(trace, backward) for arg in node.all_input_nodes if arg in forward)
    kept = [
        _copied(trace, node) if view_source(node) is not None else node
        for node in saved_values(forward, read, trace.keys_and_values, trace.sizes)
    ]
    kv = trace.keys_and_values
    boundary = {*trace.primals, *trace.tangents.values(), *kv, *kept}
    computed = ancestors(trace.backward_results, stop=boundary.__contains__)
    others = [_as_read(node, computed - boundary) for node in kept if node in computed and node.op != "placeholder"]
    return list(dict.fromkeys([*kv, *_in_order(trace, others)]))


def _in_order(trace: JointTrace, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    members = set(nodes)
    return [node for node in trace.module.graph.nodes if node in members]


def _copied(trace: JointTrace, view: fx.Node) -> fx.Node:
    """A copy of a view of a part, in the place of the view: it alone can be kept."""
    with trace.module.graph.inserting_after(view):
        copy = call(trace.module.graph, aten.clone.default, view)
    copy.meta = {**view.meta, **copy.meta}
    view.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    return copy


def _as_read(node: fx.Node, computed: set[fx.Node]) -> fx.Node:
    """A view of the whole value, if that is how the backward reads it: then it need not make the view again."""
    while True:
        readers = [user for user in node.users if user in computed]
        if len(readers) != 1 or view_source(readers[0]) is not node or not _same_elements(readers[0], node):
            return node
        node = readers[0]


def _same_elements(view: fx.Node, node: fx.Node) -> bool:
    value = view.meta["val"]
    return isinstance(value, torch.Tensor) and value.numel() == node.meta["val"].numel()


class _OnPath(Subgraph):
    """A part whose attention is a call on `path`, its first input."""

    def __init__(self, sizes: ChunkSizes) -> None:
        super().__init__()
        self.sizes, self.path = sizes, self.graph.placeholder("path")

    def add_inputs(self, nodes: Iterable[fx.Node], prefix: str = "") -> None:
        """Inputs whose `meta["memory"]` names the memory that they are in, of so many bytes."""
        nodes = list(nodes)
        super().add_inputs(nodes, prefix)
        for node in nodes:
            memory = owner(node)
            self.copies[node].meta = {**node.meta, "memory": (memory.name, self.sizes.bytes(memory.meta["val"]))}

    def call(self, method: str, *arguments: Any) -> fx.Node:
        """A call of a method of the path."""
        return self.graph.call_method(method, (self.path, *fx.node.map_arg(arguments, self.argument)))

    def copied(self, node: fx.Node) -> fx.Node:
        method = {ATTENTION: "attend", ATTENTION_BACKWARD: "attend_backward"}.get(node.target)
        if method is None:
            return super().copied(node)
        self.copies[node] = call = self.call(method, *node.args)
        call.meta = dict(node.meta)
        return call


def forward_graph(trace: JointTrace, outputs: Iterable[fx.Node]) -> fx.GraphModule:
    """The part of the forward that computes `outputs` and writes the KV of every layer to the path."""
    outputs = list(outputs)
    computed = ancestors(outputs)
    for node in reversed(trace.attention):
        # A layer whose result nobody reads still has to leave its keys and values for later chunks.
        if node not in computed:
            computed |= ancestors(list(node.args[1:3]))
    part = _OnPath(trace.sizes)
    part.add_inputs(trace.primals)
    for node in trace.module.graph.nodes:
        if node.target is ATTENTION and node not in computed:
            part.call("write", *node.args[1:4])
        elif node in computed and node not in part.copies:
            part.copied(node)
    part.set_outputs(outputs)
    return fx.GraphModule(trace.module, part.graph)


def backward_graph(trace: JointTrace, saved: list[fx.Node]) -> tuple[fx.GraphModule, list[int]]:
    """From inputs, saved values and tangents to the gradients of parameters; also returns which inputs it takes.

    Every gradient is computed in its turn, and what it reads right before it: a recomputed value does not wait.
    """
    tangents = list(trace.tangents.values())
    boundary = {*trace.primals, *saved, *tangents}
    computed = ancestors(trace.backward_results, stop=boundary.__contains__)
    inputs = [i for i, node in enumerate(trace.primals) if node in computed]
    part = _OnPath(trace.sizes)
    part.add_inputs(trace.primals[i] for i in inputs)
    part.add_inputs(saved, "saved_")
    part.add_inputs(tangents)
    gradients = [node for node in trace.gradients if node is not None]
    in_turn = trace.depending_on(tangents) & computed
    for node in [*_in_order(trace, in_turn), *gradients]:
        for needed in missing(node, part.copies):
            part.copied(needed)
    part.set_outputs(gradients)
    return fx.GraphModule(trace.module, part.graph), inputs
