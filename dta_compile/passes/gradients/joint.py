"""joint: forward and backward graphs of a chunk, from one joint trace.

The chunk graph is differentiated symbolically by tracing `torch.autograd.grad` over fake tensors with a free number of
chunk tokens and head rows, once for layers that are copies of one another (`joined_traces`). The trace is then cut in
two (`saved_values`, `partition`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dta_compile.errors import RefusalError
from dta_compile.passes.chunk.chunk_inputs import chunk_device, fake_inputs, free_sizes
from dta_compile.passes.chunk_bytes import ChunkSizes, total
from dta_compile.passes.contracts import contract
from dta_compile.passes.gradients.joined_traces import joined_trace
from dta_compile.passes.gradients.partition import JointTrace, backward_graph, choose_saved, forward_graph, states_of
from dta_compile.passes.gradients.simplify import simplify
from dta_compile.passes.graphs.new_values import write_to_new_values
from dta_compile.passes.graphs.sizes import sizes_from_inputs
from dta_compile.passes.graphs.storage import owner
from dta_compile.passes.joint_graphs import JointGraphs
from dta_compile.passes.program import Program, output_node, where
from dta_compile.passes.symbols import expression
from dta_compile.passes.tracing import tracing

aten = torch.ops.aten


@contract(
    reads=[
        "placeholders",
        "mixer_nodes",
        "chunk",
        "region_parameters",
        "constant_inputs",
        "trunk_inputs",
        "head_inputs",
    ],
    fills=["joint"],
    rewrites=["training", "frontier"],
)
def joint(program: Program) -> None:
    """Fill `program.joint`."""
    candidates = _differentiable(program) if program.training else []
    trace = _joint_trace(program, candidates)
    program.frontier = [
        dataclasses.replace(value, differentiable=i in trace.tangents) if i in candidates else value
        for i, value in enumerate(program.frontier)  # those computed from frozen parameters alone are not
    ]
    program.training = bool(trace.tangents)
    if not program.training:
        cache_only, forward_only = forward_graph(trace, []), forward_graph(trace, trace.outputs)
        program.joint = JointGraphs(cache_only, forward_only, forward_only, trace.sizes)
        return
    saved = choose_saved(trace)
    backward, backward_inputs = backward_graph(trace, saved)
    positions = {node: i for i, node in enumerate(saved)}
    program.joint = JointGraphs(
        cache_only=forward_graph(trace, []),
        forward_only=forward_graph(trace, trace.outputs),
        forward=forward_graph(trace, [*trace.outputs, *saved]),
        sizes=trace.sizes,
        backward=backward,
        backward_inputs=backward_inputs,
        saved_states=[tuple(positions[state] for state in states_of(node)) for node in trace.mixing],
        differentiated=list(trace.tangents),
        grad_parameters=[i for i, grad in enumerate(trace.gradients) if grad is not None],
        grad_sources=_sources(trace),
        **_sizes(trace, [trace.primals[i] for i in backward_inputs], saved),
    )


def _sizes(trace: JointTrace, inputs: list[fx.Node], saved: list[fx.Node]) -> dict[str, Any]:
    """The fields of `JointGraphs` that measure what is kept."""
    sizes, kept = trace.sizes, [*inputs, *saved]
    per_chunk, of_head = trace.per_token(), trace.depending_on(trace.head_inputs)
    memory = dict.fromkeys(owner(node) for node in kept if node in per_chunk)
    size = total(sizes.bytes(node.meta["val"]) for node in memory)
    head_dims = [sizes.head_dim(node.meta["val"]) for node in kept]
    return {
        "token_bytes": size.per_token,
        "head_bytes": size.per_head_row,
        "kv_bytes": total(sizes.bytes(node.meta["val"]) for node in trace.states).per_token,
        "head_dims": head_dims,
        "head_rows_separable": not any(
            dim is None and node in of_head for node, dim in zip(kept, head_dims, strict=True)
        ),
    }


def _differentiable(program: Program) -> list[int]:
    return [i for i, value in enumerate(program.frontier) if value.differentiable and not value.is_cache]


def _sources(trace: JointTrace) -> list[set[int]]:
    """For each gradient, which tangents it depends on."""
    dependent = {i: trace.depending_on([tangent]) for i, tangent in trace.tangents.items()}
    return [{i for i, nodes in dependent.items() if grad in nodes} for grad in trace.gradients if grad is not None]


def _joint_trace(program: Program, candidates: list[int]) -> JointTrace:
    """The joint graph, differentiating those of the `candidates` that depend on trained parameters at all."""
    module, sizes, differentiated = _trace(program, candidates)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    count = len(placeholders) - len(candidates)
    primals, tangents = placeholders[:count], dict(zip(candidates, placeholders[count:], strict=True))
    results = list(output_node(module.graph).args[0])
    return JointTrace(
        module=module,
        sizes=sizes,
        primals=primals,
        head_inputs=primals[count - len(program.head_inputs) - 1 :],
        outputs=results[: len(program.frontier)],
        tangents={i: tangent for i, tangent in tangents.items() if i in differentiated},
        gradients=results[len(program.frontier) :],
    )


def _trace(program: Program, grad_outputs: list[int]) -> tuple[fx.GraphModule, ChunkSizes, set[int]]:
    """The chunk graph with its derivative; also which of `grad_outputs` were differentiated."""
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    tokens, head_rows = free_sizes(shape_env)
    gradients = torch.enable_grad() if program.training else torch.no_grad()
    with tracing(mode), torch._C._DisableAutocast():
        primals = fake_inputs(program, tokens, head_rows)
        tangents = {
            i: torch.empty(
                (head_rows, *program.frontier[i].features),
                dtype=program.frontier[i].dtype,
                device=chunk_device(program),
            )
            for i in grad_outputs
        }
        with gradients:
            parameters = len(program.region_parameters)
            trace, differentiated = joined_trace(program.chunk, primals, tangents, parameters, _functional_trace)
    for size in (tokens, head_rows):
        if not expression(size).free_symbols:
            raise RefusalError(
                "an operation in the token region, or its derivative, works for one number of tokens only",
                expected="operations that work on any number of tokens",
                got=f"the traced size {size}",
                hint="pass options={'fallback': 'dense'}, and please report the model",
            )
    sizes_from_inputs(trace.graph)  # a value asked for its size would be recomputed in the backward
    simplify(trace.graph)  # what lies across segments
    return trace, ChunkSizes(tokens, head_rows), differentiated


def _functional_trace(
    function: Callable[..., Any], inputs: list[torch.Tensor], tangents: list[torch.Tensor]
) -> fx.GraphModule:
    """`make_fx` of a function of inputs and tangents, without writes in place."""
    trace = _traced(function, inputs, tangents)
    if not write_to_new_values(trace.graph):  # what some derivatives write is no dataflow
        trace = _traced(torch.func.functionalize(trace, remove="mutations"), inputs, tangents)
    simplify(trace.graph)  # here, once for all layers that are copies
    return trace


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
