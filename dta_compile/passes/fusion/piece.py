"""Pieces: clusters of a graph as functions of their own, which run as generated code where they have any."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.executable.code import Code as OwnCode
from dta_compile.passes.chunk_bytes import ChunkSizes
from dta_compile.passes.fusion.clusters import clusters, is_view, readers, sources
from dta_compile.passes.fusion.inductor import AnyCode, Code
from dta_compile.passes.fusion.native import TreeAttention
from dta_compile.passes.fusion.source import Source
from dta_compile.passes.graph_module import graph_module
from dta_compile.passes.graphs.operators import KEEP_ORDER_IN_PLACE
from dta_compile.passes.graphs.sizes import SizeNodes, is_polynomial
from dta_compile.passes.graphs.subgraph import Subgraph, missing
from dta_compile.passes.program import ancestors, has_tensor
from dta_compile.passes.symbols import expression, free_symbols


class Piece:
    """A function of sizes, then tensors, to a tuple of new tensors.

    It runs as the code that is `running` for it. Generated code is made for certain strides and for sizes of two or
    more (1 is special in all of torch, and 0 leaves nothing to run); inputs that lie in memory otherwise are copied,
    other sizes run the body's operators.

    Attributes:
        body: the operators.
        source: the same for inductor.
    """

    def __init__(self, name: str, body: fx.GraphModule, source: Source) -> None:
        self.__name__ = name  # in printed graphs
        self.body, self.source, self.sizes = body, source, source.sizes
        self.latest: tuple[Code, tuple[int, ...], list[tuple[int, ...]] | None] | None = None

    def __call__(self, *arguments: Any) -> Sequence[torch.Tensor]:
        sizes, tensors = arguments[: self.sizes], arguments[self.sizes :]
        code, latest = _running.codes.get(self), self.latest
        found = [tensor.stride() for tensor in tensors]
        if latest is not None and latest[0] is code and latest[1] == sizes and latest[2] == found:
            return latest[0].run(list(arguments))
        if not isinstance(code, Code) or (strides := self._strides(code, sizes)) is None:
            return self._operators(*arguments)
        alike = [_laid_out(tensor, wanted) for tensor, wanted in zip(tensors, strides, strict=True)]
        if all(map(operator.is_, alike, tensors)):
            self.latest = code, sizes, found  # strides of single entries may differ, which is nothing
        return code.run([*sizes, *alike])

    def __getstate__(self) -> dict[str, Any]:
        """With code in the place of the graph, and without what belongs to a process."""
        body = self.body if isinstance(self.body, OwnCode) else OwnCode.of(self.body)
        return {**self.__dict__, "body": body, "latest": None}

    def _operators(self, *arguments: Any) -> Sequence[torch.Tensor]:
        run: Any = self.body.function if isinstance(self.body, OwnCode) else self.body.forward
        return run(*arguments)

    def _strides(self, code: Code, sizes: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        """Of the tensors that the code takes; None: it does not serve these sizes. All layers of a chunk ask alike."""
        latest = self.latest  # in one go: other threads may run the piece
        if latest is None or latest[0] is not code or latest[1] != sizes:
            found = list(code.strides(*sizes)) if code.serves(*sizes) else None
            self.latest = latest = code, sizes, found
        return latest[2]


Codes = Mapping[Piece | TreeAttention, AnyCode]  # what there is; the others run as operators of torch
NO_CODES: Codes = MappingProxyType({})


class _Running(threading.local):
    """What the pieces that this thread calls run as: two calls at one time may have begun with other code."""

    codes: Codes = NO_CODES


_running = _Running()


@contextlib.contextmanager
def running(codes: Codes) -> Iterator[None]:
    """Run pieces as this code."""
    before, _running.codes = _running.codes, codes
    try:
        yield
    finally:
        _running.codes = before


def running_library(functions: TreeAttention) -> ctypes.CDLL | None:
    """These functions compiled, if what this thread runs has them."""
    found = _running.codes.get(functions)
    return found if isinstance(found, ctypes.CDLL) else None


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides: itself, unless it lies in memory in another way than its traced value."""
    found = tensor.stride()
    if found == strides:
        return tensor
    if all(size == 1 or a == b for size, a, b in zip(tensor.shape, found, strides, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def outlined(graph: fx.Graph, sizes: ChunkSizes, known: dict[Source, Piece]) -> fx.Graph:
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

    def __init__(self, graph: fx.Graph, sizes: ChunkSizes, known: dict[Source, Piece]) -> None:
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
        source = Source.of(body, symbols, values)
        if source not in self.known:
            self.known[source] = Piece(f"piece_{len(self.known)}", graph_module({}, body), source)
        return self.known[source]


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
