"""Replace a softmax of scores that is written out by the operator, so that `recognise` sees it.

    exp(x) / exp(x).sum(dim, keepdim=True)                softmax(x, dim); x may be `scores - scores.amax(...)`
    exp(x - x.logsumexp(dim, keepdim=True))               the same
    exp(x.log_softmax(dim))                               the same
    y = exp(x) * mask; y / y.sum(dim, keepdim=True)       softmax(x where the mask is not zero, else -inf),
                                                          zero where the mask is not one
    exp(x) / (1 + exp(x).sum(dim, keepdim=True))          softmax(x beside a zero, dim) without it; of c, log(c)
    exp(x - m) / (exp(-m) + exp(x - m).sum(...))          the same
    pad(x, (1, 0))                                        cat of zeros and x

That the mask is one where it is not zero is proven with the attention (`Scores.gates`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

from torch import fx

from dta_compile.passes.graphs.arguments import argument, sum_of
from dta_compile.passes.graphs.nodes import behind, call, column
from dta_compile.passes.graphs.operators import DIFFERENTIABLE_COPIES, KEEP_ORDER, MASKED_FILLS, aten
from dta_compile.passes.lowering.attention.factors import number_of
from dta_compile.passes.program import ancestors, has_tensor
from dta_compile.passes.symbols import sizes


def spell_softmaxes(graph: fx.Graph, weights: Collection[fx.Node], are_scores: Callable[[fx.Node], bool]) -> None:
    """Replace written-out softmaxes of values for which `are_scores` holds; `weights` are the parameters."""
    rules: dict[Any, Callable[..., fx.Node | None]] = {
        aten.exp.default: _of_logarithm,
        aten.div.Tensor: functools.partial(_of_quotient, weights=set(weights)),
        aten.constant_pad_nd.default: _of_padding,
    }
    for node in [node for node in graph.nodes if node.target in rules]:
        with graph.inserting_before(node):
            new = rules[node.target](node, are_scores)
        if new is not None and new.meta["val"].dtype is node.meta["val"].dtype:
            new.meta = {**node.meta, "val": new.meta["val"]}
            node.replace_all_uses_with(new)


def _of_logarithm(node: fx.Node, are_scores: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return the softmax that the exponential of a log-softmax is."""
    log, dim = node.args[0], None
    if log.target is aten._log_softmax.default:
        dim = log.args[1]
    elif log.target is aten.sub.Tensor:
        dim = _reduced_along(log, aten.logsumexp.default)
    if dim is None or not are_scores(log.args[0]):
        return None
    return call(node.graph, aten._softmax.default, log.args[0], dim, False)


def _of_quotient(node: fx.Node, are_scores: Callable[[fx.Node], bool], weights: set[fx.Node]) -> fx.Node | None:
    """Return the softmax that exponentials are, divided by their sum."""
    graph, (powers, total), factor, hidden = node.graph, node.args, None, None
    added = sum_of(total) if isinstance(total, fx.Node) else None
    dims = [_reduced_along(node, aten.sum.dim_IntList, part) for part in (added[:2] if added else [total])]
    dim = next((one for one in dims if one is not None), None)
    if dim is None or (added and (added[2] < 0 or sizes(total)[dim] != 1)):
        return None
    if powers.target is aten.mul.Tensor and all(isinstance(arg, fx.Node) and has_tensor(arg) for arg in powers.args):
        powers, factor = powers.args if powers.args[0].target is aten.exp.default else powers.args[::-1]
    elif powers.target in MASKED_FILLS and number_of(powers.args[2]) == 0:
        powers, hidden = powers.args[:2]
    if powers.target is not aten.exp.default or not are_scores(powers.args[0]):
        return None
    scores, beside = powers.args[0], None
    if added is not None:
        scores, beside = _beside(scores, added[1 if dims[0] is not None else 0], weights)
        if beside is None:
            return None
    if factor is not None:
        hidden = call(graph, aten.eq.Scalar, factor, 0)
    if hidden is not None:
        scores = call(graph, aten.masked_fill.Scalar, scores, hidden, -math.inf)
    if beside is not None:
        scores = call(graph, aten.cat.default, [column(scores, beside, dim), scores], dim)
    weights = call(graph, aten._softmax.default, scores, dim, False)
    weights = call(graph, aten.slice.Tensor, weights, dim, 1) if beside is not None else weights
    if factor is None:
        return weights
    return call(graph, aten.masked_fill.Scalar, weights, call(graph, aten.ne.Scalar, factor, 1), 0)


def _beside(scores: fx.Node, added: Any, weights: set[fx.Node]) -> tuple[fx.Node, float | None]:
    """Return scores, and the number beside them whose exponential is `added` to the sum; None for another summand.

    That of `x - shift` may be `exp(-shift)`: a zero beside x. A parameter of the shift alone has a gradient of zero.
    """
    if (number := number_of(added)) is not None and number > 0:
        return scores, math.log(number)
    if isinstance(added, fx.Node) and added.target is aten.exp.default and scores.target is aten.sub.Tensor:
        negated, (values, shift) = added.args[0], scores.args[:2]
        is_shift = negated.target is aten.neg.default and negated.args[0] is shift and sum_of(scores) is not None
        if is_shift and ancestors([shift]) & weights <= ancestors([values]):
            return values, 0.0
    return scores, None


def _of_padding(node: fx.Node, are_scores: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return the concatenation of scores with a column that they are padded by, in front or behind."""
    if not are_scores(node.args[0]):
        return None
    (scores, widths), number, graph = node.args[:2], argument(node, "value"), node.graph
    if list(widths) not in ([1, 0], [0, 1]) or not isinstance(number, (int, float)):
        return None
    added = column(scores, number)
    return call(graph, aten.cat.default, [added, scores] if widths[0] else [scores, added], -1)


def _reduced_along(node: fx.Node, reduction: Any, total: Any = None) -> int | None:
    """Return the dimension along which `total`, if not the second operand, reduces the first one; None: it does not."""
    value, total = node.args[0], node.args[1] if total is None else total
    if not isinstance(total, fx.Node) or not has_tensor(total) or node.kwargs:
        return None
    shape = sizes(total)
    total = behind(total, KEEP_ORDER | DIFFERENTIABLE_COPIES)
    if total.target is not reduction or "dtype" in total.kwargs or len(total.args[1] or ()) != 1:
        return None
    reduced, dim = total.args[0], total.args[1][0] % len(sizes(value))
    is_kept = shape == (*sizes(value)[:dim], 1, *sizes(value)[dim + 1 :])
    is_same = reduced is value or (reduced.target, reduced.args) == (value.target, value.args)
    return dim if is_kept and is_same and reduced.kwargs == value.kwargs else None
