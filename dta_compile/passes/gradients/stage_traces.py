"""The stages of a chunk graph, and the joint trace of each kind of them.

A stage is a segment of the chunk graph. Those that compute the same are of one kind, which is traced with its
derivative once: what differentiates a chunk takes time by its kinds of layers, not by their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.ops.mixer import mixer_of_backward, mixer_of_chunk
from dta_compile.passes.gradients.segments import Segment, segments
from dta_compile.passes.graphs.nodes import descendants
from dta_compile.passes.program import output_node

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
    for segment in segments(chunk.graph, parameters, len(primals) - head_inputs - trunk_inputs):
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
