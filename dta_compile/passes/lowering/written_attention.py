"""Attention that a model writes out becomes the operator that it is: a product, a softmax of it, and a product again.

Between them: scales, a soft cap, masks that fill or are added, a column of sinks, casts, in any order of heads and
groups, by `matmul`, `bmm`, `baddbmm` or `einsum`, which all are batched products here. What a spelling means is derived
from what its operators do to the scores `s[b, h, q, k]`:

* what multiplies a score and does not depend on the key multiplies the query; a number is the scale;
* `a * tanh(c * s)` is the soft cap `a`;
* what is added, or put in a score's place, is a mask, for the prover to judge (`passes.masks`). A number that is put
  there forbids if it is at most `FORBIDDEN`;
* what is added and depends on the head and the key alone, as ALiBi does in the spelling of BLOOM and MPT, is one more
  feature of the key, by which the query has a one;
* what does not depend on the key, and is added to or taken from all scores of a query, leaves the softmax as it is;
* a column that is concatenated to the scores, and cut off again behind the softmax, is a sink.

Keys and values that are repeated for a group of heads are taken as they were before. The mask sees the scores' own
dimensions, in the order `[B, H, S, S]`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.ops.attention import ATTENTION_CALL, SINK_ATTENTION_CALL, Masking
from dta_compile.passes.axes.layouts import argument
from dta_compile.passes.graphs.nodes import call, descendants, filled_with
from dta_compile.passes.graphs.operators import (
    CASTS,
    DIFFERENTIABLE_COPIES,
    DROPOUTS,
    MASKED_FILLS,
    PRODUCTS,
    QUOTIENTS,
    SUMS,
)
from dta_compile.passes.lowering.decompositions import dropout_refusal
from dta_compile.passes.lowering.factors import MOVES, Arranged, Arranger, Dim, Factor, Mismatch, leaves, moved, unify
from dta_compile.passes.program import has_tensor, where
from dta_compile.passes.symbols import sizes
from dta_compile.proofs.mask_class import FORBIDDEN

aten = torch.ops.aten

MATRIX_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.baddbmm.default)
UNARY = frozenset({aten.tanh.default, aten.neg.default})
FLOORS = frozenset({aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor, aten.clamp.default})


def recognise_attention(graph: fx.Graph, weights: Collection[fx.Node]) -> RefusalError | None:
    """Replace every product of a softmax of products by attention.

    Args:
        weights: the inputs that are parameters.

    Returns:
        Why the first one that could not be replaced is none; None: all were, or there is none.
    """
    data = [node for node in graph.find_nodes(op="placeholder") if node not in weights and has_tensor(node)]
    search, arranger, refusal = _Search(descendants(graph, data)), Arranger(graph), None
    softmaxes = [node for node in graph.nodes if node.target is aten._softmax.default]
    paths = {node: path for node in softmaxes if (path := search.path_to(node)) is not None}
    found = {weighing: (paths[node], steps) for node in paths for weighing, steps in _weighings(node)}
    for weighing in [node for node in graph.nodes if node in found]:
        try:
            with graph.inserting_before(weighing):
                _Rewrite(arranger, *found[weighing], weighing).run()
                _tell_line(weighing)
        except Mismatch as mismatch:
            refusal = refusal or _refusal(weighing, str(mismatch))
    graph.eliminate_dead_code(fx.Node.is_impure)  # what draws random numbers is, whatever inductor says
    return refusal


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
    return node.target in MATRIX_PRODUCTS


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
            elif user.target in MOVES | CASTS | DROPOUTS | {operator.getitem} and user.args[0] is node:
                pending.append((user, [*steps, user]))
    return found


@dataclasses.dataclass
class _Scores:
    """What was done to the products of queries and keys so far.

    Attributes:
        left, right: the operands, one of which is the query.
        depth: the dimension that the product sums over.
        dims: of the scores as they are now.
        scale: what they were multiplied by, before the cap if there is one.
        cap: that of `cap * tanh(scale * products)`; None: they were not capped.
        by: tensors or numbers of the call that they were multiplied with, or divided by.
        masks: what was put in their place (bool: where they stayed) or added.
        sinks: a column beside them; `has_sinks_in_front`: before the first key.
        constant: what was added to both, which must not depend on the key.
    """

    left: Arranged
    right: Arranged
    depth: Dim
    dims: list[Dim]
    scale: float = 1.0
    cap: float | None = None
    by: list[tuple[Any, Arranged | fx.Node]] = dataclasses.field(default_factory=list)
    masks: list[Arranged] = dataclasses.field(default_factory=list)
    sinks: Arranged | None = None
    has_sinks_in_front: bool = False
    constant: list[Arranged] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, node: fx.Node) -> _Scores:
        """Of the product itself."""
        left, right = (Arranged.of(arg) for arg in node.args[-2:])
        *outer, rows, depth = left.dims
        *others, depth_of_right, columns = right.dims
        unify(depth, depth_of_right)
        for one, other in zip(outer, others, strict=True):
            unify(one, other)
        scores = cls(left, right, depth, [*outer, rows, columns])
        if node.target is aten.baddbmm.default:
            beta, scores.scale = (float(node.kwargs.get(name, 1)) for name in ("beta", "alpha"))
            if beta:
                added = node.args[0]
                added = added if beta == 1 else call(added.graph, aten.mul.Tensor, added, beta)
                scores.masks.append(Arranged.beside(added, node, scores.dims))
        return scores

    def follow(self, node: fx.Node, source: fx.Node) -> None:
        """What an operator does to them, which takes them as `source`; raises `Mismatch`."""
        target = node.target
        if target in MOVES:
            self.dims = moved(node, self.dims)
        elif target in CASTS:
            if not node.meta["val"].is_floating_point():
                raise Mismatch("scores as integers")
        elif target is aten.neg.default:
            self._multiply(-1.0)
        elif target is aten.tanh.default:
            if self.cap is not None or self.masks or self.sinks is not None:
                raise Mismatch("a tanh of scores that are capped or masked already")
            self.cap = 1.0
        elif target in PRODUCTS | QUOTIENTS:
            self._scale(node, source)
        elif target in SUMS:
            self._add(node, source)
        elif target is aten.where.self or target in MASKED_FILLS:
            self._fill(node, source)
        elif target in FLOORS:
            self._floor(node, source)
        elif target is aten.cat.default:
            self._join(node, source)
        else:
            raise Mismatch(f"{target} of scores")

    def _other(self, node: fx.Node, source: fx.Node) -> Any:
        first, second = node.args[:2]
        if first is not source and node.target not in PRODUCTS | SUMS - {aten.sub.Tensor, aten.sub.Scalar}:
            raise Mismatch(f"{node.target} by scores")
        return second if first is source else first

    def _multiply(self, number: float) -> None:
        """All that there is so far."""
        if number <= 0 and (self.masks or self.sinks is not None):
            raise Mismatch("masked scores of the other sign")
        if self.sinks is not None:
            raise Mismatch("a scale of scores that have sinks already")
        self.masks = [_scaled(mask, number) if _is_added(mask) else mask for mask in self.masks]
        if self.cap is None:
            self.scale *= number
        else:
            self.cap *= abs(number)
            self.scale *= -1.0 if number < 0 else 1.0

    def _scale(self, node: fx.Node, source: fx.Node) -> None:
        other, is_quotient = self._other(node, source), node.target in QUOTIENTS
        number = _number(other)
        if number is not None:
            self._multiply(1.0 / number if is_quotient else number)
            return
        if self.cap is not None or self.masks or self.sinks is not None:
            raise Mismatch("a scale of several numbers for scores that are capped or masked already")
        target = aten.div.Tensor if is_quotient else aten.mul.Tensor
        self.by.append((target, self._beside(other, source) if has_tensor(other) else other))

    def _add(self, node: fx.Node, source: fx.Node) -> None:
        other = self._other(node, source)
        if _number(other) == 0:
            return
        if argument(node, 2, "alpha") not in (None, 1):
            raise Mismatch("a bias times a number")
        if not isinstance(other, fx.Node) or not has_tensor(other):
            raise Mismatch("a number added to scores")
        if node.target in (aten.sub.Tensor, aten.sub.Scalar):
            other = call(node.graph, aten.neg.default, other)
        (self.masks if self.sinks is None else self.constant).append(self._beside(other, source))

    def _fill(self, node: fx.Node, source: fx.Node) -> None:
        if self.sinks is not None:
            raise Mismatch("a mask of scores that have sinks already")
        is_where = node.target is aten.where.self
        condition = node.args[0] if is_where else node.args[1]
        fills_where_true = not is_where or node.args[2] is source
        filler = node.args[2] if not is_where or not fills_where_true else node.args[1]
        number, graph = _number(filler), node.graph
        if number is None:  # known at the call, which tests it
            none = call(graph, aten.full_like.default, filler, 0.0)
            parts = (filler, none) if fills_where_true else (none, filler)
            self.masks.append(self._beside(call(graph, aten.where.self, condition, *parts), source))
            return
        if number > FORBIDDEN:
            raise Mismatch(f"scores replaced by {number:g}, which do not forbid (at most {FORBIDDEN:g} does)")
        allowed = call(graph, aten.logical_not.default, condition) if fills_where_true else condition
        self.masks.append(self._beside(allowed, source))

    def _floor(self, node: fx.Node, source: fx.Node) -> None:
        """So that forbidden scores are no infinities."""
        floor = _number(node.args[1] if node.args[0] is source else node.args[0])
        if floor is None or floor > FORBIDDEN or len(node.args) > 2:
            raise Mismatch("scores that are bounded")

    def _join(self, node: fx.Node, source: fx.Node) -> None:
        parts = node.args[0]
        if len(parts) != 2 or self.sinks is not None:
            raise Mismatch("several columns beside the scores")
        self.has_sinks_in_front = parts[1] is source
        sinks = Arranged.of(parts[0] if self.has_sinks_in_front else parts[1])
        dim = (argument(node, 1, "dim") or 0) % len(self.dims)
        if sinks.dims[dim]:
            raise Mismatch("several columns beside the scores")
        for i, (one, other) in enumerate(zip(self.dims, sinks.dims, strict=True)):
            if i != dim:
                unify(one, other)
        self.sinks = sinks

    def _beside(self, node: fx.Node, source: fx.Node) -> Arranged:
        return Arranged.beside(node, source, self.dims)


def _is_added(mask: Arranged) -> bool:
    return mask.base.meta["val"].dtype is not torch.bool


def _scaled(mask: Arranged, number: float) -> Arranged:
    return dataclasses.replace(mask, base=call(mask.base.graph, aten.mul.Tensor, mask.base, number))


def _number(value: Any) -> float | None:
    """The number that an argument is, or that all of its entries are."""
    while isinstance(value, fx.Node) and value.target in CASTS | {aten.expand.default}:
        value = value.args[0]
    if isinstance(value, fx.Node):
        value = filled_with(value)
    return float(value) if isinstance(value, (int, float)) else None


def _of_dtype(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if node.meta["val"].dtype is dtype else call(node.graph, aten._to_copy.default, node, dtype=dtype)


class _Rewrite:
    """One attention, written out; `run` puts the operator in its place.

    Args:
        path: from the product of queries and keys to the softmax.
        steps: from behind the softmax to the product with the values.
        weighing: that product; new nodes come before it.
    """

    def __init__(self, arranger: Arranger, path: list[fx.Node], steps: list[fx.Node], weighing: fx.Node) -> None:
        self.arranger, self.graph, self.weighing = arranger, arranger.graph, weighing
        first, *inner, softmax = path
        self.scores = scores = _Scores.of(first)
        for source, node in zip(path, inner, strict=False):
            scores.follow(node, source)
        dim = softmax.args[1] % len(scores.dims)
        key = scores.dims[dim]
        weights = self._behind(steps, softmax, dim)
        self.out = self._unify_values(weights, steps[-1] if steps else softmax, key)
        if len(leaves(key)) != 1:
            raise Mismatch("a softmax over several dimensions, or over one key")
        (self.key,) = leaves(key)
        self._tell_dimensions(weights)

    def _behind(self, steps: list[fx.Node], softmax: fx.Node, dim: int) -> list[Dim]:
        """The dimensions of the weights as the product with the values takes them."""
        dims, is_cut, source = self.scores.dims, self.scores.sinks is None, softmax
        for node in steps:
            if not is_cut and node.target is aten.slice.Tensor:
                self._require_keys(node, source, dim)
                is_cut = True
            elif node.target in DROPOUTS:
                raise dropout_refusal(where(node), f"{node.target} of attention's weights")
            elif node.target in MOVES:
                if not is_cut and node.target not in DIFFERENTIABLE_COPIES:
                    raise Mismatch("weights of sinks that are moved before the sinks are cut off")
                dims = moved(node, dims)
            source = node
        if not is_cut:
            raise Mismatch("weights of sinks that are not cut off")
        return dims

    def _require_keys(self, node: fx.Node, source: fx.Node, dim: int) -> None:
        """A slice leaves the weights of keys: all but the one of the sink."""
        start = argument(node, 2, "start") or 0
        is_along = (argument(node, 1, "dim") or 0) % len(sizes(node)) == dim
        is_rest = start == (1 if self.scores.has_sinks_in_front else 0)
        if not (is_along and is_rest and sizes(source)[dim] - sizes(node)[dim] == 1):
            raise Mismatch("another part of the weights than those of keys")

    def _unify_values(self, weights: list[Dim], node: fx.Node, key: Dim) -> list[Dim]:
        """Fills `values`; returns the dimensions of the product."""
        if self.weighing.target is aten.baddbmm.default:
            raise Mismatch("something added to the weighed values")
        is_left = self.weighing.args[0] is node
        self.values = Arranged.of(self.weighing.args[1 if is_left else 0])
        *outer, rows, columns = weights
        *others, first, second = self.values.dims
        for one, other in zip(outer, others, strict=True):
            unify(one, other)
        summed, free = (columns, first) if is_left else (rows, second)
        unify(summed, free)
        unify(summed, key)
        self.features = second if is_left else first
        return [*outer, rows, second] if is_left else [*outer, first, columns]

    def _tell_dimensions(self, weights: list[Dim]) -> None:
        """Which factors of the weights are the batch, heads of keys and values, groups of those, and queries."""
        left, right = self.scores.left, self.scores.right
        self.query, self.keys = (left, right) if right.has(self.key) else (right, left)
        others = [leaf for leaf in leaves([part for dim in weights for part in dim]) if leaf is not self.key]
        tokens = [leaf for leaf in others if leaf.size == self.key.size and not self.keys.has(leaf)]
        if len(tokens) != 1 or not self.query.has(tokens[0]):
            raise Mismatch("as many queries as keys are expected, each in a dimension of its own")
        (self.token,) = tokens
        heads = [leaf for leaf in others if leaf is not self.token]
        self.batch = [leaf for leaf in heads if leaf.size.free_symbols]
        if len(self.batch) > 1:
            raise Mismatch("several dimensions of heads or sequences whose sizes are no numbers")
        heads = [leaf for leaf in heads if leaf not in self.batch]
        self.kv_heads = [leaf for leaf in heads if self.keys.has(leaf) or self.values.has(leaf)]
        self.heads = [*self.kv_heads, *(leaf for leaf in heads if leaf not in self.kv_heads)]

    def run(self) -> None:
        """Raises `Mismatch` where something has another place than attention has for it."""
        biases = [mask for mask in self.scores.masks if self._is_of_keys(mask)]
        query, scale = self._scaled_query()
        heads = self.kv_heads if not biases else self.heads
        keys = self.arranger.arrange(self.keys, [self.batch, heads, [self.key], leaves(self.scores.depth)])
        values = self.arranger.arrange(self.values, [self.batch, self.kv_heads, [self.key], leaves(self.features)])
        if biases:
            query, keys, scale = self._with_biases(query, keys, scale, biases)
        dtype = torch.promote_types(query.meta["val"].dtype, values.meta["val"].dtype)
        operands = [_of_dtype(one, dtype) for one in (query, keys, values)]
        masking = Masking(self._mask(dtype), False, None, 0, scale, self.scores.cap or 0.0)
        if self.scores.sinks is None:
            out = call(self.graph, ATTENTION_CALL, *operands, *masking)
        else:
            sinks = self.arranger.arrange(self.scores.sinks, [self.heads])
            out = call(self.graph, SINK_ATTENTION_CALL, *operands, _of_dtype(sinks, dtype), *masking)
        dims = [self.batch, self.heads, [self.token], leaves(self.features)]
        self._replace(self.weighing, self.out, Arranged(_of_dtype(out, self.weighing.meta["val"].dtype), dims, dims))

    def _scaled_query(self) -> tuple[fx.Node, float]:
        """The query, with what scores were multiplied by where that is no positive number, and the scale."""
        scores, scale = self.scores, self.scores.scale * (self.scores.cap or 1.0)
        query = self.arranger.arrange(self.query, [self.batch, self.heads, [self.token], leaves(scores.depth)])
        for target, by in scores.by:
            if isinstance(by, Arranged):
                if by.has(self.key):
                    continue  # a part of the mask
                by = self.arranger.arrange(by, [self.batch, self.heads, [self.token], []], broadcast=True)
            query = call(self.graph, target, query, by)
        if scale <= 0:
            query, scale = call(self.graph, aten.mul.Tensor, query, scale), 1.0
        return query, scale

    def _is_of_keys(self, mask: Arranged) -> bool:
        """Whether it is a bias of its own for every head, which no mask of `Masking` can be, by the key alone."""
        of_heads = any(mask.has(head) for head in self.heads)
        return _is_added(mask) and of_heads and mask.has(self.key) and not mask.has(self.token)

    def _with_biases(
        self, query: fx.Node, keys: fx.Node, scale: float, biases: list[Arranged]
    ) -> tuple[fx.Node, fx.Node, float]:
        """Scores of `[scale * q, 1]` and `[k, bias]`; the scale that is left."""
        if self.scores.cap is not None:
            raise Mismatch("a bias of capped scores")
        dims = [self.batch, self.heads, [self.key], list[Factor]()]
        added = [self.arranger.arrange(bias, dims) for bias in biases]
        bias = functools.reduce(functools.partial(call, self.graph, aten.add.Tensor), added)
        bias = _of_dtype(bias, keys.meta["val"].dtype)
        scaled = call(self.graph, aten.mul.Tensor, query, scale) if scale != 1.0 else query
        one = call(self.graph, aten.full_like.default, call(self.graph, aten.slice.Tensor, query, 3, 0, 1), 1.0)
        joined = [call(self.graph, aten.cat.default, [scaled, one], -1)]
        joined.append(call(self.graph, aten.cat.default, [keys, bias], -1))
        return joined[0], joined[1], 1.0

    def _mask(self, dtype: torch.dtype) -> fx.Node | None:
        if self.scores.sinks is not None and not all(
            not _is_added(one) or one.has(self.key) for one in self.scores.masks
        ):
            raise Mismatch("something added to scores that have sinks, but not to the sinks")
        parts = [mask for mask in self.scores.masks if not self._is_of_keys(mask)]
        allowed = self._joined(aten.logical_and.default, [part for part in parts if not _is_added(part)])
        added = self._joined(aten.add.Tensor, [part for part in parts if _is_added(part) and part.has(self.key)])
        if added is not None:
            added = _of_dtype(added, dtype)
            if allowed is not None:
                never = call(self.graph, aten.full_like.default, added, -float("inf"))
                added = call(self.graph, aten.where.self, allowed, added, never)
        return self._gated(allowed if added is None else added)

    def _gated(self, mask: fx.Node | None) -> fx.Node | None:
        """With what scores were multiplied by that depends on the key, as in `scores * causal - 1e4 * (1 - causal)`.

        Where that is not one the mask has to forbid: else it gets a number there that no mask has, so that no proof
        goes through.
        """
        gates = [by for _, by in self.scores.by if isinstance(by, Arranged) and by.has(self.key)]
        if not gates:
            return mask
        if mask is None or not mask.meta["val"].is_floating_point():
            raise Mismatch("a scale that depends on the key")
        for target, gate in [one for one in self.scores.by if one[1] in gates]:
            if target is not aten.mul.Tensor:
                raise Mismatch("a quotient by what depends on the key")
            gate = self._arranged(gate)
            is_one = call(self.graph, aten.eq.Scalar, gate, 1)
            forbidden = call(self.graph, aten.le.Scalar, mask, FORBIDDEN)
            wrong = call(self.graph, aten.full_like.default, mask, 1.0)
            otherwise = call(self.graph, aten.where.self, forbidden, mask, wrong)
            mask = call(self.graph, aten.where.self, is_one, mask, otherwise)
        return mask

    def _arranged(self, mask: Arranged) -> fx.Node:
        return self.arranger.arrange(mask, [self.batch, self.heads, [self.token], [self.key]], broadcast=True)

    def _joined(self, operator: Any, parts: list[Arranged]) -> fx.Node | None:
        nodes = [self._arranged(part) for part in parts]
        return functools.reduce(functools.partial(call, self.graph, operator), nodes) if nodes else None

    def _replace(self, node: fx.Node, dims: list[Dim], out: Arranged) -> None:
        """What the product, or what moves its entries, becomes, without batch and heads in one dimension on the way."""
        is_left = not self._merges(dims)
        for user in list(node.users) if not is_left else []:
            if user.target in MOVES and user.args[0] is node:
                self._replace(user, moved(user, dims), out)
        if is_left or node.users:
            node.replace_all_uses_with(self.arranger.arrange(out, [leaves(dim) for dim in dims]))

    def _merges(self, dims: list[Dim]) -> bool:
        rows = {*self.batch, self.token}
        return any(rows.intersection(leaves(dim)) and not rows.issuperset(leaves(dim)) for dim in dims)
