"""The stages of a chunk graph, and the joint trace of each kind of them.

A stage is a segment of the chunk graph. Those that compute the same are of one kind, which is traced with its
derivative once: what differentiates a chunk takes time by its kinds of layers, not by their number.

The cuts are between two mixers, wherever the fewest values are alive. In a decoder that is after every residual
connection, where all that later layers read is the hidden state; what no parameter has a part in, as tables of
positions, does not count. Which segments are copies of one another is told by their signatures.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.ops.mixer import mixer_of_backward, mixer_of_chunk
from dta_compile.passes.graphs.nodes import descendants, is_item
from dta_compile.passes.graphs.subgraph import Subgraph, graph_module, missing
from dta_compile.passes.program import ancestors, output_node

# Traces a function of lists of tensors.
Tracer = Callable[[Callable[..., Any], list[torch.Tensor], list[torch.Tensor]], fx.GraphModule]


@dataclasses.dataclass(eq=False)
class StageTrace:
    """The joint graph of a kind of stage, in which its mixers' layers count from zero.

    Attributes:
        module: from what the stage reads and gradients of what it writes to what it writes and gradients.
        is_parameter: of what it reads, which are parameters of the chunk graph.
        is_of_head: of what it reads, which depend on head rows.
        differentiated: positions of what it writes whose gradients it takes.
    """

    module: fx.GraphModule
    is_parameter: tuple[bool, ...]
    is_of_head: tuple[bool, ...]
    differentiated: tuple[int, ...]
    written: int

    @property
    def placeholders(self) -> list[fx.Node]:
        """Inputs, then gradients."""
        return list(self.module.graph.find_nodes(op="placeholder"))

    @property
    def results(self) -> list[Any]:
        """What is written, then gradients by input: None where there is none."""
        return list(output_node(self.module.graph).args[0])


@dataclasses.dataclass(eq=False)
class TracedStage:
    """A stage of a chunk graph.

    Attributes:
        segment: its nodes.
        trace: of its kind.
    """

    segment: Segment
    trace: StageTrace


class _Kind:
    """Segments with one signature, which read values of the same kind.

    Attributes:
        inputs, outputs: stand-ins for what it reads and returns.
    """

    def __init__(
        self,
        segment: Segment,
        root: fx.GraphModule,
        inputs: list[torch.Tensor],
        flags: tuple[tuple[bool, ...], tuple[bool, ...]],
        tracer: Tracer,
    ) -> None:
        self.inputs, self.flags, self._tracer = inputs, flags, tracer
        self._layers = {layer: i for i, layer in enumerate(segment.layers)}
        self._function = segment.module(root)
        self.outputs: list[torch.Tensor] = list(self._function(*inputs))
        self._traces: dict[Hashable, StageTrace] = {}

    def trace(self, tangents: Mapping[int, torch.Tensor]) -> StageTrace:
        """Its joint trace, where these of its outputs have gradients."""
        key = tuple((i, _facts(tangent)) for i, tangent in tangents.items())
        if key not in self._traces:
            module = self._tracer(self._differentiated(list(tangents)), self.inputs, [*tangents.values()])
            for node in module.graph.nodes:
                if mixer_of_chunk(node.target) or mixer_of_backward(node.target):
                    node.args = (self._layers[node.args[0]], *node.args[1:])
            self._traces[key] = StageTrace(module, *self.flags, tuple(tangents), len(self.outputs))
        return self._traces[key]

    def _differentiated(self, positions: Sequence[int]) -> Callable[..., Any]:
        def differentiate(inputs: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[torch.Tensor | None]:
            outputs = self._function(*inputs)
            leaves = [one for one in inputs if one.requires_grad]
            found: Sequence[torch.Tensor | None] = [None] * len(leaves)
            if tangents:
                found = torch.autograd.grad([outputs[i] for i in positions], leaves, tangents, allow_unused=True)
            gradients = iter(found)
            return [*outputs, *(next(gradients) if one.requires_grad else None for one in inputs)]

        return differentiate


def traced_stages(
    chunk: fx.GraphModule,
    primals: Sequence[torch.Tensor],
    tangents: Mapping[int, torch.Tensor],
    parameters: int,
    head_inputs: int,
    trunk_inputs: int,
    tracer: Tracer,
) -> list[TracedStage]:
    """The stages of a chunk graph, in order; to be called with gradients on, if there are any.

    Args:
        primals: stand-ins for the inputs of the chunk graph.
        tangents: stand-ins for the gradients of its results, by position.
        parameters: how many of the inputs may get a gradient, the first ones.
        head_inputs: how many of the inputs count head rows, the last ones.
        trunk_inputs: how many of the inputs before those count tokens.
        tracer: traces a function of inputs and tangents.
    """
    placeholders = list(chunk.graph.find_nodes(op="placeholder"))
    values: dict[fx.Node, torch.Tensor] = dict(zip(placeholders, primals, strict=True))
    weights, of_head = set(placeholders[:parameters]), descendants(chunk.graph, placeholders[-head_inputs:])
    kinds: dict[Hashable, _Kind] = {}
    found: list[tuple[Segment, _Kind]] = []
    for segment in segments(chunk.graph, parameters, len(primals) - head_inputs - trunk_inputs, of_head):
        inputs = [values[node] for node in segment.inputs]
        flags = tuple(node in weights for node in segment.inputs), tuple(node in of_head for node in segment.inputs)
        key = segment.signature(), tuple(map(_facts, inputs)), flags
        if key not in kinds:
            kinds[key] = _Kind(segment, chunk, [_stand_in(value) for value in inputs], flags, tracer)
        values |= zip(segment.outputs, kinds[key].outputs, strict=True)
        found.append((segment, kinds[key]))
    return _with_traces(found, _given(chunk, values, tangents))


def _given(
    chunk: fx.GraphModule, values: Mapping[fx.Node, torch.Tensor], tangents: Mapping[int, torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    """By result, the gradient that it gets, of those that have any."""
    results, given = list(output_node(chunk.graph).args[0]), dict[fx.Node, torch.Tensor]()
    for i, tangent in tangents.items():
        if values[results[i]].requires_grad:
            _give(given, results[i], tangent)
    return given


def _with_traces(stages: Sequence[tuple[Segment, _Kind]], given: dict[fx.Node, torch.Tensor]) -> list[TracedStage]:
    """From the last stage to the first: what one differentiates decides what those before it do."""
    found = []
    for segment, kind in reversed(stages):
        trace = kind.trace({i: given[node] for i, node in enumerate(segment.outputs) if node in given})
        found.append(TracedStage(segment, trace))
        for node, gradient in zip(segment.inputs, trace.results[trace.written :], strict=True):
            if gradient is not None:
                _give(given, node, gradient.meta["val"])
    return found[::-1]


def _give(given: dict[fx.Node, torch.Tensor], node: fx.Node, gradient: torch.Tensor) -> None:
    given[node] = given[node] + gradient if node in given else gradient


def _facts(value: torch.Tensor) -> Hashable:
    """What a trace takes from its inputs."""
    return str(value.shape), str(value.stride()), value.dtype, value.device, value.requires_grad


def _stand_in(value: torch.Tensor) -> torch.Tensor:
    new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return new.requires_grad_(value.requires_grad)


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


def segments(graph: fx.Graph, parameters: int, whole: int, of_head: Container[fx.Node]) -> list[Segment]:
    """The segments of a chunk graph, in order: one if there is no place to cut.

    Args:
        parameters: how many of the inputs are parameters, the first ones.
        whole: how many of the inputs do not run over tokens or head rows, the first ones.
        of_head: what depends on the inputs that run over head rows.
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    per_token, returned = descendants(graph, placeholders[whole:]), set(output_node(graph).all_input_nodes)
    inner = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    repeated = {node for node in inner if node not in returned and (node not in per_token or _is_size(node))}
    trained = descendants(graph, placeholders[:parameters])
    nodes = _with_layers([node for node in inner if node not in repeated])
    nodes = _with_readers(nodes, [node for node in nodes if node in of_head and node not in trained])
    cuts = [0, *_cuts(nodes, trained), len(nodes)]
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


def _with_readers(nodes: Sequence[fx.Node], late: Sequence[fx.Node]) -> list[fx.Node]:
    """In an order in which some come right before what reads them first: labels, say, which are made ready long before
    there is anything to compare with them."""
    places = {node: i for i, node in enumerate(nodes)}
    for node in reversed(late):
        places[node] = min((places[user] for user in _users(node) if user in places), default=places[node])
    return sorted(nodes, key=places.__getitem__)  # which keeps the order of those at one place


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
