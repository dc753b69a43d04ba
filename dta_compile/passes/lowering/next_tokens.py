"""Layers that pair each token with the next one, for multi-token prediction: one over all tokens, read a token later.

    y = join(cat([norm(h[:, :-1]), norm(embed(ids[:, 1:]))], -1))        # [B, S - 1, D]
    y = y + attention(y)                                                 # causal, over S - 1 tokens

Entry `t` reads the token `t + 1`, so that it belongs to that token: `h[:, :-1]` becomes `h` shifted by a token, as in
`shifts`, `ids[:, 1:]` becomes `ids`, and what is computed of them has entries for all tokens. That of the first token,
which is paired with itself so that its values are as finite as others, is not read: its keys get a bias that leaves
them no weight, and results are `[:, 1:]`. Operators are copied whose arguments name no token by its number; that they
treat every token by itself is for the pass `token_axis` to prove.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.ops.attention import ATTENTION_CALL, ATTENTION_MIXER, Masking
from dta_compile.ops.experts.operators import EXPERT_LINEAR, EXPERT_SUM
from dta_compile.ops.mixer import MIXERS
from dta_compile.ops.scoring import UNSCALED, Scoring
from dta_compile.passes.axes.layouts import batch_and_tokens, mixer_calls
from dta_compile.passes.graphs.arguments import Slice, dim_of, slice_of
from dta_compile.passes.graphs.nodes import (
    SizeNodes,
    call,
    column,
    descendants,
    erase_unused,
    filled_with,
    is_pointwise,
)
from dta_compile.passes.graphs.operators import (
    CASTS,
    COPIES,
    KEEP_ORDER,
    MATRIX_PRODUCTS,
    ROW_REDUCTIONS,
    TAKE_A_SHAPE,
    TRANSPOSITIONS,
    UNTAGGED_POINTWISE,
    aten,
)
from dta_compile.passes.graphs.source_lines import inherit_line
from dta_compile.passes.lowering.attention.distances import positions
from dta_compile.passes.lowering.shifts import shifted
from dta_compile.passes.program import ancestors, has_tensor, tensors_of
from dta_compile.passes.symbols import expression, sizes

# Operators whose arguments name no token by its number.
COPIED = (
    CASTS | COPIES | KEEP_ORDER | MATRIX_PRODUCTS | ROW_REDUCTIONS | TRANSPOSITIONS | UNTAGGED_POINTWISE
    | {aten.cat.default, aten.embedding.default, aten.expand.default, aten.split.Tensor, aten.split_with_sizes.default}
    | {aten.unbind.int, operator.getitem, aten._softmax.default, aten.topk.default, aten.gather.default}
    | {EXPERT_LINEAR, EXPERT_SUM}
)  # fmt: skip


class CannotResize(Exception):
    """A value has no counterpart over other tokens."""


def resized(
    graph: fx.Graph,
    node: fx.Node,
    replaced: Mapping[fx.Node, fx.Node],
    sizes_of: SizeNodes,
    change: tuple[sympy.Expr, sympy.Expr],
    takes_sizes: Collection[Any] = TAKE_A_SHAPE,
) -> fx.Node:
    """Insert a copy of a call for another number of tokens (or rows).

    Args:
        replaced: by argument, the one of the copy.
        change: the number as it was, and as it is in the arguments of an operator that `takes_sizes`.

    Raises:
        CannotResize: a size is no polynomial, or the result has others than with this number in the place of the old.
    """

    if node.target in takes_sizes and isinstance(filled_with(node), fx.Node):
        raise CannotResize  # filled with a size

    def new(arg: fx.Node) -> Any:
        if has_tensor(arg):
            return replaced.get(arg, arg)
        if node.target not in takes_sizes:
            return arg  # a number like any other, as in `h / h.shape[1]`
        if (size := sizes_of.build(expression(arg.meta["val"]).subs(*change))) is None:
            raise CannotResize
        return size

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), new)
    copy = call(graph, node.target, *args, **kwargs)
    if [size.subs(*change) for size in all_sizes(node)] != all_sizes(copy):
        raise CannotResize
    return copy


def all_sizes(node: fx.Node) -> list[sympy.Expr]:
    """Return the sizes of all results of a call."""
    return [expression(size) for value in tensors_of(node.meta["val"]) for size in value.shape]


def pair_next_tokens(graph: fx.Graph, parameters: Collection[fx.Node]) -> None:
    """Replace causal attention over all tokens but one in place; `graph` is functional."""
    calls = mixer_calls(graph)
    if not calls:
        return
    batch, tokens = batch_and_tokens(calls[0])
    others = [node for node in calls if batch_and_tokens(node) == (batch, tokens - 1)]
    if not tokens.is_Symbol or not others:
        return
    with_gradient = descendants(graph, parameters)
    read = ancestors(others) - ancestors([node for node in calls if node not in others])
    pairs = _Pairs(graph, batch, tokens, with_gradient)
    nodes = [node for node in graph.nodes if node in read]
    if not any(pairs.is_shift(node) and node in with_gradient for node in nodes):
        return  # the model runs on fewer tokens anew: see `cuts.other_batches`
    try:
        for node in nodes:
            pairs.add(node)
    except (CannotResize, RuntimeError, ValueError):  # of torch: an operator takes this number of tokens alone
        pass
    else:
        pairs.replace()
    erase_unused(graph)


class _Pairs:
    """Values of `tokens - 1` entries, and what replaces them: entry `t + 1` of the new is entry `t` of the old."""

    def __init__(self, graph: fx.Graph, batch: Any, tokens: Any, with_gradient: set[fx.Node]) -> None:
        self.graph, self.batch, self.tokens, self.with_gradient = graph, batch, tokens, with_gradient
        self.sizes, self.whole = SizeNodes(graph), dict[fx.Node, fx.Node]()

    def _dims(self, node: fx.Node) -> list[int]:
        return [i for i, size in enumerate(sizes(node)) if size == self.tokens - 1]

    def is_shift(self, node: fx.Node) -> bool:
        """Return whether a node is `x[:, :-1]` for all tokens `x`."""
        cut = self._cut(node)
        return cut is not None and cut.start == 0

    def add(self, node: fx.Node) -> None:
        """Add the replacement of a node, if it has one; raises `CannotResize`."""
        if not has_tensor(node) or node.op != "call_function":
            return
        with self.graph.inserting_before(node.next):
            new = self._replacement(node)
        if new is not None:
            inherit_line(new, node)
            self.whole[node] = new

    def _replacement(self, node: fx.Node) -> fx.Node | None:
        is_learned = node in self.with_gradient
        if (cut := self._cut(node)) is not None:
            if cut.start == 1:
                return cut.source
            if cut.start != 0:
                raise CannotResize
            if is_learned:
                return shifted(cut.source, cut.dim, self.batch, self.tokens)
            return self._joined(call(self.graph, aten.slice.Tensor, cut.source, cut.dim, 0, 1), node, cut.dim)
        read = [arg for arg in node.all_input_nodes if arg in self.whole]
        if not is_learned:
            value = node
            for dim in self._dims(node) if isinstance(node.meta["val"], torch.Tensor) else ():
                value = self._joined(call(self.graph, aten.slice.Tensor, value, dim, 0, 1), value, dim)
            return None if value is node else value
        if not read:
            return None
        if node.target in MIXERS:
            return self._attention(node)
        is_part = node.target in (aten.slice.Tensor, aten.select.int) and self._is_of_features(node)
        if not (node.target in COPIED or is_pointwise(node) or is_part):
            raise CannotResize
        return resized(self.graph, node, self.whole, self.sizes, (self.tokens, self.tokens + 1))

    def _cut(self, node: fx.Node) -> Slice | None:
        """Return the slice that cuts all tokens to all but one; None for other nodes."""
        if (part := slice_of(node)) is None:
            return None
        before, after = sizes(part.source)[part.dim], sizes(node)[part.dim]
        return part if (before, after) == (self.tokens, self.tokens - 1) else None

    def _is_of_features(self, node: fx.Node) -> bool:
        """Return whether a slice or `select` takes a part of a dimension that does not count tokens."""
        return not sizes(node.args[0])[dim_of(node)].free_symbols

    def _joined(self, first: fx.Node, rest: fx.Node, dim: int) -> fx.Node:
        return call(self.graph, aten.cat.default, [first, rest], dim)

    def _attention(self, node: fx.Node) -> fx.Node:
        """Return causal attention whose keys of the first token have no weight."""
        masking = Masking.of(ATTENTION_MIXER, node.args) if node.target is ATTENTION_CALL else None
        if masking is None or masking != Masking.causal(Scoring(masking.scoring.scale)):
            raise CannotResize
        query, key, value = (self.whole.get(arg, arg) for arg in node.args[:3])
        like = key.meta["val"]
        index = positions(self.graph, self.sizes.build(self.tokens), like)
        is_first = call(self.graph, aten.unsqueeze.default, call(self.graph, aten.eq.Scalar, index, 0), 1)
        none = column(key, 0.0)
        never = call(self.graph, aten.full_like.default, none, torch.finfo(like.dtype).min / 4)
        bias = call(self.graph, aten.where.self, is_first, never, none)
        pairs = [call(self.graph, aten.mul.Tensor, query, masking.scoring.scale), column(query, 1.0)], [key, bias]
        query, key = (call(self.graph, aten.cat.default, pair, 3) for pair in pairs)
        return call(self.graph, ATTENTION_CALL, query, key, value, *Masking.causal(UNSCALED).arguments)

    def replace(self) -> None:
        """Replace what is read of the old values by all entries but the first of the new ones."""
        for node, new in self.whole.items():
            dims = self._dims(node) if isinstance(node.meta["val"], torch.Tensor) else []
            if node not in self.with_gradient or len(dims) != 1 or new in node.all_input_nodes:
                continue
            with self.graph.inserting_before(new.next):
                rest = call(self.graph, aten.slice.Tensor, new, dims[0], 1)
            rest.meta = {**node.meta, **rest.meta}
            node.replace_all_uses_with(rest)
