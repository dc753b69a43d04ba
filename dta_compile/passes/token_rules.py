"""Which operators work on every token by itself, and where the token axis of their result lies.

A rule takes a node and the layouts of its tensor arguments and returns the layout of its result (a tuple of layouts for
several results), or raises `MixesTokens`. An operator without a rule mixes tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.program import Axis, Frame, Layout

aten = torch.ops.aten

Rule = Callable[[fx.Node, "Arguments"], "Layout | tuple[Layout, ...]"]
RULES: dict[Any, Rule] = {}


class MixesTokens(Exception):
    """The operator makes one token's value depend on another's (or on another sequence's)."""


class Arguments:
    """The layouts of a node's arguments, and the adoption of dense inputs into a frame.

    A value computed outside the token region (shifted labels, say) carries no frame of its own: its token axis takes
    the frame of the token-region value that it is combined with. `adopted` records that, per argument.
    """

    def __init__(self, layouts: dict[fx.Node, Layout], dense: Callable[[fx.Node], bool]) -> None:
        self.layouts, self.dense = layouts, dense
        self.adopted: dict[fx.Node, Layout] = {}

    def __getitem__(self, node: Any) -> Layout:
        if not isinstance(node, fx.Node):
            return Layout(())
        return self.adopted.get(node) or self.layouts[node]

    def adopt(self, node: fx.Node, layout: Layout) -> None:
        if layout != self.layouts[node]:
            self.adopted[node] = layout


def expression(size: Any) -> sympy.Expr:
    """A size as a sympy expression, with everything the shape environment learned substituted."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def sizes(node: fx.Node, index: int | None = None) -> tuple[sympy.Expr, ...]:
    """The shape of a node's value (of its `index`-th result)."""
    value = node.meta["val"]
    value = value if index is None else value[index]
    return tuple(expression(size) for size in value.shape)


def broadcast(node: fx.Node, arguments: Arguments, operands: Sequence[fx.Node] | None = None) -> Layout:
    """Layout of an elementwise result: operands aligned at the right, at most one axis a dimension, one frame."""
    operands = [arg for arg in (operands or node.all_input_nodes) if _is_tensor(arg)]
    rank = max(len(sizes(arg)) for arg in operands)
    frame = unify_frames([arguments[arg].frame for arg in operands if arguments[arg].token_dim is not None])
    dims: list[Axis | None] = []
    for dim in range(rank):
        axes = {axis for arg in operands if (axis := _aligned(arguments[arg], rank, dim)) is not None}
        if len(axes) > 1:
            raise MixesTokens("it combines the batch axis with the token axis")
        dims.append(next(iter(axes), None))
    result = Layout(tuple(dims), frame)
    for arg in operands:
        _adopt_operand(arg, result, rank, arguments)
    return single_token_axis(result)


def _aligned(layout: Layout, rank: int, dim: int) -> Axis | None:
    own = dim - (rank - len(layout.dims))
    return layout.dims[own] if own >= 0 else None


def _adopt_operand(arg: fx.Node, result: Layout, rank: int, arguments: Arguments) -> None:
    """Give a dense operand the axes and frame of the result where its sizes say that it has them."""
    layout, shape = arguments[arg], sizes(arg)
    dims = list(layout.dims)
    for own, size in enumerate(shape):
        axis = result.dims[own + rank - len(shape)]
        if dims[own] is None and axis is not None and size != 1:
            if (
                axis is not Axis.TOKEN
                or not arguments.dense(arg)
                or result.frame is None
                or size != result.frame.length
            ):
                raise MixesTokens(f"it lines up {arg.name} (size {size}) with the {axis.value} axis")
            dims[own] = axis
        if axis is Axis.TOKEN and size == 1 and Axis.BATCH in dims and arguments.dense(arg):
            dims[own] = axis  # one value a sequence: chunks hold tokens of several sequences, so it is read per token
    frame = result.frame if any(axis in (Axis.TOKEN, Axis.ROWS) for axis in dims) else None
    if arguments.dense(arg):
        arguments.adopt(arg, Layout(tuple(dims), frame))


def unify_frames(frames: Sequence[Frame | None]) -> Frame | None:
    """The one frame that all operands agree on; operands without a start (dense values) take the others'."""
    known = [frame for frame in frames if frame is not None]
    if not known:
        return None
    best = next((frame for frame in known if frame.start is not None), known[0])
    for frame in known:
        if sympy.simplify(frame.length - best.length) != 0:
            raise MixesTokens(f"it combines {frame.length} tokens with {best.length}")
        if frame.start is not None and sympy.simplify(frame.start - best.start) != 0:
            raise MixesTokens("it combines tokens at different positions (a shift along the token axis)")
    return best


def single_token_axis(layout: Layout) -> Layout:
    tokens = [axis for axis in layout.dims if axis in (Axis.TOKEN, Axis.ROWS)]
    batches = [axis for axis in layout.dims if axis in (Axis.BATCH, Axis.ROWS)]
    if len(tokens) > 1:
        raise MixesTokens("it compares every token with every other")
    if len(batches) > 1:
        raise MixesTokens("it compares every sequence with every other")
    return layout


def require_feature(layout: Layout, dim: int, what: str) -> int:
    """`dim` made non-negative; raises unless it is a feature dimension."""
    dim = dim % max(len(layout.dims), 1)
    if layout.dims and layout.dims[dim] is not None:
        axis = "token" if layout.dims[dim] in (Axis.TOKEN, Axis.ROWS) else "batch"
        raise MixesTokens(f"it {what} along the {axis} axis")
    return dim


def pointwise(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for an operator that works elementwise with broadcasting."""
    return broadcast(node, arguments)


def like(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for a constructor that takes its shape from its first argument."""
    return arguments[node.args[0]]


def along_features(what: str, dim_argument: int, keepdim_argument: int | None = None, results: int = 1) -> Rule:
    """Rule for an operator that works along given dimensions, which must be features.

    `keepdim_argument` None: the shape stays; else the dimensions are dropped unless that argument is true.
    """

    def rule(node: fx.Node, arguments: Arguments) -> Layout | tuple[Layout, ...]:
        layout = arguments[node.args[0]]
        chosen = _argument(node, dim_argument, "dim")
        if chosen is None or chosen == []:
            chosen = list(range(len(layout.dims)))
        chosen = [chosen] if isinstance(chosen, int) else list(chosen)
        dropped = {require_feature(layout, dim, what) for dim in chosen}
        if keepdim_argument is not None and not _argument(node, keepdim_argument, "keepdim"):
            layout = Layout(tuple(axis for i, axis in enumerate(layout.dims) if i not in dropped), layout.frame)
        return layout if results == 1 else (layout,) * results

    return rule


def _argument(node: fx.Node, position: int, name: str) -> Any:
    """An argument by the operator's own schema: given by position, by name, or its default."""
    schema = node.target._schema.arguments if hasattr(node.target, "_schema") else ()
    if position < len(node.args):
        return node.args[position]
    named = {argument.name: argument.default_value for argument in schema}
    return node.kwargs.get(name, named.get(name))


def permuted(order: Callable[[fx.Node, int], list[int]]) -> Rule:
    """Rule for a permutation of dimensions: `order(node, rank)` lists the source dimension of each result dimension."""

    def rule(node: fx.Node, arguments: Arguments) -> Layout:
        layout = arguments[node.args[0]]
        return Layout(tuple(layout.dims[i] for i in order(node, len(layout.dims))), layout.frame)

    return rule


def _transpose_order(node: fx.Node, rank: int) -> list[int]:
    order = list(range(rank))
    if rank > 1:
        first, second = (node.args[1], node.args[2]) if len(node.args) > 2 else (0, 1)
        order[first], order[second] = order[second], order[first]
    return order


def unsqueeze(node: fx.Node, arguments: Arguments) -> Layout:
    layout = arguments[node.args[0]]
    dims = list(layout.dims)
    dims.insert(node.args[1] % (len(dims) + 1), None)
    return Layout(tuple(dims), layout.frame)


def squeeze(node: fx.Node, arguments: Arguments) -> Layout:
    source = node.args[0]
    layout, shape = arguments[source], sizes(source)
    chosen = node.args[1] if len(node.args) > 1 else list(range(len(shape)))
    chosen = {dim % len(shape) for dim in ([chosen] if isinstance(chosen, int) else chosen)}
    kept = [i for i in range(len(shape)) if not (i in chosen and shape[i] == 1)]
    return Layout(tuple(layout.dims[i] for i in kept), layout.frame)


def expand(node: fx.Node, arguments: Arguments) -> Layout:
    source = node.args[0]
    layout, before, after = arguments[source], sizes(source), sizes(node)
    added = len(after) - len(before)
    dims: list[Axis | None] = []
    for i, size in enumerate(after):
        if i >= added and (before[i - added] != 1 or size == 1):
            dims.append(layout.dims[i - added])
        elif size.free_symbols:
            raise MixesTokens("it repeats a value along a batch or token axis it did not have")
        else:
            dims.append(None)
    return Layout(tuple(dims), layout.frame)


def view(node: fx.Node, arguments: Arguments) -> Layout:
    """Reshape: axes may stay, merge (batch, token) into rows, or split rows; they never merge with features."""
    source = node.args[0]
    layout, before, after = arguments[source], sizes(source), sizes(node)
    dims: list[Axis | None] = [None] * len(after)
    for group_in, group_out in reshape_groups(before, after):
        labelled = [layout.dims[i] for i in group_in if before[i] != 1]
        targets = [j for j in group_out if after[j] != 1]
        if not any(labelled):
            continue
        if len(labelled) == len(targets) == 1:
            dims[targets[0]] = labelled[0]
        elif labelled == [Axis.BATCH, Axis.TOKEN] and len(targets) == 1:
            dims[targets[0]] = Axis.ROWS
        elif labelled == [Axis.ROWS] and len(targets) == 2:
            dims[targets[0]], dims[targets[1]] = Axis.BATCH, Axis.TOKEN
        else:
            raise MixesTokens(f"it reshapes {layout} of sizes {before} to {after}, across the token axis")
    return Layout(tuple(dims), layout.frame)


def reshape_groups(before: Sequence[sympy.Expr], after: Sequence[sympy.Expr]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of dimensions with equal products, left to right, for a reshape of `before` to `after`."""
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        group_in, group_out = [i] if i < len(before) else [], [j] if j < len(after) else []
        product_in = before[i] if group_in else sympy.Integer(1)
        product_out = after[j] if group_out else sympy.Integer(1)
        i, j = i + len(group_in), j + len(group_out)
        while (ratio := sympy.cancel(product_out / product_in)) != 1:
            numerator, denominator = ratio.as_numer_denom()
            if denominator == 1 and i < len(before) or j >= len(after):
                if i >= len(before):
                    break
                group_in, product_in, i = [*group_in, i], product_in * before[i], i + 1
            else:
                group_out, product_out, j = [*group_out, j], product_out * after[j], j + 1
        groups.append((group_in, group_out))
    return groups


def slice_(node: fx.Node, arguments: Arguments) -> Layout:
    """A slice of features, or a window of tokens: the frame moves, the values stay."""
    source = node.args[0]
    dim = _argument(node, 1, "dim") or 0
    layout, before, after = arguments[source], sizes(source), sizes(node)
    dim %= len(before)
    if layout.dims[dim] is None or before[dim] == after[dim]:
        return layout
    step = _argument(node, 4, "step")
    if (
        layout.dims[dim] is not Axis.TOKEN
        or step not in (None, 1)
        or layout.frame is None
        or layout.frame.start is None
    ):
        axis = "token" if layout.dims[dim] is Axis.TOKEN else "batch"
        raise MixesTokens(
            f"it takes every {step}th entry of the {axis} axis"
            if step not in (None, 1)
            else f"it slices the {axis} axis"
        )
    start = _argument(node, 2, "start") or 0
    start = start.meta["val"] if isinstance(start, fx.Node) else start
    first = expression(start) + (before[dim] if start < 0 else 0)  # comparing a symbolic start leaves a guard
    return Layout(layout.dims, Frame(sympy.simplify(layout.frame.start + first), after[dim]))


def matmul(left: int, right: int) -> Rule:
    """Rule for mm-like operators: argument `left` [m, k] times argument `right` [k, n]; k must be a feature."""

    def rule(node: fx.Node, arguments: Arguments) -> Layout:
        a, b = arguments[node.args[left]], arguments[node.args[right]]
        if a.dims[-1] is not None or b.dims[-2 if len(b.dims) > 1 else -1] is not None:
            raise MixesTokens("it contracts (sums over) the token or batch axis")
        outer = tuple(_same_axis(x, y) for x, y in zip(a.dims[:-2], b.dims[:-2], strict=True))
        rows = a.dims[-2:-1]
        columns = b.dims[-1:] if len(b.dims) > 1 else ()
        return single_token_axis(Layout((*outer, *rows, *columns), unify_frames([a.frame, b.frame])))

    return rule


def _same_axis(a: Axis | None, b: Axis | None) -> Axis | None:
    if a is not b:
        raise MixesTokens("it multiplies along different axes")
    return a


def embedding(node: fx.Node, arguments: Arguments) -> Layout:
    table, index = arguments[node.args[0]], arguments[node.args[1]]
    if table.labelled:
        raise MixesTokens("it looks up rows of a table that is itself computed per token")
    return Layout((*index.dims, None), index.frame)


def index_tensor(node: fx.Node, arguments: Arguments) -> Layout:
    """`x[..., index]` over features, with index tensors that may themselves be per token."""
    table = arguments[node.args[0]]
    chosen = [i for i, index in enumerate(node.args[1]) if index is not None]
    indices = [node.args[1][i] for i in chosen]
    for i, index in zip(chosen, indices, strict=True):
        require_feature(table, i, "indexes")
        if index.meta["val"].dtype is torch.bool:
            raise MixesTokens("it selects by a mask, so that the result's size depends on the data")
    picked = broadcast(node, arguments, indices)
    rest = [axis for i, axis in enumerate(table.dims) if i not in chosen]
    place = chosen[0] if chosen == list(range(chosen[0], chosen[-1] + 1)) else 0
    dims = (*rest[:place], *picked.dims, *rest[place:])
    return single_token_axis(Layout(dims, unify_frames([table.frame, picked.frame])))


def index_put(node: fx.Node, arguments: Arguments) -> Layout:
    """`x[..., index] = y` over features with constant indices, and `x[mask] = number`."""
    source, indices, value = node.args[:3]
    target, given = arguments[source], arguments[value]
    first = indices[0]
    if first is not None and first.meta["val"].dtype is torch.bool:
        mask = arguments[first]
        if len(indices) > 1 or any(size != 1 for size in sizes(value)):
            raise MixesTokens("it writes different values where a mask says")
        if mask.dims != target.dims[: len(mask.dims)]:
            raise MixesTokens("it writes where a mask with other axes says")
        return Layout(target.dims, unify_frames([target.frame, mask.frame]))
    written = index_tensor(node, arguments)
    if any(arguments[index].labelled for index in indices if index is not None) or written.frame != target.frame:
        raise MixesTokens("it writes at indices that differ between tokens")
    for i, size in enumerate(sizes(value)):
        if size != 1 and given.dims[i] is not written.dims[len(written.dims) - len(given.dims) + i]:
            raise MixesTokens("it writes values that lie differently along the batch and token axes")
    return Layout(target.dims, unify_frames([target.frame, given.frame]))


def index_select(node: fx.Node, arguments: Arguments) -> Layout:
    source, dim, index = node.args
    layout = arguments[source]
    dim = require_feature(layout, dim, "selects")
    picked = arguments[index]
    dims = (*layout.dims[:dim], *picked.dims, *layout.dims[dim + 1 :])
    return single_token_axis(Layout(dims, unify_frames([layout.frame, picked.frame])))


def gather(node: fx.Node, arguments: Arguments) -> Layout:
    source, dim, index = node.args[:3]
    require_feature(arguments[source], dim, "gathers")
    result = _along_others(source, index, dim, arguments)
    return result


def scatter(node: fx.Node, arguments: Arguments) -> Layout:
    source, dim, index = node.args[:3]
    require_feature(arguments[source], dim, "scatters")
    _along_others(source, index, dim, arguments)
    if len(node.args) > 3 and isinstance(node.args[3], fx.Node) and _is_tensor(node.args[3]):
        _along_others(source, node.args[3], dim, arguments)
    return arguments[source]


def _along_others(source: fx.Node, other: fx.Node, dim: int, arguments: Arguments) -> Layout:
    """Two tensors whose dimensions other than `dim` must be the same axes with the same frame; the layout of `other`."""
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
    result = Layout(tuple(dims), frame if any(axis in (Axis.TOKEN, Axis.ROWS) for axis in dims) else None)
    if dims and dims[dim] is not None:
        raise MixesTokens("it indexes with the token or batch axis")
    if arguments.dense(other):
        arguments.adopt(other, result)
    if arguments.dense(source) and frame is not None:
        arguments.adopt(source, Layout(mine.dims, frame))
    return result


def cat(node: fx.Node, arguments: Arguments) -> Layout:
    parts, dim = list(node.args[0]), _argument(node, 1, "dim") or 0
    parts = [part for part in parts if len(sizes(part)) > 1 or sizes(part) != (0,)]
    for part in parts:
        require_feature(arguments[part], dim, "concatenates")
    return broadcast(node, arguments, _without_dim_check(parts, dim))


def _without_dim_check(parts: list[fx.Node], dim: int) -> list[fx.Node]:
    """The parts of a concatenation differ only along `dim`, a feature: they unify as an elementwise call would."""
    return parts


def stack(node: fx.Node, arguments: Arguments) -> Layout:
    layout = broadcast(node, arguments, list(node.args[0]))
    dim = (_argument(node, 1, "dim") or 0) % (len(layout.dims) + 1)
    return Layout((*layout.dims[:dim], None, *layout.dims[dim:]), layout.frame)


def split(node: fx.Node, arguments: Arguments) -> tuple[Layout, ...]:
    layout = arguments[node.args[0]]
    is_unbind = node.target is aten.unbind.int
    dim = require_feature(layout, _argument(node, 1 if is_unbind else 2, "dim") or 0, "splits")
    if is_unbind:
        layout = Layout(layout.dims[:dim] + layout.dims[dim + 1 :], layout.frame)
    return (layout,) * len(node.meta["val"])


def select(node: fx.Node, arguments: Arguments) -> Layout:
    layout = arguments[node.args[0]]
    dim = require_feature(layout, node.args[1], "selects one entry")
    return Layout(layout.dims[:dim] + layout.dims[dim + 1 :], layout.frame)


def written_slice(node: fx.Node, arguments: Arguments) -> Layout:
    """slice_scatter and select_scatter along a feature dimension (what `x[..., a:b] = y` becomes)."""
    layout, part = arguments[node.args[0]], arguments[node.args[1]]
    dim = require_feature(layout, _argument(node, 2, "dim") or 0, "writes a part")
    others = layout.dims if node.target is aten.slice_scatter.default else (*layout.dims[:dim], *layout.dims[dim + 1 :])
    if part.dims != others:
        raise MixesTokens("it writes a part that lies differently along the batch and token axes")
    return Layout(layout.dims, unify_frames([layout.frame, part.frame]))


def normalization(results: int) -> Rule:
    """Rule for layer and RMS norms over the last `len(normalized_shape)` dimensions, with their statistics."""

    def rule(node: fx.Node, arguments: Arguments) -> tuple[Layout, ...]:
        layout = arguments[node.args[0]]
        for dim in range(len(layout.dims) - len(node.args[1]), len(layout.dims)):
            require_feature(layout, dim, "normalises")
        return (layout,) * results

    return rule


def triangle(node: fx.Node, arguments: Arguments) -> Layout:
    layout = arguments[node.args[0]]
    for dim in (-1, -2):
        require_feature(layout, dim, "cuts a triangle")
    return layout


def diagonal(node: fx.Node, arguments: Arguments) -> Layout:
    layout = arguments[node.args[0]]
    taken = {
        require_feature(layout, _argument(node, i, f"dim{i - 1}"), "takes the diagonal") for i in (2, 3)
    }
    return Layout((*(axis for i, axis in enumerate(layout.dims) if i not in taken), None), layout.frame)


def unfold(node: fx.Node, arguments: Arguments) -> Layout:
    layout = arguments[node.args[0]]
    require_feature(layout, node.args[1], "takes windows")
    return Layout((*layout.dims, None), layout.frame)


def bucketize(node: fx.Node, arguments: Arguments) -> Layout:
    if arguments[node.args[1]].labelled:
        raise MixesTokens("it sorts into boundaries that are computed per token")
    return arguments[node.args[0]]


def view_as_complex(node: fx.Node, arguments: Arguments) -> Layout:
    layout = arguments[node.args[0]]
    require_feature(layout, -1, "pairs real and imaginary parts")
    return Layout(layout.dims[:-1], layout.frame)


def view_as_real(node: fx.Node, arguments: Arguments) -> Layout:
    layout = arguments[node.args[0]]
    return Layout((*layout.dims, None), layout.frame)


def convolution(node: fx.Node, arguments: Arguments) -> Layout:
    """A convolution whose kernel is one token wide is a linear map of every token."""
    _, weight, _, stride, padding = node.args[:5]
    layout = arguments[node.args[0]]
    require_feature(layout, 1, "convolves")
    if any(size != 1 for size in sizes(weight)[2:]) or any(s != 1 for s in stride) or any(padding):
        raise MixesTokens("it convolves along the token axis")
    return layout


def constant_pad(node: fx.Node, arguments: Arguments) -> Layout:
    layout = arguments[node.args[0]]
    for i in range(len(node.args[1]) // 2):
        if tuple(node.args[1][2 * i : 2 * i + 2]) != (0, 0):
            require_feature(layout, -1 - i, "pads")
    return layout


def repeat(node: fx.Node, arguments: Arguments) -> Layout:
    layout, repeats = arguments[node.args[0]], node.args[1]
    added = len(repeats) - len(layout.dims)
    for i, axis in enumerate(layout.dims):
        if axis is not None and repeats[added + i] != 1:
            raise MixesTokens("it repeats along the token or batch axis")
    return Layout((None,) * added + layout.dims, layout.frame)


def attention(node: fx.Node, arguments: Arguments) -> Layout:
    """The one operator that may look along the token axis: query, key and value `[B, heads, S, D]`."""
    query = arguments[node.args[0]]
    for operand in node.args[:3]:
        layout = arguments[operand]
        if layout.dims[1:] != (None, Axis.TOKEN, None) or layout.dims[0] not in (Axis.BATCH, None):
            raise MixesTokens(f"attention expects [batch, heads, tokens, head_dim], got {layout}")
        if layout.frame != query.frame:
            raise MixesTokens("its queries and keys are different tokens (a KV cache, or cross-attention)")
    return query


def item(node: fx.Node, arguments: Arguments) -> Layout:
    raise AssertionError("getitem is resolved by the token_axis pass")


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _register(rule: Rule, *ops: Any) -> None:
    RULES.update(dict.fromkeys(ops, rule))


_register(pointwise, aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default)
_register(pointwise, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.copy.default)
_register(pointwise, aten.lift_fresh_copy.default, aten.contiguous.default, aten.fill.Scalar, aten.fill.Tensor)
_register(pointwise, aten.hardswish.default, aten._prelu_kernel.default, aten.complex.default, aten.polar.default)
_register(pointwise, aten._conj.default, aten._conj_physical.default, aten.resolve_conj.default, aten.real.default)
_register(like, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default)
_register(view, aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_register(permuted(_transpose_order), aten.transpose.int, aten.t.default)
_register(permuted(lambda node, rank: [d % rank for d in node.args[1]]), aten.permute.default)
_register(unsqueeze, aten.unsqueeze.default)
_register(squeeze, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
_register(expand, aten.expand.default)
_register(slice_, aten.slice.Tensor)
_register(select, aten.select.int)
_register(written_slice, aten.slice_scatter.default, aten.select_scatter.default)
_register(stack, aten.stack.default)
_register(split, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
_register(cat, aten.cat.default)
_register(matmul(0, 1), aten.mm.default, aten.bmm.default, aten.mv.default)
_register(matmul(1, 2), aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
_register(embedding, aten.embedding.default)
_register(index_tensor, aten.index.Tensor)
_register(index_put, aten.index_put.default)
_register(index_select, aten.index_select.default)
_register(gather, aten.gather.default)
_register(scatter, aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
_register(along_features("normalises", 1), aten._softmax.default, aten._log_softmax.default)
_register(along_features("sums", 1, 2), aten.sum.dim_IntList, aten.mean.dim, aten.any.dim, aten.all.dim)
_register(
    along_features("reduces", 1, 2), aten.amax.default, aten.amin.default, aten.prod.dim_int, aten.logsumexp.default
)
_register(along_features("reduces", 1, 2), aten.argmax.default, aten.argmin.default)
_register(along_features("reduces", 1, 3), aten.var.correction, aten.std.correction)
_register(along_features("reduces", 1, 3, results=2), aten.var_mean.correction)
_register(along_features("reduces", 2, 3), aten.linalg_vector_norm.default)
_register(along_features("reduces", 1, 2, results=2), aten.max.dim, aten.min.dim)
_register(along_features("accumulates", 1), aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)
_register(along_features("reorders", 1), aten.flip.default, aten.glu.default)
_register(along_features("accumulates", 1, results=2), aten.cummax.default, aten.cummin.default)
_register(along_features("reduces", 1, 2, results=2), aten.median.dim, aten.nanmedian.dim, aten.mode.default)
_register(along_features("reduces", 2, 3, results=2), aten.kthvalue.default)
_register(along_features("sums", 2, 3), aten.norm.ScalarOpt_dim)
_register(along_features("sorts", 1, results=2), aten.sort.default)
_register(along_features("sorts", 2, results=2), aten.sort.stable)  # its dim is given by name
_register(along_features("selects the largest", 2, results=2), aten.topk.default)
_register(normalization(3), aten.native_layer_norm.default)
if hasattr(aten, "_fused_rms_norm"):
    _register(normalization(2), aten._fused_rms_norm.default)
_register(triangle, aten.tril.default, aten.triu.default)
_register(diagonal, aten.diagonal.default)
_register(unfold, aten.unfold.default)
_register(bucketize, aten.bucketize.Tensor)
_register(view_as_complex, aten.view_as_complex.default)
_register(view_as_real, aten.view_as_real.default)
_register(convolution, aten.convolution.default)
_register(constant_pad, aten.constant_pad_nd.default)
_register(repeat, aten.repeat.default)
_register(attention, torch.ops.dta.attention_call.default)
_register(item, operator.getitem)


def rule_for(target: Any) -> Rule | None:
    """The rule of an operator, `pointwise` for those that torch itself tags so, or None."""
    if target in RULES:
        return RULES[target]
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in target.tags:
        if torch.Tag.pointwise in target.tags:
            return pointwise
    return None


def register_token_rule(op: Any, rule: Rule) -> None:
    """Declare how an operator treats the token axis (DESIGN section 3, pass `token_axis`).

    Args:
        op: an operator overload, such as `torch.ops.my_library.my_op.default`.
        rule: called as `rule(node, arguments)`; `arguments[node.args[i]]` is the `Layout` of the i-th argument. It returns
            the `Layout` of the result (a tuple of them for several results) or raises `MixesTokens(reason)`.
            `pointwise` from this module serves any elementwise operator.

    The operator must work on any number of tokens, and give each token the same result whatever its neighbours are.
    """
    if not isinstance(op, torch._ops.OpOverload):
        from dta_compile.errors import OptionError

        raise OptionError(
            "register_token_rule needs an operator overload",
            expected="for example torch.ops.my_library.my_op.default",
            got=repr(op),
        )
    RULES[op] = rule
