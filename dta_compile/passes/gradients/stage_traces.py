"""Cut a chunk graph into stages, and trace the joint graph of each kind of stage. Called by the pass `joint`.

A stage is a segment of the chunk graph. Segments with equal signatures (copies of one another) are of one kind, which
is traced with its derivative once: the time to differentiate a chunk grows with kinds of layers, not with layers.

Cuts are wherever, between two mixers, the fewest values are alive. In a decoder that is after every residual
connection, where later layers read only the hidden state. Values that depend on no parameter (tables of positions) do
not count.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.codegen.worker import reason
from dta_compile.errors import RefusalError
from dta_compile.ops.mixer import mixer_of_backward, mixer_of_chunk
from dta_compile.passes.gradients.simplify import simplify
from dta_compile.passes.graphs.nodes import descendants, is_item, sizes_from_inputs
from dta_compile.passes.graphs.source_lines import where_now
from dta_compile.passes.graphs.storage import write_to_new_values
from dta_compile.passes.graphs.subgraph import Subgraph, missing
from dta_compile.passes.program import ancestors, output_node
from dta_compile.torch_compat.tracing import make_fx


@dataclasses.dataclass(eq=False)
class StageTrace:
    """Joint graph of one kind of stage: from inputs and output gradients to outputs and input gradients.

    Attributes:
        module: the graph, whose mixer layers are numbered from zero.
        primals: the values that the stage reads.
        outputs: the values that it writes.
        tangents: by position of a differentiated output, its gradient.
        gradients: the gradient of each primal; None if it has none.
        is_parameter: per primal, whether it is a parameter of the chunk graph.
        is_of_head: per primal, whether it depends on head rows.
    """

    module: fx.GraphModule
    primals: list[fx.Node]
    outputs: list[fx.Node]
    tangents: dict[int, fx.Node]
    gradients: list[fx.Node | None]
    is_parameter: tuple[bool, ...]
    is_of_head: tuple[bool, ...]

    @property
    def mixing(self) -> list[fx.Node]:
        """Return the mixer operators, one per layer."""
        return [node for node in self.module.graph.nodes if mixer_of_chunk(node.target)]

    @property
    def states(self) -> list[fx.Node]:
        """Return the states of all layers, which go on the path: keys and values, for attention."""
        return list(dict.fromkeys(state for node in self.mixing for state in states_of(node)))

    @property
    def backward_results(self) -> list[fx.Node]:
        """Return the gradients, and the mixers' backward operators, which add state gradients to the path."""
        leaving = [node for node in self.module.graph.nodes if mixer_of_backward(node.target)]
        return [*(gradient for gradient in self.gradients if gradient is not None), *leaving]

    def per_token(self) -> set[fx.Node]:
        """Return the values that depend on the chunk's tokens or head rows; the others are of parameters alone."""
        return self.depending_on(
            node for node in self.primals if any(not isinstance(size, int) for size in node.meta["val"].shape)
        )

    def depending_on(self, sources: Iterable[fx.Node]) -> set[fx.Node]:
        """Return `sources` and all values computed from them."""
        return descendants(self.module.graph, sources)


def states_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the states that a mixer operator puts on the path."""
    mixer = mixer_of_chunk(node.target)
    assert mixer is not None
    return mixer.states_of(node.args[1:])


def has_running_state(node: fx.Node) -> bool:
    """Return whether a mixer operator keeps one tensor for all tokens so far."""
    mixer = mixer_of_chunk(node.target)
    return mixer is not None and mixer.running_state is not None


class _Kind:
    """Segments with equal signatures and equal properties of their inputs.

    Attributes:
        inputs, outputs: fake tensors for the values that a segment reads and returns.
    """

    def __init__(
        self,
        segment: Segment,
        root: fx.GraphModule,
        inputs: list[torch.Tensor],
        flags: tuple[tuple[bool, ...], tuple[bool, ...]],
    ) -> None:
        self.inputs, self.flags = inputs, flags
        self._layers = {layer: i for i, layer in enumerate(segment.layers)}
        self._function = segment.module(root)
        self.outputs: list[torch.Tensor] = list(self._function(*inputs))
        self._traces: dict[Hashable, StageTrace] = {}

    def trace(self, tangents: Mapping[int, torch.Tensor]) -> StageTrace:
        """Return the joint graph for gradients of these outputs; it is traced once per set of outputs."""
        key = tuple((i, _facts(tangent)) for i, tangent in tangents.items())
        if key not in self._traces:
            module = _functional_trace(self._differentiated(list(tangents)), self.inputs, [*tangents.values()])
            for node in module.graph.nodes:
                if mixer_of_chunk(node.target) or mixer_of_backward(node.target):
                    node.args = (self._layers[node.args[0]], *node.args[1:])
            nodes, results = list(module.graph.find_nodes(op="placeholder")), list(output_node(module.graph).args[0])
            read, written = len(self.inputs), len(self.outputs)
            of_outputs = dict(zip(tangents, nodes[read:], strict=True))
            self._traces[key] = StageTrace(
                module, nodes[:read], results[:written], of_outputs, results[written:], *self.flags
            )
        return self._traces[key]

    def _differentiated(self, positions: Sequence[int]) -> Callable[..., Any]:
        def differentiate(inputs: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[torch.Tensor | None]:
            outputs = self._function(*inputs)
            leaves = [leaf for leaf in inputs if leaf.requires_grad]
            computed: Sequence[torch.Tensor | None] = [None] * len(leaves)
            if tangents:
                computed = torch.autograd.grad([outputs[i] for i in positions], leaves, tangents, allow_unused=True)
            gradients = iter(computed)
            return [*outputs, *(next(gradients) if leaf.requires_grad else None for leaf in inputs)]

        return differentiate


def traced_stages(
    chunk: fx.GraphModule,
    primals: Sequence[torch.Tensor],
    tangents: Mapping[int, torch.Tensor],
    parameters: int,
    head_inputs: int,
    trunk_inputs: int,
) -> list[tuple[Segment, StageTrace]]:
    """Trace the stages of a chunk graph, in order, each by its kind; the caller enables or disables gradients.

    Args:
        primals: fake tensors for the inputs of the chunk graph.
        tangents: fake tensors for the gradients of its results, by position.
        parameters: number of inputs that may get a gradient, the first ones.
        head_inputs: number of inputs that run over head rows, the last ones.
        trunk_inputs: number of inputs that run over tokens, before the `head_inputs`.
    """
    placeholders = list(chunk.graph.find_nodes(op="placeholder"))
    values: dict[fx.Node, torch.Tensor] = dict(zip(placeholders, primals, strict=True))
    weights, of_head = set(placeholders[:parameters]), descendants(chunk.graph, placeholders[-head_inputs:])
    kinds: dict[Hashable, _Kind] = {}
    facts_of = functools.cache(_facts)  # inputs that are alike are one
    stages: list[tuple[Segment, _Kind]] = []
    for segment in segments(chunk.graph, parameters, len(primals) - head_inputs - trunk_inputs, of_head):
        inputs = [values[node] for node in segment.inputs]
        flags = tuple(node in weights for node in segment.inputs), tuple(node in of_head for node in segment.inputs)
        key = segment.signature(), tuple(map(facts_of, inputs)), flags
        if key not in kinds:
            kinds[key] = _Kind(segment, chunk, [_stand_in(value) for value in inputs], flags)
        values |= zip(segment.outputs, kinds[key].outputs, strict=True)
        stages.append((segment, kinds[key]))
    return _with_traces(stages, _result_gradients(chunk, values, tangents))


def _functional_trace(
    function: Callable[..., Any], inputs: list[torch.Tensor], tangents: list[torch.Tensor]
) -> fx.GraphModule:
    """Trace a function of inputs and tangents by `make_fx`, functionalise and simplify the trace."""
    trace = _make_fx(function, inputs, tangents)
    if not write_to_new_values(trace.graph):  # some derivatives mutate values that others read
        trace = _make_fx(torch.func.functionalize(trace, remove="mutations"), inputs, tangents)
    sizes_from_inputs(trace.graph)  # else the backward would recompute a value only for its size
    simplify(trace.graph)
    return trace


def _make_fx(function: Any, *inputs: Any) -> fx.GraphModule:
    try:
        return make_fx(function, _allow_non_fake_inputs=True)(*inputs)
    except Exception as error:
        raise RefusalError(
            "torch cannot differentiate this operation over a free number of tokens",
            where=where_now(),
            got=reason(error),
            hint="write it with other operations",
        ) from error


def _result_gradients(
    chunk: fx.GraphModule, values: Mapping[fx.Node, torch.Tensor], tangents: Mapping[int, torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    """Return the gradients of the chunk graph's results, of those that require one."""
    results, gradients = list(output_node(chunk.graph).args[0]), dict[fx.Node, torch.Tensor]()
    for i, tangent in tangents.items():
        if values[results[i]].requires_grad:
            _add_gradient(gradients, results[i], tangent)
    return gradients


def _with_traces(
    stages: Sequence[tuple[Segment, _Kind]], gradients: dict[fx.Node, torch.Tensor]
) -> list[tuple[Segment, StageTrace]]:
    """Trace stages from the last to the first: input gradients of a stage are output gradients of earlier ones."""
    traced = []
    for segment, kind in reversed(stages):
        trace = kind.trace({i: gradients[node] for i, node in enumerate(segment.outputs) if node in gradients})
        traced.append((segment, trace))
        for node, gradient in zip(segment.inputs, trace.gradients, strict=True):
            if gradient is not None:
                _add_gradient(gradients, node, gradient.meta["val"])
    return traced[::-1]


def _add_gradient(gradients: dict[fx.Node, torch.Tensor], node: fx.Node, gradient: torch.Tensor) -> None:
    gradients[node] = gradients[node] + gradient if node in gradients else gradient


def _facts(value: torch.Tensor) -> Hashable:
    """Return the properties of an input that a trace depends on."""
    return str(value.shape), str(value.stride()), value.dtype, value.device, value.requires_grad


def _stand_in(value: torch.Tensor) -> torch.Tensor:
    new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return new.requires_grad_(value.requires_grad)


# Least number of nodes of a segment, below which a trace of its own does not pay.
LEAST_NODES = 8


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive nodes of a graph, as a function of the values that they read.

    Attributes:
        inputs: the values that the nodes read from outside.
        nodes: the nodes in order, including the sizes and constants that they read.
        outputs: the nodes that other segments read or the graph returns.
    """

    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @functools.cached_property
    def layers(self) -> list[int]:
        """Return the indices of its mixer layers, in order."""
        return [int(node.args[0]) for node in self.nodes if mixer_of_chunk(node.target)]

    def module(self, root: fx.GraphModule) -> fx.GraphModule:
        """Return the segment as a module."""
        subgraph = Subgraph()
        subgraph.add_inputs(self.inputs)
        for node in self.nodes:
            subgraph.copied(node)
        return subgraph.module(root, self.outputs)

    def signature(self) -> Hashable:
        """Return a key that is equal for segments that compute the same, up to the indices of their layers."""
        numbers = {node: f"\0{i}" for i, node in enumerate((*self.inputs, *self.nodes))}
        layers = {layer: i for i, layer in enumerate(dict.fromkeys(self.layers))}
        rows = []
        for node in self.nodes:
            args = node.args
            if layers and mixer_of_chunk(node.target):
                args = layers[args[0]], *args[1:]
            rows.append((node.op, node.target, repr(fx.node.map_arg((args, node.kwargs), numbers.__getitem__))))
        return len(self.inputs), tuple(rows), tuple(numbers[node] for node in self.outputs)


def segments(graph: fx.Graph, parameters: int, whole: int, of_head: Container[fx.Node]) -> list[Segment]:
    """Cut a chunk graph into segments, in order; return one segment if there is nowhere to cut.

    Args:
        parameters: number of inputs that are parameters, the first ones.
        whole: number of inputs that do not run over tokens or head rows, the first ones.
        of_head: the nodes that depend on inputs that run over head rows.
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    per_token, returned = descendants(graph, placeholders[whole:]), set(output_node(graph).all_input_nodes)
    inner = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    repeated = {node for node in inner if (node not in per_token or _is_size(node)) and node not in returned}
    trained = descendants(graph, placeholders[:parameters])
    nodes = _behind_inputs([node for node in inner if node not in repeated])
    nodes = _before_readers(nodes, [node for node in nodes if node in of_head and node not in trained])
    cuts = [0, *_cuts(nodes, trained), len(nodes)]
    parts = [nodes[start:stop] for start, stop in itertools.pairwise(cuts) if start < stop]
    return [_segment(part, returned, repeated) for part in parts]


def _behind_inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Move values that are only returned (the states of a layer) right behind their inputs: those that neither a mixer
    depends on, nor anything computed from the last mixer."""
    mixers = [node for node in nodes if mixer_of_chunk(node.target)]
    if not mixers:
        return list(nodes)
    needed = ancestors([*mixers, *descendants(mixers[0].graph, mixers[-1:])])
    last = nodes.index(mixers[-1])
    positions: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        positions[node] = i
        if node not in needed:
            earliest = max((positions[arg] for arg in node.all_input_nodes if arg in positions), default=i)
            positions[node] = earliest if earliest < last else i
    return sorted(nodes, key=positions.__getitem__)


def _before_readers(nodes: Sequence[fx.Node], late: Sequence[fx.Node]) -> list[fx.Node]:
    """Move `late` nodes right before their first reader: labels, for example, which are prepared long before they are
    compared with anything."""
    positions = {node: i for i, node in enumerate(nodes)}
    for node in reversed(late):
        positions[node] = min((positions[user] for user in _users(node) if user in positions), default=positions[node])
    return sorted(nodes, key=positions.__getitem__)  # stable: nodes with equal keys keep their order


def _is_size(node: fx.Node) -> bool:
    if node.target is torch.ops.aten.sym_size.int:
        return True
    return getattr(node.target, "__module__", "") == "_operator" and not is_item(node)


def _segment(nodes: Sequence[fx.Node], returned: set[fx.Node], repeated: set[fx.Node]) -> Segment:
    """Make a segment of nodes and of copies of the `repeated` nodes that they read: sizes, and values of weights and
    constants alone."""
    members = set(nodes)
    order: dict[fx.Node, None] = {}

    def needs(node: fx.Node) -> list[fx.Node]:
        return [arg for arg in node.all_input_nodes if arg in members or arg in repeated]

    for node in nodes:
        if any(arg not in order for arg in needs(node)):
            order |= dict.fromkeys(missing(node, order, needs))
        else:
            order[node] = None
    inputs = dict.fromkeys(arg for node in order for arg in node.all_input_nodes if arg not in order)
    outputs = [node for node in nodes if node in returned or not members.issuperset(_users(node))]
    return Segment(tuple(inputs), tuple(order), tuple(outputs))


def _users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op != "output"]


def _cuts(nodes: Sequence[fx.Node], counted: Container[fx.Node]) -> list[int]:
    """Return the positions to cut before. Nodes before the first mixer, or after the last, are cut where as few values
    are alive as between layers; a layer may have several mixers, with more values alive between them."""
    mixers = [i for i, node in enumerate(nodes) if mixer_of_chunk(node.target)]
    if len(mixers) < 2:
        return []
    position: dict[fx.Node, int] = {node: i for i, node in enumerate(nodes)}
    readers = [[position.get(user, len(nodes)) for user in _users(node)] for node in nodes]
    last_read = [max(positions, default=i) for i, positions in enumerate(readers)]
    alive = _alive(last_read, [node in counted for node in nodes])
    tuples = _alive(last_read, [any(map(is_item, node.users)) for node in nodes])  # stay in a segment
    least = [
        min((alive[i] for i in range(first + 1, second + 1) if not tuples[i]), default=-1)
        for first, second in itertools.pairwise(mixers)
    ]
    cuts = [0]
    gaps = itertools.pairwise([-1, *mixers, len(nodes) - 1])
    between_layers = min((limit for limit in least if limit >= 0), default=-1)
    for (first, second), limit in zip(gaps, [between_layers, *least, between_layers], strict=True):
        for i in range(first + 1, second + 1):
            if alive[i] != limit or tuples[i]:
                continue
            if i - cuts[-1] >= LEAST_NODES or len(cuts) == 1:
                cuts.append(i)
            elif len(cuts) == 2:  # the first layer is to equal the others, so no nodes before it join it
                cuts[1] = i
    return cuts[1:]


def _alive(last_read: Sequence[int], counts: Sequence[bool]) -> list[int]:
    """Return for every position the number of values that are computed before it and read at or after it, among those
    that count."""
    changes = [0] * (len(last_read) + 2)
    for i, last in enumerate(last_read):
        if counts[i]:
            changes[i + 1] += 1
            changes[last + 1] -= 1
    return list(itertools.accumulate(changes))
