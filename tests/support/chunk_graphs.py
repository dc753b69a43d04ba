"""Graphs of one chunk: their nodes, and runs of them on random values without a tree or a schedule.

run = Run(program, tokens=7, head_rows=5)
gradients = run.backward(run.kept, run.tangents)
"""

import collections

import torch
from torch import fx

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.passes.value_bytes import Bytes
from dta_compile.runtime.path.stack import StagePath
from tests.support.inside import inside


def nodes_of(program, name):
    """Return the nodes of a graph of the whole chunk, stage by stage; a kind's nodes recur for every stage of it."""
    nodes, anchors = [], [stage.anchor for stage in program.joint.stages]
    stages = list(zip(program.stages.of_kinds(), anchors, strict=True))
    for (_, kind), anchor in reversed(stages) if name == "backward" else stages:
        graph = anchor if name == "cache_only" else name
        if graph in kind.graphs:
            nodes += kind.graphs[graph].graph.nodes
    return nodes


def targets(graph):
    """Count the calls of each operator; `graph` is a graph module or its nodes."""
    nodes = graph.graph.nodes if isinstance(graph, fx.GraphModule) else graph
    return collections.Counter(str(node.target) for node in nodes if node.op.startswith("call"))


def program_of(model, vocabulary):
    """Compile a model's log-probs of labels and return the program."""
    torch._dynamo.reset()

    def logprobs(ids, labels):
        logits = model(ids)
        logits = getattr(logits, "logits", logits)
        return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    compiled = torch.compile(logprobs, backend="dta")
    compiled(*torch.randint(1, vocabulary, (2, 3, 9))).sum().backward()
    return inside(compiled).only.program


class LinearPath:
    """Stand-in for the path: a linear function with attention's shapes and its assumed allocations."""

    def __init__(self):
        self.on_backward = lambda layer: None

    def of_layers(self, layers):
        return StagePath(self, layers)

    def write(self, layer, key, value):
        pass

    def mix(self, layer, query, key, value, scale, softcap):
        repeated = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return query + repeated, query.sum(-1)

    def mix_backward(self, layer, grad, query, key, value, out, logsumexp, scale, softcap):
        self.on_backward(layer)
        scratch = [torch.empty_like(value) for value in (query, key, value)]
        grads = [(grad.mean() * value).clone() for value in (query, key, value)]
        del scratch
        return tuple(grads)


def inputs_of(program):
    """Return, for each input of a chunk, a node of a stage that reads it, and whether it is transposed there."""
    nodes_of_slots = {}
    for stage, kind in program.stages.of_kinds():
        nodes = list(kind.forward.graph.find_nodes(op="placeholder"))[1:]
        for i, (slot, node) in enumerate(zip(stage.reads, nodes, strict=True)):
            if slot < program.stages.inputs and (slot not in nodes_of_slots or i not in kind.transposed):
                nodes_of_slots[slot] = node, i in kind.transposed
    return [nodes_of_slots[slot] for slot in range(program.stages.inputs)]


def example(node, sizes, tokens, head_rows):
    """Return a random value for a graph's input."""
    value = node.meta["val"]
    at = dict(zip(sizes.symbols, (tokens, head_rows), strict=True))
    shape = [size if isinstance(size, int) else int(size.node.expr.subs(at)) for size in value.shape]
    if value.is_floating_point():
        return torch.randn(shape, dtype=value.dtype) / 8
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % min(tokens, 31)


class Run:
    """Forward run of a chunk on random inputs, with its saved values and a way to run its backward."""

    def __init__(self, program, tokens, head_rows, path=None):
        self.joint, self.path, sizes = program.joint, path or LinearPath(), program.stages.sizes
        torch.manual_seed(0)
        values = [(example(node, sizes, tokens, head_rows), t) for node, t in inputs_of(program)]
        self.inputs = [value.t() if transposed else value for value, transposed in values]
        self.outputs = self.joint.run_forward(self.path, *self.arguments())
        self.kept = [self.inputs[i] for i in self.joint.backward_inputs] + self.outputs[len(program.frontier) :]
        self.tangents = [torch.randn_like(self.outputs[i]) / 8 for i in self.joint.differentiated]
        self.parameters = [self.inputs[i] for i in self.joint.grad_parameters]
        self.kept_whole = sum(i < program.stages.whole for i in self.joint.backward_inputs)

    def arguments(self):
        """Return the arguments after the path, for all graphs but the backward."""
        return [*self.inputs, *self.joint.transposes(self.inputs)]

    def kept_bytes(self, *others):
        """Count the bytes of memory that only the chunk owns."""
        memory = [value.untyped_storage() for value in (*self.kept[self.kept_whole :], *others)]
        return sum({piece.data_ptr(): piece.nbytes() for piece in memory}.values())

    def gradients(self):
        return [torch.zeros_like(value, dtype=statistics_dtype(value.dtype)) for value in self.parameters]

    def backward(self, kept, tangents):
        gradients = self.gradients()
        self.joint.run_backward([self.path, *kept, *tangents, *gradients])
        return gradients

    def hand_over(self):
        """Return the arguments of a backward, and drop all other references to saved values."""
        arguments = [self.path, *self.kept, *self.tangents, *self.gradients()]
        self.inputs, self.outputs, self.kept, self.tangents = [], (), [], []
        return arguments


def operators(nodes):
    """Count the calls of each operator like `targets`, in-place variants included under the plain name."""
    counts = collections.Counter()
    for name, count in targets(nodes).items():
        counts[name.replace("_.", ".")] += count
    return counts


def allocations(program, name, tokens, head_rows):
    """Return the sizes of a graph's allocations (frees are negative) in order, and the bytes that it is handed."""
    joint, marker = program.joint, 1234567
    with torch.profiler.profile(profile_memory=True) as profiler:
        run = Run(program, tokens, head_rows)
        if name == "backward":
            graph, held, arguments = joint.run_backward, run.kept_bytes(*run.tangents), [run.hand_over()]
        else:
            graph, held, arguments = getattr(joint, f"run_{name}"), 0, [run.path, *run.arguments()]
        torch.empty(marker, dtype=torch.uint8)
        results = graph(*arguments)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    del results
    return sizes[sizes.index(-marker) + 1 :], held


def peak(working, tokens, head_rows):
    """Return the peak bytes that `ChunkGraphs.working` predicts for a chunk of `tokens` tokens and `head_rows` rows."""
    return max((Bytes(*part).at(tokens, head_rows) for part in working), default=0.0)
