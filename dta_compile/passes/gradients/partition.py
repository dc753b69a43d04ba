"""partition: a stage's joint trace cut into forward and backward graphs at the values that the forward saves.

Every operator of a mixer becomes a call on `path`, the runtime's stack, which each graph takes as its first input.

What is saved, and what the backward computes again, is a minimum cut of the forward graph. Keeping a value costs
`TOUCHED_PER_SAVED` times its bytes; computing it again costs the bytes that its operator reads and writes, as operators
that run one by one are bound by memory bandwidth. So values are recomputed where that touches less than
`TOUCHED_PER_SAVED` bytes for every byte that is then not kept, a chain of operators being paid for as a whole:
`silu(gate) * up` is recomputed, a rotated query is kept, and so is the small `rsqrt` of a normalisation, since a whole
row is read to make it.

Matrix products, attention, softmax, sorting, and whatever else is not known to be cheap are never repeated. A view
costs nothing and is not kept beside the memory it is in. A view of a part (the values in a fused QKV projection) may be
copied, so that the rest of that memory is not kept alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import networkx as nx
import torch
from torch import fx

from dta_compile.ops.mixer import mixer_of_backward, mixer_of_chunk
from dta_compile.passes.chunk_bytes import ChunkSizes
from dta_compile.passes.gradients.stage_traces import StageTrace
from dta_compile.passes.graphs.nodes import call, descendants, is_item, is_pointwise
from dta_compile.passes.graphs.operators import LOOKUPS, ONE_PASS, ROW_REDUCTIONS
from dta_compile.passes.graphs.storage import owner, view_source
from dta_compile.passes.graphs.subgraph import Subgraph, graph_module, missing, source_side
from dta_compile.passes.program import ancestors, has_tensor

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


TOUCHED_PER_SAVED = 8
NEVER = float("inf")
NOMINAL_ROWS = 1024  # costs are those of a chunk with as many tokens and head rows


def saved_values(
    forward: set[fx.Node], read: Iterable[fx.Node], states: Iterable[fx.Node], sizes: ChunkSizes
) -> list[fx.Node]:
    """The cheapest values to keep, in graph order.

    Args:
        forward: what the forward computes from the chunk's inputs, these included.
        read: those of `forward` that the backward reads.
        states: what mixers keep on the path; their memory is always kept.
    """
    return _Cut(forward, [*read, *states], {owner(node) for node in states}, sizes).solve()


class _Cut:
    """The network. A value is two nodes: "had" by the backward in whatever way, and "made" by the backward."""

    def __init__(self, forward: set[fx.Node], read: list[fx.Node], pinned: set[fx.Node], sizes: ChunkSizes) -> None:
        self.forward, self.read, self.pinned, self.sizes = forward, read, pinned, sizes
        self.bytes: dict[fx.Node, int] = {}
        self.network = nx.DiGraph()
        self.network.add_nodes_from(("source", "sink"))

    def solve(self) -> list[fx.Node]:
        pending = list(dict.fromkeys(self._stored(node) for node in self.read))
        for node in pending:
            self._edge("source", (node, "had"))
        added: dict[fx.Node, None] = {}
        while pending:
            node = pending.pop()
            if node not in added:
                added[node] = None
                pending += self._add(node)
        backward = source_side(self.network)
        return [node for node in added if (node, "had") in backward and (node, "made") not in backward]

    def _add(self, node: fx.Node) -> list[fx.Node]:
        """Add a value; returns the values that it is computed from, if it may be computed again."""
        keep, make = self._cost_of_keeping(node), self._cost_of_making(node)
        self._edge((node, "had"), (node, "made"), keep)
        if make == NEVER:
            self._edge((node, "made"), "sink")
            return []
        self._edge((node, "made"), "sink", make)
        sources = list(dict.fromkeys(self._stored(arg) for arg in node.all_input_nodes if arg in self.forward))
        for source in sources:
            self._edge((node, "made"), (source, "had"))
        return sources

    def _edge(self, tail: object, head: object, capacity: float = NEVER) -> None:
        self.network.add_edge(tail, head, **({} if capacity == NEVER else {"capacity": capacity}))

    def _stored(self, node: fx.Node) -> fx.Node:
        """The node that stands for a value: views of a whole value are as good as the value."""
        while (source := view_source(node)) is not None and not self._is_part(node):
            node = source
        return node

    def _is_part(self, node: fx.Node) -> bool:
        return not isinstance(node.meta["val"], (tuple, list)) and self._bytes(node) < self._bytes(view_source(node))

    def _cost_of_keeping(self, node: fx.Node) -> float:
        if not isinstance(node.meta["val"], torch.Tensor):
            return NEVER
        copy = 2 * self._bytes(node) if view_source(node) is not None else 0
        return TOUCHED_PER_SAVED * self._bytes(node) + copy

    def _cost_of_making(self, node: fx.Node) -> float:
        if node.op == "placeholder" or node in self.pinned:
            return NEVER
        if view_source(node) is not None or is_item(node) or not has_tensor(node):
            return 0
        read, written = sum(self._bytes(arg) for arg in node.all_input_nodes), self._bytes(node)
        if is_pointwise(node) or node.target in ONE_PASS:
            return read + written
        if node.target in LOOKUPS:
            return 2 * written
        return 2 * read + written if node.target in ROW_REDUCTIONS else NEVER

    def _bytes(self, node: fx.Node) -> int:
        if node not in self.bytes:
            self.bytes[node] = round(self.sizes.bytes(node.meta["val"]).at(NOMINAL_ROWS, NOMINAL_ROWS))
        return self.bytes[node]
