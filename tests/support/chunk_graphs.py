"""The graphs of one chunk: what they are made of, and runs of them on random values, without a tree and a schedule.

run = Run(program, tokens=7, head_rows=5)
gradients = run.backward(run.kept, run.tangents)
"""

import collections

import torch

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.passes.chunk_bytes import Bytes
from tests.support.inside import inside


def targets(module):
    return collections.Counter(str(node.target) for node in module.graph.nodes if node.op.startswith("call"))


def program_of(model, vocabulary):
    """The program of the log-probs that a model gives to labels."""
    torch._dynamo.reset()

    def logprobs(ids, labels):
        logits = model(ids)
        logits = getattr(logits, "logits", logits)
        return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    compiled = torch.compile(logprobs, backend="dta")
    compiled(*torch.randint(1, vocabulary, (2, 3, 9))).sum().backward()
    return inside(compiled).only.program


class LinearPath:
    """Stands for the path: something linear of attention's shapes, which allocates what attention is taken to."""

    def __init__(self):
        self.on_backward = lambda layer: None

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


def example(node, joint, tokens, head_rows):
    """A random value for a graph's input."""
    value = node.meta["val"]
    at = dict(zip(joint.sizes.symbols, (tokens, head_rows), strict=True))
    shape = [size if isinstance(size, int) else int(size.node.expr.subs(at)) for size in value.shape]
    if value.is_floating_point():
        return torch.randn(shape, dtype=value.dtype) / 8
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % min(tokens, 31)


class Run:
    """A chunk's forward on random inputs: what it kept, and how to run its backward."""

    def __init__(self, program, tokens, head_rows, path=None):
        self.joint, self.path = program.joint, path or LinearPath()
        forward, backward = (
            list(g.graph.find_nodes(op="placeholder")) for g in (self.joint.forward, self.joint.backward)
        )
        torch.manual_seed(0)
        self.inputs = [example(node, self.joint, tokens, head_rows) for node in forward[1:]]
        self.inputs = self.joint.taken(self.inputs)  # as they were before
        self.outputs = self.joint.forward(self.path, *self.joint.taken(self.inputs))
        self.kept = [self.inputs[i] for i in self.joint.backward_inputs] + list(self.outputs[len(program.frontier) :])
        others = backward[1 + len(self.kept) :]
        self.tangents = [
            example(node, self.joint, tokens, head_rows) for node in others[: len(self.joint.differentiated)]
        ]
        self.parameters = [self.inputs[i] for i in self.joint.grad_parameters]

        whole = len(self.inputs) - len(program.trunk_inputs) - 1 - len(program.head_inputs)
        self.kept_whole = sum(i < whole for i in self.joint.backward_inputs)  # parameters and constants come first

    def kept_bytes(self, *others):
        """Of memory that belongs to the chunk alone."""
        memory = [value.untyped_storage() for value in (*self.kept[self.kept_whole :], *others)]
        return sum({piece.data_ptr(): piece.nbytes() for piece in memory}.values())

    def gradients(self):
        return [torch.zeros_like(value, dtype=statistics_dtype(value.dtype)) for value in self.parameters]

    def backward(self, kept, tangents):
        gradients = self.gradients()
        self.joint.boxed_backward([self.path, *kept, *tangents, *gradients])
        return gradients

    def hand_over(self):
        """The arguments of a backward, and nothing else that refers to what was kept."""
        arguments = [self.path, *self.kept, *self.tangents, *self.gradients()]
        self.inputs, self.outputs, self.kept, self.tangents = [], (), [], []
        return arguments


def operators(module):
    """As `targets`, whether an operator works in place or not."""
    counts = collections.Counter()
    for name, count in targets(module).items():
        counts[name.replace("_.", ".")] += count
    return counts


def allocations(program, name, tokens, head_rows):
    """Sizes of what a graph allocates (negative: frees), in order, and the bytes that it is handed."""
    joint, marker = program.joint, 1234567
    with torch.profiler.profile(profile_memory=True) as profiler:
        run = Run(program, tokens, head_rows)
        if name == "backward":
            graph, held, arguments = joint.boxed_backward, run.kept_bytes(*run.tangents), [run.hand_over()]
        else:
            graph, held, arguments = getattr(joint, name), 0, [run.path, *joint.taken(run.inputs)]
        torch.empty(marker, dtype=torch.uint8)
        results = graph(*arguments)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    del results
    return sizes[sizes.index(-marker) + 1 :], held


def peak(working, tokens, head_rows):
    """Bytes at the peak that `JointGraphs.working` predicts of a graph, for a chunk of so many tokens and head rows."""
    return max((Bytes(*part).at(tokens, head_rows) for part in working), default=0.0)
