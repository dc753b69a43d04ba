"""Parts of a graph as graphs of their own."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule


class Subgraph:
    """A new graph with copies of nodes of another one.

    Attributes:
        graph: the new graph.
        copies: by node of the other graph, what stands for it in this one.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, Any] = {}

    def add_inputs(self, nodes: Iterable[fx.Node], prefix: str = "") -> None:
        """Take the values of some nodes as inputs."""
        for node in nodes:
            self.copies[node] = self.graph.placeholder(prefix + node.name)

    def copied(self, node: fx.Node) -> fx.Node:
        """A copy of a node whose arguments are there."""
        self.copies[node] = copy = self.graph.node_copy(node, self.argument)
        return copy

    def argument(self, node: fx.Node) -> Any:
        """What a copy reads in the place of a node."""
        return self.copies[node]

    def set_outputs(self, values: Iterable[Any]) -> None:
        """Return the copies of nodes, and whatever is none as it is."""
        self.graph.output(tuple(self.copies[value] if isinstance(value, fx.Node) else value for value in values))


def inputs_of(node: fx.Node) -> Iterable[fx.Node]:
    """The nodes that a node reads."""
    return node.all_input_nodes


def missing(
    node: fx.Node, known: Container[fx.Node], needs: Callable[[fx.Node], Iterable[fx.Node]] = inputs_of
) -> list[fx.Node]:
    """A node and what it needs that is not known yet, in an order to compute them in."""
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
    """A module that generates its code when it is first called: most graphs are only read, or rewritten before that."""
    return _LazyGraphModule(root, graph)
