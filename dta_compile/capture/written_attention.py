"""Detect attention that is written out in a captured graph without attention calls.

Passes then try to recognise it (`written_attention`); what they do not recognise is refused rather than silently
trained densely. Detection follows the data flow of Dynamo's graph: a product of two activations, a softmax or similar
function of it, and a product of that with an activation, with no weights in between. An activation depends on data and
on parameters, so that a loss over embeddings from outside the graph does not count.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import torch
from torch import fx

from dta_compile.capture.dynamo.sizes import is_data, is_weight
from dta_compile.errors import RefusalError
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.program import name_of
from dta_compile.passes.symbols import expression

SOFTMAX = ("softmax", "_softmax", "softmax_")
WEIGHINGS = (*SOFTMAX, "exp", "exp_", "exp2", "sigmoid", "sigmoid_", "relu", "relu_")
PRODUCTS = ("matmul", "bmm", "mm", "einsum", "baddbmm", "addbmm", "addmm", "tensordot", "__matmul__", "__rmatmul__")
OF_FEATURES = ("linear", "conv1d", "conv2d")
OUTER = ("mul", "mul_", "__mul__", "multiply")
OPAQUE = (
    "multi_head_attention",
    "scaled_dot_product",
    "flex_attention",
    "flash_attn",
    "varlen_attn",
    "attention_forward",
)


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Dependencies of a value, and the stage of attention that it has reached since the last product with weights.

    Attributes:
        data: it depends on data.
        parameters: it depends on parameters.
        scores: it depends on a product of two activations.
        weights: it depends on a softmax, or a similar function, of scores.
    """

    data: bool = False
    parameters: bool = False
    scores: bool = False
    weights: bool = False

    @property
    def is_activation(self) -> bool:
        return self.data and self.parameters

    def __or__(self, other: _Origin) -> _Origin:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return _Origin(*(one or another for one, another in pairs))


def written_out_attention(module: fx.GraphModule) -> RefusalError | None:
    """Return the error to raise if passes do not recognise the attention in a graph; None if it has no attention."""
    inputs = [_of_input_or_computed(node) for node in module.graph.nodes if node.op == "placeholder"]
    origins: dict[fx.Node, _Origin] = {}
    node, _ = _follow(module, inputs, origins)
    if node is None:
        return None
    if any(part in name_of(node) for part in OPAQUE):
        what, got = f"attention through {name_of(node)}, which this backend does not take apart", name_of(node)
    else:
        what = "attention is written out in a way that this backend does not take apart"
        got = "products of activations, weighed by another function of products of activations than a softmax"
    return RefusalError(
        what,
        where=where(node),
        expected="torch.nn.functional.scaled_dot_product_attention or dta_compile.attention"
        " (transformers: attn_implementation='sdpa' or 'dta')",
        got=got,
        hint="call dta_compile.attention, or in transformers set attn_implementation='dta';"
        " options={'fallback': 'dense'} runs such a model without sharing",
    )


def trains_parameters(module: fx.GraphModule) -> bool:
    """Return whether a graph has both parameters and data, unlike a loss that is compiled on its own."""
    inputs = [_of_input(node) for node in module.graph.nodes if node.op == "placeholder"]
    return any(origin.parameters for origin in inputs) and any(origin.data for origin in inputs)


def _of_input(node: fx.Node) -> _Origin:
    return _Origin(data=is_data(node), parameters=is_weight(node.meta.get("example_value")))


def _of_input_or_computed(node: fx.Node) -> _Origin:
    """Return the origin of an input, a weight also if it was computed from parameters outside of the graph."""
    value = node.meta.get("example_value")
    is_computed = isinstance(value, torch.Tensor) and value.requires_grad and value.dim() <= 2
    return _Origin(parameters=True) if is_computed else _of_input(node)


def _follow(
    module: fx.GraphModule, inputs: Sequence[_Origin], origins: dict[fx.Node, _Origin]
) -> tuple[fx.Node | None, _Origin]:
    """Return the first node that is attention, if any, and the origin of the graph's outputs; fill `origins`."""
    remaining = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            origins[node] = next(remaining, _Origin())
            continue
        operands = [origins[arg] for arg in node.all_input_nodes]
        origins[node] = _combined(operands)
        if name_of(node) == "setitem" or name_of(node).endswith("_"):
            _write(node, origins)
        body = _body(module, node)
        if body is not None:
            arguments = [origins[arg] for arg in node.args[1:] if isinstance(arg, fx.Node)]
            attention, origins[node] = _follow(body, arguments, origins)
            if attention is not None:
                return attention, origins[node]
        elif node.op in ("call_function", "call_method"):
            activations = [origin for origin in operands if origin.is_activation]
            if any(part in name_of(node) for part in OPAQUE) and activations:
                return node, origins[node]
            if _is_product(node) and len(activations) > 1:
                if any(origin.weights for origin in activations):
                    return node, origins[node]
                origins[node] = dataclasses.replace(origins[node], scores=True, weights=False)
            elif _is_product(node) and not _is_by_pair(node):
                origins[node] = dataclasses.replace(origins[node], scores=False, weights=False)
            elif origins[node].scores and name_of(node) in WEIGHINGS:
                origins[node] = dataclasses.replace(origins[node], weights=True)
            elif len(activations) < len(operands) and name_of(node) in OF_FEATURES and not _is_by_pair(node):
                origins[node] = dataclasses.replace(origins[node], scores=False, weights=False)
    return None, _combined([origins[node] for node in module.graph.nodes if node.op == "output"])


def _write(node: fx.Node, origins: dict[fx.Node, _Origin]) -> None:
    """Add the origin of a written value, such as keys for a cache, to all values of which the target is a view."""
    written, target = origins[node], node
    while target.args and isinstance(target.args[0], fx.Node):
        target = target.args[0]
        origins[target] |= dataclasses.replace(written, scores=False, weights=False)


def _combined(origins: Sequence[_Origin]) -> _Origin:
    total = _Origin()
    for origin in origins:
        total |= origin
    return total


def _body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """Return the subgraph that a higher-order operator, such as checkpointing, calls; None for other nodes."""
    first = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(first, fx.Node) or first.op != "get_attr":
        return None
    body = getattr(module, str(first.target), None)
    return body if isinstance(body, fx.GraphModule) else None


def _is_by_pair(node: fx.Node) -> bool:
    """Return whether a product with weights mixes the heads of `[B, H, S, S]`, which stays by query and key."""
    values = [value.meta.get("example_value") for value in (*node.all_input_nodes, node)]
    *operands, result = ([*map(expression, v.shape)] if isinstance(v, torch.Tensor) else [] for v in values)
    return any(len(pair) > 3 and pair[-1] == pair[-2] and pair[-2:-1] == result[-2:-1] for pair in operands)


def _is_product(node: fx.Node) -> bool:
    """Return whether a node contracts an index of two operands, or is an outer product by broadcasting.

    The result of an outer product is larger than each of its operands.
    """
    if name_of(node) in PRODUCTS or node.target is operator.matmul:
        return True
    shapes = [arg.meta.get("example_value") for arg in (*node.all_input_nodes, node)]
    if name_of(node) not in OUTER or not all(isinstance(value, torch.Tensor) for value in shapes) or len(shapes) < 3:
        return False
    return all(value.numel() < shapes[-1].numel() for value in shapes[:-1])
