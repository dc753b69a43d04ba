"""Minimum cuts of a dataflow graph, by the number of values per token that cross them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import networkx as nx
from torch import fx

from dta_compile.executable.layouts import Layout


def cheapest_cut(
    nodes: Iterable[fx.Node],
    cost: Callable[[fx.Node], float],
    first: set[fx.Node],
    last: set[fx.Node],
    leaving: set[fx.Node],
) -> set[fx.Node]:
    """Which of `nodes` to run in the first of two parts so that the values crossing to the second cost least.

    The result is closed under inputs (among `nodes`), contains `first` and avoids `last`. A node of it pays `cost` once
    if any user is in the second part or if it is in `leaving`. Of equally cheap cuts the one with fewest nodes wins.
    """
    nodes = list(nodes)
    members = set(nodes)
    network = nx.DiGraph()
    network.add_node("source")
    network.add_node("sink")
    for node in nodes:
        network.add_edge((node, "in"), (node, "out"), capacity=cost(node))
        for user in node.users:
            if user in members:
                network.add_edge((node, "out"), (user, "in"))
                network.add_edge((user, "in"), (node, "in"))
        if node in first:
            network.add_edge("source", (node, "in"))
        if node in last:
            network.add_edge((node, "in"), "sink")
        if node in leaving:
            network.add_edge((node, "out"), "sink")
    reachable = source_side(network)
    return {node for node in nodes if (node, "in") in reachable}


def source_side(network: nx.DiGraph) -> set[Any]:
    """The smallest source side of a minimum cut between the nodes "source" and "sink"."""
    residual = nx.algorithms.flow.shortest_augmenting_path(network, "source", "sink")
    open_edges = nx.subgraph_view(
        residual, filter_edge=lambda u, v: residual[u][v]["flow"] < residual[u][v]["capacity"]
    )
    return set(nx.descendants(open_edges, "source"))


def bytes_per_token(node: fx.Node, layout: Layout) -> float:
    """Bytes of one token's share of a value: its feature dimensions times the size of an element."""
    value = node.meta["val"]
    features = [int(size) for size, axis in zip(value.shape, layout.dims, strict=True) if axis is None]
    return float(math.prod(features) * value.element_size())


def is_per_token(layout: Layout) -> bool:
    """Whether a chunk has a row of the value for every token (of its sequence, if the value has no token axis)."""
    return layout.row_dim is not None
