"""From a graph of dense operators to terms: which entries of its inputs an entry of a tensor is made of.

Operators that only move entries around become arithmetic on indices, pointwise ones stay as they are. A tensor that
any other operator makes is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.layouts import argument, expression, sizes
from dta_compile.passes.mask_terms import Const, Index, Term, Terms
from dta_compile.passes.nodes import is_pointwise
from dta_compile.passes.program import Program
from dta_compile.passes.shape_rules import reshape_groups, transpose_order

aten = torch.ops.aten

Indices = tuple[Term, ...]
ConstantOf = Callable[[Term, sympy.Expr], "float | None"]

COPIES = (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
# Torch does not tag these pointwise.
UNTAGGED = (aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.floor_divide.default)
FILLED = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.scalar_tensor.default: 0,
    aten.zeros_like.default: False,
    aten.ones_like.default: True,
}
SCANNED = "scanned"  # the index along which sums and cumulative sums go


class Elements:
    """Entries of the tensors of a program.

    Args:
        program: whose nodes are asked for.
        terms: where terms are made.
        constant_of: gives the number that a boolean or integer term is, whatever `SCANNED` is below a size; None: it is
            not the same everywhere.

    Attributes:
        items: numbers of the call that are read from a tensor, by the expression that Dynamo knows them by.
    """

    def __init__(self, program: Program, terms: Terms, constant_of: ConstantOf) -> None:
        self.program, self.terms, self.constant_of = program, terms, constant_of
        self.items: dict[sympy.Expr, fx.Node] = {}
        self._known: dict[tuple[fx.Node, Indices], Term] = {}
        self._first: dict[fx.Node, fx.Node] = {}
        self._computed: dict[tuple[Any, str], fx.Node] = {}

    def entry(self, node: fx.Node, index: Indices) -> Term:
        """The entry of a node's tensor at an index; along dimensions of size 1 the index is taken for 0."""
        index = tuple(self._zero if size == 1 else at for size, at in zip(sizes(node), index, strict=True))
        key = (node, index)
        if key not in self._known:
            rule = self._rule(node)
            found = rule(node, index) if rule is not None else None
            self._known[key] = self.terms.entry(self._first_like(node), index) if found is None else found
        return self._known[key]

    def _first_like(self, node: fx.Node) -> fx.Node:
        """The first node asked for that computes the same: `ids.eq(1).cumsum(1)` may be written once for each side."""
        if node.op != "call_function" or node in self.program.draws:
            return node
        if node not in self._first:
            same = fx.node.map_arg((node.args, node.kwargs), self._first_like)
            self._first[node] = self._computed.setdefault((node.target, repr(same)), node)
        return self._first[node]

    @property
    def _zero(self) -> Const:
        return self.terms.const(0)

    def _rule(self, node: fx.Node) -> Callable[[fx.Node, Indices], Term | None] | None:
        """How to get an entry of a node's result; None: only from the result itself."""
        if node.op == "get_attr":
            return self._attribute
        if node.op != "call_function":
            return None
        name = RULES.get(node.target)
        if name is None and is_pointwise(node):
            name = "_pointwise"
        return None if name is None else getattr(self, name)

    def _copy(self, node: fx.Node, index: Indices) -> Term:
        return self.entry(node.args[0], index)

    # Numbers

    def _number(self, arg: Any) -> sympy.Expr:
        """A size or an integer among a node's arguments."""
        return expression(arg.meta["val"] if isinstance(arg, fx.Node) else arg)

    def _scalar(self, arg: Any) -> Any:
        """A number that an operator takes: a term if it is one of the call's."""
        if not isinstance(arg, fx.Node):
            return arg
        value = arg.meta["val"]
        if not hasattr(value, "node"):
            return value
        if arg.target is aten._local_scalar_dense.default:
            self.items[value.node.expr] = arg.args[0]
        return self.terms.number(value.node.expr, torch.float64 if isinstance(value, torch.SymFloat) else torch.int64)

    def _plus(self, at: Term, offset: sympy.Expr) -> Term:
        if offset == 0:
            return at
        return self.terms.apply(aten.add.Scalar, at, self._python(offset))

    def _times(self, at: Term, factor: sympy.Expr) -> Term:
        return at if factor == 1 else self.terms.apply(aten.mul.Scalar, at, self._python(factor))

    def _python(self, expr: sympy.Expr) -> Any:
        """A size as operators of a tensor and a number take it."""
        return int(expr) if isinstance(expr, sympy.Integer) else self.terms.number(expr)

    def _clamped(self, at: Term, size: sympy.Expr) -> Term:
        """An index made to exist, where the entry is taken only if it does."""
        raised = self.terms.apply(aten.maximum.default, at, self._zero)
        return self.terms.apply(aten.minimum.default, raised, self._as_tensor(size - 1))

    def _as_tensor(self, expr: sympy.Expr) -> Term:
        """A number in the place of a tensor, as operators of two tensors want it."""
        return self._plus(self._zero, expr) if not isinstance(expr, sympy.Integer) else self.terms.const(int(expr))

    def _wrapped(self, at: Term, size: sympy.Expr) -> Term:
        """An index that counts from the end if it is negative."""
        if isinstance(at, Index) or (isinstance(at, Const) and at.value >= 0):
            return at
        is_negative = self.terms.apply(aten.lt.Scalar, at, 0)
        return self.terms.apply(aten.where.self, is_negative, self._plus(at, size), at)

    def _attribute(self, node: fx.Node, index: Indices) -> Term | None:
        value = getattr(self.program.module, str(node.target), None)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return self.terms.const(value.item(), value.dtype, value.dim() == 0)
        return None

    def _filled(self, node: fx.Node, index: Indices) -> Term | None:
        place, value = FILLED[node.target], node.meta["val"]
        fill = place if isinstance(place, bool) else self._scalar(node.args[place])
        if isinstance(fill, Term):
            return None if value.is_floating_point() else self._plus(self._zero, self._number(node.args[place]))
        return self.terms.const(torch.tensor(fill, dtype=value.dtype).item(), value.dtype, value.dim() == 0)

    def _arange(self, node: fx.Node, index: Indices) -> Term | None:
        bounds = node.args if len(node.args) > 1 else (0, *node.args)
        start, step = bounds[0], bounds[2] if len(bounds) > 2 else 1
        numbers = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in (start, step)]
        if not all(isinstance(number, (int, torch.SymInt)) for number in numbers):
            return None
        counted = self._plus(self._times(index[0], self._number(step)), self._number(start))
        return self._cast(counted, node.meta["val"].dtype)

    def _cast(self, term: Term, dtype: torch.dtype) -> Term:
        return term if term.dtype == dtype else self.terms.apply(aten._to_copy.default, term, dtype=dtype)

    # Pointwise operators

    def _aligned(self, node: fx.Node, index: Indices) -> Term:
        """The entry of an operand that broadcasts to `index`."""
        rank = node.meta["val"].dim()
        return self.entry(node, index[len(index) - rank :] if rank else ())

    def _pointwise(self, node: fx.Node, index: Indices) -> Term | None:
        def converted(arg: Any) -> Any:
            if isinstance(arg, fx.Node) and isinstance(arg.meta["val"], torch.Tensor):
                return self._aligned(arg, index)
            return self._scalar(arg)

        if any(isinstance(arg, (list, tuple)) for arg in node.args) or not isinstance(node.meta["val"], torch.Tensor):
            return None
        args = [converted(arg) for arg in node.args]
        kwargs = {name: converted(arg) for name, arg in node.kwargs.items()}
        if any(isinstance(arg, Term) for arg in kwargs.values()):
            return None
        return self.terms.apply(node.target, *args, result=node.meta["val"].dtype, **kwargs)

    def _converted(self, node: fx.Node, index: Indices) -> Term:
        return self._cast(self.entry(node.args[0], index), node.meta["val"].dtype)

    # Operators that move entries

    def _view(self, node: fx.Node, index: Indices) -> Term | None:
        source = node.args[0]
        while source.target in VIEWS:
            source = source.args[0]  # flattened and taken apart again: one reshape
        before, after = sizes(source), sizes(node)
        found: dict[int, Term] = {}
        for group_in, group_out in reshape_groups(before, after):
            ins, outs = [i for i in group_in if before[i] != 1], [j for j in group_out if after[j] != 1]
            if len(ins) == len(outs) == 1:
                found[ins[0]] = index[outs[0]]
            elif ins:
                found |= self._taken_apart(self._flattened([(index[j], after[j]) for j in outs]), before, ins)
        return self.entry(source, tuple(found.get(i, self._zero) for i in range(len(before))))

    def _flattened(self, parts: Sequence[tuple[Term, sympy.Expr]]) -> Term:
        """The position that indices along dimensions of these sizes have in all of them, row by row."""
        position: Term = self._zero
        for at, size in parts:
            position = self.terms.apply(aten.add.Tensor, self._times(position, size), at)
        return position

    def _taken_apart(self, position: Term, shape: Sequence[sympy.Expr], dims: Sequence[int]) -> dict[int, Term]:
        found: dict[int, Term] = {}
        for dim in reversed(dims[1:]):
            size = self._as_tensor(shape[dim])
            found[dim] = self.terms.apply(aten.remainder.Tensor, position, size)
            position = self.terms.apply(aten.floor_divide.default, position, size)
        found[dims[0]] = position
        return found

    def _unsqueeze(self, node: fx.Node, index: Indices) -> Term:
        dim = node.args[1] % len(index)
        return self.entry(node.args[0], index[:dim] + index[dim + 1 :])

    def _squeeze(self, node: fx.Node, index: Indices) -> Term:
        shape = sizes(node.args[0])
        chosen = node.args[1] if len(node.args) > 1 else list(range(len(shape)))
        chosen = {dim % max(len(shape), 1) for dim in ([chosen] if isinstance(chosen, int) else chosen)}
        left = iter(index)
        dropped = [i in chosen and size == 1 for i, size in enumerate(shape)]
        return self.entry(node.args[0], tuple(self._zero if drop else next(left) for drop in dropped))

    def _expand(self, node: fx.Node, index: Indices) -> Term:
        return self._aligned(node.args[0], index)

    def _permute(self, node: fx.Node, index: Indices) -> Term:
        return self._permuted(node, index, [dim % len(index) for dim in node.args[1]])

    def _transpose(self, node: fx.Node, index: Indices) -> Term:
        return self._permuted(node, index, transpose_order(node, len(index)))

    def _permuted(self, node: fx.Node, index: Indices, order: Sequence[int]) -> Term:
        return self.entry(node.args[0], tuple(index[order.index(dim)] for dim in range(len(order))))

    def _from_start(self, place: Any, size: sympy.Expr) -> sympy.Expr | None:
        """A place along a dimension, counted from its start; None if nobody knows from where it is counted."""
        place = self._number(place)
        if place.is_negative:
            return place + size
        return place if place.is_nonnegative else None

    def _slice(self, node: fx.Node, index: Indices) -> Term | None:
        source, dim = node.args[0], (argument(node, 1, "dim") or 0) % len(index)
        step = argument(node, 4, "step") or 1
        start = self._from_start(argument(node, 2, "start") or 0, sizes(source)[dim])
        if start is None:
            return None
        at = self._plus(self._times(index[dim], self._number(step)), start)
        return self.entry(source, (*index[:dim], at, *index[dim + 1 :]))

    def _select(self, node: fx.Node, index: Indices) -> Term | None:
        source, dim = node.args[0], node.args[1] % (len(index) + 1)
        at = self._from_start(node.args[2], sizes(source)[dim])
        if at is None:
            return None
        return self.entry(source, (*index[:dim], self._as_tensor(at), *index[dim:]))

    def _flip(self, node: fx.Node, index: Indices) -> Term:
        dims, shape = {dim % len(index) for dim in node.args[1]}, sizes(node)
        flipped = [
            self._plus(self.terms.apply(aten.neg.default, at), shape[i] - 1) if i in dims else at
            for i, at in enumerate(index)
        ]
        return self.entry(node.args[0], tuple(flipped))

    def _repeat(self, node: fx.Node, index: Indices) -> Term:
        shape = sizes(node.args[0])
        inner = index[len(index) - len(shape) :]
        wrapped = [
            at if after == size else self.terms.apply(aten.remainder.Tensor, at, self._as_tensor(size))
            for at, size, after in zip(inner, shape, sizes(node)[len(index) - len(shape) :], strict=True)
        ]
        return self.entry(node.args[0], tuple(wrapped))

    def _cat(self, node: fx.Node, index: Indices) -> Term:
        dim = (argument(node, 1, "dim") or 0) % len(index)
        parts = [part for part in node.args[0] if sizes(part) != (0,)]
        stops, stop = [], sympy.Integer(0)
        for part in parts:
            stop = stop + sizes(part)[dim]
            stops.append(stop)

        def of_part(i: int) -> Term:
            at = self._plus(index[dim], -(stops[i] - sizes(parts[i])[dim]))
            return self.entry(parts[i], (*index[:dim], self._clamped(at, sizes(parts[i])[dim]), *index[dim + 1 :]))

        found = of_part(len(parts) - 1)
        for i in reversed(range(len(parts) - 1)):
            found = self._chosen(self._below(index[dim], stops[i]), of_part(i), found)
        return self._cast(found, node.meta["val"].dtype)

    def _stack(self, node: fx.Node, index: Indices) -> Term:
        dim = (argument(node, 1, "dim") or 0) % len(index)
        rest = index[:dim] + index[dim + 1 :]
        *others, found = [self.entry(part, rest) for part in node.args[0]]
        for i, other in reversed(list(enumerate(others))):
            found = self._chosen(self._below(index[dim], sympy.Integer(i + 1)), other, found)
        return found

    def _below(self, at: Term, bound: sympy.Expr) -> Term:
        return self.terms.apply(aten.lt.Scalar, at, self._python(bound))

    def _chosen(self, condition: Term, one: Term, other: Term) -> Term:
        return self.terms.apply(aten.where.self, condition, one, other)

    def _constant_pad_nd(self, node: fx.Node, index: Indices) -> Term:
        source, widths = node.args[0], node.args[1]
        shape, at, exists = sizes(source), list(index), None
        for i in range(len(widths) // 2):
            dim, before = len(index) - 1 - i, self._number(widths[2 * i])
            moved = self._plus(index[dim], -before)
            at[dim] = self._clamped(moved, shape[dim])
            for one in (self.terms.apply(aten.ge.Scalar, moved, 0), self._below(moved, shape[dim])):
                exists = one if exists is None else self.terms.apply(aten.logical_and.default, exists, one)
        inner, value = self.entry(source, tuple(at)), node.meta["val"]
        fill = argument(node, 2, "value") or 0
        if exists is None or isinstance(fill, fx.Node):
            return inner
        return self._chosen(exists, inner, self.terms.const(torch.tensor(fill, dtype=value.dtype).item(), value.dtype))

    def _tril(self, node: fx.Node, index: Indices) -> Term:
        return self._triangle(node, index, aten.le.Tensor)

    def _triu(self, node: fx.Node, index: Indices) -> Term:
        return self._triangle(node, index, aten.ge.Tensor)

    def _triangle(self, node: fx.Node, index: Indices, within: Any) -> Term:
        distance = self.terms.apply(aten.sub.Tensor, index[-1], index[-2])
        kept = self.terms.apply(within, distance, self._as_tensor(self._number(argument(node, 1, "diagonal") or 0)))
        dtype = node.meta["val"].dtype
        zero = self.terms.const(torch.zeros((), dtype=dtype).item(), dtype)
        return self._chosen(kept, self.entry(node.args[0], index), zero)

    def _diagonal(self, node: fx.Node, index: Indices) -> Term | None:
        if any(argument(node, i, name) not in (None, default) for i, name, default in _DIAGONAL):
            return None
        return self.entry(node.args[0], (index[-1], index[-1])) if len(index) == 1 else None

    def _slice_scatter(self, node: fx.Node, index: Indices) -> Term | None:
        base, part = node.args[:2]
        dim = (argument(node, 2, "dim") or 0) % len(index)
        start = self._from_start(argument(node, 3, "start") or 0, sizes(base)[dim])
        if start is None or (argument(node, 5, "step") or 1) != 1:
            return None
        return self._written(base, part, index, dim, start, sizes(part)[dim], keeps_dim=True)

    def _select_scatter(self, node: fx.Node, index: Indices) -> Term | None:
        base, part, dim = node.args[0], node.args[1], node.args[2] % len(index)
        at = self._from_start(node.args[3], sizes(base)[dim])
        if at is None:
            return None
        return self._written(base, part, index, dim, at, sympy.Integer(1), keeps_dim=False)

    def _written(
        self,
        base: fx.Node,
        part: fx.Node,
        index: Indices,
        dim: int,
        start: sympy.Expr,
        length: sympy.Expr,
        keeps_dim: bool,
    ) -> Term:
        moved = self._plus(index[dim], -start)
        inside = self.terms.apply(
            aten.logical_and.default, self.terms.apply(aten.ge.Scalar, moved, 0), self._below(moved, length)
        )
        at = (self._clamped(moved, length),) if keeps_dim else ()
        written = self.entry(part, (*index[:dim], *at, *index[dim + 1 :]))
        return self._chosen(inside, self._cast(written, base.meta["val"].dtype), self.entry(base, index))

    # Look-ups

    def _index(self, node: fx.Node, index: Indices) -> Term | None:
        source, picks = node.args[0], node.args[1]
        if any(pick is not None and pick.meta["val"].dtype is torch.bool for pick in picks):
            return None
        chosen = [i for i, pick in enumerate(picks) if pick is not None]
        rank = max(picks[i].meta["val"].dim() for i in chosen)
        first = chosen[0] if chosen == list(range(chosen[0], chosen[-1] + 1)) else 0
        picked, rest = index[first : first + rank], iter(index[:first] + index[first + rank :])
        shape = sizes(source)
        at = [
            self._wrapped(self._aligned(picks[i], picked), shape[i]) if i in chosen else next(rest)
            for i in range(len(shape))
        ]
        return self.entry(source, tuple(at))

    def _index_select(self, node: fx.Node, index: Indices) -> Term:
        source, dim, picks = node.args
        dim %= len(index)
        return self.entry(source, (*index[:dim], self.entry(picks, index[dim : dim + 1]), *index[dim + 1 :]))

    def _gather(self, node: fx.Node, index: Indices) -> Term:
        source, dim, picks = node.args[:3]
        dim %= len(index)
        return self.entry(source, (*index[:dim], self.entry(picks, index), *index[dim + 1 :]))

    def _embedding(self, node: fx.Node, index: Indices) -> Term:
        return self.entry(node.args[0], (self.entry(node.args[1], index[:-1]), index[-1]))

    # Sums, where they are the same for every row

    def _cumsum(self, node: fx.Node, index: Indices) -> Term | None:
        dim = node.args[1] % len(index)
        constant = self._constant_along(node.args[0], index, dim)
        if constant is None:
            return None
        count = self._times(self._plus(index[dim], sympy.Integer(1)), sympy.Integer(int(constant)))
        return self._cast(count if constant else self._zero, node.meta["val"].dtype)

    def _any(self, node: fx.Node, index: Indices) -> Term | None:
        dims = argument(node, 1, "dim") if len(node.args) > 1 else None
        if not isinstance(dims, int) or argument(node, 2, "keepdim"):
            return None
        dim = dims % (len(index) + 1)
        constant = self._constant_along(node.args[0], (*index[:dim], self._zero, *index[dim:]), dim)
        return None if constant is None else self.terms.const(bool(constant), torch.bool)

    def _constant_along(self, node: fx.Node, index: Indices, dim: int) -> float | None:
        along = (*index[:dim], self.terms.index(SCANNED), *index[dim + 1 :])
        return self.constant_of(self.entry(node, along), sizes(node)[dim])


_DIAGONAL = ((1, "offset", 0), (2, "dim1", 0), (3, "dim2", 1))

RULES: dict[Any, str] = {
    **dict.fromkeys(COPIES, "_copy"),
    **dict.fromkeys(VIEWS, "_view"),
    **dict.fromkeys(FILLED, "_filled"),
    **dict.fromkeys(UNTAGGED, "_pointwise"),
    aten.arange.default: "_arange",
    aten.arange.start: "_arange",
    aten.arange.start_step: "_arange",
    aten._to_copy.default: "_converted",
    aten.unsqueeze.default: "_unsqueeze",
    aten.squeeze.default: "_squeeze",
    aten.squeeze.dim: "_squeeze",
    aten.squeeze.dims: "_squeeze",
    aten.expand.default: "_expand",
    aten.permute.default: "_permute",
    aten.transpose.int: "_transpose",
    aten.t.default: "_transpose",
    aten.slice.Tensor: "_slice",
    aten.select.int: "_select",
    aten.flip.default: "_flip",
    aten.repeat.default: "_repeat",
    aten.cat.default: "_cat",
    aten.stack.default: "_stack",
    aten.constant_pad_nd.default: "_constant_pad_nd",
    aten.tril.default: "_tril",
    aten.triu.default: "_triu",
    aten.diagonal.default: "_diagonal",
    aten.slice_scatter.default: "_slice_scatter",
    aten.select_scatter.default: "_select_scatter",
    aten.index.Tensor: "_index",
    aten.index_select.default: "_index_select",
    aten.gather.default: "_gather",
    aten.embedding.default: "_embedding",
    aten.cumsum.default: "_cumsum",
    aten.any.dim: "_any",
    aten.all.dim: "_any",
}
