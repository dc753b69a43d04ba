"""Finds attention that a model writes out, a product, a softmax of it and a product again, and calls of attention over
heads that were merged with sequences, `[B * H, S, D]`; `rewrite` makes one call over `[B, H, S, D]` of each.

By `matmul`, `bmm`, `baddbmm` or `einsum`, in any order of heads and groups: in a lowered graph all of these are batched
products between operators that only move entries, which is taken back (`factors`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.ops.attention import ATTENTION_CALL
from dta_compile.passes.graphs.nodes import SizeNodes, descendants, filled_with, is_float
from dta_compile.passes.graphs.operators import (
    CASTS,
    DROPOUTS,
    MASKED_FILLS,
    MATRIX_PRODUCTS,
    PRODUCTS,
    QUOTIENTS,
    SUMS,
)
from dta_compile.passes.lowering.attention.distances import Distances
from dta_compile.passes.lowering.attention.factors import MOVES, Arranger, Mismatch
from dta_compile.passes.lowering.attention.rewrite import CHANGES, Attention, Rewrite
from dta_compile.passes.lowering.attention.scores import FLOORS
from dta_compile.passes.program import has_tensor, where
from dta_compile.passes.symbols import sizes

aten = torch.ops.aten

OF_SCORES = MATRIX_PRODUCTS - {aten.addmm.default}
LIKES = (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
UNARY = frozenset({aten.tanh.default, aten.neg.default})


def recognise_attention(graph: fx.Graph, weights: Collection[fx.Node]) -> RefusalError | None:
    """Replace what is attention by calls of it.

    Args:
        weights: the inputs that are parameters.

    Returns:
        Why the first product of a softmax of a product could not be replaced; None: all were, or there is none. What
        was not has its own reason in `meta["unrecognised"]`.
    """
    data = [node for node in graph.find_nodes(op="placeholder") if node not in weights and has_tensor(node)]
    search, arranger, refusal = _Search(descendants(graph, data)), Arranger(graph), None
    softmaxes = [node for node in graph.nodes if node.target is aten._softmax.default]
    paths = {node: path for node in softmaxes if (path := search.path_to(node)) is not None}
    _spell_out_likes(graph, {node for path in paths.values() for node in path})
    weighings = {node: _weighings(node) for node in paths}
    written = {weighing: (paths[node], steps) for node in paths for weighing, steps in weighings[node]}
    for softmax in [node for node in paths if not weighings[node] and node.users]:
        changed = _first_change(softmax)
        unrecognised = _refusal(changed, f"{changed.target} of the weights that a softmax gives")
        softmax.meta["unrecognised"], refusal = unrecognised, refusal or unrecognised
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            is_call = node.target is ATTENTION_CALL and (_merges_rows(node) or _is_biased(node))
        if node not in written and not is_call:
            continue
        try:
            with graph.inserting_before(node):
                if is_call:
                    found = Attention.called(node)
                else:
                    found = Attention.written_out(*written[node], node, search.path_to)
                Rewrite(arranger, found, node, weights).run()
                _tell_line(node)
        except Mismatch as mismatch:
            if not is_call:
                node.meta["unrecognised"] = _refusal(node, str(mismatch))
                refusal = refusal or node.meta["unrecognised"]
    graph.eliminate_dead_code(fx.Node.is_impure)  # what draws random numbers is, whatever inductor says
    return refusal


def _spell_out_likes(graph: fx.Graph, scores: Collection[fx.Node]) -> None:
    """`zeros_like(scores)` reads the sizes of scores alone: no mask that is made of it depends on them."""
    builder = SizeNodes(graph)
    for node in [node for node in graph.nodes if node.target in LIKES and node.args[0] in scores]:
        with graph.inserting_before(node):
            shape, value = [builder.build(size) for size in sizes(node)], node.meta["val"]
            if None not in shape:
                kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
                full = graph.call_function(aten.full.default, (shape, filled_with(node)), kwargs)
                full.meta = dict(node.meta)
                node.replace_all_uses_with(full)


def _merges_rows(attention: fx.Node) -> bool:
    """Whether on the way to an operand sequences were merged with something, as with heads in `[B * H, S, D]`."""
    for node in attention.args[:3]:
        while node.target in MOVES:
            if any(size.is_Mul for size in sizes(node)):
                return True
            node = node.args[0]
    return False


def _is_biased(attention: fx.Node) -> bool:
    """Whether what a call adds to its scores depends on the distance of query and key."""
    mask = attention.args[3]
    if mask is None or not is_float(mask) or mask.meta["val"].dim() < 2:
        return False
    labels = (*[None] * (mask.meta["val"].dim() - 2), "q", "k")
    return Distances(attention.graph, attention.meta["val"].dtype).split(mask, labels) is not None


def _tell_line(node: fx.Node) -> None:
    """The nodes that were made before one are of its line."""
    made = node.prev
    while made.op == "call_function" and "stack_trace" not in made.meta:
        made.meta["stack_trace"] = node.meta.get("stack_trace")
        made = made.prev


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
    """Finds what a softmax is of: the product of two values that data goes into, and the way from there."""

    def __init__(self, data: set[fx.Node]) -> None:
        self.data = data
        self.known: dict[fx.Node, list[fx.Node] | None] = {}

    def path_to(self, node: fx.Node) -> list[fx.Node] | None:
        """From the product to a node, both included; None: it is no function of scores."""
        pending = [node]
        while pending:
            one = pending[-1]
            missing = [arg for arg in _ways(one) if arg not in self.known]
            if one in self.known or not missing:
                self.known.setdefault(one, self._path(one))
                pending.pop()
            else:
                pending += missing
        return self.known[node]

    def _path(self, node: fx.Node) -> list[fx.Node] | None:
        if _is_product(node):
            return [node] if all(arg in self.data for arg in node.args[-2:]) else None
        found = [path for arg in _ways(node) if (path := self.known[arg]) is not None]
        return [*found[0], node] if found else None


def _is_product(node: fx.Node) -> bool:
    return node.target in OF_SCORES


def _ways(node: fx.Node) -> list[fx.Node]:
    """The arguments that scores may come from."""
    if node.target in MOVES | CASTS | UNARY | MASKED_FILLS | {aten._softmax.default}:
        found = node.args[:1]
    elif node.target in PRODUCTS | SUMS | QUOTIENTS | FLOORS:
        found = node.args[:2]
    elif node.target is aten.where.self:
        found = node.args[1:3]
    elif node.target is aten.cat.default:
        found = node.args[0]
    else:
        found = ()
    return [arg for arg in found if isinstance(arg, fx.Node) and has_tensor(arg)]


def _weighings(softmax: fx.Node) -> list[tuple[fx.Node, list[fx.Node]]]:
    """The products that take the weights of a softmax, each with the way there."""
    found, pending = [], [(softmax, list[fx.Node]())]
    while pending:
        node, steps = pending.pop()
        for user in node.users:
            if _is_product(user) and node in user.args[-2:]:
                found.append((user, steps))
            elif user.target in CHANGES or (user.target in KEPT | DROPOUTS and user.args[0] is node):
                pending.append((user, [*steps, user]))
    return found


# Weights are finite: where all scores of a query are hidden, and eager has NaN, it is padding.
KEPT = MOVES | CASTS | {operator.getitem, aten.nan_to_num.default}


def _first_change(softmax: fx.Node) -> fx.Node:
    """What is done to the weights of a softmax first, where no product takes them."""
    node = softmax
    while len(node.users) == 1 and (user := next(iter(node.users))).target in KEPT | CHANGES:
        node = user
    return next(iter(node.users), node)
