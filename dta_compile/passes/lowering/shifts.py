"""Replace token shifts that a model writes with slices by the `token_shift` mixer, and causal depthwise convolutions.

    cat([x[:, :1], x[:, 1:] + g * x[:, :-1]], 1)
    pad(x, (0, 0, 1, -1))                pad(x, (0, 0, 1, 0))[:, :-1]             RWKV's token shift
    y = roll(x, 1, 1);  y[:, 0] = 0
    conv1d(pad(x, (2, 0)), weight)       of any groups and dilation; also with `padding` and a slice of the result
    pad(x, (2, 0)).unfold(2, 3, 1)       windows
    conv1d(x, weight, padding=k - 1, groups=D)[..., :S]          `short_convolution`, as conv1d(pad(x, (k - 1, 0)), ...)

Each value has all tokens of the call; its entry `t` reads entries `t` and `t - k` of other values, its first entries
something else. `lower` calls this to extend the slices to all tokens: `x[:, 1:]` to `x`, and `x[:, :-1]`, which is used
one token later, to `x` shifted by a token, a recurrence whose state is the previous token. The first tokens are
selected by their index. Values that would read a later token remain, and are refused later like any other mixing.

The operators that combine slices run for the first tokens as well, over a state of zeros, with a result that is not
selected and a gradient of zero. Since 0 * inf is NaN, only operators are supported that are finite at zero, with finite
derivatives, such as linear layers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.axes.layouts import batch_and_tokens, mixer_calls
from dta_compile.passes.graphs.arguments import argument, dim_of, order_of, select_of, slice_of
from dta_compile.passes.graphs.nodes import (
    behind,
    call,
    descendants,
    erase_unused,
    filled_with,
    is_finite,
    is_float,
    is_pointwise,
    of_rows,
    raised,
)
from dta_compile.passes.graphs.operators import (
    CASTS,
    COPIES,
    DIFFERENTIABLE_COPIES,
    LINEAR_LAYERS,
    MATRIX_PRODUCTS,
    RESHAPES,
    TRANSPOSITIONS,
    aten,
)
from dta_compile.passes.program import ancestors, has_tensor
from dta_compile.passes.symbols import expression, sizes, value_of
from dta_compile.torch_compat.sizes import Min, Mod, PythonMod

ROOTS = frozenset(
    {
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten.convolution.default,
        aten.select_scatter.default,
        aten.slice.Tensor,
        aten.slice_scatter.default,
        aten.unfold.default,
    }
)


class _NoShift(Exception):
    """A value is not made of shifted tokens."""


@dataclasses.dataclass(frozen=True)
class _Extended:
    """Extension of a value to all tokens, with the value's entries from token `begin` on."""

    node: fx.Node
    begin: int = 0


def shifts_to_mixers(graph: fx.Graph, parameters: Iterable[fx.Node]) -> None:
    """Replace shifts whose result attention or a layer reads, in place; `graph` is functional."""
    calls = mixer_calls(graph)
    if not calls:
        return
    first, *others = dict.fromkeys(map(batch_and_tokens, calls))
    over = [(batch, tokens) for batch, tokens in others if tokens.is_Symbol]  # further batches, see `other_batches`
    parameters = list(parameters)
    data = [node for node in graph.find_nodes(op="placeholder") if node not in parameters and has_tensor(node)]
    with_gradient, of_data = descendants(graph, parameters), descendants(graph, data)
    before = ancestors([*calls, *layers(graph, of_data)])
    for batch, tokens in (first, *over) if first[1].free_symbols else ():
        for node in list(graph.nodes):
            if node.target not in ROOTS or node not in before or node not in with_gradient or not is_float(node):
                continue
            with graph.inserting_before(node):
                if (value := _whole(node, batch, tokens, of_data, with_gradient)) is not None:
                    node.replace_all_uses_with(value)
        erase_unused(graph)


def layers(graph: fx.Graph, of_data: set[fx.Node]) -> list[fx.Node]:
    """Return the products of data with values of parameters alone; a loss applies none to the values that it shifts."""
    products = (node for node in graph.nodes if node.target in MATRIX_PRODUCTS and node in of_data)
    return [node for node in products if any(has_tensor(arg) and arg not in of_data for arg in node.args[-2:])]


def _whole(
    node: fx.Node, batch: sympy.Expr, tokens: sympy.Expr, of_data: set[fx.Node], with_gradient: set[fx.Node]
) -> fx.Node | None:
    """Return a value to replace a node of shifted tokens by; None for other nodes."""
    if node.target is aten.slice_scatter.default:
        base, part, *bounds = node.args
        if sizes(node) == sizes(part):
            return part  # writes all entries: the outer one of two nodes for `y[:, 0] = x`
        if part.target is aten.slice.Tensor and part.args == (base, *bounds):
            return base  # `y[:, 1:] += x` writes back a slice that was added to in place
    dim = _dim_of(node)
    if dim is None or sizes(node)[dim] != tokens:
        return None
    if node.target is aten.slice.Tensor and sizes(node.args[0])[dim] == tokens:
        return None  # all of the tokens
    shifts, last = _Shifts(node, dim, batch, tokens, of_data, with_gradient), node.prev
    try:
        with node.meta["val"].fake_mode:  # for constructors
            value = shifts.assembled(node, 0)
            value = _Extended(shifts.as_wide(value.node, node), value.begin)
    except _NoShift:
        return None
    if value.node.meta["val"].dtype != node.meta["val"].dtype:
        return None
    while (last := last.next) is not node:
        last.meta = {**node.meta, **last.meta}
    is_part = node.target is aten.slice.Tensor  # may cut off what was put in front
    return value.node if value.begin == 0 and (shifts.any or is_part) else None


def _dim_of(node: fx.Node) -> int | None:
    """Return the dimension along which a node joins or cuts entries; None if it pads several."""
    rank = node.meta["val"].dim() - (node.target is aten.unfold.default)
    if node.target is aten.constant_pad_nd.default:
        padded = [i for i, count in enumerate(node.args[1]) if not isinstance(count, int) or count != 0]
        dims = {rank - 1 - i // 2 for i in padded}
        return dims.pop() if len(dims) == 1 else None
    if node.target is aten.convolution.default:
        return rank - 1
    return node.args[1] % rank if node.target is aten.unfold.default else dim_of(node)


class _Shifts:
    """Extension of values to `tokens` entries along one dimension.

    Args:
        of_data: nodes that depend on data.
        with_gradient: nodes that depend on parameters. The others are computed for the batch, before the tree.
    """

    def __init__(
        self,
        root: fx.Node,
        dim: int,
        batch: sympy.Expr,
        tokens: sympy.Expr,
        of_data: set[fx.Node],
        with_gradient: set[fx.Node],
    ) -> None:
        self.root, self.graph, self.batch, self.tokens, self.of_data = root, root.graph, batch, tokens, of_data
        self.with_gradient = with_gradient
        self.back = root.meta["val"].dim() - dim  # the dimension, counted from the end
        self.any = False  # whether anything is shifted
        self._sizes: dict[sympy.Expr, fx.Node] = {}

    def _dim(self, node: fx.Node) -> int:
        return int(node.meta["val"].dim()) - self.back

    def _size(self, node: fx.Node) -> sympy.Expr:
        """Return the size along the dimension; 1 for a value that lacks it."""
        dim = self._dim(node)
        return sizes(node)[dim] if dim >= 0 else sympy.S.One

    def _is_of_no_token(self, node: fx.Node) -> bool:
        """Return whether a value, such as a weight or a number, is the same for all tokens."""
        has_symbols = any(size.free_symbols for size in sizes(node))
        return self._dim(node) < 0 or (self._size(node) == 1 and not has_symbols and node not in self.of_data)

    def at(self, node: fx.Node, offset: int) -> _Extended:
        """Return a value of all tokens whose entry `t + offset` is entry `t` of a node; raises `_NoShift`."""
        value = self._at(node, offset)
        # A number in the place of a filled tensor has no dimensions, and makes no other operand of wider dtype; for
        # operators that look at sizes, `as_wide` brings these back.
        self._require(value.node.meta["val"].dtype == node.meta["val"].dtype)
        return value

    def as_wide(self, value: fx.Node, node: fx.Node) -> fx.Node:
        """Repeat a value in the place of a node to the sizes of the node, and to all tokens."""
        shape = [self.tokens if dim == self._dim(node) else size for dim, size in enumerate(sizes(node))]
        if sizes(value) == tuple(shape):
            return value
        shape = [int(size) if size.is_Integer else self._size_of_call(size) for size in shape]
        return call(self.graph, aten.expand.default, value, shape)

    def _at(self, node: fx.Node, offset: int) -> _Extended:
        if self._is_of_no_token(node):
            return _Extended(node)
        if isinstance(filler := filled_with(node), (int, float)):
            return _Extended(self._number(node, filler))
        if node.target is aten.fill.Tensor:
            return self.at(node.args[1], offset)
        if node.target is aten.expand.default and self._size(node.args[0]) == 1:
            self._require(self._size(node) == 1 or self._is_of_no_token(node.args[0]))
            return self.at(node.args[0], offset)
        try:
            return self.assembled(node, offset)
        except _NoShift:
            if self._size(node) != self.tokens or offset < 0:
                raise
        return _Extended(self._shifted(node, offset), offset)

    def assembled(self, node: fx.Node, offset: int) -> _Extended:
        """Return the same for a node that joins, cuts or combines values; raises `_NoShift`."""
        if node.op != "call_function" or not has_tensor(node):
            raise _NoShift
        target, args = node.target, node.args
        if target is aten.cat.default:
            return self._joined(node, offset)
        if target is aten.slice.Tensor:
            if sizes(node) == sizes(args[0]):
                return self.at(args[0], offset)
            if dim_of(node) != self._dim(node):
                return self._combined(node, offset)
            part = slice_of(node)
            if part is None or type(part.start) is not int or part.start < 0:
                raise _NoShift
            return self.at(part.source, offset - part.start)
        if target is aten.constant_pad_nd.default:
            self._require(_dim_of(node) == self._dim(node))
            before, after = (self._number_of_tokens(count) for count in args[1][2 * self.back - 2 : 2 * self.back])
            return self._padded(args[0], before, after, argument(node, "value"), offset)
        if target is aten.convolution.default:
            return self._convolved(node, offset)
        if target is aten.unfold.default:
            return self._windows(node, offset)
        if target in TRANSPOSITIONS and self._size(node) != self.tokens:
            return self._transposed(node, offset)
        if target is aten.index_select.default:
            self._require(args[1] % node.meta["val"].dim() == self._dim(node) and self._size(args[0]) == self.tokens)
            count = offset + self._rolled_by(args[2])
            rolled = self.at(args[0], count)
            return _Extended(rolled.node, max(rolled.begin, count))
        if target in (aten.slice_scatter.default, aten.select_scatter.default):
            return self._written(node, offset)
        if target in RESHAPES:
            return self._projected(node, offset)
        is_finite_pointwise = target in COPIES | CASTS or (is_pointwise(node) and is_finite(node))
        self._require(is_finite_pointwise and self._size(node) != self.tokens)
        return self._combined(node, offset)

    def _number(self, node: fx.Node, number: float) -> fx.Node:
        return call(self.graph, aten.full.default, [], number, **_like(node))

    def _rolled_by(self, index: fx.Node) -> int:
        """Return by how many tokens `roll` shifts; its index is traced as `(arange(S) + (S - k) % S) % S`."""
        self._require(index.target is aten.fmod.Scalar and index.args[0].target is aten.add.Tensor)
        positions, start = index.args[0].args[:2]
        length = value_of(index.args[1])
        is_range = positions.target is aten.arange.default
        self._require(is_range and expression(value_of(positions.args[0])) == self.tokens)
        self._require(expression(length) == self.tokens)
        begin = expression(value_of(start))
        count = self.tokens - (begin.args[0] if begin.func in (Mod, PythonMod) else begin)
        self._require(count.is_Integer and count > 0)
        self._require(length >= int(count))  # a guard
        return int(count)

    def _number_of_tokens(self, count: fx.Node | int) -> int:
        """Return by how many tokens `pad` shifts; `min(k, S)` is k in rows of at least k tokens."""
        tokens = expression(value_of(count))
        for least in tokens.atoms(Min):
            number = sympy.Mul(*(arg for arg in least.args if arg.is_Integer))
            self._require(least == Min(number, self.tokens))
            self._require(value_of(self._size_of_call(self.tokens)) >= int(number))  # a guard
            tokens = tokens.xreplace({least: number})
        self._require(tokens.is_Integer)
        return int(tokens)

    def _require(self, holds: Any) -> None:
        if not holds:
            raise _NoShift

    def _padded(self, node: fx.Node, before: int, after: int, number: float, offset: int) -> _Extended:
        """Return a value with numbers before and after its entries, of which no token may read the latter."""
        beyond = offset + before + self._size(node) - self.tokens
        self._require(after <= 0 or (beyond.is_Integer and beyond >= 0))
        filler = _Extended(self._number(node, number))
        return self._first(offset + before, filler, self.at(node, offset + before))

    def _convolved(self, node: fx.Node, offset: int) -> _Extended:
        """Apply a convolution to all tokens, as a product for each group over the channels of all tokens it reads."""
        if offset == 0 and (short := self._short_convolution(node)) is not None:
            return _Extended(short)
        source, weight, bias, stride, padding, dilation, is_transposed, _, groups = node.args
        self._require(all(size.is_Integer for size in (sizes(source)[1], *sizes(weight))))
        channels, width = (int(size) for size in (sizes(source)[1], sizes(weight)[-1]))
        self._require(self.back == 1 and len(sizes(source)) == 3 and stride == [1] and not is_transposed)
        every = range(0, width * dilation[0], dilation[0])
        taps = [self._padded(source, padding[0], padding[0], 0, offset - tap) for tap in every]
        self._require(all(sizes(tap.node)[1:] == (channels, self.tokens) for tap in taps))
        lead = [call(self.graph, aten.sym_size.int, taps[0].node, i) for i in (0, 2)]
        read = call(self.graph, aten.stack.default, [tap.node for tap in taps], -1)
        read = call(self.graph, aten.permute.default, read, [1, 3, 0, 2])
        shape, results = [groups, channels // groups * width], int(sizes(weight)[0])
        read = call(self.graph, aten.reshape.default, read, [*shape, -1])
        weight = call(self.graph, aten.reshape.default, weight, [groups, results // groups, shape[1]])
        out = call(self.graph, aten.bmm.default, weight, read)
        out = call(self.graph, aten.reshape.default, out, [results, *lead])
        out = call(self.graph, aten.permute.default, out, [1, 0, 2])
        if bias is not None:
            out = call(self.graph, aten.add.Tensor, out, call(self.graph, aten.unsqueeze.default, bias, 1))
        return _Extended(out, max(tap.begin for tap in taps))

    def _short_convolution(self, node: fx.Node) -> fx.Node | None:
        """Insert the mixer for a causal convolution of all tokens `[B, D, S]` by channel; None: it is another one."""
        source, weight, bias, stride, padding, dilation, is_transposed, _, groups = node.args
        if not sizes(weight)[-1].is_Integer:  # a kernel as long as the row
            return None
        width, before = int(sizes(weight)[-1]), padding[0]
        if source.target is aten.constant_pad_nd.default and not argument(source, "value") and before == 0:
            before, *others = source.args[1]
            if any(others):
                return None
            source = source.args[0]
        is_causal = before == width - 1 > 0 and [*stride, *dilation] == [1, 1] and not is_transposed
        is_by_channel = sizes(weight) == (groups, 1, width) and sizes(source) == (self.batch, groups, self.tokens)
        if not is_causal or not is_by_channel:
            return None
        self.any = True
        rows = call(self.graph, aten.permute.default, source, [0, 2, 1])
        taps = call(self.graph, aten.reshape.default, weight, [groups, width])
        out = call(self.graph, torch.ops.dta.short_convolution.default, rows, taps, None)
        if bias is not None:
            out = call(self.graph, aten.add.Tensor, out, bias)
        return call(self.graph, aten.permute.default, out, [0, 2, 1])

    def _along(self, source: fx.Node, dim: int, *offsets: int) -> list[_Extended]:
        """Return a value of all tokens, which run along another dimension, for each offset."""
        other = copy.copy(self)
        other.back = int(source.meta["val"].dim()) - dim
        values = [other.at(source, offset) for offset in offsets]
        self.any |= other.any
        return values

    def _transposed(self, node: fx.Node, offset: int) -> _Extended:
        source, *order = node.args
        dims = order_of(node, len(sizes(node)))
        (value,) = self._along(source, dims[self._dim(node)], offset)
        self._require(len(sizes(value.node)) == len(dims))
        return _Extended(call(self.graph, node.target, value.node, *order), value.begin)

    def _windows(self, node: fx.Node, offset: int) -> _Extended:
        """Return the windows of all tokens, which run along a new last dimension."""
        source, _, width, step = node.args
        self._require(self._dim(node) == _dim_of(node) and step == 1)
        parts = self._along(source, self._dim(node), *(offset - tap for tap in range(width)))
        shapes = {sizes(part.node) for part in parts}
        self._require(len(shapes) == 1 and len(shapes.pop()) == len(sizes(source)))
        windows = call(self.graph, aten.stack.default, [part.node for part in parts], -1)
        return _Extended(windows, max(part.begin for part in parts))

    def _joined(self, node: fx.Node, offset: int) -> _Extended:
        """Join parts, all but the last of which have a constant size."""
        self._require(dim_of(node) == self._dim(node))
        *first, last = node.args[0]
        counts = [self._size(part) for part in first]
        self._require(all(count.is_Integer for count in counts))
        dtype = node.meta["val"].dtype
        value = self._cast(self.at(last, offset + int(sum(counts))), dtype)
        for i in reversed(range(len(first))):
            part = self._cast(self.at(first[i], offset + int(sum(counts[:i]))), dtype)
            value = self._first(offset + int(sum(counts[: i + 1])), part, value)
        return value

    def _cast(self, value: _Extended, dtype: torch.dtype) -> _Extended:
        if value.node.meta["val"].dtype is dtype:
            return value
        return _Extended(call(self.graph, aten._to_copy.default, value.node, dtype=dtype), value.begin)

    def _written(self, node: fx.Node, offset: int) -> _Extended:
        """Apply a write to the first entries of a value, or to all from some entry on."""
        base, part, dim, start, *others = node.args
        if dim % node.meta["val"].dim() != self._dim(node) and node.target is aten.slice_scatter.default:
            return self._combined(node, offset)  # some features of all its tokens
        self._require(dim % node.meta["val"].dim() == self._dim(node) and len(others) < 2)
        if node.target is aten.select_scatter.default:
            self._require(start == 0)
            return self._first(offset + 1, self._picked(part, offset), self.at(base, offset))
        start, count = start or 0, self._size(part)
        self._require(type(start) is int and start >= 0)
        if start + count == self._size(node):
            return self._first(offset + start, self.at(base, offset), self.at(part, offset + start))
        self._require(start == 0 and count.is_Integer)
        return self._first(offset + int(count), self.at(part, offset), self.at(base, offset))

    def _picked(self, node: fx.Node, offset: int) -> _Extended:
        """Return the value of one token that `select_scatter` writes, which lacks the dimension."""
        if (selected := select_of(node)) is not None:
            source, dim, index = selected
            self._require(dim == self._dim(source) and type(index) is int and index >= 0)
            return self.at(source, offset - index)
        self._require(node.target is aten.fill.Tensor or isinstance(filled_with(node), (int, float)))
        return _Extended(node.args[1] if node.target is aten.fill.Tensor else self._number(node, filled_with(node)))

    def _projected(self, node: fx.Node, offset: int) -> _Extended:
        """Apply a linear layer to all tokens; it is traced as a product of `[B * (S - 1), D]` with weights."""
        product = node.args[0]
        self._require(product.target in LINEAR_LAYERS)
        *bias, matrix, weight = product.args
        matrix = behind(matrix, RESHAPES | DIFFERENTIABLE_COPIES)
        shape = sizes(matrix)
        self._require(self.back == 2 and len(shape) == 3 and sizes(node)[:2] == shape[:2] and not product.kwargs)
        self._require(not any(size.free_symbols for value in (*bias, weight) for size in sizes(value)))
        source = self.at(matrix, offset)
        if not sizes(source.node):  # one number
            row = call(self.graph, aten.expand.default, source.node, [1, int(shape[2])])
            row = call(self.graph, product.target, *bias, row, weight)
            return _Extended(call(self.graph, aten.reshape.default, row, [-1]))
        self._require(sizes(source.node) == (shape[0], self.tokens, shape[2]))
        lead = [call(self.graph, aten.sym_size.int, source.node, i) for i in (0, 1)]
        rows = call(self.graph, aten.reshape.default, source.node, [-1, int(shape[2])])
        rows = call(self.graph, product.target, *bias, rows, weight)
        return _Extended(call(self.graph, aten.reshape.default, rows, [*lead, int(sizes(node)[2])]), source.begin)

    def _combined(self, node: fx.Node, offset: int) -> _Extended:
        """Apply a pointwise operator to all tokens of its operands."""
        operands = [arg for arg in node.all_input_nodes if has_tensor(arg)]
        same = (self._size(arg) == self._size(node) or self._is_of_no_token(arg) for arg in operands)
        self._require(all(same))  # a value of one token is not that of every token
        values = {arg: self.at(arg, offset) for arg in operands}
        nodes = {arg: value.node for arg, value in values.items()}
        if node.target in (aten.slice.Tensor, aten.slice_scatter.default):  # of features
            nodes = {arg: self.as_wide(value, arg) for arg, value in nodes.items()}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: nodes.get(arg, arg))
        return _Extended(call(self.graph, node.target, *args, **kwargs), max(value.begin for value in values.values()))

    def _first(self, count: int, first: _Extended, rest: _Extended) -> _Extended:
        """Select `first` before token `count`, and `rest` from there on."""
        if count <= 0:
            return rest
        self._require(rest.begin <= count)
        length = self._size_of_call(self.tokens)
        positions = call(self.graph, aten.arange.default, length, device=self.root.meta["val"].device)
        is_first = raised(call(self.graph, aten.lt.Scalar, positions, count), self.back - 1, -1)
        return _Extended(call(self.graph, aten.where.self, is_first, first.node, rest.node), first.begin)

    def _size_of_call(self, size: sympy.Expr) -> fx.Node:
        if size not in self._sizes:
            inputs = [node for node in self.graph.find_nodes(op="placeholder") if has_tensor(node)]
            dims = ((node, dim) for node in inputs for dim, own in enumerate(sizes(node)) if own == size)
            if (place := next(dims, None)) is None:
                raise _NoShift
            self._sizes[size] = call(self.graph, aten.sym_size.int, *place)
        return self._sizes[size]

    def _shifted(self, node: fx.Node, count: int) -> fx.Node:
        """Shift a value by `count` tokens, with zeros before the first."""
        if count == 0:
            return node
        self.any = True
        if node not in self.with_gradient:
            pads = [*[0, 0] * (self.back - 1), count, -count]
            return call(self.graph, aten.constant_pad_nd.default, node, pads)
        dim = self._dim(node)
        self._require(dim > 0 and sizes(node)[0] == self.batch)
        self._require(all(size.is_Integer for i, size in enumerate(sizes(node)) if i not in (0, dim)))

        def shift(rows: fx.Node) -> fx.Node:
            features, like = int(sizes(rows)[2]), _like(node)
            taps = [call(self.graph, aten.full.default, [features, n], tap, **like) for n, tap in ((1, 1), (count, 0))]
            weight = call(self.graph, aten.cat.default, taps, 1)
            return call(self.graph, torch.ops.dta.token_shift.default, rows, weight, None)

        return of_rows(node, dim, shift)


def shifted(node: fx.Node, dim: int, batch: sympy.Expr, tokens: sympy.Expr) -> fx.Node:
    """Return a value with a gradient of all tokens along a dimension, shifted by a token; the first keeps its own."""
    shifts = _Shifts(node, dim, batch, tokens, set(), {node})
    with node.meta["val"].fake_mode:  # for constructors
        return shifts._first(1, _Extended(node), _Extended(shifts._shifted(node, 1), 1)).node


def _like(node: fx.Node) -> dict[str, Any]:
    return {"dtype": node.meta["val"].dtype, "device": node.meta["val"].device}
