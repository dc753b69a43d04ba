"""Recognise keys that a learned index chooses for each query: `topk` of scores, scattered into a mask.

    scores = (w * relu(scale * q @ k.mT)).sum(heads)          by products, einsum, or a product and a sum; or `q @ k.mT`
    scores = scores.masked_fill(~causal, -inf)                or `where`, or a mask that is added
    index = scores.topk(min(count, S), -1).indices
    mask = causal & torch.zeros(B, S, S, dtype=bool).scatter(-1, index, True)

Blocks of keys are chosen by their best key (`blocks`). The choice becomes a mixer (`ops.chosen_keys`) with the masks of
the scores as its own, and the scattered tensor `CHOSEN`, one bit for each pair of a query and a key or block. What is
made of that tensor is for the pass `mixers` to judge.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sympy
from torch import fx

from dta_compile.ops.attention import Masking
from dta_compile.ops.chosen_keys import CHOOSE_KEYS_CALL, CHOSEN, Choosing
from dta_compile.ops.scoring import Scoring
from dta_compile.passes.graphs.arguments import argument
from dta_compile.passes.graphs.nodes import behind, call, column, constructed, descendants, erase_unused
from dta_compile.passes.graphs.operators import CASTS, MASKED_FILLS, PRODUCTS, QUOTIENTS, SUMS, aten
from dta_compile.passes.graphs.source_lines import inherit_line
from dta_compile.passes.lowering.attention.blocks import Blocks, Written, operand_of_blocks
from dta_compile.passes.lowering.attention.dimensions import Attention
from dta_compile.passes.lowering.attention.factors import (
    MOVES,
    Arranged,
    Arranger,
    Dim,
    Mismatch,
    leaves,
    number_of,
    unify,
)
from dta_compile.passes.lowering.attention.recognise import SCORE_PRODUCTS
from dta_compile.passes.lowering.attention.rewrite import Rewrite
from dta_compile.passes.lowering.attention.scores import Scores, is_added
from dta_compile.passes.program import has_tensor
from dta_compile.passes.symbols import expression, sizes, value_of
from dta_compile.torch_compat.sizes import Min

TIES = (
    "numbers of each key alone: equal tokens have equal ones, between which topk decides by rounding and by the length"
    " of the row"
)
MOST_STEPS = 64  # operators between the product of index queries and keys and `topk`


def recognise_choices(graph: fx.Graph, weights: Collection[fx.Node]) -> None:
    """Replace scattered choices of keys in place; others keep the reason in `meta["unrecognised_choice"]`.

    Args:
        weights: placeholders that are parameters.
    """
    data = [node for node in graph.find_nodes(op="placeholder") if node not in weights and has_tensor(node)]
    arranger, of_data = Arranger(graph), descendants(graph, data)
    choices = dict[tuple[fx.Node, bool], fx.Node]()
    for node in list(graph.nodes):
        written = Written.by(node)
        if written is None:
            continue
        topk, leaves_out = written.topk, written.none is not None
        try:
            with graph.inserting_before(node):
                if (topk, leaves_out) not in choices and (leaves_out or _count(topk) != sizes(topk.args[0])[-1]):
                    choices[topk, leaves_out] = _Choice(topk, of_data, leaves_out).replaced(arranger, weights)
                choice = choices.get((topk, leaves_out))
                for visible in written.visible():
                    visible.replace_all_uses_with(_scattered(arranger, written, choice))
        except Mismatch as mismatch:
            topk.meta["unrecognised_choice"] = str(mismatch)
    erase_unused(graph)


def _count(topk: fx.Node) -> sympy.Expr:
    return expression(value_of(topk.args[1]))


def _scattered(arranger: Arranger, written: Written, choice: fx.Node | None) -> fx.Node:
    """Return what a scatter writes as a function of `CHOSEN`; `choice` is None if all keys are chosen."""
    value, scores = written.scatter.meta["val"], sizes(written.topk.args[0])
    graph, shape = arranger.graph, [arranger.sizes.build(size) for size in scores]
    if None in shape or len(shape) not in (3, 4):
        raise Mismatch(f"a mask of sizes {scores}")
    base, filled = (constructed(graph, aten.full.default, shape, number, like=value) for number in written.numbers)
    if choice is None:
        return filled
    chosen = call(graph, CHOSEN, choice, shape[-1])
    if len(shape) == 3:
        if sizes(chosen)[1] != 1:
            raise Mismatch("a choice for each head in a mask that merges heads with sequences")
        chosen = call(graph, aten.select.int, chosen, 1, 0)
    return call(graph, aten.where.self, chosen, filled, base)


def _are_of_keys(scores: fx.Node) -> bool:
    """Return whether scores are masked numbers of each key alone, the same for every query (Doge)."""
    value = Arranged.of(behind(scores, MASKED_FILLS))
    *_, queries, keys = map(leaves, value.dims)
    return not any(map(value.has, queries)) and all(map(value.has, keys))


class _Choice:
    """Scores `[B, S, T]` or `[B, H, S, T]` that `topk` chooses by; raises `Mismatch` if they are not understood."""

    def __init__(self, topk: fx.Node, of_data: set[fx.Node], leaves_out: bool) -> None:
        self.of_data, self.leaves_out = of_data, leaves_out
        self.known: dict[fx.Node, list[fx.Node] | None] = {}
        self.count = self._constant(_count(topk), sizes(topk.args[0])[-1])
        path = self._path_to(topk.args[0], MOST_STEPS)
        if path is None:
            alone = _are_of_keys(topk.args[0])
            raise Mismatch(
                TIES if alone else "scores that are no query @ key, and no weighted sum of relu(query @ key)"
            )
        product, *steps = path
        self.topk, self.scores, self.source, self.blocks = topk, Scores.of(product), product, Blocks()
        self.by_head: list[Dim] | None = None  # dimensions of the scores before they were summed over heads
        self.weights: Arranged | None = None
        self.is_positive = False  # whether the relu is applied
        for node in steps:
            self._follow(node)
            self.source = node

    @staticmethod
    def _constant(count: sympy.Expr, keys: sympy.Expr) -> int:
        options = [part for part in count.args if part != keys] if isinstance(count, Min) else [count]
        if len(options) != 1 or not isinstance(options[0], sympy.Integer):
            raise Mismatch(f"{count} keys, a number that depends on the call")
        return int(options[0])

    def _path_to(self, node: fx.Node, steps: int) -> list[fx.Node] | None:
        """Return the nodes from the product of queries and keys to a node, both included; None if there is none."""
        if node not in self.known:
            self.known[node] = None  # until it is known
            self.known[node] = self._path(node, steps - 1) if steps else None
        return self.known[node]

    def _path(self, node: fx.Node, steps: int) -> list[fx.Node] | None:
        operands: Sequence[Any] = ()
        if node.target in MOVES | CASTS | MASKED_FILLS | {aten.relu.default, aten.sum.dim_IntList}:
            operands = node.args[:1]
        elif (source := operand_of_blocks(node)) is not None:
            operands = [source]
        elif node.target in SCORE_PRODUCTS | PRODUCTS | SUMS | QUOTIENTS:
            operands = node.args[-2:] if node.target in SCORE_PRODUCTS else node.args[:2]
        elif node.target is aten.where.self:
            operands = node.args[1:3]
        nodes = [arg for arg in operands if isinstance(arg, fx.Node) and has_tensor(arg)]
        paths = [path for arg in nodes if (path := self._path_to(arg, steps)) is not None]
        if node.target in SCORE_PRODUCTS:
            paths = [path for path in paths if any(step.target is aten.relu.default for step in path)]
            if not paths:
                return [node] if all(arg in self.of_data for arg in nodes) else None
        return [*paths[0], node] if paths else None

    def _follow(self, node: fx.Node) -> None:
        """Apply the effect of a node whose operand `self.source` is the scores so far."""
        scores, target = self.scores, node.target
        if self.blocks.follow(node, self.source):
            return
        if target is aten.relu.default:
            is_weighed = self.weights is not None or self.by_head is not None
            if is_weighed or scores.is_changed or scores.by or scores.further:
                raise Mismatch("a relu of scores that are weighed, summed or masked, or scaled by several numbers")
            self.is_positive = True
        elif target in SCORE_PRODUCTS:
            self._weighed(node)
        elif target is aten.sum.dim_IntList:
            self._summed(node)
        elif target in PRODUCTS and self.is_positive and (weights := self._weights_of(node)) is not None:
            if self.weights is not None or scores.is_changed:
                raise Mismatch("several weights of index scores, or weights of masked ones")
            self.weights = scores.beside(weights, node)
        else:
            scores.follow(node, self.source)
        if scores.scale <= 0 or scores.cap is not None or (self.is_positive and scores.by):
            raise Mismatch(f"{target} of index scores")

    def _weights_of(self, node: fx.Node) -> fx.Node | None:
        """Return the other factor of a product if it is a tensor of several numbers."""
        other = node.args[1] if node.args[0] is self.source else node.args[0]
        return other if isinstance(other, fx.Node) and has_tensor(other) and number_of(other) is None else None

    def _weighed(self, node: fx.Node) -> None:
        """Apply a batched product with the weights, which sums over heads."""
        if self.weights is not None or self.scores.is_changed:
            raise Mismatch("a product of scores that are weighed or masked already")
        is_left = node.args[-2] is self.source
        other, dims = Arranged.of(node.args[-1 if is_left else -2]), self.scores.dims
        if node.target is aten.baddbmm.default:
            raise Mismatch("something added to index scores")
        summed, kept = (-1, -2) if is_left else (-2, -1)
        unify([*dims[:-2], dims[summed]], [*other.dims[:-2], other.dims[kept]])
        if leaves(other.dims[summed]):
            raise Mismatch("several index scores of a key")
        self.by_head, self.weights, ends = dims, other, [dims[kept], other.dims[summed]]
        self.scores.dims = [*dims[:-2], *(ends if is_left else ends[::-1])]

    def _summed(self, node: fx.Node) -> None:
        """Apply a sum over heads."""
        dims, keeps = self.scores.dims, argument(node, "keepdim")
        if self.scores.is_changed or not self.is_positive:
            raise Mismatch("a sum of scores that are masked, or may be negative")
        self.by_head = dims
        over = {dim % len(dims) for dim in node.args[1] or range(len(dims))}
        self.scores.dims = [[] if i in over else dim for i, dim in enumerate(dims) if i not in over or keeps]

    def replaced(self, arranger: Arranger, weights: Collection[fx.Node]) -> fx.Node:
        """Insert the call that makes the choice, `[B, 1, S, count]`."""
        scores = self.scores
        key = scores.dims[-1]
        keys = next((side for side in (scores.left, scores.right) if all(map(side.has, leaves(key)))), scores.right)
        attention = Attention.over(scores, keys, [], key, scores.dims if self.by_head is None else self.by_head, [])
        batch, heads, token, last = attention.batch, attention.heads, attention.token, attention.key
        by_head = self.by_head is None and self.weights is None
        own = [[*batch], *[heads] * by_head, [token], [last]]
        if [leaf for dim in scores.dims for leaf in leaves(dim)] != [leaf for dim in own for leaf in dim]:
            raise Mismatch("a choice over other dimensions than sequences, heads, queries and keys")
        if attention.kv_heads not in ([], heads):
            raise Mismatch("index keys that several heads share")
        is_shifted = scores.shift or scores.by or any(is_added(mask) and not mask.has(last) for mask in scores.masks)
        if self.blocks.forced is not None and is_shifted:
            raise Mismatch("numbers beside scores that are scaled by several numbers, or shifted")
        rewrite = Rewrite(arranger, attention, self.topk, weights, {})
        if any(map(rewrite.is_of_keys, scores.masks)):
            raise Mismatch("a bias by head and key of scores that keys are chosen by")
        query, scale = rewrite._scaled_query()
        keys = arranger.arrange(attention.keys, [batch, attention.kv_heads, [last], leaves(scores.depth)])
        dims = [batch, heads, [token], list[Any]()]
        of_heads = column(query, 1.0) if self.weights is None else arranger.arrange(self.weights, dims)
        operands = (call(arranger.graph, aten.detach.default, value) for value in (query, of_heads, keys))
        masking = Masking(rewrite._mask(query.meta["val"].dtype), False, None, 0, Scoring(scale))
        how = Choosing(self.count, self.blocks.size, self.is_positive, by_head, self.leaves_out)
        forced = self.blocks.of_scores(len(scores.dims))
        node = call(arranger.graph, CHOOSE_KEYS_CALL, *operands, *masking.arguments, *how, forced)
        for new in (node, *node.all_input_nodes):
            inherit_line(new, self.topk)
        return node
