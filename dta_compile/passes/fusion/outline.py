"""Outline clusters of operators that one generated kernel can run, as calls of pieces. Called by the pass `codegen`.

Pointwise operators, reductions over rows and copies are clustered. Matrix products, attention, lookups and in-place
operators stay as calls between the clusters. The level of an operator is the number of such calls that must come before
it. A cluster consists of connected operators of one level, so that no cluster depends on a call that depends on it. A
value that only later levels read (a rematerialised forward value) moves to the first of these, and values computed from
it that only accumulations read follow it, since nothing waits for them. Clusters of one level that share one of the
widest inputs of each are merged, so that it is read once.

Views belong to no cluster: they cost nothing, so every reader makes its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.executable.code import Input, Source, size_symbols, text_of
from dta_compile.executable.pieces import Piece
from dta_compile.passes.graphs.nodes import SizeNodes, is_item, is_pointwise, is_polynomial
from dta_compile.passes.graphs.operators import CONSTRUCTORS, KEEP_ORDER_IN_PLACE, ONE_PASS, REDUCTIONS
from dta_compile.passes.graphs.storage import view_source
from dta_compile.passes.graphs.subgraph import Subgraph, graph_module, missing
from dta_compile.passes.program import ancestors, has_tensor, tensors_of, writes_in_place
from dta_compile.passes.symbols import expression, free_symbols
from dta_compile.passes.value_bytes import ChunkSizes

Known = dict[Source, tuple[Piece, fx.GraphModule]]
"""Pieces and their bodies, by source."""


def outlined(graph: fx.Graph, sizes: ChunkSizes, known: Known) -> fx.Graph:
    """Return the graph with its clusters as calls of pieces; new pieces are added to `known`."""
    return _Outliner(graph, sizes, known).build()


@dataclasses.dataclass(eq=False)
class _Cluster:
    """Operators that become one piece.

    Attributes:
        nodes: the operators in graph order.
        inputs: the values that they read from outside.
        outputs: per result of the piece, all nodes that it replaces (a value and views of it), see
            `_Outliner._as_read`.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[list[fx.Node]]


class _Outliner(Subgraph):
    """Copy of a graph in order, in which clusters are called, and views made, right before their first reader."""

    def __init__(self, graph: fx.Graph, sizes: ChunkSizes, known: Known) -> None:
        super().__init__()
        self.old, self.symbols, self.known = graph, sizes.symbols, known
        self.readers = readers(graph)
        for node in graph.find_nodes(op="placeholder"):
            self.copied(node)
        self.sizes = SizeNodes(self.graph)
        available = self.sizes.sources.keys() & set(self.symbols)
        fused = [nodes for nodes in clusters(graph) if _symbols(nodes) <= available]
        self.members = set(itertools.chain.from_iterable(fused))
        self.cluster_of: dict[fx.Node, _Cluster] = {}
        for nodes in fused:
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
        """Return whether a node is a size that can be computed from sizes of the graph's inputs."""
        value = node.meta.get("val")
        return (
            isinstance(value, torch.SymInt)
            and expression(value).free_symbols <= self.sizes.sources.keys()
            and is_polynomial(value)
        )

    def argument(self, node: fx.Node) -> Any:
        return self.sizes.build(expression(node.meta["val"])) if self._is_size(node) else super().argument(node)

    def _as_read(self, node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
        """Return the nodes that a result of the piece replaces: a value, and a view of it if all readers outside read
        this view, since generated code writes any shape. Other pieces read the value and view it themselves."""
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
        occurring = _symbols(cluster.nodes)
        sizes: list[Any] = [self.sizes.build(symbol) for symbol in self.symbols if symbol in occurring]
        outputs = [alike[0] for alike in cluster.outputs]
        piece = self._piece(cluster, sizes, outputs)
        results = self.graph.call_function(piece, (*sizes, *(self.copies[node] for node in cluster.inputs)))
        results.meta["val"] = tuple(node.meta["val"] for node in outputs)
        for i, alike in enumerate(cluster.outputs):
            item = self.graph.call_function(operator.getitem, (results, i))
            item.meta = dict(alike[0].meta)
            self.copies |= dict.fromkeys(alike, item)

    def _piece(self, cluster: _Cluster, sizes: list[fx.Node], outputs: list[fx.Node]) -> Piece:
        """Return the known piece with the same operators and input shapes, up to names of sizes, or a new one."""
        body = _body(cluster.nodes, sizes, cluster.inputs, outputs)
        symbols = [expression(node.meta["val"]) for node in sizes]
        values = [node.meta["val"] for node in cluster.inputs]
        source = source_of(body, symbols, values)
        if source not in self.known:
            self.known[source] = Piece(f"piece_{len(self.known)}", source), graph_module({}, body)
        return self.known[source][0]


def _inputs(cluster: list[fx.Node]) -> list[fx.Node]:
    """Return the values that a cluster reads from outside, in the order in which it reads them."""
    members = set(cluster)
    return list(dict.fromkeys(source for node in cluster for source in sources(node) if source not in members))


def _symbols(cluster: list[fx.Node]) -> set[sympy.Symbol]:
    """Return the symbols of the sizes that occur in a cluster."""
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
    """Build the graph of a cluster; node names depend only on its operators, so that equal clusters print alike."""
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
    """Return the source of a graph whose placeholders are sizes (`symbols` in the shapes of `values`), then tensors."""
    renamed = dict(zip(symbols, size_symbols(len(symbols)), strict=True))
    return Source(*text_of(body), len(symbols), tuple(_input(value, renamed) for value in values))


def _input(value: torch.Tensor, renamed: dict[sympy.Symbol, sympy.Symbol]) -> Input:
    shape, strides = (
        tuple(size if isinstance(size, int) else expression(size).subs(renamed) for size in sizes)
        for sizes in (value.shape, value.stride())
    )
    return Input(value.dtype, value.device, shape, strides)


LEAST_OPERATORS = 2  # a single operator is no faster as a piece


def clusters(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the clusters with at least two operators other than constructors, each in graph order."""
    fused = _fusible(graph)
    levels = _levels(graph, fused)
    cluster_of: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in fused:
            joined = [node]
            for source in sources(node):
                other = cluster_of.get(source)
                if other is not None and other is not joined and levels[source] == levels[node]:
                    joined = [*other, *joined]
                    cluster_of.update((member, joined) for member in joined)
            cluster_of[node] = joined
    all_clusters = list({id(cluster): cluster for cluster in cluster_of.values()}.values())
    order = {node: i for i, node in enumerate(graph.nodes)}
    operators = {node for node in fused if not is_item(node) and node.target not in CONSTRUCTORS}
    paying = [cluster for cluster in all_clusters if len(operators.intersection(cluster)) >= LEAST_OPERATORS]
    return [sorted(cluster, key=order.__getitem__) for cluster in _joined(paying, levels)]


def _joined(apart: list[list[fx.Node]], levels: dict[fx.Node, int]) -> Iterable[list[fx.Node]]:
    """Merge clusters of one level that share one of their widest inputs."""
    joined: dict[tuple[int, fx.Node], list[fx.Node]] = {}
    for cluster in apart:
        keys = [(levels[cluster[0]], source) for source in _widest_inputs(cluster)]
        others = {id(joined[key]): joined[key] for key in keys if key in joined}.values()
        members = [*itertools.chain.from_iterable(others), *cluster]
        keys += [key for key, other in joined.items() if any(other is another for another in others)]
        joined.update(dict.fromkeys(keys, members))
    return {id(cluster): cluster for cluster in joined.values()}.values()


def _widest_inputs(cluster: list[fx.Node]) -> list[fx.Node]:
    """Return the inputs of a cluster with the most entries per token or head row."""
    members, widths = set(cluster), dict[fx.Node, int]()
    for source in dict.fromkeys(source for node in cluster for source in sources(node) if source not in members):
        sizes = [expression(tensor.numel()) for tensor in tensors_of(source.meta.get("val"))]
        widths[source] = sum(int(size.subs(dict.fromkeys(size.free_symbols, 1))) for size in sizes if size.free_symbols)
    return [source for source, width in widths.items() if width == max(widths.values()) > 0] or cluster[:1]


def is_view(node: fx.Node) -> bool:
    """Return whether a value is a view that can be made again wherever it is read."""
    maker = node.args[0] if is_item(node) else node
    return view_source(node) is not None and not writes_in_place(maker) and _has_known_sizes(maker)


def sources(node: fx.Node) -> list[fx.Node]:
    """Return the values that a clustered operator reads, views replaced by the values that they are of."""
    return list(dict.fromkeys(_base(arg) for arg in node.all_input_nodes if has_tensor(arg)))


def readers(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By value that is no view, return the nodes other than views that read it or a view of it."""
    reading: dict[fx.Node, list[fx.Node]] = {node: [] for node in graph.nodes}
    for node in graph.nodes:
        if not is_view(node):
            for source in dict.fromkeys(map(_base, node.all_input_nodes)):
                reading[source].append(node)
    return reading


def _base(node: fx.Node) -> fx.Node:
    while is_view(node):
        node = view_source(node)
    return node


def _fusible(graph: fx.Graph) -> set[fx.Node]:
    fusible: set[fx.Node] = set()
    for node in graph.nodes:
        if node.args and node.args[0] in fusible if is_item(node) else _is_fusible(node):
            fusible.add(node)
    return fusible


def _is_fusible(node: fx.Node) -> bool:
    known = is_pointwise(node) or node.target in ONE_PASS or node.target in REDUCTIONS
    if not known or is_view(node) or not _has_known_sizes(node):
        return False
    tensors = tensors_of([value.meta.get("val") for value in (node, *node.all_input_nodes)])
    same_device = len({tensor.device for tensor in tensors}) == 1
    return same_device and not any(tensor.is_complex() or tensor.is_sparse for tensor in tensors)


def _has_known_sizes(node: fx.Node) -> bool:
    """Return whether the sizes that an operator takes can be computed from those of the graph's inputs."""
    return all(has_tensor(arg) or is_polynomial(arg.meta.get("val")) for arg in node.all_input_nodes)


def _levels(graph: fx.Graph, fused: set[fx.Node]) -> dict[fx.Node, int]:
    """Return the level of each node: the least possible one, then raised as far as its readers allow."""
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        levels[node] = _least_level(node, fused, levels)
    consumers = readers(graph)
    loose: set[fx.Node] = set()  # read only by accumulations, which may be late
    for node in reversed(graph.nodes):
        several = is_item(node) or any(map(is_item, consumers[node]))  # results of one operator stay together
        if node not in fused or several:
            continue
        if all((writes_in_place(reader) and not consumers[reader]) or reader in loose for reader in consumers[node]):
            loose.add(node)
            later = [levels[reader] for reader in consumers[node] if reader in fused and levels[reader] > levels[node]]
            levels[node] = min(later, default=levels[node])
        elif not fused.isdisjoint(consumers[node]):
            bound = [
                reader for reader in consumers[node] if reader not in loose and (reader in fused or consumers[reader])
            ]
            levels[node] = min((levels[reader] for reader in bound), default=levels[node])
    for node in graph.nodes:
        if node in loose:
            levels[node] = max(levels[node], _least_level(node, fused, levels))
    return levels


def _least_level(node: fx.Node, fused: set[fx.Node], levels: dict[fx.Node, int]) -> int:
    if node not in fused:
        return max((levels[_base(arg)] for arg in node.all_input_nodes), default=0)
    return max((levels[s] + (s not in fused and s.op != "placeholder") for s in sources(node)), default=0)
