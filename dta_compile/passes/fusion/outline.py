"""Clusters of a graph as calls of pieces."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.executable.pieces import Piece
from dta_compile.executable.source import Input, Module, Source, size_symbols
from dta_compile.passes.chunk_bytes import ChunkSizes
from dta_compile.passes.fusion.clusters import clusters, is_view, readers, sources
from dta_compile.passes.graph_module import graph_module
from dta_compile.passes.graphs.operators import KEEP_ORDER_IN_PLACE
from dta_compile.passes.graphs.sizes import SizeNodes, is_polynomial
from dta_compile.passes.graphs.subgraph import Subgraph, missing
from dta_compile.passes.program import ancestors, has_tensor
from dta_compile.passes.symbols import expression, free_symbols

Known = dict[Source, tuple[Piece, fx.GraphModule]]
"""Pieces, and their bodies."""


def outlined(graph: fx.Graph, sizes: ChunkSizes, known: Known) -> fx.Graph:
    """The graph with its clusters as calls of pieces: those in `known` if they are the same, else new ones."""
    return _Outliner(graph, sizes, known).build()


@dataclasses.dataclass(eq=False)
class _Cluster:
    """Operators that become a piece.

    Attributes:
        nodes: in the order of the graph.
        inputs: what they read from outside.
        outputs: what the piece returns, and all nodes that make it: see `_Outliner._as_read`.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[list[fx.Node]]


class _Outliner(Subgraph):
    """Copies a graph in its order; a cluster is called, and a view is made, right before it is first needed."""

    def __init__(self, graph: fx.Graph, sizes: ChunkSizes, known: Known) -> None:
        super().__init__()
        self.old, self.symbols, self.known = graph, sizes.symbols, known
        self.readers = readers(graph)
        for node in graph.find_nodes(op="placeholder"):
            self.copied(node)
        self.sizes = SizeNodes(self.graph)
        available = self.sizes.sources.keys() & set(self.symbols)
        found = [nodes for nodes in clusters(graph) if _symbols(nodes) <= available]
        self.members = set(itertools.chain.from_iterable(found))
        self.cluster_of: dict[fx.Node, _Cluster] = {}
        for nodes in found:
            inside = set(nodes)
            outputs = [self._as_read(node, inside) for node in nodes if not inside.issuperset(self.readers[node])]
            cluster = _Cluster(nodes, _inputs(nodes), outputs)
            self.cluster_of |= dict.fromkeys([*nodes, *itertools.chain.from_iterable(outputs)], cluster)

    def build(self) -> fx.Graph:
        for node in self.old.nodes:
            if node not in self.cluster_of and not is_view(node) and not self._is_size(node):
                for needed in missing(node, self.copies, self._needs):
                    if needed in self.cluster_of and needed not in self.copies:
                        self._call(self.cluster_of[needed])
                    elif needed not in self.cluster_of:
                        self.copied(needed)
        return self.graph

    def _needs(self, node: fx.Node) -> list[fx.Node]:
        needed = self.cluster_of[node].inputs if node in self.cluster_of else node.all_input_nodes
        return [arg for arg in needed if not self._is_size(arg)]

    def _is_size(self, node: fx.Node) -> bool:
        """Whether a node is a size that need not be asked for at every place where it is used."""
        value = node.meta.get("val")
        return (
            isinstance(value, torch.SymInt)
            and expression(value).free_symbols <= self.sizes.sources.keys()
            and is_polynomial(value)
        )

    def argument(self, node: fx.Node) -> Any:
        return self.sizes.build(expression(node.meta["val"])) if self._is_size(node) else super().argument(node)

    def _as_read(self, node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
        """What a piece returns of one of its values, as all nodes that make it: a view of the value, if the others read
        nothing else, as generated code writes it in any shape. Other pieces take the value and view it themselves."""
        others = set(self.readers[node]) - inside
        return [node] if others & self.members else self._viewed([node], others)

    def _viewed(self, alike: list[fx.Node], others: set[fx.Node]) -> list[fx.Node]:
        users = [user for node in alike for user in node.users if user in others or self._is_read_by(others, user)]
        same = {(user.target, user.args[1:]) for user in users}
        in_another_shape = len(same) == 1 and users[0].target in KEEP_ORDER_IN_PLACE
        return self._viewed(users, others) if in_another_shape else alike

    def _is_read_by(self, others: set[fx.Node], view: fx.Node) -> bool:
        return is_view(view) and any(user in others or self._is_read_by(others, user) for user in view.users)

    def _call(self, cluster: _Cluster) -> None:
        found = _symbols(cluster.nodes)
        sizes: list[Any] = [self.sizes.build(symbol) for symbol in self.symbols if symbol in found]
        outputs = [alike[0] for alike in cluster.outputs]
        piece = self._piece(cluster, sizes, outputs)
        results = self.graph.call_function(piece, (*sizes, *(self.copies[node] for node in cluster.inputs)))
        results.meta["val"] = tuple(node.meta["val"] for node in outputs)
        for i, alike in enumerate(cluster.outputs):
            item = self.graph.call_function(operator.getitem, (results, i))
            item.meta = dict(alike[0].meta)
            self.copies |= dict.fromkeys(alike, item)

    def _piece(self, cluster: _Cluster, sizes: list[fx.Node], outputs: list[fx.Node]) -> Piece:
        """The one with the same operators for inputs of the same shapes, whichever of the chunk's sizes these have."""
        body = _body(cluster.nodes, sizes, cluster.inputs, outputs)
        symbols = [expression(node.meta["val"]) for node in sizes]
        values = [node.meta["val"] for node in cluster.inputs]
        source = source_of(body, symbols, values)
        if source not in self.known:
            self.known[source] = Piece(f"piece_{len(self.known)}", source), graph_module({}, body)
        return self.known[source][0]


def _inputs(cluster: list[fx.Node]) -> list[fx.Node]:
    """What a cluster reads from outside, in the order of its reading."""
    members = set(cluster)
    return list(dict.fromkeys(source for node in cluster for source in sources(node) if source not in members))


def _symbols(cluster: list[fx.Node]) -> set[sympy.Symbol]:
    """The sizes that occur in a cluster."""
    inputs = set(_inputs(cluster))
    read = ancestors(cluster, stop=lambda node: node in inputs or not has_tensor(node))
    return free_symbols(expression(size) for node in read for size in _sizes(node.meta["val"]))


def _sizes(value: Any) -> Iterator[int | torch.SymInt]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _sizes(item)
    elif isinstance(value, torch.Tensor):
        yield from (*value.shape, *value.stride())
    elif isinstance(value, (int, torch.SymInt)):
        yield value


def _body(cluster: list[fx.Node], sizes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.Graph:
    """A cluster as a graph of its own; names depend on its operators alone, so that equal ones print alike."""
    body, copies = fx.Graph(), dict[fx.Node, Any]()
    for kind, nodes in (("size", sizes), ("input", inputs)):
        for i, node in enumerate(nodes):
            copies[node] = body.placeholder(f"{kind}_{i}")
            copies[node].meta["val"] = node.meta["val"]
    size_nodes = SizeNodes(body)

    def copy(node: fx.Node) -> Any:
        if node not in copies and not has_tensor(node):
            copies[node] = size_nodes.build(expression(node.meta["val"]))
        elif node not in copies:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copy)
            copies[node] = body.call_function(node.target, args, kwargs)
            copies[node].meta["val"] = node.meta["val"]
        return copies[node]

    for node in cluster:
        copy(node)
    body.output(tuple(map(copy, outputs)))
    return body


def source_of(body: fx.Graph, symbols: Sequence[sympy.Symbol], values: Sequence[torch.Tensor]) -> Source:
    """Of a graph whose placeholders are sizes, named by `symbols` in the shapes of `values`, then tensors."""
    code = body.python_code("self")
    used = set(re.findall(r"\w+", code.src))
    names = ((name, value) for name, value in sorted(code.globals.items()) if name in used)
    renamed = dict(zip(symbols, size_symbols(len(symbols)), strict=True))
    return Source(
        code.src,
        tuple(
            (name, Module(value.__name__) if isinstance(value, types.ModuleType) else value) for name, value in names
        ),
        len(symbols),
        tuple(_input(value, renamed) for value in values),
    )


def _input(value: torch.Tensor, renamed: dict[sympy.Symbol, sympy.Symbol]) -> Input:
    shape, strides = (
        tuple(size if isinstance(size, int) else expression(size).subs(renamed) for size in sizes)
        for sizes in (value.shape, value.stride())
    )
    return Input(value.dtype, value.device, shape, strides)
