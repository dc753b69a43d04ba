"""Tell sequences, heads and tokens in the dimensions of attention, written out or called, that `rewrite` replaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.ops.attention import ATTENTION_MIXER, Masking
from dta_compile.passes.graphs.arguments import slice_of
from dta_compile.passes.graphs.nodes import is_float
from dta_compile.passes.graphs.operators import CASTS, DIFFERENTIABLE_COPIES, DROPOUTS, MASKED_FILLS, aten
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.lowering.attention.factors import MOVES, Arranged, Dim, Factor, Mismatch, leaves, moved, unify
from dta_compile.passes.lowering.attention.scores import PathTo, Scores
from dta_compile.passes.symbols import sizes

# Supported changes of softmax weights, if they set only weights to zero that are zero already.
CHANGES = MASKED_FILLS | {aten.where.self, aten.mul.Tensor}


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention to be replaced by a call, with the factors of its dimensions.

    Attributes:
        scores: product of queries and keys, and the effect of the operators on it.
        query, keys, values: operands.
        batch: factor of sequences; empty if there is one sequence.
        heads: factors of heads: first those of keys and values, `kv_heads`, then those of a group.
        token, key: factors of queries and of keys.
        features: feature dimension of values and result.
        out: dimensions of the result that is replaced.
        is_causal: whether it is causal in addition to its mask.
    """

    scores: Scores
    query: Arranged
    keys: Arranged
    values: Arranged
    batch: Dim
    kv_heads: Dim
    heads: Dim
    token: Factor
    key: Factor
    features: Dim
    out: list[Dim]
    is_causal: bool

    @classmethod
    def over(
        cls,
        scores: Scores,
        values: Arranged,
        features: Dim,
        key: Dim,
        weights: Sequence[Dim],
        out: list[Dim],
        is_causal: bool = False,
    ) -> Attention:
        """Tell sequences, heads and tokens in the dimensions `weights` of the softmax weights; raises `Mismatch`.

        `key` is the dimension that the softmax sums over.
        """
        if len(leaves(key)) != 1:
            raise Mismatch("a softmax over several dimensions, or over one key")
        (last,) = leaves(key)
        left, right = scores.left, scores.right
        query, keys = (left, right) if right.has(last) else (right, left)
        every = [keys, *(more.right if more.right.has(last) else more.left for more in scores.further)]
        others = [leaf for leaf in leaves([part for dim in weights for part in dim]) if leaf is not last]
        tokens = [leaf for leaf in others if leaf.size == last.size and not any(side.has(leaf) for side in every)]
        if len(tokens) != 1 or not query.has(tokens[0]):
            raise Mismatch("other queries than keys, or other dimensions than those of sequences, heads and tokens")
        heads = [leaf for leaf in others if leaf is not tokens[0]]
        batch = [leaf for leaf in heads if leaf.size.free_symbols]
        if len(batch) > 1:
            raise Mismatch("several dimensions of sequences or heads whose sizes are no numbers")
        kv_heads = [leaf for leaf in heads if leaf not in batch and any(side.has(leaf) for side in (*every, values))]
        heads = [*kv_heads, *(leaf for leaf in heads if leaf not in batch and leaf not in kv_heads)]
        return cls(scores, query, keys, values, batch, kv_heads, heads, tokens[0], last, features, out, is_causal)

    @classmethod
    def written_out(cls, path: list[fx.Node], steps: list[fx.Node], weighing: fx.Node, path_to: PathTo) -> Attention:
        """Return attention that consists of a product, a softmax and a second product; raises `Mismatch`.

        Args:
            path: nodes from the product of queries and keys to the softmax, both included.
            steps: nodes between the softmax and the product with the values.
            weighing: product with the values.
            path_to: see `Scores`.
        """
        *inner, softmax = path
        scores = Scores.along(inner, path_to)
        dim = softmax.args[1] % len(scores.dims)
        key, weights = scores.dims[dim], _behind(scores, steps, softmax, dim)
        if weighing.target is aten.baddbmm.default:
            raise Mismatch("something added to the weighed values")
        is_left = weighing.args[0] is (steps[-1] if steps else softmax)
        values = Arranged.of(weighing.args[1 if is_left else 0])
        *outer, rows, columns = weights
        *others, upper, lower = values.dims
        summed, of_values, features = (columns, upper, lower) if is_left else (rows, lower, upper)
        unify([*outer, summed, summed], [*others, of_values, key])
        out = [*outer, rows, features] if is_left else [*outer, features, columns]
        return cls.over(scores, values, features, key, weights, out)

    @classmethod
    def called(cls, node: fx.Node) -> Attention:
        """Return the attention of a call, in terms of its operands before they were rearranged; raises `Mismatch`."""
        query, keys, values = map(Arranged.of, node.args[:3])
        masking = Masking.of(ATTENTION_MIXER, node.args)
        batch, heads, tokens, depth = query.dims
        batch_of_keys, kv_heads, key, depth_of_keys = keys.dims
        unify([depth, *keys.dims[:3], batch], [depth_of_keys, *values.dims[:3], batch_of_keys])
        groups = sizes(node.args[0])[1] / sizes(node.args[1])[1]
        unify([heads], [kv_heads if groups == 1 else [*kv_heads, Factor(groups)]])
        dims = [batch, heads, tokens, key]
        scale, cap = masking.scoring.scale, masking.scoring.softcap or None
        scores = Scores(node, query, keys, depth, dims, scale / (cap or 1.0), cap)
        if masking.mask is not None:
            scores.masks.append(Arranged.within(masking.mask, dims))
        if masking.segments is not None or masking.window:
            raise Mismatch("a call of attention within segments")
        out = [batch, heads, tokens, values.dims[3]]
        return cls.over(scores, values, values.dims[3], key, dims, out, masking.is_causal)


def dropout_refusal(line: str, got: str) -> RefusalError:
    """Return the error for dropout of attention's weights."""
    return RefusalError(
        "attention dropout cannot run over a prefix tree: every rollout would need its own random mask",
        where=line,
        expected="dropout_p=0.0",
        got=got,
        hint="set the model's attention dropout to 0, or call model.eval()",
    )


def _behind(scores: Scores, steps: list[fx.Node], softmax: fx.Node, dim: int) -> list[Dim]:
    """Follow the softmax weights to the product with the values; return their dimensions, or raise `Mismatch`."""
    dims, is_cut, source = scores.dims, scores.sinks is None, softmax
    for node in steps:
        if not is_cut and node.target is aten.slice.Tensor:
            _require_keys(scores, node, source, dim)
            is_cut = True
        elif node.target in DROPOUTS:
            raise dropout_refusal(where(node), f"{node.target} of attention's weights")
        elif node.target in CASTS and not is_float(node):
            raise Mismatch("weights as integers or booleans")
        elif node.target in CHANGES:
            if not is_cut:
                raise Mismatch("weights of sinks that are changed before the sinks are cut off")
            scores.follow_weights(node, source, dims)
        elif node.target in MOVES:
            if not is_cut and node.target not in DIFFERENTIABLE_COPIES:
                raise Mismatch("weights of sinks that are moved before the sinks are cut off")
            dims = moved(node, dims)
        source = node
    if not is_cut:
        raise Mismatch("weights of sinks that are not cut off")
    return dims


def _require_keys(scores: Scores, node: fx.Node, source: fx.Node, dim: int) -> None:
    """Raise `Mismatch` unless a slice cuts off the column of sinks alone."""
    is_rest = slice_of(node) == (source, dim, int(scores.has_sinks_in_front))
    if not is_rest or sizes(source)[dim] - sizes(node)[dim] != 1:
        raise Mismatch("another part of the weights than those of keys")
