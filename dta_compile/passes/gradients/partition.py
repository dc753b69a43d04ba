"""partition: a stage's joint trace cut into forward and backward graphs at the values that the forward saves.

Every operator of a mixer becomes a call on `path`, the runtime's stack, which each graph takes as its first input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.ops.mixer import mixer_of_backward, mixer_of_chunk
from dta_compile.passes.chunk_bytes import ChunkSizes
from dta_compile.passes.gradients.saved_values import saved_values
from dta_compile.passes.gradients.stage_traces import StageTrace
from dta_compile.passes.graph_module import graph_module
from dta_compile.passes.graphs.nodes import call, descendants, is_item
from dta_compile.passes.graphs.storage import owner, view_source
from dta_compile.passes.graphs.subgraph import Subgraph, missing
from dta_compile.passes.program import ancestors

aten = torch.ops.aten


class JointTrace:
    """The joint graph of a kind of stage: from what it reads and gradients of what it writes to what it writes and
    gradients of what it reads.

    Attributes:
        sizes: of its values, in terms of tokens and head rows.
        primals: what the stage reads.
        outputs: what it writes.
        tangents: gradients of the outputs that are differentiated, by position.
        gradients: per primal; None where it gets none.
    """

    def __init__(self, trace: StageTrace, sizes: ChunkSizes) -> None:
        self.module, self.sizes = trace.module, sizes
        placeholders, results = trace.placeholders, trace.results
        count = len(trace.is_parameter)
        self.primals = placeholders[:count]
        self.tangents = dict(zip(trace.differentiated, placeholders[count:], strict=True))
        self.outputs: list[fx.Node] = results[: trace.written]
        self.gradients: list[fx.Node | None] = results[trace.written :]

    @property
    def mixing(self) -> list[fx.Node]:
        """The mixers' operators, a layer each."""
        return [node for node in self.module.graph.nodes if mixer_of_chunk(node.target)]

    @property
    def states(self) -> list[fx.Node]:
        """What all layers keep on the path: keys and values, for attention."""
        return list(dict.fromkeys(state for node in self.mixing for state in states_of(node)))

    @property
    def backward_results(self) -> list[fx.Node]:
        """Gradients, and the calls that leave gradients of states on the path."""
        leaving = [node for node in self.module.graph.nodes if mixer_of_backward(node.target)]
        return [*(gradient for gradient in self.gradients if gradient is not None), *leaving]

    def per_token(self) -> set[fx.Node]:
        """What depends on the chunk's inputs or their number; the rest is made of parameters alone."""
        return self.depending_on(node for node in self.primals if runs_over_chunk(node))

    def depending_on(self, sources: Iterable[fx.Node]) -> set[fx.Node]:
        """`sources` and all that is computed from them."""
        return descendants(self.module.graph, sources)


def runs_over_chunk(node: fx.Node) -> bool:
    """Whether a value has a dimension of tokens or head rows."""
    return any(not isinstance(size, int) for size in node.meta["val"].shape)


def states_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """What a mixer's operator keeps on the path."""
    mixer = mixer_of_chunk(node.target)
    assert mixer is not None
    return mixer.states_of(node.args[1:])


def choose_saved(trace: JointTrace) -> list[fx.Node]:
    """The values to save: states of all layers that the stage makes, then others. Copies of views may be added to the
    trace.

    No weights: what depends on parameters alone is cheap to redo, and would be kept once per chunk.
    """
    forward = ancestors([*trace.outputs, *trace.mixing]) & trace.per_token()
    forward |= {node for node in trace.module.graph.nodes if is_item(node) and node.args[0] in forward}
    backward = [node for node in ancestors(trace.backward_results) if node not in forward]
    read = dict.fromkeys(arg for node in _in_order(trace, backward) for arg in node.all_input_nodes if arg in forward)
    kept = [
        _copied(trace, node) if view_source(node) is not None else node
        for node in saved_values(forward, read, trace.states, trace.sizes)
    ]
    states = [state for state in trace.states if state.op != "placeholder"]
    boundary = {*trace.primals, *trace.tangents.values(), *states, *kept}
    computed = ancestors(trace.backward_results, stop=boundary.__contains__)
    others = [_as_read(node, computed - boundary) for node in kept if node in computed and node.op != "placeholder"]
    return list(dict.fromkeys([*states, *_in_order(trace, others)]))


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
    """A part whose mixers are calls on `path`, its first input."""

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
        backward = mixer_of_backward(node.target)
        mixer = backward or mixer_of_chunk(node.target)
        if mixer is None:
            return super().copied(node)
        self.copies[node] = call = self.call("mix_backward" if backward else "mix", *node.args)
        call.meta = dict(node.meta)
        if mixer.scratch is not None:
            operands = mixer.operands_of(node.args[2:] if backward else node.args[1:])
            call.meta["scratch"] = mixer.scratch([one.meta["val"] for one in operands])[1 if backward else 0]
        return call


def forward_graph(trace: JointTrace, outputs: Iterable[fx.Node]) -> fx.GraphModule:
    """The part of the forward that computes `outputs` and writes the states of every layer to the path."""
    outputs = list(outputs)
    computed = ancestors(outputs)
    for node in reversed(trace.mixing):
        # A layer whose result nobody reads still has to leave its states for later chunks.
        if node not in computed:
            mixer = mixer_of_chunk(node.target)
            runs = mixer is not None and mixer.running_state is not None
            computed |= ancestors([node] if runs else list(states_of(node)))
    part = _OnPath(trace.sizes)
    part.add_inputs(trace.primals)
    for node in trace.module.graph.nodes:
        if node not in computed and mixer_of_chunk(node.target):
            part.call("write", node.args[0], *states_of(node))
        elif node in computed and node not in part.copies:
            part.copied(node)
    part.set_outputs(outputs)
    return graph_module(trace.module, part.graph)


def backward_graph(trace: JointTrace, saved: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[int]]:
    """From inputs, saved values and tangents to the gradients of inputs; also returns which inputs it takes.

    Every gradient is computed in its turn, and what it reads right before it: a recomputed value does not wait.
    """
    tangents = list(trace.tangents.values())
    boundary = {*trace.primals, *saved, *tangents}
    computed = ancestors(trace.backward_results, stop=boundary.__contains__)
    needed = computed.union(trace.states)
    inputs = [i for i, node in enumerate(trace.primals) if node in needed]
    part = _OnPath(trace.sizes)
    part.add_inputs(trace.primals[i] for i in inputs)
    part.add_inputs(saved, "saved_")
    part.add_inputs(tangents)
    gradients = [node for node in trace.gradients if node is not None]
    in_turn = trace.depending_on(tangents) & computed
    for node in [*_in_order(trace, in_turn), *gradients]:
        for one in missing(node, part.copies):
            part.copied(one)
    part.set_outputs(gradients)
    return graph_module(trace.module, part.graph), inputs
