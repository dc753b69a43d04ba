"""Token rules: the operators that work on every token by itself, and the layouts of their results.

A rule takes a node and the layouts of its tensor arguments, and returns the layout of its result (a tuple of layouts
for several results) or raises `MixesTokens`. An operator without a rule mixes tokens. `token_axis` applies them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from dta_compile.errors import OptionError
from dta_compile.executable.layouts import Axis, Layout
from dta_compile.ops.collectives import ALONG_THE_LAST, EMBEDDING_PART, ENTRY_BY_ENTRY
from dta_compile.ops.experts.operators import EXPERT_LINEAR, EXPERT_SUM
from dta_compile.ops.mixer import BATCH, MIXERS, TOKENS
from dta_compile.passes.axes import shape_rules
from dta_compile.passes.axes.layouts import (
    Arguments,
    MixesTokens,
    Rule,
    broadcast,
    is_tensor,
    require_feature,
    single_token_axis,
    unify_frames,
)
from dta_compile.passes.axes.refusals import COUNTED, LARGEST, RECURRENCE, SELECTED, SPARSE
from dta_compile.passes.graphs.arguments import argument
from dta_compile.passes.graphs.operators import (
    CASTS,
    COPIES,
    MASKED_FILLS,
    MATRIX_PRODUCTS,
    RESHAPES,
    SQUEEZES,
    TRANSPOSITIONS,
    aten,
    is_tagged_pointwise,
)
from dta_compile.passes.program import Advice
from dta_compile.passes.symbols import sizes
from dta_compile.torch_compat.operators import OpOverload

TOKEN_RULES: dict[Any, Rule] = {}
REGISTERED: set[Any] = set()  # operators with a rule registered by users


def pointwise(node: fx.Node, arguments: Arguments) -> Layout | tuple[Layout, ...]:
    """Rule for pointwise operators with broadcasting."""
    return _of_results(node, broadcast(node, arguments))


def _of_results(node: fx.Node, layout: Layout) -> Layout | tuple[Layout, ...]:
    """Return a layout for each result of an operator."""
    results = node.meta.get("val")
    return (layout,) * len(results) if isinstance(results, (tuple, list)) else layout


def along_features(what: str, *dims: int, drops: bool = False, advice: Advice | None = None) -> Rule:
    """Return the rule for an operator along `dims`, or along those of its argument `dim`, which must be features.

    They are dropped if it `drops` them, or has an argument `keepdim` that is false. `advice`: if they are of tokens.
    """

    def rule(node: fx.Node, arguments: Arguments) -> Layout | tuple[Layout, ...]:
        layout = arguments[node.args[0]]
        chosen = dims or argument(node, "dims") or argument(node, "dim")
        if chosen is None or chosen == []:
            chosen = range(len(layout.dims))
        chosen = [chosen] if isinstance(chosen, int) else chosen
        dropped = {require_feature(layout, dim, what, advice) for dim in chosen}
        if drops or argument(node, "keepdim") is False:
            layout = Layout(tuple(axis for i, axis in enumerate(layout.dims) if i not in dropped), layout.frame)
        return _of_results(node, layout)

    return rule


def matmul(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for products `[m, k]` times `[k, n]`, of which k must be a feature, and for these plus a first argument."""
    *added, left, right = node.args
    a, b = arguments[left], arguments[right]
    if a.dims[-1] is not None or b.dims[-2 if len(b.dims) > 1 else -1] is not None:
        raise MixesTokens("it contracts (sums over) the token or batch axis")
    if a.dims[:-2] != b.dims[:-2]:
        raise MixesTokens("it multiplies along different axes")
    columns = b.dims[-1:] if len(b.dims) > 1 else ()
    product = single_token_axis(Layout((*a.dims[:-1], *columns), unify_frames([a.frame, b.frame])))
    if added and broadcast(node, arguments, added, beside=product).dims != product.dims:
        raise MixesTokens("it adds a value with axes that the product lacks")
    return product


def embedding(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `embedding`: one row of a table for every index."""
    table, index = arguments[node.args[0]], arguments[node.args[1]]
    if table.labelled:
        raise MixesTokens("it looks up rows of a table that is itself computed per token")
    if node.target is not EMBEDDING_PART and argument(node, "scale_grad_by_freq"):
        raise MixesTokens(
            "with scale_grad_by_freq, its gradient is divided by how often tokens occur in the batch", COUNTED
        )
    if node.target is not EMBEDDING_PART and argument(node, "sparse"):
        raise MixesTokens("with sparse=True, its gradient has an entry for every token of the batch", SPARSE)
    return Layout((*index.dims, None), index.frame)


def index_tensor(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `x[..., index]` over features, with index tensors that may themselves be per token."""
    table = arguments[node.args[0]]
    chosen = [i for i, index in enumerate(node.args[1]) if index is not None]
    indices = [node.args[1][i] for i in chosen]
    for i, index in zip(chosen, indices, strict=True):
        require_feature(table, i, "indexes")
        if index.meta["val"].dtype is torch.bool:
            raise MixesTokens("it selects by a mask, so that the result's size depends on the data", SELECTED)
    picked = broadcast(node, arguments, indices)
    rest = [axis for i, axis in enumerate(table.dims) if i not in chosen]
    first = chosen[0] if chosen == list(range(chosen[0], chosen[-1] + 1)) else 0
    dims = (*rest[:first], *picked.dims, *rest[first:])
    return single_token_axis(Layout(dims, unify_frames([table.frame, picked.frame])))


def index_put(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `x[..., index] = y` over features with constant indices; `lowering/row_loops` handles masks."""
    source, indices, value = node.args[:3]
    target, part = arguments[source], arguments[value]
    if any(index is not None and index.meta["val"].dtype is torch.bool for index in indices):
        raise MixesTokens("it writes different values where a mask says")
    written = index_tensor(node, arguments)
    if any(arguments[index].labelled for index in indices if index is not None) or written.frame != target.frame:
        raise MixesTokens("it writes at indices that differ between tokens")
    for i, size in enumerate(sizes(value)):
        if size != 1 and part.dims[i] is not written.dims[len(written.dims) - len(part.dims) + i]:
            raise MixesTokens("it writes values that lie differently along the batch and token axes")
    return Layout(target.dims, unify_frames([target.frame, part.frame]))


def index_select(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `index_select` of a feature dimension, which the axes of the index replace."""
    source, dim, index = node.args
    layout = arguments[source]
    dim = require_feature(layout, dim, "selects")
    picked = arguments[index]
    dims = (*layout.dims[:dim], *picked.dims, *layout.dims[dim + 1 :])
    return single_token_axis(Layout(dims, unify_frames([layout.frame, picked.frame])))


def gather(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `gather` along a feature dimension, by an index per token."""
    source, dim, index = node.args[:3]
    require_feature(arguments[source], dim, "gathers")
    return _along_others(source, index, dim, arguments)


def scatter(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `scatter` along a feature dimension, by an index per token."""
    source, dim, index = node.args[:3]
    require_feature(arguments[source], dim, "scatters")
    _along_others(source, index, dim, arguments)
    if len(node.args) > 3 and is_tensor(node.args[3]):
        _along_others(source, node.args[3], dim, arguments)
    return arguments[source]


def index_add(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `index_add` along a feature dimension, by an index that is the same for all tokens."""
    source, dim, index, added = node.args[:4]
    require_feature(arguments[source], dim, "adds")
    if arguments[index].labelled:
        raise MixesTokens("it adds at indices that differ between tokens")
    _along_others(source, added, dim, arguments)
    return arguments[source]


def _along_others(source: fx.Node, other: fx.Node, dim: int, arguments: Arguments) -> Layout:
    """Return the layout of `other`; raise `MixesTokens` unless its axes, except at `dim`, and frame are `source`'s."""
    mine, theirs = arguments[source], arguments[other]
    rank = len(mine.dims)
    dim %= max(rank, 1)
    frame = unify_frames([mine.frame, theirs.frame])
    dims = list(theirs.dims)
    for i in range(rank):
        if i == dim or mine.dims[i] is dims[i]:
            continue
        adoptable = arguments.dense(other) and dims[i] is None and frame is not None
        if not adoptable or mine.dims[i] is not Axis.TOKEN or sizes(other)[i] != frame.length:  # type: ignore[union-attr]
            raise MixesTokens("its operands lie differently along the batch and token axes")
        dims[i] = Axis.TOKEN
    result = Layout(tuple(dims), frame if Layout(tuple(dims)).token_dim is not None else None)
    if dims and dims[dim] is not None:
        raise MixesTokens("it indexes with the token or batch axis")
    if arguments.dense(other):
        arguments.adopt(other, result)
    if arguments.dense(source) and frame is not None:
        arguments.adopt(source, Layout(mine.dims, frame))
    return result


def normalization(node: fx.Node, arguments: Arguments) -> Layout | tuple[Layout, ...]:
    """Rule for layer and RMS norms over the last `len(normalized_shape)` dimensions, with statistics."""
    layout = arguments[node.args[0]]
    for dim in range(len(layout.dims) - len(node.args[1]), len(layout.dims)):
        require_feature(layout, dim, "normalises")
    if any(isinstance(weight, fx.Node) and arguments[weight].labelled for weight in node.args[2:4]):
        raise MixesTokens("its weights differ between tokens or sequences")
    return _of_results(node, layout)


def bucketize(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `bucketize` with boundaries that are the same for all tokens."""
    if arguments[node.args[1]].labelled:
        raise MixesTokens("it sorts into boundaries that are computed per token")
    return arguments[node.args[0]]


def convolution(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for convolutions with a kernel one token wide, which are linear maps of every token."""
    _, weight, _, stride, padding = node.args[:5]
    layout = arguments[node.args[0]]
    require_feature(layout, 1, "convolves")
    if any(size != 1 for size in sizes(weight)[2:]) or any(s != 1 for s in stride) or any(padding):
        raise MixesTokens("it convolves along the token axis")
    return layout


def at_experts(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for products of (token, expert) slots with the experts' weights, and for the sum over a token's experts."""
    *slots, weight, _ = node.args
    if arguments[weight].labelled:
        raise MixesTokens("its experts' weights are computed per token")
    rows, expert = slots[:2]
    joined = broadcast(node, arguments, slots, at_left=True)
    rank = len(arguments[expert].dims)
    if joined.dims[rank - 1] is not None and len(arguments[rows].dims) == rank:
        raise MixesTokens("it takes the experts of one token for those of others")
    require_feature(arguments[rows], -1, "contracts")
    dims = joined.dims[:rank]
    if node.target is EXPERT_SUM:
        require_feature(Layout(dims), -1, "sums")
        dims = dims[:-1]
    return Layout((*dims, None), joined.frame)


def mixing(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for mixers, the operators that may read along the token axis: all operands must be over the same tokens."""
    mixer = MIXERS[node.target]
    operands, batch_dim = [value for _, value in mixer.over_tokens(node.args)], mixer.batch_dim
    first, both = arguments[operands[0]], " and ".join(operand.plural for operand in mixer.operands[:2])
    for operand, value in zip(mixer.operands, mixer.operands_of(node.args), strict=True):
        if not operand.has_tokens and arguments[value].labelled:
            raise MixesTokens(f"its {operand.plural} depend on the tokens")
    for value in operands:
        layout = arguments[value]
        one_sequence = layout.dims[batch_dim] is None and sizes(value)[batch_dim] == 1
        axes = {BATCH: None if one_sequence else Axis.BATCH, TOKENS: Axis.TOKEN}
        if layout.dims != tuple(axes.get(dim) for dim in mixer.dims[: len(layout.dims)]):
            expected = ", ".join(mixer.dims)
            raise MixesTokens(f"{mixer.name} expects [{expected}], got {layout} of {sizes(value)}")
        if layout.frame != first.frame:
            raise MixesTokens(f"its {both} are different tokens (a KV cache, or cross-attention)")
        if one_sequence != (first.dims[batch_dim] is None):
            raise MixesTokens(f"its {both} are of different numbers of sequences")
    return first


def item(node: fx.Node, arguments: Arguments) -> Layout:
    """Stand in the table for `getitem`, which `token_axis` resolves itself."""
    raise AssertionError("getitem is resolved by the token_axis pass")


def _register(rule: Rule, *ops: Any) -> None:
    TOKEN_RULES.update(dict.fromkeys(ops, rule))


_register(pointwise, *CASTS, *COPIES, *MASKED_FILLS, aten.where.self)
_register(pointwise, aten.contiguous.default, aten.copy.default, aten.fill.Scalar, aten.fill.Tensor, aten.zero.default)
_register(pointwise, aten.hardswish.default, aten._prelu_kernel.default, aten.complex.default, aten.polar.default)
_register(pointwise, aten._conj.default, aten._conj_physical.default, aten.resolve_conj.default, aten.real.default)
_register(
    shape_rules.like, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default
)
_register(shape_rules.view, *RESHAPES)
_register(shape_rules.rearranged, *TRANSPOSITIONS, *SQUEEZES, aten.unsqueeze.default, aten.expand.default)
_register(shape_rules.slice_, aten.slice.Tensor)
_register(shape_rules.select, aten.select.int)
_register(shape_rules.written_slice, aten.slice_scatter.default, aten.select_scatter.default)
_register(shape_rules.stack, aten.stack.default)
_register(shape_rules.split, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
_register(shape_rules.cat, aten.cat.default)
_register(matmul, *MATRIX_PRODUCTS, aten.mv.default, aten.addmv.default)
_register(embedding, aten.embedding.default)
_register(index_tensor, aten.index.Tensor)
_register(index_put, aten.index_put.default)
_register(index_select, aten.index_select.default)
_register(gather, aten.gather.default)
_register(index_add, aten.index_add.default)
_register(scatter, aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
_register(along_features("normalises"), aten._softmax.default, aten._log_softmax.default)
_register(along_features("sums"), aten.sum.dim_IntList, aten.mean.dim, aten.any.dim, aten.all.dim)
_register(along_features("sums"), aten.norm.ScalarOpt_dim)
_register(along_features("reduces", advice=LARGEST), aten.amax.default, aten.max.dim)
_register(along_features("reduces"), aten.amin.default, aten.min.dim, aten.argmax.default, aten.argmin.default)
_register(along_features("reduces"), aten.prod.dim_int, aten.logsumexp.default, aten.median.dim, aten.nanmedian.dim)
_register(along_features("reduces"), aten.var.correction, aten.std.correction, aten.var_mean.correction)
_register(along_features("reduces"), aten.linalg_vector_norm.default, aten.kthvalue.default, aten.mode.default)
_register(along_features("accumulates", advice=RECURRENCE), aten.cumsum.default, aten.cumprod.default)
_register(along_features("accumulates", advice=RECURRENCE), aten.logcumsumexp.default)
_register(along_features("accumulates"), aten.cummax.default, aten.cummin.default)
_register(along_features("reorders"), aten.flip.default, aten.glu.default)
_register(along_features("transforms"), aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)
_register(along_features("sorts"), aten.sort.default, aten.sort.stable)
_register(along_features("selects the largest"), aten.topk.default)
_register(along_features("cuts a triangle", -1, -2), aten.tril.default, aten.triu.default)
_register(along_features("pairs real and imaginary parts", -1, drops=True), aten.view_as_complex.default)
_register(along_features("gathers from other ranks", -1), *ALONG_THE_LAST)
_register(normalization, aten.native_layer_norm.default)
if hasattr(aten, "_fused_rms_norm"):
    _register(normalization, aten._fused_rms_norm.default)
_register(shape_rules.diagonal, aten.diagonal.default)
_register(shape_rules.with_last, aten.view_as_real.default, aten.unfold.default)
_register(bucketize, aten.bucketize.Tensor)
_register(convolution, aten.convolution.default)
_register(pointwise, *ENTRY_BY_ENTRY)
_register(embedding, EMBEDDING_PART)
_register(at_experts, EXPERT_LINEAR, EXPERT_SUM)
_register(shape_rules.constant_pad, aten.constant_pad_nd.default)
_register(shape_rules.repeat, aten.repeat.default)
_register(item, operator.getitem)


def rule_for(target: Any) -> Rule | None:
    """Return the rule of an operator; `pointwise` if torch tags it so; None if there is none."""
    if target in TOKEN_RULES:
        return TOKEN_RULES[target]
    if target in MIXERS:
        return mixing
    if not is_tagged_pointwise(target):
        return None
    gives_tensors = all(isinstance(result.type, torch.TensorType) for result in target._schema.returns)
    return pointwise if gives_tensors else None  # not one number for the whole tensor (aten.equal)


def register_token_rule(op: Any, rule: Rule) -> None:
    """Declare how an operator treats the token axis; rules are written with `dta_compile.token_rules`.

    Args:
        op: an operator overload, such as `torch.ops.my_library.my_op.default`.
        rule: called as `rule(node, arguments)`; `arguments[node.args[i]]` is the `Layout` of the i-th argument. It
            returns the `Layout` of the result (a tuple of them for several results) or raises `MixesTokens(reason)`.
            `pointwise` serves any elementwise operator.

    The operator must work on any number of tokens, and give each token the same result whatever its neighbours are.
    """
    if not isinstance(op, OpOverload):
        raise OptionError(
            "register_token_rule needs an operator overload",
            expected="for example torch.ops.my_library.my_op.default",
            got=repr(op),
        )
    TOKEN_RULES[op] = rule
    REGISTERED.add(op)
