"""Partition a stage's joint graph into forward and backward graphs at the saved values. Called by the pass `joint`.

Mixer operators become method calls on `path`, the runtime's stack, which every graph takes as its first input.

A minimum cut of the forward graph decides which values are saved and which are rematerialised in the backward. Saving
a value costs `TOUCHED_PER_SAVED` times its bytes. Recomputing it costs the bytes that its operator reads and writes, as
operators that run one by one are bound by memory bandwidth. So values are recomputed where that touches less than
`TOUCHED_PER_SAVED` bytes per byte that is then not kept, counted over whole chains of operators: `silu(gate) * up` is
recomputed; a rotated query is saved, and so is the small `rsqrt` of a normalisation, since that reads a whole row.

Matrix products, attention, softmax, sorting and all operators not known to be cheap are never recomputed. A view of a
whole value costs nothing, and is not saved beside its base. A view of a part (V of a fused QKV projection) may be
copied, so that the rest of the storage is not kept alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import networkx as nx
import torch
from torch import fx

from dta_compile.ops.mixer import mixer_of_backward, mixer_of_chunk
from dta_compile.passes.gradients.stage_traces import StageTrace, has_running_state, states_of
from dta_compile.passes.graphs.nodes import call, is_item, is_pointwise
from dta_compile.passes.graphs.operators import LOOKUPS, ONE_PASS, ROW_REDUCTIONS
from dta_compile.passes.graphs.storage import owner, view_source
from dta_compile.passes.graphs.subgraph import Subgraph, missing, source_side
from dta_compile.passes.program import ancestors, has_tensor
from dta_compile.passes.value_bytes import ChunkSizes

aten = torch.ops.aten


def choose_saved(trace: StageTrace, sizes: ChunkSizes) -> list[fx.Node]:
    """Return the values to save: the states that the stage computes, then others. May add copies of views to the trace.

    Values of parameters alone are not saved: they are cheap to recompute, and would be kept once per chunk.
    """
    forward = ancestors([*trace.outputs, *trace.mixing]) & trace.per_token()
    forward |= {node for node in trace.module.graph.nodes if is_item(node) and node.args[0] in forward}
    backward = [node for node in ancestors(trace.backward_results) if node not in forward]
    read = dict.fromkeys(arg for node in _in_order(trace, backward) for arg in node.all_input_nodes if arg in forward)
    saved = [
        _copied(trace, node) if view_source(node) is not None else node
        for node in _Cut(forward, [*read, *trace.states], set(map(owner, trace.states)), sizes).solve()
    ]
    states = [state for state in trace.states if state.op != "placeholder"]
    boundary = {*trace.primals, *trace.tangents.values(), *states, *saved}
    computed = ancestors(trace.backward_results, stop=boundary.__contains__)
    others = [_as_read(node, computed - boundary) for node in saved if node in computed and node.op != "placeholder"]
    return list(dict.fromkeys([*states, *_in_order(trace, others)]))


def _in_order(trace: StageTrace, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    members = set(nodes)
    return [node for node in trace.module.graph.nodes if node in members]


def _copied(trace: StageTrace, view: fx.Node) -> fx.Node:
    """Replace a view of a part by its copy, which can be saved without its base."""
    with trace.module.graph.inserting_after(view):
        copy = call(trace.module.graph, aten.clone.default, view)
    copy.meta = {**view.meta, **copy.meta}
    view.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    return copy


def _as_read(node: fx.Node, computed: set[fx.Node]) -> fx.Node:
    """Return the view of a value that the backward reads, if it reads only one view, of the whole value."""
    while True:
        readers = [user for user in node.users if user in computed]
        if len(readers) != 1 or view_source(readers[0]) is not node or not _same_elements(readers[0], node):
            return node
        node = readers[0]


def _same_elements(view: fx.Node, node: fx.Node) -> bool:
    value = view.meta["val"]
    return isinstance(value, torch.Tensor) and value.numel() == node.meta["val"].numel()


class _OnPath(Subgraph):
    """Part of a joint graph in which mixers are method calls on `path`, the first input."""

    def __init__(self, sizes: ChunkSizes) -> None:
        super().__init__()
        self.sizes, self.path = sizes, self.graph.placeholder("path")

    def add_inputs(self, nodes: Iterable[fx.Node], prefix: str = "") -> None:
        """Add placeholders whose `meta["memory"]` has the name and bytes of their storage."""
        nodes = list(nodes)
        super().add_inputs(nodes, prefix)
        for node in nodes:
            memory = owner(node)
            self.copies[node].meta = {**node.meta, "memory": (memory.name, self.sizes.bytes(memory.meta["val"]))}

    def call(self, method: str, *arguments: Any) -> fx.Node:
        """Add a call of a method of the path."""
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
            call.meta["scratch"] = mixer.scratch([operand.meta["val"] for operand in operands])[1 if backward else 0]
        return call


def forward_graph(trace: StageTrace, sizes: ChunkSizes, outputs: Iterable[fx.Node]) -> fx.GraphModule:
    """Build the graph that computes `outputs` and writes the states of every layer to the path."""
    outputs = list(outputs)
    computed = ancestors(outputs)
    for node in reversed(trace.mixing):
        # A layer whose result is not needed still writes its states, for later chunks.
        if node not in computed:
            computed |= ancestors([node] if has_running_state(node) else list(states_of(node)))
    subgraph = _OnPath(sizes)
    subgraph.add_inputs(trace.primals)
    for node in trace.module.graph.nodes:
        if node not in computed and mixer_of_chunk(node.target):
            subgraph.call("write", node.args[0], *states_of(node))
        elif node in computed and node not in subgraph.copies:
            subgraph.copied(node)
    return subgraph.module(trace.module, outputs)


def backward_graph(trace: StageTrace, sizes: ChunkSizes, saved: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[int]]:
    """Build the graph from inputs, saved values and tangents to input gradients; also return the inputs that it takes.

    A recomputed value is placed right before the first gradient operator that reads it, so that its lifetime is short.
    """
    tangents = list(trace.tangents.values())
    boundary = {*trace.primals, *saved, *tangents}
    computed = ancestors(trace.backward_results, stop=boundary.__contains__)
    needed = computed.union(trace.states)
    inputs = [i for i, node in enumerate(trace.primals) if node in needed]
    subgraph = _OnPath(sizes)
    subgraph.add_inputs(trace.primals[i] for i in inputs)
    subgraph.add_inputs(saved, "saved_")
    subgraph.add_inputs(tangents)
    gradients = [node for node in trace.gradients if node is not None]
    in_turn = trace.depending_on(tangents) & computed
    for node in [*_in_order(trace, in_turn), *gradients]:
        for required in missing(node, subgraph.copies):
            subgraph.copied(required)
    return subgraph.module(trace.module, gradients), inputs


TOUCHED_PER_SAVED = 8
NEVER = float("inf")
NOMINAL_ROWS = 1024  # tokens and head rows of the chunk that costs are computed for


class _Cut:
    """Network whose minimum cut is the cheapest values to save.

    A value is two nodes: "had" (the backward needs it) and "made" (it recomputes it).

    Args:
        forward: the values that the forward computes from the chunk's inputs, and these inputs.
        read: the values of `forward` that the backward reads, and the states of mixers.
        pinned: the storages of states, which are always kept.
    """

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
        """Add a value; return the values that it is computed from, if it may be recomputed."""
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
        """Return the node that represents a value: a view of a whole value is represented by its base."""
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
