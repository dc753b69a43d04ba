"""The joint trace of a chunk graph, of which layers that are copies of one another are traced once.

Every kind of segment is traced with its derivative by itself. The whole is then put together from copies: forward in
the order of the segments, backward the other way round, the gradients of a value that several of them read added up.
Tracing all of it at once would give the same, in time that grows with the number of layers.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.ops.mixer import mixer_of_backward, mixer_of_chunk
from dta_compile.passes.gradients.segments import Segment, segments
from dta_compile.passes.graph_module import graph_module
from dta_compile.passes.graphs.nodes import call, is_item
from dta_compile.passes.program import ancestors, output_node

aten = torch.ops.aten
# Traces a function of lists of tensors.
Tracer = Callable[[Callable[..., Any], list[torch.Tensor], list[torch.Tensor]], fx.GraphModule]


class _Trace:
    """The joint graph of a kind of segment.

    Attributes:
        inputs, tangents: its placeholders.
        outputs: what the segment returns.
        gradients: by input; None where it gets none.
        forward, backward: the nodes in between, in order.
    """

    def __init__(self, module: fx.GraphModule, inputs: int, outputs: int) -> None:
        self.module = module
        placeholders = list(module.graph.find_nodes(op="placeholder"))
        results = list(output_node(module.graph).args[0])
        self.inputs, self.tangents = placeholders[:inputs], placeholders[inputs:]
        self.outputs, self.gradients = results[:outputs], results[outputs:]
        first = ancestors([*self.outputs, *(node for node in module.graph.nodes if mixer_of_chunk(node.target))])
        inner = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
        first |= {node for node in inner if is_item(node) and node.args[0] in first}
        self.forward = [node for node in inner if node in first]
        self.backward = [node for node in inner if node not in first]


class _Kind:
    """Segments with one signature, which read values of the same kind.

    Attributes:
        inputs, outputs: stand-ins for what it reads and returns.
        layers: the numbers of its mixers' layers in traces.
    """

    def __init__(self, segment: Segment, root: fx.GraphModule, inputs: list[torch.Tensor], tracer: Tracer) -> None:
        self.layers, self.inputs, self._tracer = segment.layers, inputs, tracer
        self._function = segment.module(root)
        self.outputs: list[torch.Tensor] = list(self._function(*inputs))
        self._traces: dict[Hashable, _Trace] = {}

    def trace(self, tangents: Mapping[int, torch.Tensor]) -> _Trace:
        """Its joint trace, where these of its outputs have gradients."""
        key = tuple((i, _facts(tangent)) for i, tangent in tangents.items())
        if key not in self._traces:
            module = self._tracer(self._differentiated(list(tangents)), self.inputs, [*tangents.values()])
            self._traces[key] = _Trace(module, len(self.inputs), len(self.outputs))
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


@dataclasses.dataclass
class _Copy:
    """A segment of the graph, as a copy of its kind.

    Attributes:
        trace: once it is known which gradients it gets.
        placed: by node of the trace, its copy in the joint graph.
    """

    segment: Segment
    kind: _Kind
    trace: _Trace | None = None
    placed: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)


def joined_trace(
    chunk: fx.GraphModule,
    primals: Sequence[torch.Tensor],
    tangents: Mapping[int, torch.Tensor],
    parameters: int,
    tracer: Tracer,
) -> tuple[fx.GraphModule, set[int]]:
    """The joint graph of a chunk graph; to be called with gradients on, if there are any.

    Args:
        primals: stand-ins for the inputs of the chunk graph.
        tangents: stand-ins for the gradients of its results, by position.
        parameters: how many of the inputs may get a gradient, the first ones.
        tracer: traces a function of inputs and tangents.

    Returns:
        A graph from primals and all tangents to the results and the gradients, None where there is none; and which
        results were differentiated.
    """
    return _Joining(chunk, primals, tangents, tracer).run(parameters)


class _Joining:
    """Puts a joint graph together."""

    def __init__(
        self,
        chunk: fx.GraphModule,
        primals: Sequence[torch.Tensor],
        tangents: Mapping[int, torch.Tensor],
        tracer: Tracer,
    ) -> None:
        self.chunk, self.tracer = chunk, tracer
        self.placeholders = list(chunk.graph.find_nodes(op="placeholder"))
        self.values: dict[fx.Node, torch.Tensor] = dict(zip(self.placeholders, primals, strict=True))
        self.tangents = tangents
        self.results = list(output_node(chunk.graph).args[0])
        self.graph, self.attributes = fx.Graph(), dict[str, Any]()
        self.placed: dict[fx.Node, fx.Node] = {}  # by node of the chunk graph, its value in the joint graph
        self.gradients: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # to be added up

    def run(self, parameters: int) -> tuple[fx.GraphModule, set[int]]:
        copies = self._copies(parameters)
        differentiated = [i for i in self.tangents if self.values[self.results[i]].requires_grad]
        self._choose_traces(copies, differentiated)
        for i, node in enumerate(self.placeholders):
            self.placed[node] = self._placeholder(f"primals_{i + 1}", self.values[node])
        for number, (i, value) in enumerate(self.tangents.items()):
            tangent = self._placeholder(f"tangents_{number + 1}", value)
            if i in differentiated:
                self.gradients[self.results[i]].append(tangent)
        for copy in copies:
            self._place_forward(copy)
        for copy in reversed(copies):
            self._place_backward(copy)
        gradients = [self._gradient(node) for node in self.placeholders[:parameters]]
        self.graph.output([*(self.placed[node] for node in self.results), *gradients])
        return graph_module(self.attributes, self.graph), set(differentiated)

    def _copies(self, parameters: int) -> list[_Copy]:
        """The segments with their kinds; fills `values`."""
        kinds: dict[Hashable, _Kind] = {}
        copies = []
        for segment in segments(self.chunk.graph, parameters):
            inputs = [self.values[node] for node in segment.inputs]
            key = segment.signature(), tuple(map(_facts, inputs))
            if key not in kinds:
                kinds[key] = _Kind(segment, self.chunk, [_stand_in(value) for value in inputs], self.tracer)
            self.values |= zip(segment.outputs, kinds[key].outputs, strict=True)
            copies.append(_Copy(segment, kinds[key]))
        return copies

    def _choose_traces(self, copies: Sequence[_Copy], differentiated: Sequence[int]) -> None:
        """From the last segment to the first: what one differentiates decides what those before it do."""
        given: dict[fx.Node, torch.Tensor] = {}

        def give(node: fx.Node, gradient: torch.Tensor) -> None:
            given[node] = given[node] + gradient if node in given else gradient

        for i in differentiated:
            give(self.results[i], self.tangents[i])
        for copy in reversed(copies):
            outputs = enumerate(copy.segment.outputs)
            copy.trace = copy.kind.trace({i: given[node] for i, node in outputs if node in given})
            for node, gradient in zip(copy.segment.inputs, copy.trace.gradients, strict=True):
                if gradient is not None:
                    give(node, gradient.meta["val"])

    def _placeholder(self, name: str, value: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def _place_forward(self, copy: _Copy) -> None:
        assert copy.trace is not None
        copy.placed |= zip(copy.trace.inputs, (self.placed[node] for node in copy.segment.inputs), strict=True)
        self._place(copy, copy.trace.forward)
        self.placed |= zip(copy.segment.outputs, (copy.placed[node] for node in copy.trace.outputs), strict=True)

    def _place_backward(self, copy: _Copy) -> None:
        assert copy.trace is not None
        given = [gradient for node in copy.segment.outputs if (gradient := self._gradient(node)) is not None]
        copy.placed |= zip(copy.trace.tangents, given, strict=True)
        self._place(copy, copy.trace.backward)
        for node, gradient in zip(copy.segment.inputs, copy.trace.gradients, strict=True):
            if gradient is not None:
                self.gradients[node].append(copy.placed[gradient])

    def _place(self, copy: _Copy, nodes: Sequence[fx.Node]) -> None:
        """Copy nodes of a trace to the end of the joint graph."""
        assert copy.trace is not None
        layers = dict(zip(copy.kind.layers, copy.segment.layers, strict=True))
        for node in nodes:
            copy.placed[node] = new = self.graph.node_copy(node, copy.placed.__getitem__)
            if node.op == "get_attr":
                new.target = f"constant_{len(self.attributes)}"
                self.attributes[new.target] = getattr(copy.trace.module, str(node.target))
            elif mixer_of_chunk(node.target) or mixer_of_backward(node.target):
                new.args = (layers[node.args[0]], *new.args[1:])

    def _gradient(self, node: fx.Node) -> fx.Node | None:
        """The gradient of a value, once all that read it have left theirs."""
        parts = self.gradients.pop(node, [])
        if not parts:
            return None
        total, *others = parts
        for part in others:
            total = call(self.graph, aten.add.Tensor, total, part)
        return total


def _facts(value: torch.Tensor) -> Hashable:
    """What a trace takes from its inputs."""
    return str(value.shape), str(value.stride()), value.dtype, value.device, value.requires_grad


def _stand_in(value: torch.Tensor) -> torch.Tensor:
    new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return new.requires_grad_(value.requires_grad)
