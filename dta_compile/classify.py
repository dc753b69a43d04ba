"""Classify a captured graph before any pass: it runs over the tree, runs as captured, or is refused.

Generation is distinguished from training and scoring on Dynamo's own graph: it has no gradients and is passed a KV
cache. It runs as captured, because lowering would take seconds for every kind of step that `generate` makes (prefill
and decoding, with and without padding) and gain nothing. A call that creates its own cache is scoring: its rows share
prefixes, and the cache is computed if somebody reads it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence

import sympy
import torch
from torch import fx

from dta_compile.capture.dynamo import breaks, recompile_limit, restarts, running, sizes
from dta_compile.capture.flash_attention import IN_GRAPH
from dta_compile.capture.media.encoder_calls import encode
from dta_compile.capture.media.encoder_cut import EncoderCalls, without_encoder_calls
from dta_compile.capture.media.given_embeddings import GivenEmbeddings, with_given_embeddings
from dta_compile.capture.media.graph_encoders import EncodedMedia, without_encoders
from dta_compile.capture.media.joined_features import over_all_tokens
from dta_compile.capture.parameter_writes import ParameterWrites, without_parameter_writes
from dta_compile.capture.recurrences import hands_over_states
from dta_compile.capture.tensor_parallel import LocalGraph, on_own_tensors
from dta_compile.capture.written_attention import SOFTMAX, trains_parameters, written_out_attention
from dta_compile.errors import RefusalError
from dta_compile.ops.mixer import MIXERS, Mixer, Operand
from dta_compile.passes.program import all_nodes, name_of, output_node
from dta_compile.passes.symbols import depends_on_data, expression, free_symbols, selects_rows

GENERATION = (
    "a call without gradients reads or fills a KV cache, as generation does: such calls run as captured "
    "(scoring runs over the prefix tree where it is given no cache; one that it makes itself does not matter)"
)

NO_ATTENTION = (
    "a graph that trains parameters has no scaled_dot_product_attention: it runs as captured, and rows share nothing "
    "(of recurrent and convolutional models, those run over a prefix tree that call functions of transformers, fla, "
    "mamba-ssm or causal-conv1d, or dta_compile.linear_attention and its like)"
)
NO_ATTENTION_HERE = (
    "the model breaks into several graphs, and one that trains parameters has no attention: it runs as captured, and "
    "rows share nothing in it (TORCH_LOGS=graph_breaks shows the line)"
)


class Kind(enum.Enum):
    """Ways to run a captured graph."""

    TREE = "runs over a prefix tree, if the passes can prove it equivalent"
    PLAIN = "runs as captured"
    REFUSED = "does not run"


@dataclasses.dataclass(frozen=True)
class Captured:
    """Captured graph with the facts that are known before any pass.

    Attributes:
        module: Dynamo's graph; with symbolic batch and token sizes if it runs over the tree.
        kind: how it runs.
        training: gradients are enabled and an input requires one.
        has_attention: it calls attention or another mixer, or attention is written out in it.
        own_symbols: every size has a symbol of its own, also where sizes are equal (no duck shaping).
        graph_break: reason and line of the graph break that ends it; None without a break.
        written: the graph without writes to parameters that run before it.
        local: this rank's graph (of `written`, if there is one), if parameters are DTensors (tensor parallelism).
        encoded: the graph (of `local` or `written`, if there is one) without calls of encoders of images and other
            media, and then without encoders that it contains, if it has such.
        given: the graph (of the last of `encoded`, ...) that reads given embeddings with a gradient from tables.
        note: a line to log for a graph that runs as captured.
        refusal: the error of a refused graph; with written-out attention, the error to raise if the passes find none.
    """

    module: fx.GraphModule
    kind: Kind
    training: bool
    has_attention: bool
    own_symbols: bool
    graph_break: str | None
    written: ParameterWrites | None = None
    local: LocalGraph | None = None
    encoded: Sequence[EncodedMedia | EncoderCalls] = ()
    given: GivenEmbeddings | None = None
    note: str | None = None
    refusal: RefusalError | None = None


def classify(module: fx.GraphModule) -> Captured:
    """Classify a captured graph; have a graph for the tree traced again until its sizes are symbolic.

    The backend calls this for every graph while Dynamo waits for the result. Tracing again is an exception that passes
    through here to Dynamo, which then calls the backend with the next trace.
    """
    own_symbols = sizes.restore_duck_shapes()
    restarts.trace_again_if_a_leaf_is_returned(module.graph)
    has_attention = any(captured_mixer_calls(module))
    facts = Captured(
        module, Kind.TREE, _is_training(module), has_attention, own_symbols, graph_break=breaks.graph_break(module)
    )
    if not has_attention:
        refusal = written_out_attention(module)
        facts = dataclasses.replace(facts, has_attention=refusal is not None, refusal=refusal)
    graph = _for_the_tree(facts) if facts.has_attention else _without_attention(facts)
    if _selects_in_vain(graph):
        restarts.trace_again_without_selections()
    return graph


def _without_attention(graph: Captured) -> Captured:
    if not (graph.training and trains_parameters(graph.module)):
        return dataclasses.replace(graph, kind=Kind.PLAIN)
    is_part = graph.graph_break or breaks.resumes_after_a_break() or breaks.given_up()
    return dataclasses.replace(graph, kind=Kind.PLAIN, note=NO_ATTENTION_HERE if is_part else NO_ATTENTION)


def _for_the_tree(graph: Captured) -> Captured:
    sizes.trace_again_with_symbolic_sizes(graph.module.graph)
    recompile_limit.allow_one_more_graph()
    if not graph.training and _generates(graph.module):
        return dataclasses.replace(graph, kind=Kind.PLAIN, note=GENERATION)
    try:
        written = without_parameter_writes(graph.module)
        module = written.module if written else graph.module
        local = on_own_tensors(module)
        module = local.module if local else module
        over_all_tokens(module)
        encoded: list[EncodedMedia | EncoderCalls] = []
        for cut in (without_encoder_calls, without_encoders):
            if part := cut(module):
                encoded.append(part)
                module = part.module
    except RefusalError as refusal:
        return dataclasses.replace(graph, kind=Kind.REFUSED, refusal=refusal)
    sizes.unify_equal_sizes(module.graph if encoded else graph.module.graph)
    given = with_given_embeddings(module, *_mixing(module)) if graph.training else None
    if given and not graph.own_symbols:
        sizes.trace_again_without_duck_shapes(already=False)  # it may be a weight that is as wide as the batch is long
    return dataclasses.replace(graph, written=written, local=local, encoded=encoded, given=given)


def _selects_in_vain(graph: Captured) -> bool:
    """Return whether selections of rows (sizes that depend on data) are useless in this graph.

    They are if the graph does not run over the tree, or if its mixers read selected rows only.
    """
    calls = [call for _, call in captured_mixer_calls(graph.module)]
    values = (arg.meta.get("example_value") for call in calls for arg in call.all_input_nodes)
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    is_over_selected = any(depends_on_data(size) for shape in shapes for size in shape)
    return is_over_selected or (graph.kind is not Kind.TREE and selects_rows(graph.module.graph))


def _is_training(module: fx.GraphModule) -> bool:
    values = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    for call in module.graph.find_nodes(op="call_function", target=encode):
        values += call.meta["example_value"]
    return torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def captured_mixer_calls(module: fx.GraphModule) -> Iterator[tuple[Mixer, fx.Node]]:
    """Yield the calls of attention and other mixers in a captured graph, including those in checkpointed regions."""
    known = {function: mixer for mixer in (*MIXERS.values(), *IN_GRAPH.values()) for function in mixer.functions}
    for node in all_nodes(module):
        if node.op == "call_function" and node.target in known:
            yield known[node.target], node


def _mixing(module: fx.GraphModule) -> tuple[list[fx.Node], set[sympy.Symbol], set[sympy.Expr]]:
    """Return the nodes of a graph that mix tokens, or have a graph inside that does.

    Next come the symbols of their sizes, and the first sizes, which count rows.
    """
    calls = {call for _, call in captured_mixer_calls(module)}
    if not calls:  # attention is written out
        calls = {node for node in all_nodes(module) if name_of(node) in SOFTMAX}
    bodies = {call.graph.owning_module for call in calls}
    values = (node.meta.get("example_value") for call in calls for node in (call, *call.all_input_nodes))
    shapes = [[*map(expression, value.shape)] for value in values if isinstance(value, torch.Tensor) and value.dim()]
    counting, of_rows = free_symbols(size for shape in shapes for size in shape), {shape[0] for shape in shapes}
    named = dict(module.named_modules())
    around = {name for name, body in named.items() if not bodies.isdisjoint(body.modules())}
    return (
        [
            node
            for node in module.graph.nodes
            if node in calls or any(arg.op == "get_attr" and arg.target in around for arg in node.all_input_nodes)
        ],
        counting,
        of_rows,
    )


def _generates(module: fx.GraphModule) -> bool:
    """Return whether attention reads keys of other tokens, or the graph adds keys or values to a cache passed to it."""
    calls = list(captured_mixer_calls(module))
    if hands_over_states(module) or any(_reads_cache(mixer, call) for mixer, call in calls):
        return True
    outputs = set(output_node(module.graph).all_input_nodes)
    returns = any(not outputs.isdisjoint(_sources(mixer, call)) for mixer, call in calls)
    return returns and running.is_given_a_cache()


def _reads_cache(mixer: Mixer, call: fx.Node) -> bool:
    # Count the token dimension from the end, since some functions take operands without batch or heads; operands of
    # recurrences may lack trailing dimensions instead.
    dim = mixer.token_dim - (0 if mixer.running_state else len(mixer.dims))
    lengths = {
        expression(_operand(call, index, operand).meta["example_value"].shape[dim])
        for index, operand in enumerate(mixer.operands)
        if operand.has_tokens
    }
    return len(lengths) > 1


def _sources(mixer: Mixer, call: fx.Node) -> Iterator[fx.Node]:
    """Yield the states of a mixer call (keys and values) and the tensors that they are views or copies of."""
    for node in (_operand(call, index, mixer.operands[index]) for index in mixer.states):
        while True:
            yield node
            tensors = [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("example_value"), torch.Tensor)]
            if len(tensors) != 1:
                break
            node = tensors[0]


def _operand(call: fx.Node, index: int, operand: Operand) -> fx.Node:
    return call.args[index] if len(call.args) > index else call.kwargs[operand.name]
