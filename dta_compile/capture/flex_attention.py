"""Rewrite FlexAttention calls of a captured graph as written-out attention, which the passes recognise like any other.

Dynamo captures `mask_mod` and `score_mod` as graphs over indices. Here they are called on all indices at once, so that
the prover sees a mask of comparisons of positions and the passes can take the score function apart. Of a `BlockMask`
only `mask_mod` defines the mask; its block tables are for kernels, and the nodes that compute them are removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.passes.graphs.regions import rewritten
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.program import output_node, with_writes, writes_of
from dta_compile.torch_compat.autograd import predispatch

FLEX_ATTENTION = torch.ops.higher_order.flex_attention
MASK_MOD = -1  # its index in the tuple of a block mask


def without_flex_attention(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph with every FlexAttention call written out; the graph itself if it has none.

    Raises:
        RefusalError: statistics of the scores are used besides the result.
    """
    return rewritten(module, lambda node: node.target is FLEX_ATTENTION, _write_out)


def _write_out(graph: fx.Graph) -> None:
    eliminate_dead_code(graph)  # statistics that nobody uses
    for node in graph.find_nodes(op="call_function", target=FLEX_ATTENTION):
        query, key, value, score_mod, blocks, scale, _, *captured = node.args
        for user in list(node.users):
            if user.args[1] != 0:
                raise _statistics_refusal(user)
            with graph.inserting_before(user):
                arguments = (query, key, value, score_mod, blocks[MASK_MOD], scale, *(captured or ((), ())))
                written = graph.call_function(written_out, arguments)
            written.meta = dict(user.meta)
            user.replace_all_uses_with(written)
            graph.erase_node(user)
        graph.erase_node(node)
    eliminate_dead_code(graph)


def _statistics_refusal(user: fx.Node) -> RefusalError:
    return RefusalError(
        "flex_attention's statistics are used besides its result",
        where=where(user),
        expected="flex_attention without return_lse and return_aux",
        got="log-sum-exps, or maxima, of the scores",
        hint="compute what needs the statistics of attention outside of the compiled function",
    )


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    mask_mod: Callable[..., torch.Tensor],
    scale: float,
    of_scores: Sequence[Any],
    of_mask: Sequence[Any],
) -> torch.Tensor:
    """Compute `flex_attention` of `[B, H, S, D]` densely.

    Args:
        of_scores, of_mask: tensors that `score_mod` and `mask_mod` capture, passed after the indices.
    """
    batch, heads, tokens, _ = query.shape
    key, value = (_repeated(operand, batch, heads) for operand in (key, value))
    index = [
        torch.arange(size, device=query.device).view([-1 if i == dim else 1 for i in range(4)])
        for dim, size in enumerate((batch, heads, tokens, key.shape[2]))
    ]
    scores = score_mod(query @ key.mT * scale, *index, *of_scores)
    allowed = mask_mod(*index, *of_mask)
    return scores.masked_fill(allowed.logical_not(), -math.inf).softmax(-1) @ value


def _repeated(operand: torch.Tensor, batch: Any, heads: int) -> torch.Tensor:
    groups = heads // operand.shape[1]
    operand = operand if groups == 1 else operand.repeat_interleave(groups, 1)
    return operand.expand(batch, -1, -1, -1)


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Erase unused nodes, including in-place writes to unused values and the levels of a `vmap` without used nodes."""
    writes, levels = writes_of(graph), [node for node in graph.nodes if _is_of_vmap(node)]
    effects = [node for node in graph.nodes if node.is_impure() and not _is_of_vmap(node) and node not in writes]
    # Inputs outlive the graph, so that writes to them count.
    kept = [output_node(graph), *effects, *graph.find_nodes(op="placeholder")]
    needed = with_writes(kept, writes)
    if not needed.isdisjoint(levels):
        needed = with_writes([*kept, *levels], writes)
    for node in reversed(list(graph.nodes)):
        is_droppable = not node.is_impure() or _is_of_vmap(node) or node in writes
        if node not in needed and node.op in ("call_function", "call_method", "get_attr") and is_droppable:
            graph.erase_node(node)


def _is_of_vmap(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", None) == predispatch.__name__
