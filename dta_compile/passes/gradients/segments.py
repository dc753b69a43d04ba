"""A chunk graph cut into segments: between two mixers, wherever the fewest values are alive.

In a decoder that is after every residual connection, where all that later layers read is the hidden state; what no
parameter has a part in, as tables of positions, does not count. Which segments are copies of one another is told by
their signatures.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.ops.mixer import mixer_of_chunk
from dta_compile.passes.graph_module import graph_module
from dta_compile.passes.graphs.nodes import descendants, is_item
from dta_compile.passes.graphs.subgraph import Subgraph, missing
from dta_compile.passes.program import ancestors, output_node

# A segment of fewer nodes is not worth a trace.
LEAST_NODES = 8


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive nodes of a graph, as a function of what they read.

    Attributes:
        inputs: the values from outside of it.
        nodes: in order, with the sizes and constants that they read.
        outputs: those of the nodes that others read, or the graph returns.
    """

    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @property
    def layers(self) -> list[int]:
        """The numbers of its mixers' layers, in order."""
        return [int(node.args[0]) for node in self.nodes if mixer_of_chunk(node.target)]

    def module(self, root: fx.GraphModule) -> fx.GraphModule:
        """The function."""
        part = Subgraph()
        part.add_inputs(self.inputs)
        for node in self.nodes:
            part.copied(node)
        part.set_outputs(self.outputs)
        return graph_module(root, part.graph)

    def signature(self) -> Hashable:
        """The same for segments that compute the same, but for the numbers of their layers."""
        numbers = {node: f"\0{i}" for i, node in enumerate((*self.inputs, *self.nodes))}
        layers = {layer: i for i, layer in enumerate(dict.fromkeys(self.layers))}
        rows = []
        for node in self.nodes:
            args = (layers[node.args[0]], *node.args[1:]) if mixer_of_chunk(node.target) else node.args
            rows.append((node.op, node.target, repr(fx.node.map_arg((args, node.kwargs), numbers.__getitem__))))
        return len(self.inputs), tuple(rows), tuple(numbers[node] for node in self.outputs)


def segments(graph: fx.Graph, parameters: int, whole: int) -> list[Segment]:
    """The segments of a chunk graph, in order: one if there is no place to cut.

    Args:
        parameters: how many of the inputs are parameters, the first ones.
        whole: how many of the inputs do not run over tokens or head rows, the first ones.
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    per_token, returned = descendants(graph, placeholders[whole:]), set(output_node(graph).all_input_nodes)
    inner = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    repeated = {node for node in inner if node not in returned and (node not in per_token or _is_size(node))}
    nodes = _with_layers([node for node in inner if node not in repeated])
    cuts = [0, *_cuts(nodes, descendants(graph, placeholders[:parameters])), len(nodes)]
    parts = [nodes[start:stop] for start, stop in itertools.pairwise(cuts) if start < stop]
    return [_segment(part, returned, repeated) for part in parts]


def _with_layers(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """In an order in which what is returned in the end, as the states of a layer, comes right after what it is made of:
    what neither a mixer depends on nor anything that the last one has a part in."""
    mixers = [node for node in nodes if mixer_of_chunk(node.target)]
    if not mixers:
        return list(nodes)
    kept = ancestors([*mixers, *descendants(mixers[0].graph, mixers[-1:])])
    last = nodes.index(mixers[-1])
    places: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        made = max((places[arg] for arg in node.all_input_nodes if arg in places), default=i)
        places[node] = made if made < last and node not in kept else i
    return sorted(nodes, key=places.__getitem__)


def _is_size(node: fx.Node) -> bool:
    if node.target is torch.ops.aten.sym_size.int:
        return True
    return getattr(node.target, "__module__", "") == "_operator" and not is_item(node)


def _segment(nodes: Sequence[fx.Node], returned: set[fx.Node], repeated: set[fx.Node]) -> Segment:
    """With its own of the `repeated` nodes that it reads: sizes, and what is made of weights and constants alone."""
    members = set(nodes)
    order: dict[fx.Node, None] = {}

    def needs(node: fx.Node) -> list[fx.Node]:
        return [arg for arg in node.all_input_nodes if arg in members or arg in repeated]

    for node in nodes:
        order |= dict.fromkeys(missing(node, order, needs))
    inputs = dict.fromkeys(arg for node in order for arg in node.all_input_nodes if arg not in order)
    outputs = [node for node in nodes if node in returned or not members.issuperset(_users(node))]
    return Segment(tuple(inputs), tuple(order), tuple(outputs))


def _users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op != "output"]


def _cuts(nodes: Sequence[fx.Node], counted: Container[fx.Node]) -> list[int]:
    """Positions to cut before; what precedes the first mixer, or follows the last, is cut where layers end: a layer may
    have several mixers, and more values are alive between them."""
    mixers = [i for i, node in enumerate(nodes) if mixer_of_chunk(node.target)]
    if len(mixers) < 2:
        return []
    alive = _alive(nodes, lambda node: int(node in counted))
    tuples = _alive(nodes, lambda node: int(any(is_item(user) for user in node.users)))  # stay in a segment
    least = [
        min((alive[i] for i in range(first + 1, second + 1) if not tuples[i]), default=-1)
        for first, second in itertools.pairwise(mixers)
    ]
    found = [0]
    gaps = itertools.pairwise([-1, *mixers, len(nodes) - 1])
    between_layers = min((limit for limit in least if limit >= 0), default=-1)
    for (first, second), limit in zip(gaps, [between_layers, *least, between_layers], strict=True):
        for i in range(first + 1, second + 1):
            if alive[i] != limit or tuples[i]:
                continue
            if i - found[-1] >= LEAST_NODES or len(found) == 1:
                found.append(i)
            elif len(found) == 2:  # however little comes before the first layer, this is to be like the others
                found[1] = i
    return found[1:]


def _alive(nodes: Sequence[fx.Node], weight: Callable[[fx.Node], int]) -> list[int]:
    """Before every position, the weight of the values made so far that are read from there on."""
    position: dict[Any, int] = {node: i for i, node in enumerate(nodes)}
    changes = [0] * (len(nodes) + 2)
    for i, node in enumerate(nodes):
        last = max((position.get(user, len(nodes)) for user in _users(node)), default=i)
        changes[i + 1] += weight(node)
        changes[last + 1] -= weight(node)
    return list(itertools.accumulate(changes))
