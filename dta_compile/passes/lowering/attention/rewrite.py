"""Replace attention whose dimensions are known by one call over `[B, H, S, D]`.

Keys and values that are repeated for groups of heads are passed without the repetition. A bias by head and key alone,
such as ALiBi in BLOOM and MPT, or learned (`token_biases`), becomes one more feature of the keys, whose feature of the
query is one. A bias by the distance of query and key (`distances`) becomes two features, `[-slope * q, slope]` of the
query and `[1, k]` of the key. They are the first ones of the dot product, whose running sum then begins with the bias
and rounds like it. Others (`profiles`, `bias_tables`) become an operand of their own. Nodes that only move entries of
the old result are rebuilt on the new one, so that no value merges sequences and heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch import fx

from dta_compile.ops.attention import BIAS, CALLS, SINKS, TABLE, TOKEN_SINKS, Masking
from dta_compile.ops.scoring import Scoring
from dta_compile.passes.graphs.nodes import call, column, constructed, may_have_gradient
from dta_compile.passes.graphs.operators import aten
from dta_compile.passes.lowering.attention.bias_tables import Known, Tables, by_depth, terms
from dta_compile.passes.lowering.attention.dimensions import Attention
from dta_compile.passes.lowering.attention.distances import EARLIER_KEYS, Distances, cast, labels_of, positions
from dta_compile.passes.lowering.attention.factors import (
    MOVES,
    Arranged,
    Arranger,
    Dim,
    Factor,
    Mismatch,
    leaves,
    moved,
    number_of,
)
from dta_compile.passes.lowering.attention.profiles import Profiles
from dta_compile.passes.lowering.attention.scores import is_added
from dta_compile.passes.lowering.attention.token_biases import TokenBiases
from dta_compile.passes.program import ancestors, has_tensor
from dta_compile.passes.symbols import sizes
from dta_compile.proofs.mask_class import CERTAIN, FORBIDDEN


class Rewrite:
    """Replacement of a node by a call; new nodes are inserted at the graph's insertion point, right before `node`.

    Methods raise `Mismatch` if a value has a dimension that operands of attention cannot have.

    Args:
        weights: the inputs that are parameters.
        known: see `Tables`.
    """

    def __init__(
        self, arranger: Arranger, attention: Attention, node: fx.Node, weights: Collection[fx.Node], known: Known
    ) -> None:
        self.arranger, self.attention, self.node, self.weights = arranger, attention, node, set(weights)
        self.tables = functools.partial(Tables, weights=self.weights, known=known)
        self.by_token = functools.partial(TokenBiases, weights=self.weights)
        self.call = functools.partial(call, arranger.graph)
        self.rows = {*attention.batch, attention.token}
        self.biases: list[Arranged] = []  # learned ones, by key
        self.of_earlier_keys = False  # see `Distances`
        self.queries = [attention.batch, attention.heads, [attention.token]]  # dimensions without features

    def run(self) -> None:
        """Insert the call, and replace the uses of the old result."""
        attention, scores = self.attention, self.attention.scores
        slopes = self._split(Distances) if self._takes_slopes() else []
        of_queries = self._by_token("q")
        self.biases = self._by_token("k")
        if not self.biases:
            scores.masks += of_queries
            of_queries = []
        biases = [*self.biases, *(mask for mask in scores.masks if self.is_of_keys(mask))]
        profiles, tables = self._split(Profiles), self._split(self.tables)
        if profiles and tables:
            raise Mismatch("biases by query and distance, and others by the distance alone")
        query, scale = self._scaled_query()
        heads = attention.heads if biases or slopes else attention.kv_heads
        keys = self.arranger.arrange(attention.keys, [attention.batch, heads, [attention.key], leaves(scores.depth)])
        if scores.further or biases or slopes:
            query, keys, scale = *self._with_features(query, keys, scale, heads, of_queries, biases, slopes), 1.0
        values = self.arranger.arrange(
            attention.values, [attention.batch, heads, [attention.key], leaves(attention.features)]
        )
        dtype = torch.promote_types(query.meta["val"].dtype, values.meta["val"].dtype)
        operands = [cast(operand, dtype) for operand in (query, keys, values)]
        masking = Masking(self._mask(dtype), attention.is_causal, None, 0, Scoring(scale, scores.cap or 0.0))
        further = {}
        if scores.sinks is not None:
            by_token = bool(profiles or tables) or any(map(scores.sinks.has, self.rows))
            sinks = self._sinks(scores.sinks, by_token)
            further[TOKEN_SINKS if by_token else SINKS] = cast(sinks, dtype)
        if profiles:
            further[BIAS] = self._profile(profiles)
        elif tables:
            further[TABLE] = self._table(tables)
        out = self.call(CALLS[tuple(further)], *operands, *further.values(), *masking.arguments)
        out.meta[EARLIER_KEYS] = self.of_earlier_keys
        dims = [*self.queries, leaves(attention.features)]
        self._replace(self.node, attention.out, Arranged(cast(out, self.node.meta["val"].dtype), dims, dims))

    def _sinks(self, sinks: Arranged, by_token: bool) -> fx.Node:
        """Return sinks `[H]`, or `[B, H, S, 1]` by token."""
        heads, number = self.attention.heads, number_of(sinks.base)
        if number is not None:
            value, size = sinks.base.meta["val"], self.arranger.size(heads)
            filled = constructed(self.arranger.graph, aten.full.default, [size], number, like=value)
            sinks = Arranged(filled, [heads], [heads])
        return self._column(sinks, self.attention.token) if by_token else self.arranger.arrange(sinks, [heads])

    def _scaled_query(self) -> tuple[fx.Node, float]:
        """Return the query, multiplied by all factors of scores other than positive numbers, and the scale."""
        attention, scores = self.attention, self.attention.scores
        scale = scores.scale * (scores.cap or 1.0)
        query = self.arranger.arrange(attention.query, [*self.queries, leaves(scores.depth)])
        for target, by in scores.by:
            if isinstance(by, Arranged):
                if by.has(attention.key):
                    continue  # see `_gated`
                by = self.arranger.arrange(by, [*self.queries, []], broadcast=True)
            query = self.call(target, query, by)
        if scale <= 0:
            query, scale = self.call(aten.mul.Tensor, query, scale), 1.0
        return query, scale

    def _with_features(
        self,
        query: fx.Node,
        keys: fx.Node,
        scale: float,
        heads: Dim,
        of_queries: Sequence[Arranged],
        biases: Sequence[Arranged],
        slopes: Sequence[Arranged | float],
    ) -> tuple[fx.Node, fx.Node]:
        """Return query and keys with all features.

        These are `[-slope * q, slope, bias of the query, 1, scale * query, further queries]` of the query and
        `[1, k, 1, bias, keys, further keys]` of the key; a bias more precise than the keys is split over several.
        """
        attention, scores = self.attention, self.attention.scores
        if scores.cap is not None and (biases or slopes):
            raise Mismatch("a bias of capped scores")
        queries, every = [query if scale == 1 else self.call(aten.mul.Tensor, query, scale)], [keys]
        for more in scores.further:
            of_query, of_keys = (more.left, more.right) if more.right.has(attention.key) else (more.right, more.left)
            depth, scale = leaves(more.depth), more.scale * (scores.cap or 1.0)
            further = self.arranger.arrange(of_query, [*self.queries, depth])
            queries.append(self.call(aten.mul.Tensor, further, scale))
            every.append(self.arranger.arrange(of_keys, [attention.batch, heads, [attention.key], depth]))
        ones = column(query, 1.0)
        for added, token, own, others in (
            (biases, attention.key, every, queries),
            (of_queries, attention.token, queries, every),
        ):
            if added:
                columns = [self._column(bias, token) for bias in added]
                parts = self._parts(functools.reduce(functools.partial(self.call, aten.add.Tensor), columns), keys)
                own[:0], others[:0] = parts, [ones if others is queries else column(keys, 1.0)] * len(parts)
        if slopes:
            features = self._of_distance(ones, slopes)
            queries, every = [*features[0], *queries], [*features[1], *every]
        return self.call(aten.cat.default, queries, -1), self.call(aten.cat.default, every, -1)

    def is_of_keys(self, mask: Arranged) -> bool:
        """Return whether a mask is a bias by head and key alone, which `Masking` cannot express.

        A learned one is excluded: it may hide keys, by numbers so large that scores are rounded away.
        """
        attention = self.attention
        is_by_head = any(mask.has(head) for head in attention.heads) and not self._learned(mask.base)
        return is_added(mask) and is_by_head and mask.has(attention.key) and not mask.has(attention.token)

    def _learned(self, *nodes: fx.Node) -> set[fx.Node]:
        """Return the parameters that values are computed from."""
        return ancestors(list(nodes)) & self.weights

    def _trained(self, *nodes: fx.Node) -> set[fx.Node]:
        """Return the parameters that values have a gradient for: none through choices of keys, which are integers."""
        return ancestors(list(nodes), stop=lambda node: has_tensor(node) and not may_have_gradient(node)) & self.weights

    def _takes_slopes(self) -> bool:
        """Return whether features of queries can hold slopes: 32 bits at least, and scores without cap or sinks.

        A number added to all scores of a query, but not to its sink, changes the softmax.
        """
        scores, query = self.attention.scores, self.attention.query.base.meta["val"]
        return scores.cap is None and scores.sinks is None and query.dtype.itemsize >= 4

    def _split(
        self, kind: Callable[[fx.Graph, torch.dtype, bool], Distances], over: str = "qk"
    ) -> list[Arranged | float]:
        """Return slopes, profiles, tables or values by key of biases that run over both tokens, or one of them.

        The rest stays in the masks.
        """
        slopes, masks = list[Arranged | float](), list[Arranged]()
        attention = self.attention
        for mask in attention.scores.masks:
            labels = labels_of([leaves(dim) for dim in mask.own], attention.token, attention.key)
            split = None
            if is_added(mask) and set(over) <= set(labels):
                dtype = attention.scores.product.meta["val"].dtype
                analysis = kind(self.arranger.graph, dtype, attention.scores.sinks is not None)
                split = analysis.split(mask.base, labels)
            parts = [part for part in split or () if isinstance(part, fx.Node)]
            # Eager mode gives a gradient of zero to a parameter that splitting drops, so such a mask stays whole.
            if split is None or self._learned(*parts) < self._learned(mask.base):
                masks.append(mask)
                continue
            rest, slope = split
            self.of_earlier_keys |= analysis.of_earlier_keys
            masks += [] if rest is None else [_broadcast(mask, rest)]
            key = attention.key if over == "qk" else None
            slopes.append(_broadcast(mask, slope, key) if isinstance(slope, fx.Node) else slope)
        attention.scores.masks = masks
        return slopes

    def _by_token(self, of: Literal["q", "k"]) -> list[Arranged]:
        """Return learned biases by key or by query; leave the rest in the masks."""
        parts = self._split(functools.partial(self.by_token, of=of), of)
        return [part for part in parts if isinstance(part, Arranged)]

    def _profile(self, profiles: Sequence[Arranged | float]) -> fx.Node:
        """Return the learned bias by distance, `[B, H, S, n]`."""
        attention, (profile, *others) = self.attention, profiles
        if others or attention.scores.cap is not None or not isinstance(profile, Arranged):
            raise Mismatch("several learned biases by distance, or one of capped scores")
        rows = {*self.rows, *attention.heads}
        distance = [leaf for dim in profile.own for leaf in leaves(dim) if leaf not in rows]
        return self.arranger.arrange(profile, [*self.queries, distance])

    def _table(self, tables: Sequence[Arranged | float]) -> fx.Node:
        """Return the sum of tables by distance, `[B, H, S, 1]`, which is the same for all sequences."""
        if any(isinstance(table, Arranged) and any(map(table.has, self.attention.batch)) for table in tables):
            raise Mismatch("a bias by distance that differs between sequences")
        nodes = [self._column(table, self.attention.token) for table in tables if isinstance(table, Arranged)]
        total = functools.reduce(
            lambda left, right: self.call(aten.add.Tensor, *terms(left, right, self.weights)), nodes
        )
        return by_depth(total, self.weights)

    def _of_distance(self, ones: fx.Node, slopes: Sequence[Arranged | float]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the features `[-slope * q, slope]` of the query and `[1, k]` of the key; `ones` are `[B, H, S, 1]`.

        They add up to `slope * (k - q)`, however far from the first token both are: to the bias, up to a function of
        the query.
        """
        attention, like = self.attention, ones.meta["val"]
        parts = [
            cast(self._column(part, attention.token), like.dtype)
            if isinstance(part, Arranged)
            else self.call(aten.full_like.default, ones, part)
            for part in slopes
        ]
        slope = functools.reduce(functools.partial(self.call, aten.add.Tensor), parts)
        index = positions(self.arranger.graph, self.arranger.size([attention.key]), like)
        of_query, of_key = (self._column(Arranged(index, [[i]], [[i]]), i) for i in (attention.token, attention.key))
        start = self.call(aten.neg.default, self.call(aten.mul.Tensor, slope, of_query))
        return [start, slope], [self.call(aten.full_like.default, of_key, 1.0), of_key]

    def _column(self, value: Arranged, token: Factor) -> fx.Node:
        """Arrange a value as one feature `[B, H, S, 1]` of every query or key."""
        return self.arranger.arrange(value, [self.attention.batch, self.attention.heads, [token], list[Factor]()])

    def _parts(self, value: fx.Node, like: fx.Node) -> list[fx.Node]:
        """Return values in the dtype of `like` that add up to a value; three of 16 bits have the digits of float32."""
        wide, dtype = value.meta["val"].dtype, like.meta["val"].dtype
        parts = [cast(value, dtype)]
        for _ in range(2 if wide.itemsize > dtype.itemsize == 2 else 0):
            value = self.call(aten.sub.Tensor, value, cast(parts[-1], wide))
            value = self.call(aten.masked_fill.Scalar, value, self.call(aten.isinf.default, parts[-1]), 0)
            parts.append(cast(value, dtype))
        return parts

    def _mask(self, dtype: torch.dtype) -> fx.Node | None:
        scores, key = self.attention.scores, self.attention.key
        if any(value.has(key) for value in scores.constant):
            raise Mismatch("a bias that depends on the key beside sinks")
        parts = [mask for mask in scores.masks if not self.is_of_keys(mask)]
        biases = [part for part in parts if is_added(part) and part.has(key)]
        for part in [*scores.masks, *scores.constant]:
            if is_added(part) and not part.has(key) and not self._is_trained_otherwise(part.base):
                raise Mismatch("a learned bias that the softmax cancels")  # eager's gradient is zero
        if scores.sinks is not None and len(biases) < sum(map(is_added, scores.masks)):
            raise Mismatch("something added to scores that have sinks, but not to the sinks")
        allowed = self._joined(aten.logical_and.default, [part for part in parts if not is_added(part)])
        added = self._joined(aten.add.Tensor, biases)
        if added is not None:
            added = cast(added, dtype)
        filler = max(scores.filler, torch.finfo(dtype).min) if scores.filler > CERTAIN else -math.inf
        by_query = (part for part in scores.shifts if not part.has(key))
        is_finite = filler > -math.inf or scores.has_unknown_filler
        if is_finite and not all(self.biases and self._learned(part.base) for part in by_query):
            raise Mismatch(f"a bias by query of scores that {filler:g} then hides from each other")
        if filler > -math.inf and added is not None:  # a lower bound of scores
            added = self.call(aten.clamp_min.default, added, filler)
        elif filler > -math.inf and allowed is not None:  # the proof reads the filler from the mask
            added = self.call(aten.full_like.default, allowed, 0.0, dtype=dtype)
        if allowed is not None and added is not None:
            never = self.call(aten.full_like.default, added, filler)
            added = self.call(aten.where.self, allowed, added, never)
        return self._gated(allowed if added is None else added)

    def _is_trained_otherwise(self, node: fx.Node) -> bool:
        """Return whether the parameters that a value has gradients for have some through what the scores consist of."""
        scores = self.attention.scores
        beside = [*self.biases, *(by for _, by in scores.by if isinstance(by, Arranged))]
        beside += [] if scores.sinks is None else [scores.sinks]
        products = [each.product for each in (scores, *scores.further)]
        return self._trained(node) <= self._trained(*products, *(value.base for value in beside))

    def _gated(self, mask: fx.Node | None) -> fx.Node | None:
        """Add the gates of scores and softmax weights to the mask, so that the prover judges both.

        A gate is a factor that depends on the key, as in `scores * causal - 1e4 * (1 - causal)`. Where it is not one,
        the mask must hide the key; otherwise it becomes 1.0 there, which no valid mask contains.
        """
        scores, key = self.attention.scores, self.attention.key
        gates = [(target, by) for target, by in scores.by if isinstance(by, Arranged) and by.has(key)]
        if any(not gate.has(key) or self._learned(gate.base) for gate in scores.gates):
            raise Mismatch("aten.mul.Tensor of the weights that a softmax gives")
        for target, gate in [*gates, *((aten.mul.Tensor, gate) for gate in scores.gates)]:
            if mask is None or target is not aten.mul.Tensor:
                raise Mismatch("a scale that depends on the key")
            factor = self._arranged(gate)
            if mask.meta["val"].dtype is torch.bool:
                dtype, choices = scores.product.meta["val"].dtype, (0.0, -float("inf"))
                numbers = (self.call(aten.full_like.default, factor, number, dtype=dtype) for number in choices)
                mask = self.call(aten.where.self, mask, *numbers)
            is_bool = factor.meta["val"].dtype is torch.bool
            is_one = factor if is_bool else self.call(aten.eq.Scalar, factor, 1)
            forbidden = self.call(aten.le.Scalar, mask, FORBIDDEN)
            wrong = self.call(aten.full_like.default, mask, 1.0)
            otherwise = self.call(aten.where.self, forbidden, mask, wrong)
            mask = self.call(aten.where.self, is_one, mask, otherwise)
        return mask

    def _arranged(self, mask: Arranged) -> fx.Node:
        return self.arranger.arrange(mask, [*self.queries, [self.attention.key]], broadcast=True)

    def _joined(self, operator: Any, parts: list[Arranged]) -> fx.Node | None:
        nodes = [self._arranged(part) for part in parts]
        return functools.reduce(functools.partial(self.call, operator), nodes) if nodes else None

    def _replace(self, node: fx.Node, dims: list[Dim], out: Arranged) -> None:
        """Replace uses of a node of these dimensions; if they merge sequences with heads, first those of its views."""
        parts = [set(leaves(dim)) for dim in dims]
        if any(part & self.rows and not part <= self.rows for part in parts):
            for user in list(node.users):
                if user.target in MOVES and user.args[0] is node:
                    self._replace(user, moved(user, dims), out)
        if node.users:
            node.replace_all_uses_with(self.arranger.arrange(out, [leaves(dim) for dim in dims]))


def _broadcast(mask: Arranged, base: fx.Node, key: Factor | None = None) -> Arranged:
    """Arrange a value by the dimensions of a mask where its size is not 1, with a fresh one in place of `key`'s."""
    own = [[] if size == 1 else dim for dim, size in zip(mask.own, sizes(base), strict=True)]
    own = [[Factor(size)] if key in leaves(dim) else dim for dim, size in zip(own, sizes(base), strict=True)]
    return Arranged(base, own, own)
