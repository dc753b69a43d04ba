"""Token rules for operators that only move entries (views, slices, ...), and names of dimensions behind views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from torch import fx

from dta_compile.executable.layouts import Axis, Flat, Frame, Layout, flat
from dta_compile.passes.axes.layouts import Arguments, MixesTokens, broadcast, require_feature, unify_frames
from dta_compile.passes.axes.refusals import OTHER_TOKENS, RECURRENCE, STREAMS, WRITES
from dta_compile.passes.graphs.arguments import argument, dim_of, operand_dims
from dta_compile.passes.graphs.operators import RESHAPES, SQUEEZES, aten
from dta_compile.passes.program import has_tensor
from dta_compile.passes.symbols import expression, sizes, value_of

AnyAxis = Axis | Flat
Labels = tuple[str | None, ...]  # names of the dimensions of a value; None: any
Factor = tuple[AnyAxis | None, sympy.Expr]  # of a dimension: an axis, or None for features, and its size
FLATTENED: dict[Any, tuple[Axis, Axis]] = {
    Axis.ROWS: (Axis.BATCH, Axis.TOKEN),
    Axis.TOKEN_ROWS: (Axis.TOKEN, Axis.BATCH),
}


def like(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for a constructor that takes its shape from its first argument."""
    return arguments[node.args[0]]


def rearranged(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for permutations, `squeeze`, `unsqueeze` and `expand`: they must neither drop nor add a token axis."""
    layout, dims = arguments[node.args[0]], operand_dims(node)
    assert dims is not None
    if any(dim is None and size.free_symbols for dim, size in zip(dims, sizes(node), strict=True)):
        raise MixesTokens("it repeats a value along a batch or token axis it did not have")
    if layout.token_dim is not None and layout.token_dim not in dims:
        raise MixesTokens("it drops the axis of a single token")
    return Layout(tuple(None if dim is None else layout.dims[dim] for dim in dims), layout.frame)


def labels_in(arg: Any, labels: Labels) -> Labels:
    """Return the labels of an operand that is broadcast to a value with these labels; () for a number."""
    if not isinstance(arg, fx.Node) or not has_tensor(arg):
        return ()
    shape = sizes(arg)
    own = labels[len(labels) - len(shape) :]
    return tuple(None if size == 1 else label for size, label in zip(shape, own, strict=True))


def labelled_source(node: fx.Node, labels: Labels) -> tuple[fx.Node, Labels] | None:
    """Return the operand that a node is a copy or a view of, all of it, and its labels; None for other nodes."""
    if (dims := operand_dims(node)) is not None and node.target not in SQUEEZES:
        source = node.args[0]
        own = (labels[dims.index(i)] if i in dims else None for i in range(len(sizes(source))))
        return source, labels_in(source, labels) if node.target is aten.expand.default else tuple(own)
    if node.target not in RESHAPES:
        return None
    before, after = sizes(node.args[0]), sizes(node)
    left = iter([label for label, size in zip(labels, after, strict=True) if size != 1])
    if [size for size in before if size != 1] != [size for size in after if size != 1]:
        return None
    return node.args[0], tuple(None if size == 1 else next(left) for size in before)


def view(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for reshapes: sequences, tokens and features are flattened together, and taken apart again."""
    source = node.args[0]
    layout, before, after = arguments[source], sizes(source), sizes(node)
    dims: list[AnyAxis | None] = [None] * len(after)
    for group_in, group_out in reshape_groups(before, after):
        flattened = [factor for i in group_in if before[i] != 1 for factor in factors(layout, i, before[i])]
        if all(axis is None for axis, _ in flattened):
            continue
        targets = [j for j in group_out if after[j] != 1]
        regrouped = _regrouped(flattened, [after[j] for j in targets])
        if regrouped is None:
            raise MixesTokens(f"it reshapes {layout} of sizes {before} to {after}, across the token axis")
        for j, axis in zip(targets, regrouped, strict=True):
            dims[j] = axis
    _keep_single_token(layout, dims, after)
    result = Layout(tuple(dims), layout.frame)
    if result.has_flat and result.token_dim is None:
        raise MixesTokens(f"it reshapes {layout} of sizes {before} to {after}, across the batch axis")
    return result


def factors(layout: Layout, dim: int, size: sympy.Expr) -> list[Factor]:
    """Return what a dimension flattens, the slowest first."""
    axis = layout.dims[dim]
    parts = axis.factors if isinstance(axis, Flat) else FLATTENED.get(axis, ())
    if not parts or layout.frame is None:
        return [(axis, size)]
    counts: dict[Axis | int, sympy.Expr] = {part: sympy.Integer(part) for part in parts if isinstance(part, int)}
    counts[Axis.TOKEN] = layout.frame.length
    sequences = sympy.cancel(size / sympy.Mul(*(counts[part] for part in parts if part is not Axis.BATCH)))
    return [(part if isinstance(part, Axis) else None, counts.get(part, sequences)) for part in parts]


def _regrouped(flattened: list[Factor], shape: Sequence[sympy.Expr]) -> list[AnyAxis | None] | None:
    """Return the axes of dimensions of these sizes that hold all factors in order; None if one cuts an axis."""
    left, dims = list(flattened), []
    for size in shape:
        parts: list[AnyAxis | int] = []
        while size != 1:
            if not left:
                return None
            axis, own = left.pop(0)
            rest = sympy.cancel(size / own)
            if axis is None and own.is_Integer and rest != 1 and (1 / rest).is_Integer:
                left.insert(0, (None, 1 / rest))
                own, rest = size, sympy.Integer(1)
            if rest.as_numer_denom()[1] != 1 or (axis is None and not own.is_Integer):
                return None
            if axis is None and parts and isinstance(parts[-1], int):
                parts[-1] *= int(own)
            else:
                parts.append(int(own) if axis is None else axis)
            size = rest
        if len(parts) > 1 and any(isinstance(part, Flat) or part in FLATTENED for part in parts):
            return None  # of tokens at unknown positions
        dims.append(_joined(tuple(parts)))
    return None if left else dims


def _joined(parts: tuple[AnyAxis | int, ...]) -> AnyAxis | None:
    if len(parts) == 1:
        return None if isinstance(parts[0], int) else parts[0]
    rows = next((axis for axis, both in FLATTENED.items() if both == parts), None)
    return rows or flat(parts)


def _keep_single_token(layout: Layout, dims: list[AnyAxis | None], after: Sequence[sympy.Expr]) -> None:
    """Keep the token axis of a window of one token: it is the first unlabelled dimension of size one."""
    if layout.token_dim is None or Layout(tuple(dims)).token_dim is not None:
        return
    dim = next((j for j, size in enumerate(after) if size == 1 and dims[j] is None), None)
    if dim is None:
        raise MixesTokens("it drops the axis of a single token")
    dims[dim] = Axis.TOKEN


def reshape_groups(before: Sequence[sympy.Expr], after: Sequence[sympy.Expr]) -> list[tuple[list[int], list[int]]]:
    """Group the dimensions of a reshape into the smallest runs with equal products before and after, left to right."""
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        group_in, group_out = [i] if i < len(before) else [], [j] if j < len(after) else []
        product_in = before[i] if group_in else sympy.Integer(1)
        product_out = after[j] if group_out else sympy.Integer(1)
        i, j = i + len(group_in), j + len(group_out)
        while (ratio := sympy.cancel(product_out / product_in)) != 1:
            denominator = ratio.as_numer_denom()[1]
            if (denominator == 1 and i < len(before)) or j >= len(after):
                if i >= len(before):
                    break
                group_in, product_in, i = [*group_in, i], product_in * before[i], i + 1
            else:
                group_out, product_out, j = [*group_out, j], product_out * after[j], j + 1
        groups.append((group_in, group_out))
    return groups


def slice_(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `slice`: along features, or a window of tokens, which moves the frame."""
    source = node.args[0]
    layout, before, after, dim = arguments[source], sizes(source), sizes(node), dim_of(node)
    if layout.dims[dim] is None or before[dim] == after[dim]:
        return layout
    step, axis = argument(node, "step"), "token" if layout.dims[dim] is Axis.TOKEN else "batch"
    if step not in (None, 1):
        raise MixesTokens(f"it takes one in {step} entries of the {axis} axis", OTHER_TOKENS)
    if axis == "batch" or layout.frame is None or layout.frame.start is None:
        raise MixesTokens(f"it slices the {axis} axis")
    start = argument(node, "start") or 0
    start = value_of(start)
    first = expression(start) + (before[dim] if start < 0 else 0)  # comparing a symbolic start adds a guard
    return Layout(layout.dims, Frame(sympy.simplify(layout.frame.start + first), after[dim]))


def select(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `select` of an entry of a feature dimension, which it drops."""
    layout = arguments[node.args[0]]
    written = (reader for user in node.users for reader in user.users if reader.target is aten.select_scatter.default)
    dim = require_feature(layout, argument(node, "dim"), "selects one entry", WRITES if any(written) else OTHER_TOKENS)
    return Layout((*layout.dims[:dim], *layout.dims[dim + 1 :]), layout.frame)


def cat(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `cat` along features, or of values over the same tokens, one after the other."""
    parts, dim = list(node.args[0]), argument(node, "dim")
    parts = [part for part in parts if len(sizes(part)) > 1 or sizes(part) != (0,)]
    layout = arguments[parts[0]]
    if layout.token_dim is not None and all(arguments[part] == layout for part in parts):
        rank = len(layout.dims)
        return _of_copies(layout, [len(parts) if i == dim % rank else 1 for i in range(rank)])
    for part in parts:
        require_feature(arguments[part], dim, "concatenates")
    return broadcast(node, arguments, parts)


def _of_copies(layout: Layout, times: Sequence[Any]) -> Layout:
    """Return the layout of several copies along each dimension, one after the other: copies are features."""
    dims = []
    for axis, number in zip(layout.dims, times, strict=True):
        if axis is not None and number != 1:
            if not isinstance(number, int) or layout.token_dim is None:
                raise MixesTokens(f"it repeats along the {'token' if axis.is_over_tokens else 'batch'} axis")
            axis = flat((number, *(axis.factors if isinstance(axis, Flat) else FLATTENED.get(axis, (axis,)))))
        dims.append(axis)
    return Layout(tuple(dims), layout.frame)


def stack(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `stack` along a new feature dimension."""
    layout = broadcast(node, arguments, list(node.args[0]))
    dim = argument(node, "dim") % (len(layout.dims) + 1)
    return Layout((*layout.dims[:dim], None, *layout.dims[dim:]), layout.frame)


def split(node: fx.Node, arguments: Arguments) -> tuple[Layout, ...]:
    """Rule for `split` and `unbind` of a feature dimension; `unbind` drops it."""
    layout = arguments[node.args[0]]
    is_unbind = node.target is aten.unbind.int
    dim = require_feature(layout, argument(node, "dim"), "splits", RECURRENCE if is_unbind else STREAMS)
    if is_unbind:
        layout = Layout(layout.dims[:dim] + layout.dims[dim + 1 :], layout.frame)
    return (layout,) * len(node.meta["val"])


def written_slice(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `slice_scatter` and `select_scatter` along a feature dimension (`x[..., a:b] = y`, functionalised)."""
    layout, part = arguments[node.args[0]], arguments[node.args[1]]
    dim = require_feature(layout, argument(node, "dim"), "writes a part", WRITES)
    others = layout.dims if node.target is aten.slice_scatter.default else (*layout.dims[:dim], *layout.dims[dim + 1 :])
    if part.dims != others:
        raise MixesTokens("it writes a part that lies differently along the batch and token axes")
    return Layout(layout.dims, unify_frames([layout.frame, part.frame]))


def constant_pad(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for padding of feature dimensions."""
    layout = arguments[node.args[0]]
    for i in range(len(node.args[1]) // 2):
        if tuple(node.args[1][2 * i : 2 * i + 2]) != (0, 0):
            require_feature(layout, -1 - i, "pads")
    return layout


def repeat(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `repeat`: copies along dimensions, one after the other, and new dimensions in front."""
    layout, repeats = arguments[node.args[0]], node.args[1]
    added = len(repeats) - len(layout.dims)
    copies = _of_copies(layout, repeats[added:])
    return Layout((None,) * added + copies.dims, layout.frame)


def diagonal(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `diagonal`: two feature dimensions become one, the last."""
    layout = arguments[node.args[0]]
    removed = {require_feature(layout, argument(node, name), "takes the diagonal") for name in ("dim1", "dim2")}
    return Layout((*(axis for i, axis in enumerate(layout.dims) if i not in removed), None), layout.frame)


def with_last(node: fx.Node, arguments: Arguments) -> Layout:
    """Rule for `view_as_real`, and for `unfold` of a feature dimension: entries run along a new last dimension."""
    layout = arguments[node.args[0]]
    if node.target is aten.unfold.default:
        require_feature(layout, node.args[1], "takes windows")
    return Layout((*layout.dims, None), layout.frame)
