"""Recognise attention that a model writes out: a product, its softmax, and a product of that with values.

Calls of attention over heads that were merged with sequences, `[B * H, S, D]`, or with a bias by distance, are
recognised as well. `rewrite` replaces each by one call over `[B, H, S, D]`. `lower` runs this on the lowered graph, in
which every spelling, by `matmul`, `bmm`, `baddbmm` or `einsum` and in any order of heads and groups, consists of
batched products between operators that only move entries, which `factors` undoes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.ops.attention import ATTENTION_CALL
from dta_compile.passes.graphs.nodes import (
    SizeNodes,
    descendants,
    erase_unused,
    filled_with,
    full_for,
    is_float,
    is_item,
)
from dta_compile.passes.graphs.operators import (
    CASTS,
    DROPOUTS,
    MASKED_FILLS,
    MATRIX_PRODUCTS,
    PRODUCTS,
    QUOTIENTS,
    SUMS,
    aten,
)
from dta_compile.passes.graphs.source_lines import copy_stack_trace, where
from dta_compile.passes.graphs.subgraph import missing
from dta_compile.passes.lowering.attention.bias_tables import Known, Tables
from dta_compile.passes.lowering.attention.dimensions import CHANGES, Attention
from dta_compile.passes.lowering.attention.distances import Distances
from dta_compile.passes.lowering.attention.factors import MOVES, Arranger, Mismatch, take_parts_before_moves
from dta_compile.passes.lowering.attention.profiles import Profiles
from dta_compile.passes.lowering.attention.rewrite import Rewrite
from dta_compile.passes.lowering.attention.scores import FLOORS
from dta_compile.passes.lowering.attention.softmaxes import spell_softmaxes
from dta_compile.passes.lowering.attention.token_biases import TokenBiases
from dta_compile.passes.lowering.attention.weight_sums import SPLITS, distribute_products
from dta_compile.passes.program import FEW_TOKENS, GraphWithoutAttention, has_tensor
from dta_compile.passes.symbols import sizes

SCORE_PRODUCTS = MATRIX_PRODUCTS - {aten.addmm.default}
LIKES = (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
UNARY = frozenset({aten.tanh.default, aten.neg.default})


def recognise_attention(graph: fx.Graph, weights: Collection[fx.Node]) -> RefusalError | GraphWithoutAttention | None:
    """Replace attention by calls of the attention operator.

    Args:
        weights: placeholders that are parameters.

    Returns:
        The reason why the first candidate, a softmax of a product, could not be replaced, or that all are over one or
        two tokens; None if all were, or there is none. Nodes that were not replaced, and their products of queries and
        keys, have their own reason in `meta["unrecognised"]`.
    """
    take_parts_before_moves(graph)
    data = [node for node in graph.find_nodes(op="placeholder") if node not in weights and has_tensor(node)]
    scores = _Search(descendants(graph, data))
    spell_softmaxes(graph, weights, lambda node: scores.path_to(node) is not None)
    distribute_products(graph, _Search(descendants(graph, data), parts=True).are_weights)
    search, arranger, refusal = _Search(descendants(graph, data)), Arranger(graph), None
    known: Known = {}
    kinds = (
        Distances,
        functools.partial(TokenBiases, weights=weights),
        Profiles,
        functools.partial(Tables, weights=weights, known=known),
    )
    softmaxes = [node for node in graph.nodes if node.target is aten._softmax.default]
    paths = {node: path for node in softmaxes if (path := search.path_to(node)) is not None}
    _spell_out_likes(graph, {node for path in paths.values() for node in path})
    weighings = {node: _weighings(node) for node in paths}
    written = {weighing: (paths[node], steps) for node in paths for weighing, steps in weighings[node]}
    for softmax in [node for node in paths if not weighings[node] and node.users]:
        changed = _first_change(softmax)
        unrecognised = _refusal(changed, f"{changed.target} of the weights that a softmax gives")
        softmax.meta["unrecognised"], refusal = unrecognised, refusal or unrecognised
        paths[softmax][0].meta["unrecognised"] = unrecognised
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            is_call = node.target is ATTENTION_CALL and (_merges_rows(node) or _is_biased(node, kinds))
        if node not in written and not is_call:
            continue
        try:
            with graph.inserting_before(node):
                if is_call:
                    attention = Attention.called(node)
                else:
                    attention = Attention.written_out(*written[node], node, search.path_to)
                Rewrite(arranger, attention, node, weights, known).run()
                copy_stack_trace(node)
        except Mismatch as mismatch:
            if not is_call:
                node.meta["unrecognised"] = _refusal(node, str(mismatch))
                written[node][0][0].meta["unrecognised"] = node.meta["unrecognised"]
                refusal = refusal or node.meta["unrecognised"]
    erase_unused(graph)
    has_free_lengths = any(sizes(node)[1].free_symbols for node in data if len(sizes(node)) == 2)
    if refusal and not has_free_lengths and all(map(_is_short, paths.values())):
        return GraphWithoutAttention(FEW_TOKENS)
    return refusal


def _is_short(path: list[fx.Node]) -> bool:
    """Return whether a softmax is over one or two keys, which torch specialises, for a constant number of queries."""
    product, *_, softmax = path
    return sizes(softmax)[softmax.args[1]] in (1, 2) and not any(size.free_symbols for size in sizes(product)[-2:])


def _spell_out_likes(graph: fx.Graph, scores: Collection[fx.Node]) -> None:
    """Replace `zeros_like(scores)` and the like by `full`: masks made of them depend on no scores.

    Integers like features, `zeros_like(hidden, dtype=torch.int)[..., 0]`, tell kinds of tokens apart in masks, too.
    """
    builder = SizeNodes(graph)
    for node in [node for node in graph.nodes if node.target in LIKES]:
        if node.args[0] not in scores and (is_float(node) or not is_float(node.args[0])):
            continue
        with graph.inserting_before(node):
            shape = [builder.build(size) for size in sizes(node)]
            if None not in shape:
                node.replace_all_uses_with(full_for(node, shape, filled_with(node)))


def _merges_rows(attention: fx.Node) -> bool:
    """Return whether an operand is made by views in which a size is a product, such as `[B * H, S, D]`."""
    for node in attention.args[:3]:
        while node.target in MOVES:
            if any(size.is_Mul for size in sizes(node)):
                return True
            node = node.args[0]
    return False


def _is_biased(attention: fx.Node, kinds: Sequence[Callable[[fx.Graph, torch.dtype], Distances]]) -> bool:
    """Return whether the mask of a call has a bias by the distance of query and key, of one of these kinds."""
    mask = attention.args[3]
    if mask is None or not is_float(mask) or mask.meta["val"].dim() < 2:
        return False
    labels = (*[None] * (mask.meta["val"].dim() - 2), "q", "k")
    dtype = attention.meta["val"].dtype
    return any(kind(attention.graph, dtype).split(mask, labels) is not None for kind in kinds)


def _refusal(node: fx.Node, got: str) -> RefusalError:
    return RefusalError(
        "attention is written out as products and a softmax in a way that this backend does not take apart",
        where=where(node),
        expected="scores of queries and keys that are scaled, soft-capped, masked, and weigh values by their softmax",
        got=got,
        hint="call torch.nn.functional.scaled_dot_product_attention or dta_compile.attention (transformers:"
        " attn_implementation='sdpa' or 'dta'); options={'fallback': 'dense'} runs such a model without sharing",
    )


class _Search:
    """Memoised search for the product of two values that depend on data, of which a node is a function.

    Args:
        parts: search through parts of values, too, which `Scores` does not follow.
    """

    def __init__(self, data: set[fx.Node], parts: bool = False) -> None:
        self.data, self.parts = data, parts
        self.known: dict[fx.Node, list[fx.Node] | None] = {}

    def path_to(self, node: fx.Node) -> list[fx.Node] | None:
        """Return the path from the product to a node, both included; None if it is no function of scores."""
        for step in missing(node, self.known, self._operands):
            self.known[step] = self._path(step)
        return self.known[node]

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        is_part = node.target is aten.select.int or is_item(node) or node.target in SPLITS
        return [node.args[0]] if self.parts and is_part else _possible_scores(node)

    def are_weights(self, node: fx.Node) -> bool:
        """Return whether a node is a function of the softmax of scores."""
        return any(step.target is aten._softmax.default for step in self.path_to(node) or ())

    def _path(self, node: fx.Node) -> list[fx.Node] | None:
        if node.target in SCORE_PRODUCTS:
            return [node] if all(arg in self.data for arg in node.args[-2:]) else None
        paths = [path for arg in self._operands(node) if (path := self.known[arg]) is not None]
        return [*paths[0], node] if paths else None


def _possible_scores(node: fx.Node) -> list[fx.Node]:
    """Return the operands that may be scores, which the node changes in a way that `Scores` can follow."""
    if node.target in MOVES | CASTS | UNARY | MASKED_FILLS | {aten._softmax.default}:
        operands = node.args[:1]
    elif node.target in PRODUCTS | SUMS | QUOTIENTS | FLOORS:
        operands = node.args[:2]
    elif node.target is aten.where.self:
        operands = node.args[1:3]
    elif node.target is aten.cat.default:
        operands = node.args[0]
    else:
        operands = ()
    return [arg for arg in operands if isinstance(arg, fx.Node) and has_tensor(arg)]


def _weighings(softmax: fx.Node) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Return the products of softmax weights with values, each with the nodes between softmax and product."""
    products, pending = [], [(softmax, list[fx.Node]())]
    while pending:
        node, steps = pending.pop()
        for user in node.users:
            if user.target in SCORE_PRODUCTS and node in user.args[-2:]:
                products.append((user, steps))
            elif user.target in CHANGES or (user.target in KEEP_WEIGHTS | DROPOUTS and user.args[0] is node):
                pending.append((user, [*steps, user]))
    return products


# Operators that keep weights as they are; `nan_to_num` does, since weights are NaN only at padding, which reads no key.
KEEP_WEIGHTS = MOVES | CASTS | {operator.getitem, aten.nan_to_num.default}


def _first_change(softmax: fx.Node) -> fx.Node:
    """Return the first operator on softmax weights that leads to no product with values."""
    node = softmax
    while len(node.users) == 1 and (user := next(iter(node.users))).target in KEEP_WEIGHTS | CHANGES:
        node = user
    return next(iter(node.users), node)
