"""Generation is told from training on Dynamo's own graph, before any pass: without gradients, with a KV cache.

Such a graph runs as captured. Lowering it would take seconds for every kind of step that `generate` makes (prefill,
decoding, with padding and without), for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx

from dta_compile.passes.program import output_node
from dta_compile.passes.symbols import expression


def attention_calls(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The attention calls of a captured graph, also inside checkpointed regions."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
                    yield node


def uses_kv_cache(module: fx.GraphModule) -> bool:
    """Whether attention reads other tokens' keys, or the graph returns keys or values for later calls."""
    outputs = set(output_node(module.graph).all_input_nodes)
    return any(_reads_cache(call) or not outputs.isdisjoint(_sources(call)) for call in attention_calls(module))


def _reads_cache(call: fx.Node) -> bool:
    query, key = _operand(call, 0, "query"), _operand(call, 1, "key")
    return expression(query.meta["example_value"].shape[-2]) != expression(key.meta["example_value"].shape[-2])


def _sources(call: fx.Node) -> Iterator[fx.Node]:
    """Keys and values of a call, and what they are views or copies of."""
    for node in (_operand(call, 1, "key"), _operand(call, 2, "value")):
        while True:
            yield node
            tensors = [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("example_value"), torch.Tensor)]
            if len(tensors) != 1:
                break
            node = tensors[0]


def _operand(call: fx.Node, index: int, name: str) -> fx.Node:
    return call.args[index] if len(call.args) > index else call.kwargs[name]
