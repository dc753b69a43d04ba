"""joint: forward and backward graphs of a chunk, from one joint trace.

The chunk graph is differentiated symbolically by tracing `torch.autograd.grad` over fake tensors with a free number of
chunk tokens and head rows. The trace is cut at the values that the backward needs: the forward saves exactly those
(but no weight: what depends on parameters alone is cheap to redo and would be kept once per chunk). Every attention
operator becomes a call on `path`, the runtime's stack, which each graph takes as its first input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from dta_compile.errors import RefusalError
from dta_compile.passes.attention_op import ATTENTION, ATTENTION_BACKWARD
from dta_compile.passes.program import ChunkInput, Program, ancestors, has_tensor, output_node, where, writes_in_place
from dta_compile.passes.size_nodes import sizes_from_inputs

aten = torch.ops.aten


@dataclasses.dataclass
class JointGraphs:
    """The executable graphs of a chunk. All take `path`, then the chunk graph's inputs, in the chunk graph's order.

    Attributes:
        cache_only: writes the chunk's KV to the path; returns nothing (an anchor).
        forward_only: writes KV, returns the frontier values (an anchor with outputs, or scoring).
        forward: writes KV, returns the frontier values, then the saved values.
        backward: takes `path`, the `backward_inputs` of the chunk's inputs, the saved values, the gradients of the
            differentiable frontier values, and (after the accumulate pass) accumulators for `grad_parameters`.
        saved_kv: for each layer, where its key and value are among the saved values.
        differentiated: positions of the frontier values whose gradients the backward takes.
        grad_parameters: positions among the chunk graph's parameters that receive a gradient.
        grad_sources: for each of `grad_parameters`, which frontier values its gradient comes from.
        saved_bytes_per_token: bytes that the saved values take per chunk token (head rows counted as one a token).
    """

    cache_only: fx.GraphModule
    forward_only: fx.GraphModule
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    backward_inputs: list[int]
    saved_kv: list[tuple[int, int]]
    differentiated: list[int]
    grad_parameters: list[int]
    grad_sources: list[set[int]]
    saved_bytes_per_token: float


def joint(program: Program) -> None:
    """Fill `program.joint`."""
    candidates = _differentiable(program) if program.training else []
    trace, differentiated = _trace(program, candidates)
    graph = trace.graph
    for i in set(candidates) - differentiated:
        program.frontier[i].differentiable = False  # computed from frozen parameters alone
    program.training = bool(differentiated)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    num_tangents = len(candidates)
    tangents = dict(zip(candidates, placeholders[len(placeholders) - num_tangents :], strict=True))
    tangents = {i: tangent for i, tangent in tangents.items() if i in differentiated}
    primals = placeholders[: len(placeholders) - num_tangents]
    results = list(output_node(graph).args[0])
    outputs, grads = results[: len(program.frontier)], results[len(program.frontier) :]
    attention = [node for node in graph.nodes if node.target is ATTENTION]

    forward_only = _extract(trace, primals, outputs, attention)
    cache_only = _extract(trace, primals, [], attention)
    if not program.training:
        program.joint = JointGraphs(cache_only, forward_only, forward_only, None, [], [], [], [], [], 0.0)
        return
    backward_nodes = _depending_on(graph, list(tangents.values()))
    saved = _saved_values(graph, primals, backward_nodes, attention)
    grad_parameters = [i for i, grad in enumerate(grads) if grad is not None]
    wanted = [grads[i] for i in grad_parameters]
    backward, backward_inputs = _backward_graph(trace, primals, saved, list(tangents.values()), wanted)
    positions = {node: i for i, node in enumerate(saved)}
    program.joint = JointGraphs(
        cache_only=cache_only,
        forward_only=forward_only,
        forward=_extract(trace, primals, [*outputs, *saved], attention),
        backward=backward,
        backward_inputs=backward_inputs,
        saved_kv=[(positions[node.args[1]], positions[node.args[2]]) for node in attention],
        differentiated=list(tangents),
        grad_parameters=grad_parameters,
        grad_sources=_sources(graph, tangents, wanted),
        saved_bytes_per_token=sum(_bytes_per_row(node) for node in saved),
    )


def _differentiable(program: Program) -> list[int]:
    return [i for i, value in enumerate(program.frontier) if value.differentiable and not value.is_cache]


def _sources(graph: fx.Graph, tangents: dict[int, fx.Node], grads: list[fx.Node]) -> list[set[int]]:
    """Which tangents each gradient depends on."""
    dependent = {i: _depending_on(graph, [tangent]) for i, tangent in tangents.items()}
    return [{i for i, nodes in dependent.items() if grad in nodes} for grad in grads]


def _trace(program: Program, grad_outputs: list[int]) -> tuple[fx.GraphModule, set[int]]:
    """The joint graph: chunk inputs and gradients of the outputs to outputs and gradients of the parameters.

    Also returns which of `grad_outputs` depend on trained parameters at all.
    """
    differentiated: set[int] = set()
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    tokens, head_rows = (_free_size(shape_env, name, hint) for name, hint in (("tokens", 61), ("head_rows", 53)))

    def differentiate(primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[torch.Tensor | None]:
        with torch.enable_grad() if program.training else torch.no_grad():
            outputs = program.chunk(*primals)
        if not program.training:
            return list(outputs)
        trained = [p for p in primals[: len(program.region_parameters)] if p.requires_grad]
        pairs = [(outputs[i], tangent) for i, tangent in zip(grad_outputs, tangents, strict=True)]
        differentiated.update(i for i in grad_outputs if outputs[i].requires_grad)
        live, given = [out for out, _ in pairs if out.requires_grad], [t for out, t in pairs if out.requires_grad]
        found = iter(torch.autograd.grad(live, trained, given, allow_unused=True) if live else [None] * len(trained))
        grads = [next(found) if p.requires_grad else None for p in primals[: len(program.region_parameters)]]
        return [*outputs, *grads]

    with mode, enable_python_dispatcher(), torch._C._DisableAutocast(), fx.traceback.preserve_node_meta():
        primals = _fake_inputs(program, tokens, head_rows)
        tangents = [
            torch.empty(
                (head_rows, *program.frontier[i].features), dtype=program.frontier[i].dtype, device=_device(program)
            )
            for i in grad_outputs
        ]
        trace = _traced(differentiate, primals, tangents)
        if any(
            writes_in_place(node) for node in trace.graph.nodes
        ):  # some derivatives do: their writes are no dataflow
            functional = torch.func.functionalize(trace, remove="mutations")
            trace = _traced(functional, primals, tangents)
    for size in (tokens, head_rows):
        if not size.node.expr.free_symbols:
            raise RefusalError(
                "an operation in the token region, or its derivative, works for one number of tokens only",
                expected="operations that work on any number of tokens",
                got=f"the traced size {size}",
                hint="pass options={'fallback': 'dense'}, and please report the model",
            )
    sizes_from_inputs(trace.graph)  # a value asked for its size would be recomputed in the backward
    trace.graph.eliminate_dead_code()
    return trace, differentiated


def _traced(function: Any, *inputs: Any) -> fx.GraphModule:
    try:
        return make_fx(function, _allow_non_fake_inputs=True)(*inputs)
    except Exception as error:
        probe = fx.Graph().placeholder("traced")
        probe.meta = dict(fx.traceback.get_current_meta())
        raise RefusalError(
            "torch cannot differentiate this operation over a free number of tokens",
            where=where(probe),
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}",
            hint="write it with other operations",
        ) from error


def _free_size(shape_env: ShapeEnv, name: str, hint: int) -> Any:
    symbol = shape_env.create_symbol(
        hint, source=ConstantSource(f"__dta_{name}"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
    )
    return shape_env.create_symintnode(symbol, hint=hint)


def _fake_inputs(program: Program, tokens: Any, head_rows: Any) -> list[torch.Tensor]:
    def whole(node: fx.Node, requires_grad: bool = False) -> torch.Tensor:
        value = node.meta["val"]
        shape, stride = [int(s) for s in value.shape], [int(s) for s in value.stride()]
        fake = torch.empty_strided(
            shape, stride, dtype=value.dtype, device=_device(program) if value.is_meta else value.device
        )
        return fake.requires_grad_(requires_grad)

    def rows(item: ChunkInput, count: Any) -> torch.Tensor:
        value = item.node.meta["val"]
        return torch.empty((count, *feature_sizes(item)), dtype=value.dtype, device=value.device)

    parameters = [
        whole(program.placeholders[spec.index], spec.requires_grad and program.training)
        for spec in program.region_parameters
    ]
    constants = [whole(node) for node in program.constant_inputs]
    index = torch.empty((head_rows,), dtype=torch.int64, device=_device(program))
    trunk = [rows(item, tokens) for item in program.trunk_inputs]
    head = [rows(item, head_rows) for item in program.head_inputs]
    return [*parameters, *constants, *trunk, index, *head]


def feature_sizes(item: ChunkInput) -> tuple[int, ...]:
    """The sizes of a chunk input's feature dimensions."""
    shape = item.node.meta["val"].shape
    return tuple(int(size) for size, axis in zip(shape, item.layout.dims, strict=True) if axis is None)


def _device(program: Program) -> torch.device:
    return program.attention[0].node.meta["val"].device


def _depending_on(graph: fx.Graph, sources: list[fx.Node]) -> set[fx.Node]:
    found = set(sources)
    for node in graph.nodes:
        if node.op != "output" and any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def _saved_values(
    graph: fx.Graph, primals: list[fx.Node], backward_nodes: set[fx.Node], attention: list[fx.Node]
) -> list[fx.Node]:
    """Forward values that the backward reads, the keys and values of all layers among them."""
    saved: dict[fx.Node, None] = {}
    for node in attention:
        saved.update(dict.fromkeys(node.args[1:3]))
    per_token = _per_token(graph, primals)
    for node in graph.nodes:
        if node in backward_nodes and node.op not in ("placeholder", "output"):
            for arg in node.all_input_nodes:
                if arg not in backward_nodes and arg in per_token and has_tensor(arg):
                    saved[arg] = None
    return [node for node in saved if node.op != "placeholder"]


def _per_token(graph: fx.Graph, primals: list[fx.Node]) -> set[fx.Node]:
    """Values that depend on the chunk's tokens; the others (weights, sizes) are recomputed where they are needed."""
    symbolic = [node for node in primals if any(not isinstance(size, int) for size in node.meta["val"].shape)]
    return _depending_on(graph, symbolic)


def _extract(
    trace: fx.GraphModule, primals: list[fx.Node], outputs: Iterable[fx.Node], attention: list[fx.Node]
) -> fx.GraphModule:
    """The part of the forward that computes `outputs` and writes the KV of every layer to the path."""
    outputs = list(outputs)
    computed = ancestors(outputs)
    for node in reversed(attention):
        # A layer whose result nobody reads still has to leave its keys and values for later chunks.
        if node not in computed:
            computed |= ancestors(list(node.args[1:3]))
    graph, copies = fx.Graph(), {}
    path = graph.placeholder("path")
    for node in primals:
        copies[node] = graph.placeholder(node.name)
    for node in trace.graph.nodes:
        if node.target is ATTENTION and node not in computed:
            graph.call_method("write", (path, copies[node.args[1]], copies[node.args[2]], node.args[3]))
        elif node in computed and node not in copies:
            copies[node] = _copy(graph, node, copies, path)
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(trace, graph)


def _backward_graph(
    trace: fx.GraphModule,
    primals: list[fx.Node],
    saved: list[fx.Node],
    tangents: list[fx.Node],
    grads: list[fx.Node],
) -> tuple[fx.GraphModule, list[int]]:
    boundary = {*primals, *saved, *tangents}
    backward_attention = [node for node in trace.graph.nodes if node.target is ATTENTION_BACKWARD]
    computed = ancestors([*grads, *backward_attention], stop=lambda node: node in boundary)
    inputs = [i for i, node in enumerate(primals) if node in computed]
    graph, copies = fx.Graph(), {}
    path = graph.placeholder("path")
    for node in [*(primals[i] for i in inputs), *saved, *tangents]:
        copies[node] = graph.placeholder(f"saved_{node.name}" if node in saved else node.name)
    for node in trace.graph.nodes:
        if node in computed and node not in copies:
            copies[node] = _copy(graph, node, copies, path)
    graph.output(tuple(copies[node] for node in grads))
    return fx.GraphModule(trace, graph), inputs


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], path: fx.Node) -> fx.Node:
    if node.target is ATTENTION or node.target is ATTENTION_BACKWARD:
        method = "attend" if node.target is ATTENTION else "attend_backward"
        arguments = fx.node.map_arg(node.args, lambda arg: copies[arg])
        copy = graph.call_method(method, (path, *arguments))
        copy.meta = dict(node.meta)
        return copy
    return graph.node_copy(node, lambda arg: copies[arg])


def _bytes_per_row(node: fx.Node) -> float:
    value = node.meta["val"]
    total = value.element_size()
    for size in value.shape:
        total *= size if isinstance(size, int) else 1
    return float(total)
