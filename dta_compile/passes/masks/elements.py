"""Rules of operators that move entries: express an entry of a tensor in an FX graph by entries of its inputs.

Moving entries becomes arithmetic on indices; pointwise operators are applied to terms (`entries`). Tensors from
operators without a rule are opaque leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from dta_compile.ops.chosen_keys import CHOSEN, choosing_of
from dta_compile.passes.axes.shape_rules import reshape_groups
from dta_compile.passes.graphs.arguments import argument, dim_of, operand_dims
from dta_compile.passes.graphs.nodes import behind
from dta_compile.passes.graphs.operators import (
    COPIES,
    FILLS,
    RANGES,
    RESHAPES,
    SQUEEZES,
    TRANSPOSITIONS,
    UNTAGGED_POINTWISE,
    aten,
)
from dta_compile.passes.masks.entries import Entries, Indices
from dta_compile.passes.program import Program
from dta_compile.passes.symbols import sizes
from dta_compile.proofs.cases import held_by
from dta_compile.proofs.mask_class import LONGEST_ROW
from dta_compile.proofs.terms import Term, Terms

ConstantOf = Callable[[Term, sympy.Expr], "float | None"]

SCANNED = "scanned"  # the index variable of reductions and cumulative sums

ENTRY_RULES: dict[Any, str] = {
    **dict.fromkeys(RESHAPES, "_view"),
    **dict.fromkeys(COPIES | SQUEEZES | TRANSPOSITIONS, "_rearranged"),
    **dict.fromkeys(FILLS, "_filled"),
    **dict.fromkeys(RANGES, "_arange"),
    **dict.fromkeys(UNTAGGED_POINTWISE, "_pointwise"),
    aten._to_copy.default: "_converted",
    aten.fill.Tensor: "_filled_with_entry",
    aten.unsqueeze.default: "_rearranged",
    aten.expand.default: "_rearranged",
    aten.slice.Tensor: "_slice",
    aten.select.int: "_select",
    aten.flip.default: "_flip",
    aten.repeat.default: "_repeat",
    aten.cat.default: "_cat",
    aten.stack.default: "_stack",
    aten.constant_pad_nd.default: "_constant_pad_nd",
    aten.tril.default: "_triangle",
    aten.triu.default: "_triangle",
    aten.diagonal.default: "_diagonal",
    aten.slice_scatter.default: "_written",
    aten.select_scatter.default: "_written",
    aten.index.Tensor: "_index",
    aten.index_select.default: "_index_select",
    aten.gather.default: "_gather",
    aten.embedding.default: "_embedding",
    aten.cumsum.default: "_cumsum",
    aten.any.dim: "_any",
    aten.all.dim: "_any",
    CHOSEN: "_chosen_key",
}


class Elements(Entries):
    """`Entries` with the rules of operators that move entries.

    Args:
        program: the program of the nodes.
        terms: the factory of the terms.
        constant_of: returns the number that a boolean or integer term equals for all values of `SCANNED` below a size;
            None if that cannot be proven.
        sizes: size of the dimension that each index variable runs along, which every call checks to be at most
            `LONGEST_ROW`.
        chosen: what to take for the bits of a choice of keys at the mask's own pairs of tokens.
    """

    rules: ClassVar[Mapping[Any, str]] = ENTRY_RULES

    def __init__(
        self,
        program: Program,
        terms: Terms,
        constant_of: ConstantOf,
        sizes: Mapping[str, sympy.Expr],
        chosen: bool = True,
    ) -> None:
        super().__init__(program, terms)
        self.constant_of, self.sizes, self.chosen = constant_of, sizes, chosen
        self._flat: dict[Term, tuple[tuple[Term, sympy.Expr], ...]] = {}

    def _filled_with_entry(self, node: fx.Node, index: Indices) -> Term:
        return self.entry(node.args[1], ())

    def _converted(self, node: fx.Node, index: Indices) -> Term:
        return self._cast(self.entry(node.args[0], index), node.meta["val"].dtype)

    # Operators that move entries

    def _view(self, node: fx.Node, index: Indices) -> Term | None:
        source = behind(node.args[0], RESHAPES)  # consecutive reshapes are one reshape
        before, after = sizes(source), sizes(node)
        source_index: dict[int, Term] = {}
        for group_in, group_out in reshape_groups(before, after):
            ins, outs = [i for i in group_in if before[i] != 1], [j for j in group_out if after[j] != 1]
            if len(ins) == len(outs) == 1:
                source_index[ins[0]] = index[outs[0]]
            elif ins:
                source_index |= self._taken_apart(self._flattened([(index[j], after[j]) for j in outs]), before, ins)
        return self.entry(source, tuple(source_index.get(i, self._zero) for i in range(len(before))))

    def _flattened(self, parts: Sequence[tuple[Term, sympy.Expr]]) -> Term:
        """Return the row-major position of indices along dimensions of these sizes."""
        position = parts[0][0]
        for at, size in parts[1:]:
            position = self.terms.apply(aten.add.Tensor, self._times(position, size), at)
        if len(parts) > 1:
            self._flat[position] = tuple(parts)
        return position

    def _taken_apart(self, position: Term, shape: Sequence[sympy.Expr], dims: Sequence[int]) -> dict[int, Term]:
        parts = self._flat.get(position, ())
        if [size for _, size in parts] == [shape[dim] for dim in dims]:  # undoes `_flattened`
            return {dim: at for dim, (at, _) in zip(dims, parts, strict=True)}
        indices: dict[int, Term] = {}
        for dim in reversed(dims[1:]):
            size = self._as_tensor(shape[dim])
            indices[dim] = self.terms.apply(aten.remainder.Tensor, position, size)
            position = self.terms.apply(aten.floor_divide.default, position, size)
        indices[dims[0]] = position
        return indices

    def _rearranged(self, node: fx.Node, index: Indices) -> Term:
        source, dims = node.args[0], operand_dims(node) or []
        at = (index[dims.index(dim)] if dim in dims else self._zero for dim in range(len(sizes(source))))
        return self.entry(source, tuple(at))

    def _from_start(self, position: Any, size: sympy.Expr) -> sympy.Expr | None:
        """Return a position along a dimension counted from its start; None if its sign is unknown.

        Negative positions count from the end and are clamped to 0, as in slices.
        """
        position = self._number(position)
        if position.is_negative:
            return sympy.Max(0, position + size)
        return position if position.is_nonnegative else None

    def _slice(self, node: fx.Node, index: Indices) -> Term | None:
        source, dim, step = node.args[0], dim_of(node), argument(node, "step")
        start = self._from_start(argument(node, "start") or 0, sizes(source)[dim])
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
        dim = argument(node, "dim") % len(index)
        parts = [part for part in node.args[0] if sizes(part) != (0,)]
        stops, stop = [], sympy.Integer(0)
        for part in parts:
            stop = stop + sizes(part)[dim]
            stops.append(stop)

        def of_part(i: int) -> Term:
            at = self._plus(index[dim], -(stops[i] - sizes(parts[i])[dim]))
            at = self._clamped(at, sizes(parts[i])[dim])
            return self._cast(self.entry(parts[i], (*index[:dim], at, *index[dim + 1 :])), node.meta["val"].dtype)

        result = of_part(len(parts) - 1)
        for i in reversed(range(len(parts) - 1)):
            result = self._chosen(self._below(index[dim], stops[i]), of_part(i), result)
        return result

    def _stack(self, node: fx.Node, index: Indices) -> Term:
        dim = argument(node, "dim") % len(index)
        rest = index[:dim] + index[dim + 1 :]
        *others, result = [self._cast(self.entry(part, rest), node.meta["val"].dtype) for part in node.args[0]]
        for i, other in reversed(list(enumerate(others))):
            result = self._chosen(self._below(index[dim], sympy.Integer(i + 1)), other, result)
        return result

    def _below(self, at: Term, bound: sympy.Expr) -> Term:
        return self.terms.apply(aten.lt.Scalar, at, self._python(bound))

    def _chosen(self, condition: Term, one: Term, other: Term) -> Term:
        return self.terms.apply(aten.where.self, condition, one, other)

    def _constant_pad_nd(self, node: fx.Node, index: Indices) -> Term | None:
        source, widths = node.args[0], node.args[1]
        shape, at, exists = sizes(source), list(index), None
        for i in range(len(widths) // 2):
            dim, before = len(index) - 1 - i, self._number(widths[2 * i])
            moved = self._plus(index[dim], -before)
            at[dim] = self._clamped(moved, shape[dim])
            for condition in (self.terms.apply(aten.ge.Scalar, moved, 0), self._below(moved, shape[dim])):
                exists = condition if exists is None else self.terms.apply(aten.logical_and.default, exists, condition)
        inner, value = self.entry(source, tuple(at)), node.meta["val"]
        fill = argument(node, "value") or 0
        if exists is None:
            return inner
        if isinstance(fill, fx.Node):
            return None
        return self._chosen(exists, inner, self._filled_with(fill, value.dtype))

    def _triangle(self, node: fx.Node, index: Indices) -> Term:
        within = aten.le.Tensor if node.target is aten.tril.default else aten.ge.Tensor
        distance = self.terms.apply(aten.sub.Tensor, index[-1], index[-2])
        kept = self.terms.apply(within, distance, self._as_tensor(self._number(argument(node, "diagonal"))))
        return self._chosen(kept, self.entry(node.args[0], index), self._filled_with(0, node.meta["val"].dtype))

    def _diagonal(self, node: fx.Node, index: Indices) -> Term | None:
        is_main = [argument(node, name) for name in ("offset", "dim1", "dim2")] == [0, 0, 1]
        return self.entry(node.args[0], (index[-1], index[-1])) if is_main and len(index) == 1 else None

    def _written(self, node: fx.Node, index: Indices) -> Term | None:
        base, part, dim = node.args[0], node.args[1], dim_of(node)
        keeps_dim = node.target is aten.slice_scatter.default
        start = self._from_start(argument(node, "start" if keeps_dim else "index") or 0, sizes(base)[dim])
        if start is None or argument(node, "step") not in (None, 1):
            return None
        length = sizes(part)[dim] if keeps_dim else sympy.Integer(1)
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
        if any(pick is not None and pick.meta["val"].dtype in (torch.bool, torch.uint8) for pick in picks):
            return None  # a mask
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

    def _index_select(self, node: fx.Node, index: Indices) -> Term | None:
        source, dim, picks = node.args
        if not sizes(picks):
            return None
        dim %= len(index)
        return self.entry(source, (*index[:dim], self.entry(picks, index[dim : dim + 1]), *index[dim + 1 :]))

    def _gather(self, node: fx.Node, index: Indices) -> Term | None:
        source, dim, picks = node.args[:3]
        if not index:
            return None
        dim %= len(index)
        return self.entry(source, (*index[:dim], self.entry(picks, index), *index[dim + 1 :]))

    def _embedding(self, node: fx.Node, index: Indices) -> Term:
        return self.entry(node.args[0], (self.entry(node.args[1], index[:-1]), index[-1]))

    def _chosen_key(self, node: fx.Node, index: Indices) -> Term | None:
        """Return the bit of a pair if it is that of the mask's own query, head and key, or block of the key."""
        row = self._zero if sizes(node)[0] == 1 else self.terms.index("row")
        block, heads = choosing_of(node.args[0].args).block, sizes(node)[1]
        group = self.sizes.get("head", heads) / heads
        if not group.is_Integer:
            return None
        head = self._zero if heads == 1 else self._divided(self.terms.index("head"), group)
        own = row, head, self.terms.index("query"), self._divided(self.terms.index("key"), sympy.Integer(block))
        is_own = all(map(self._is_same, index, own))
        return self.terms.const(self.chosen, torch.bool) if is_own else None

    def _divided(self, at: Term, by: sympy.Expr) -> Term:
        return at if by == 1 else self.terms.apply(aten.floor_divide.default, at, self._as_tensor(by))

    def _is_same(self, one: Term, other: Term) -> bool:
        """Return whether indices are proven to be the same."""
        if one is other:
            return True
        are_equal = self.terms.apply(aten.eq.Tensor, one, other)
        return self.constant_of(are_equal, sympy.Integer(1)) == 1

    # Reductions and cumulative sums of constants

    def _cumsum(self, node: fx.Node, index: Indices) -> Term | None:
        constant = self._constant_along(node.args[0], index, node.args[1]) if index else None
        if constant is None or constant != constant or constant in (math.inf, -math.inf) or constant != int(constant):
            return None
        value = node.meta["val"]
        if value.is_floating_point() and abs(constant) * LONGEST_ROW > held_by(value.dtype)[1]:
            return None  # a partial sum may be rounded
        dim = node.args[1] % len(index)
        return self._times(self._plus(index[dim], sympy.Integer(1)), sympy.Integer(int(constant)))

    def _any(self, node: fx.Node, index: Indices) -> Term | None:
        """Return `any`, or `all`, along one dimension, in as far as it is known.

        Over keys, it is that of the query's own key or of all of them: the first is what a real query is decided by.
        """
        dims, source = argument(node, "dim") if len(node.args) > 1 else None, node.args[0]
        if not isinstance(dims, int) or not (shape := sizes(source)):
            return None
        dim, query = dims % len(shape), self.terms.index("query")
        rest = index[dim + 1 :] if argument(node, "keepdim") else index[dim:]
        constant = self._constant_along(source, (*index[:dim], self._zero, *rest), dim)
        if constant is not None:
            return self.terms.const(bool(constant), torch.bool)
        if not any(at is query and size == shape[dim] for at, size in zip(index, sizes(node), strict=True)):
            return None
        own = self._cast(self.entry(source, (*index[:dim], query, *rest)), torch.bool)
        join = aten.logical_or.default if node.target is aten.any.dim else aten.logical_and.default
        return self.terms.apply(join, own, self.terms.entry(self._leaf(self._first.like(node)), index))

    def _constant_along(self, node: fx.Node, index: Indices, dim: int) -> float | None:
        """Return the number that all entries along a non-empty dimension equal; None if that cannot be proven."""
        dim %= len(index)
        size = sizes(node)[dim]
        is_bound = size in self.sizes.values() or (size.is_number and size <= LONGEST_ROW)
        if not (size.is_positive and is_bound):
            return None
        along = (*index[:dim], self.terms.index(SCANNED), *index[dim + 1 :])
        return self.constant_of(self.entry(node, along), size)
