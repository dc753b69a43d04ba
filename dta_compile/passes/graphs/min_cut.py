"""Minimum cuts of a dataflow graph, by the number of values per token that cross them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import networkx as nx
from torch import fx

from dta_compile.executable.layouts import Layout
from dta_compile.passes.program import ancestors


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
    members = dict.fromkeys(nodes)
    given = ancestors(list(first)) & members.keys()  # is in the first part, whatever is chosen
    network = nx.DiGraph()
    network.add_node("source")
    network.add_node("sink")
    for node in members:
        users = [user for user in node.users if user in members and user not in given]
        if node in given and not users and node not in leaving and node not in last:
            continue
        network.add_edge("source" if node in given else (node, "in"), (node, "out"), capacity=cost(node))
        for user in users:
            network.add_edge((node, "out"), (user, "in"))
            if node not in given:
                network.add_edge((user, "in"), (node, "in"))
        if node in last:
            network.add_edge("source" if node in given else (node, "in"), "sink")
        if node in leaving:
            network.add_edge((node, "out"), "sink")
    reachable = source_side(network)
    return given | {node for node in members if (node, "in") in reachable}


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
