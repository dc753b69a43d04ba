"""clusters: operators of a graph that one generated kernel can run, kept apart by those that a library runs better.

Pointwise operators, reductions over rows and copies are clustered; matrix products, attention, lookups and whatever
writes in place stay between the clusters. Every operator has a level, the number of such calls that must come before
it: clusters are connected operators of one level, so none of them waits for a call that waits for itself. A value that
later levels read, as a forward value computed again for the backward, moves to the first of them, and what is made of
it for an accumulation goes along: nothing waits for those. Clusters of one level that share one of the widest values
that each reads are one: it is read once.

Views belong to no cluster: they cost nothing, so whatever reads one makes it for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import fx

from dta_compile.passes.graphs.nodes import is_item, is_pointwise
from dta_compile.passes.graphs.operators import CONSTRUCTORS, ONE_PASS, REDUCTIONS
from dta_compile.passes.graphs.sizes import is_polynomial
from dta_compile.passes.graphs.storage import view_source
from dta_compile.passes.program import has_tensor, writes_in_place
from dta_compile.passes.symbols import expression

LEAST_OPERATORS = 2  # one by itself runs as well where it is


def clusters(graph: fx.Graph) -> list[list[fx.Node]]:
    """Those with at least two operators that read something, in no order; each in the order of the graph."""
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
    found = list({id(cluster): cluster for cluster in cluster_of.values()}.values())
    order = {node: i for i, node in enumerate(graph.nodes)}
    paying = [cluster for cluster in found if sum(map(_pays, cluster)) >= LEAST_OPERATORS]
    return [sorted(cluster, key=order.__getitem__) for cluster in _joined(paying, levels)]


def _joined(found: list[list[fx.Node]], levels: dict[fx.Node, int]) -> Iterable[list[fx.Node]]:
    """The same, with those of one level as one that read the same of their widest inputs."""
    joined: dict[tuple[int, fx.Node], list[fx.Node]] = {}
    for cluster in found:
        keys = [(levels[cluster[0]], source) for source in _widest_inputs(cluster)]
        others = {id(joined[key]): joined[key] for key in keys if key in joined}.values()
        members = [*itertools.chain.from_iterable(others), *cluster]
        keys += [key for key, other in joined.items() if any(other is one for one in others)]
        joined.update(dict.fromkeys(keys, members))
    return {id(cluster): cluster for cluster in joined.values()}.values()


def _widest_inputs(cluster: list[fx.Node]) -> list[fx.Node]:
    """Those of a cluster's inputs that have the most numbers for a token or head row."""
    members, widths = set(cluster), dict[fx.Node, int]()
    for source in dict.fromkeys(source for node in cluster for source in sources(node)):
        sizes = [expression(tensor.numel()) for tensor in _tensors(source)] if source not in members else []
        widths[source] = sum(int(size.subs(dict.fromkeys(size.free_symbols, 1))) for size in sizes if size.free_symbols)
    return [source for source, width in widths.items() if width == max(widths.values()) > 0] or cluster[:1]


def is_view(node: fx.Node) -> bool:
    """Whether a value is in the memory of another one and can be made again wherever it is read."""
    maker = node.args[0] if is_item(node) else node
    return view_source(node) is not None and not writes_in_place(maker) and _has_known_sizes(maker)


def sources(node: fx.Node) -> list[fx.Node]:
    """The values that a clustered operator reads, views being traced back to what they are views of."""
    return list(dict.fromkeys(_base(arg) for arg in node.all_input_nodes if has_tensor(arg)))


def readers(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For every value that is no view, the nodes that read it or a view of it; views do not count."""
    found: dict[fx.Node, list[fx.Node]] = {node: [] for node in graph.nodes}
    for node in graph.nodes:
        if not is_view(node):
            for source in dict.fromkeys(map(_base, node.all_input_nodes)):
                found[source].append(node)
    return found


def _base(node: fx.Node) -> fx.Node:
    while is_view(node):
        node = view_source(node)
    return node


def _fusible(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.args and node.args[0] in found if is_item(node) else _is_fusible(node):
            found.add(node)
    return found


def _is_fusible(node: fx.Node) -> bool:
    known = is_pointwise(node) or node.target in ONE_PASS or node.target in REDUCTIONS
    if not known or is_view(node) or not _has_known_sizes(node):
        return False
    tensors = [*_tensors(node), *(tensor for arg in node.all_input_nodes for tensor in _tensors(arg))]
    same_device = len({tensor.device for tensor in tensors}) == 1
    return same_device and not any(tensor.is_complex() or tensor.is_sparse for tensor in tensors)


def _tensors(node: fx.Node) -> Iterable[torch.Tensor]:
    value = node.meta.get("val")
    return [item for item in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(item, torch.Tensor)]


def _has_known_sizes(node: fx.Node) -> bool:
    """Whether the numbers that an operator takes can be computed from the sizes of the graph's inputs."""
    return all(has_tensor(arg) or is_polynomial(arg.meta.get("val")) for arg in node.all_input_nodes)


def _pays(node: fx.Node) -> bool:
    return not is_item(node) and node.target not in CONSTRUCTORS


def _levels(graph: fx.Graph, fused: set[fx.Node]) -> dict[fx.Node, int]:
    """How many calls outside of clusters come before each node: as few as can be, then as many as its readers allow."""
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        levels[node] = _least_level(node, fused, levels)
    found = readers(graph)
    loose: set[fx.Node] = set()  # read by accumulations alone, which may wait
    for node in reversed(graph.nodes):
        several = is_item(node) or any(map(is_item, found[node]))  # results of one operator stay together
        if node not in fused or several:
            continue
        if all((writes_in_place(reader) and not found[reader]) or reader in loose for reader in found[node]):
            loose.add(node)
            later = [levels[reader] for reader in found[node] if reader in fused and levels[reader] > levels[node]]
            levels[node] = min(later, default=levels[node])
        elif not fused.isdisjoint(found[node]):
            bound = [reader for reader in found[node] if reader not in loose and (reader in fused or found[reader])]
            levels[node] = min((levels[reader] for reader in bound), default=levels[node])
    for node in graph.nodes:
        if node in loose:
            levels[node] = max(levels[node], _least_level(node, fused, levels))
    return levels


def _least_level(node: fx.Node, fused: set[fx.Node], levels: dict[fx.Node, int]) -> int:
    if node not in fused:
        return max((levels[_base(arg)] for arg in node.all_input_nodes), default=0)
    return max((levels[s] + (s not in fused and s.op != "placeholder") for s in sources(node)), default=0)
