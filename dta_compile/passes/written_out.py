"""Attention written out as matrix products and a softmax: recognised to be refused, not trained densely in silence."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.passes.program import where

SOFTMAX = (F.softmax, torch.softmax, "softmax")
PRODUCTS = (torch.matmul, torch.bmm, torch.einsum, operator.matmul, "matmul", "bmm", "__matmul__")
TANH = (torch.tanh, F.tanh, "tanh")
PASSING_ON = ("to", "float", "type_as", "type", "contiguous", "clone", F.dropout, torch.dropout, operator.getitem)


def written_out_attention(module: fx.GraphModule) -> RefusalError | None:
    """The refusal of a graph that weighs tokens by a softmax over all pairs of them; None if it has no such thing."""
    for node in module.graph.nodes:
        if node.target in SOFTMAX and _over_pairs(node) and _weighs(node):
            capped = any(other.target in TANH for other in module.graph.nodes)
            return RefusalError(
                "attention is written out as matrix products and a softmax, which this backend does not take apart",
                where=where(node),
                expected="torch.nn.functional.scaled_dot_product_attention (transformers: attn_implementation='sdpa')",
                got="a softmax over all pairs of tokens"
                + (", of scores that may be soft-capped (tanh)" if capped else ""),
                hint="soft-capped scores and attention sinks are not supported; "
                "options={'fallback': 'dense'} runs such a model without sharing",
            )
    return None


def _over_pairs(node: fx.Node) -> bool:
    """Scores `[..., S, S]`, or `[..., S, S + 1]` with a sink, that carry a gradient."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.dim() < 3 or not value.requires_grad:
        return False
    queries, keys = value.shape[-2:]
    return bool(queries != 1) and str(keys) in (str(queries), str(queries + 1))


def _weighs(node: fx.Node) -> bool:
    """Whether the result becomes a factor of a matrix product."""
    return any(user.target in PRODUCTS or (user.target in PASSING_ON and _weighs(user)) for user in node.users)
