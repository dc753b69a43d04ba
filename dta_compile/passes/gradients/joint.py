"""joint: cut the chunk graph into stages, and make forward and backward graphs of each kind of stage.

Each kind of stage is traced once with `torch.autograd.grad` over fake tensors, with symbolic numbers of tokens and head
rows (`stage_traces`). The joint graph is then partitioned into a forward and a backward (`partition`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.passes.chunk.chunk_graph import chunk_device, fake_inputs, free_sizes
from dta_compile.passes.contracts import contract
from dta_compile.passes.gradients.partition import backward_graph, choose_saved, forward_graph
from dta_compile.passes.gradients.stage_traces import Segment, StageTrace, has_running_state, states_of, traced_stages
from dta_compile.passes.gradients.unroll import Unrolled
from dta_compile.passes.graphs.storage import owner
from dta_compile.passes.program import Program
from dta_compile.passes.stage_graphs import ChunkStages, KeptValue, Memory, StageGraphs, StageOfChunk
from dta_compile.passes.symbols import expression
from dta_compile.passes.tracing import tracing
from dta_compile.passes.value_bytes import Bytes, ChunkSizes, total
from dta_compile.torch_compat.sizes import ShapeEnv
from dta_compile.torch_compat.tensors import DisableAutocast, FakeTensorMode


@contract(
    reads=[
        *("inputs", "placeholders", "mixers", "mixer_nodes", "chunk", "folding"),
        *("region_parameters", "constant_inputs", "trunk_inputs", "head_inputs"),
    ],
    fills=["stages", "copied_mixers"],
    rewrites=["training", "frontier"],
)
def joint(program: Program) -> None:
    """Fill `program.stages`; drop from the frontier's differentiable values those of frozen parameters alone."""
    values = enumerate(program.frontier if program.training else ())
    candidates = [i for i, value in values if value.differentiable and not value.is_cache]
    traced, sizes = _traced_stages(program, candidates)
    unrolled = Unrolled(program, traced)
    program.copied_mixers = unrolled.mixers
    program.stages = stages = _connected(program, unrolled, candidates, sizes)
    program.frontier = [
        dataclasses.replace(value, differentiable=i in stages.differentiated) if i in candidates else value
        for i, value in enumerate(program.frontier)
    ]
    program.training = bool(stages.differentiated)


def _connected(program: Program, traced: Unrolled, candidates: Sequence[int], sizes: ChunkSizes) -> ChunkStages:
    """Assign slots to the values that stages read and write. Of the `candidates` for differentiation, those that depend
    on trained parameters are differentiated."""
    slots = {value: i for i, value in enumerate(traced.inputs)}
    inputs, stages = len(slots), list[StageOfChunk]()
    kinds = dict[StageTrace, int]()
    taken = set[int]()  # slots whose gradients a stage takes
    for stage in traced.stages():
        slots |= {value: len(slots) + i for i, value in enumerate(stage.writes)}
        reads, writes = (tuple(map(slots.__getitem__, values)) for values in (stage.reads, stage.writes))
        kind = kinds.setdefault(stage.trace, len(kinds))
        stages.append(StageOfChunk(kind, stage.layers, reads, writes))
        taken |= {writes[i] for i in stage.trace.tangents}
    outputs = [slots[value] for value in traced.outputs]
    first_of_head = inputs - len(program.head_inputs) - 1
    return ChunkStages(
        kinds=tuple(_graphs_of(trace, sizes, bool(taken)) for trace in kinds),
        stages=tuple(stages),
        sizes=sizes,
        inputs=inputs,
        whole=first_of_head - len(program.trunk_inputs),
        of_head=frozenset(range(first_of_head, inputs)),
        outputs=tuple(outputs),
        differentiated=tuple(i for i in candidates if outputs[i] in taken),
    )


def _graphs_of(trace: StageTrace, sizes: ChunkSizes, training: bool) -> StageGraphs:
    """Partition the joint graph of a kind of stage; in `training`, states are saved even if nothing has a gradient."""
    saved = choose_saved(trace, sizes) if training else []
    memory = _Memory(trace, sizes)
    forward_only = forward_graph(trace, sizes, trace.outputs)
    attention = [node for node in trace.mixing if not has_running_state(node)]  # whose results may be kept
    graphs = StageGraphs(
        cache_only=forward_graph(trace, sizes, []),
        forward_only=forward_only,
        forward=forward_only,
        backward=None,
        written=tuple(map(memory.of, trace.outputs)),
        state_bytes=total(sizes.bytes(node.meta["val"]) for node in trace.states).per_token,
        result_bytes=total(sizes.bytes(node.meta["val"]) for node in attention).per_token,
    )
    return _with_backward(trace, graphs, saved, memory) if training else graphs


def _with_backward(trace: StageTrace, graphs: StageGraphs, saved: Sequence[fx.Node], memory: _Memory) -> StageGraphs:
    own = [node for node in saved if node not in trace.outputs]
    backward, inputs = backward_graph(trace, memory.sizes, saved)
    nodes = [*(trace.primals[i] for i in inputs), *saved]
    places = [
        *(("read", i) for i in inputs),
        *(("saved", own.index(node)) if node in own else ("written", trace.outputs.index(node)) for node in saved),
    ]
    kept = [
        KeptValue(place, *memory.of(node), memory.sizes.head_dim(node.meta["val"]))
        for place, node in zip(places, nodes, strict=True)
    ]
    position = {node: i for i, node in enumerate(nodes)}
    gradients = [i for i, gradient in enumerate(trace.gradients) if gradient is not None]
    of_head = trace.depending_on(node for node, flag in zip(trace.primals, trace.is_of_head, strict=True) if flag)
    return dataclasses.replace(
        graphs,
        forward=forward_graph(trace, memory.sizes, [*trace.outputs, *own]),
        backward=backward if trace.tangents else None,
        kept=tuple(kept),
        states=tuple(tuple(position[state] for state in states_of(node)) for node in trace.mixing),
        differentiated=tuple(trace.tangents),
        gradients=tuple(gradients),
        parameters=tuple(i for i in gradients if trace.is_parameter[i]),
        sources=tuple(_sources(trace)),
        separable=not any(value.head_dim is None and node in of_head for value, node in zip(kept, nodes, strict=True)),
    )


class _Memory:
    """Storages of a stage's values: of outputs ("written", i), of inputs ("read", i), of others ("saved", name)."""

    def __init__(self, trace: StageTrace, sizes: ChunkSizes) -> None:
        self.sizes, self.per_chunk = sizes, trace.per_token()
        self.known: dict[fx.Node, Memory] = {}
        for i, node in enumerate(trace.outputs):
            self.known.setdefault(owner(node), ("written", i))
        self.known |= {node: ("read", i) for i, node in enumerate(trace.primals)}

    def of(self, node: fx.Node) -> tuple[Memory, Bytes]:
        """Return the storage of a value, and its bytes if it depends on the chunk."""
        source = owner(node)
        size = self.sizes.bytes(source.meta["val"]) if node in self.per_chunk else Bytes()
        return self.known.get(source, ("saved", source.name)), size


def _sources(trace: StageTrace) -> list[frozenset[int]]:
    """Return, for each gradient, the positions of the tangents that it depends on."""
    dependent = {i: trace.depending_on([tangent]) for i, tangent in trace.tangents.items()}
    return [
        frozenset(i for i, nodes in dependent.items() if gradient in nodes)
        for gradient in trace.gradients
        if gradient is not None
    ]


def _traced_stages(program: Program, grad_outputs: list[int]) -> tuple[list[tuple[Segment, StageTrace]], ChunkSizes]:
    """Trace the stages of the chunk graph; refuse graphs that work for one number of tokens or head rows only."""
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    tokens, head_rows = free_sizes(shape_env)
    gradients = torch.enable_grad() if program.training else torch.no_grad()
    with tracing(mode), DisableAutocast():
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
            parameters, of_head = len(program.region_parameters), len(program.head_inputs) + 1
            traced = traced_stages(program.chunk, primals, tangents, parameters, of_head, len(program.trunk_inputs))
    for size in (tokens, head_rows):
        if not expression(size).free_symbols:
            raise RefusalError(
                "an operation in the token region, or its derivative, works for one number of tokens only",
                expected="operations that work on any number of tokens",
                got=f"the traced size {size}",
                hint="pass options={'fallback': 'dense'}, and please report the model",
            )
    return traced, ChunkSizes(tokens, head_rows)
