"""Copies of parts of an FX graph, and the minimum cuts by which graphs are split."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from typing import Any

import networkx as nx
import torch
from torch import fx

from dta_compile.executable.layouts import Flat, Layout
from dta_compile.passes.program import Value, ancestors, items_of
from dta_compile.torch_compat.tracing import LazyGraphModule


class Subgraph:
    """A new graph that receives copies of another graph's nodes.

    Attributes:
        graph: the new graph.
        copies: by node of the other graph, its copy or replacement in the new one.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, Any] = {}

    def add_inputs(self, nodes: Iterable[fx.Node], prefix: str = "") -> None:
        """Add a placeholder for each of some nodes."""
        for node in nodes:
            self.copies[node] = self.graph.placeholder(prefix + node.name)

    def copied(self, node: fx.Node) -> fx.Node:
        """Copy a node whose arguments have been copied."""
        self.copies[node] = copy = copied(self.graph, node, self.argument)
        return copy

    def argument(self, node: fx.Node) -> Any:
        """Return the argument that replaces a node in copies of its users."""
        return self.copies[node]

    def module(self, root: torch.nn.Module, outputs: Iterable[Any]) -> fx.GraphModule:
        """Return the graph as a module that returns the copies of nodes, and other values unchanged."""
        self.graph.output(tuple(self.copies[value] if isinstance(value, fx.Node) else value for value in outputs))
        return graph_module(root, self.graph)


def add_call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, name: str | None = None
) -> fx.Node:
    """Insert a call as `Graph.call_function` does, in half of the time: that looks for symbolic sizes among all
    arguments, of which graphs of ours have none, and numbers a node anew after every assignment."""
    node = graph.create_node("call_function", target, name=name)
    object.__setattr__(node, "args", args)
    if kwargs:
        object.__setattr__(node, "kwargs", kwargs)
    return node


def copied(graph: fx.Graph, node: fx.Node, argument: Callable[[fx.Node], Any]) -> fx.Node:
    """Insert a copy of another graph's node, as `Graph.node_copy` does, see `add_call`."""
    if node.op != "call_function":
        return graph.node_copy(node, argument)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), argument)  # first: this may insert nodes
    copy = add_call(graph, node.target, args, kwargs, node.name)
    copy.meta.update(node.meta)
    return copy


def missing(
    node: fx.Node,
    known: Container[fx.Node],
    needs: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes,
) -> list[fx.Node]:
    """Return a node and its dependencies (by `needs`) that are not in `known`, in topological order."""
    order: dict[fx.Node, None] = {}
    opened: set[fx.Node] = set()
    pending = [] if node in known else [node]
    while pending:
        node = pending[-1]
        needed = [arg for arg in needs(node) if arg not in known and arg not in order]
        if needed:
            assert node not in opened, f"{node} waits for itself"
            opened.add(node)
            pending += reversed(needed)
            continue
        pending.pop()
        order[node] = None
    return list(order)


def graph_module(root: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Make a module that generates code at its first call: most graphs are never run, or rewritten before."""
    return LazyGraphModule(root, graph)


def cheapest_cut(
    nodes: Iterable[fx.Node],
    cost: Callable[[fx.Node], float],
    first: set[fx.Node],
    last: set[fx.Node],
    leaving: set[fx.Node],
) -> set[fx.Node]:
    """Return the nodes of the first of two parts, such that the values that cross to the second cost least.

    The part is closed under inputs (among `nodes`), contains `first` and avoids `last`. A node in it pays `cost` once
    if any user is in the second part or if it is in `leaving`. Of equally cheap cuts the one with fewest nodes wins.
    """
    members = dict.fromkeys(nodes)
    before = ancestors({arg for node in first for arg in node.all_input_nodes} - first)
    fixed = (first | before) & members.keys()  # in the first part in every cut
    network = nx.DiGraph()
    network.add_node("source")
    network.add_node("sink")
    for node in members:
        users = [user for user in node.users if user in members and user not in fixed]
        if node in fixed and not users and node not in leaving and node not in last:
            continue
        network.add_edge("source" if node in fixed else (node, "in"), (node, "out"), capacity=cost(node))
        for user in users:
            network.add_edge((node, "out"), (user, "in"))
            if node not in fixed:
                network.add_edge((user, "in"), (node, "in"))
        if node in last:
            network.add_edge("source" if node in fixed else (node, "in"), "sink")
        if node in leaving:
            network.add_edge((node, "out"), "sink")
    reachable = source_side(network)
    return fixed | {node for node in members if (node, "in") in reachable}


def source_side(network: nx.DiGraph) -> set[Any]:
    """Return the smallest source side of a minimum cut between the nodes "source" and "sink"."""
    residual = nx.algorithms.flow.shortest_augmenting_path(network, "source", "sink")
    open_edges = nx.subgraph_view(
        residual, filter_edge=lambda u, v: residual[u][v]["flow"] < residual[u][v]["capacity"]
    )
    return set(nx.descendants(open_edges, "source"))


def bytes_per_token(node: fx.Node, layout: Value) -> float:
    """Return the bytes per token of a value: the product of its features and the element size; infinity for a tuple."""
    if not isinstance(layout, Layout):
        return math.inf  # tuples cannot be expanded; their items can
    value = node.meta["val"]
    features = [int(size) for size, axis in zip(value.shape, layout.dims, strict=True) if axis is None]
    features += [axis.features for axis in layout.dims if isinstance(axis, Flat)]
    return float(math.prod(features) * value.element_size())


def is_per_token(value: Value) -> bool:
    """Return whether a chunk has one row per token (that of its sequence, without a token axis) of all of a value."""
    if isinstance(value, Layout):  # most are
        return value.row_dim is not None
    return all(isinstance(item, Layout) and item.row_dim is not None for item in items_of(value))
