"""Generation is told from training on Dynamo's own graph, before any pass: without gradients, with a KV cache.

Such a graph runs as captured. Lowering it would take seconds for every kind of step that `generate` makes (prefill,
decoding, with padding and without), for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from dta_compile.capture.flash_attention import KEPT
from dta_compile.ops.mixer import MIXERS, Mixer, Operand
from dta_compile.passes.program import output_node
from dta_compile.passes.symbols import expression


def captured_mixer_calls(module: fx.GraphModule) -> Iterator[tuple[Mixer, fx.Node]]:
    """The calls of attention and other mixers in a captured graph, also inside checkpointed regions."""
    known = {function: mixer for mixer in (*MIXERS.values(), *KEPT.values()) for function in mixer.functions}
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.op == "call_function" and node.target in known:
                    yield known[node.target], node


def uses_kv_cache(module: fx.GraphModule) -> bool:
    """Whether attention reads other tokens' keys, or the graph returns keys or values for later calls."""
    outputs = set(output_node(module.graph).all_input_nodes)
    return any(
        _reads_cache(mixer, call) or not outputs.isdisjoint(_sources(mixer, call))
        for mixer, call in captured_mixer_calls(module)
    )


def _reads_cache(mixer: Mixer, call: fx.Node) -> bool:
    # From the end where functions take operands without batch or heads; those of recurrences may lack the last ones.
    dim = mixer.token_dim - (0 if mixer.running_state else len(mixer.dims))
    lengths = {
        expression(_operand(call, index, operand).meta["example_value"].shape[dim])
        for index, operand in enumerate(mixer.operands)
        if operand.has_tokens
    }
    return len(lengths) > 1


def _sources(mixer: Mixer, call: fx.Node) -> Iterator[fx.Node]:
    """States of a call, keys and values, and what they are views or copies of."""
    for node in (_operand(call, index, mixer.operands[index]) for index in mixer.states):
        while True:
            yield node
            tensors = [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("example_value"), torch.Tensor)]
            if len(tensors) != 1:
                break
            node = tensors[0]


def _operand(call: fx.Node, index: int, operand: Operand) -> fx.Node:
    return call.args[index] if len(call.args) > index else call.kwargs[operand.name]
