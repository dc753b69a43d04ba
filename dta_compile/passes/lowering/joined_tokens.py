"""Tokens put together of parts along the token axis, such as a learned prompt in front of every row, as one value.

    x = cat([prompt.expand(B, n, D), embed(ids)], 1)                     # [B, n + S, D], read by attention

A part of a fixed length that is the same for every row (soft prompts, memory tokens, a class token) is a table, of
which each of its tokens reads the row of its place. A part of `S` tokens is computed for all `n + S` of them, where the
tokens of other parts repeat its first or last one, so that their values are as finite as others. Which part a token
takes is said by its place:

    x = where(place < n, embedding(prompt, clamp(place, 0, n - 1)), embed(ids[:, clamp(place - n, 0, S - 1)]))

Operators are copied whose arguments name no token by its number; that they treat every token by itself is for the pass
`token_axis` to prove. That rows of a table are equal is proven here: they come of an `expand` or `repeat`, and the
operators after it treat every row by itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.axes.layouts import batch_and_tokens, mixer_calls
from dta_compile.passes.graphs.arguments import dim_of, slice_of
from dta_compile.passes.graphs.nodes import SizeNodes, call, descendants, erase_unused, is_pointwise
from dta_compile.passes.graphs.operators import CASTS, COPIES, MATRIX_PRODUCTS, RESHAPES, TAKE_A_SHAPE, aten
from dta_compile.passes.graphs.source_lines import inherit_line
from dta_compile.passes.lowering.attention.distances import positions
from dta_compile.passes.lowering.next_tokens import COPIED, CannotResize, all_sizes, resized
from dta_compile.passes.program import ancestors, has_tensor
from dta_compile.passes.symbols import expression, sizes, value_of

# Operators that treat every entry of dimension 0 by itself, where arguments and result have the rows of a batch there.
BY_ROW = CASTS | COPIES | MATRIX_PRODUCTS | RESHAPES | {aten.embedding.default, aten.unsqueeze.default}
REPEATS = {aten.expand.default, aten.repeat.default, aten.full.default}  # sizes of the batch are among their arguments


def join_tokens(graph: fx.Graph, parameters: Collection[fx.Node]) -> None:
    """Replace parts put together along the token axis, before the last mixer, in place; `graph` is functional."""
    calls = mixer_calls(graph)
    if not calls:
        return
    batch, tokens = batch_and_tokens(calls[0])
    if not tokens.free_symbols:
        return
    with_gradient, before = descendants(graph, parameters), ancestors(calls)
    sizes_of = SizeNodes(graph)
    for node in [*graph.find_nodes(op="call_function", target=aten.cat.default)]:
        if node not in before or node not in with_gradient:
            continue
        if dim_of(node) != 1 or sizes(node)[1] != tokens:
            continue
        with graph.inserting_before(node), node.meta["val"].fake_mode:
            last = node.prev
            try:
                joined = _Joined(graph, node, batch, with_gradient, sizes_of).value()
            except (CannotResize, RuntimeError, ValueError):  # of torch: an operator takes this number of tokens alone
                continue
            while (last := last.next) is not node:
                inherit_line(last, node)
        node.replace_all_uses_with(joined)
    erase_unused(graph)


class _Joined:
    """The parts `[B, L, ...]` of one value `[B, T, ...]`, and what replaces them; new nodes come right before it."""

    def __init__(
        self, graph: fx.Graph, node: fx.Node, batch: sympy.Expr, with_gradient: set[fx.Node], sizes_of: SizeNodes
    ) -> None:
        self.graph, self.node, self.batch, self.with_gradient = graph, node, batch, with_gradient
        self.tokens, self.sizes = sizes(node)[1], sizes_of
        like = torch.empty(0, dtype=torch.int64, device=node.meta["val"].device)
        self.places = positions(graph, sizes_of.build(self.tokens), like)

    def value(self) -> fx.Node:
        """Return the value made of all parts; raises `CannotResize`."""
        start: sympy.Expr = sympy.Integer(0)
        of_rows, of_all = [], []
        for part in _parts(self.node):
            length = sizes(part)[1]
            if length.free_symbols:
                of_rows.append((start, length, _Widened(self, start, length).of(part)))
            else:
                of_all.append((start, length, self._looked_up(self._of_one_row(part, {}), start, int(length))))
            start += length
        if not of_rows:
            raise CannotResize
        value = of_rows[0][2]
        for start, length, part in (*of_rows[1:], *of_all):
            shape = [-1 if i == 1 else 1 for i in range(self.node.meta["val"].dim())]
            is_own = call(self.graph, aten.view.default, self.is_within(start, length), shape)
            value = call(self.graph, aten.where.self, is_own, part, value)
        return value

    def index(self, start: sympy.Expr, length: sympy.Expr) -> fx.Node:
        """Insert `[T]`, the place of each token in a part; those of other parts have its first or last one."""
        shifted = self.places if start == 0 else call(self.graph, aten.sub.Tensor, self.places, self._size(start))
        return call(self.graph, aten.clamp.default, shifted, 0, self._size(length - 1))

    def _size(self, size: sympy.Expr) -> Any:
        if (built := self.sizes.build(size)) is None:
            raise CannotResize
        return built

    def is_within(self, start: sympy.Expr, length: sympy.Expr) -> fx.Node:
        """Insert `[T]`, whether each token is in a part."""
        after = call(self.graph, aten.ge.Scalar, self.places, self._size(start))
        until = call(self.graph, aten.lt.Scalar, self.places, self._size(start + length))
        return call(self.graph, aten.logical_and.default, after, until)

    def _looked_up(self, part: fx.Node, start: sympy.Expr, length: int) -> fx.Node:
        """Insert `[1, T, ...]`, the row of each token's place in a part `[1, length, ...]`."""
        shape = [int(size) for size in sizes(part)[2:]]
        if sizes(part)[0] != 1:  # a batch that is a constant
            raise CannotResize
        table = call(self.graph, aten.reshape.default, part, [length, -1])
        rows = call(self.graph, aten.embedding.default, table, self.index(start, sympy.Integer(length)))
        return call(self.graph, aten.view.default, rows, [1, self._size(self.tokens), *shape])

    def _of_one_row(self, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
        """Insert the value for one row of a value that is the same for all rows of the batch, in dimension 0."""
        if node not in known:
            known[node] = self._first_row(node, known)
        return known[node]

    def _first_row(self, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
        if not has_tensor(node) or not any(size.has(*self.batch.free_symbols) for size in sizes(node)):
            return node
        is_repeat = node.target in REPEATS and not self._has_rows(node.args[0])
        if not (is_repeat or node.target in BY_ROW or is_pointwise(node)) or not self._has_rows(node):
            raise CannotResize
        of_all_rows = node.args[-1:] if node.target in MATRIX_PRODUCTS else node.args[:1]
        if node.target in (*MATRIX_PRODUCTS, aten.embedding.default) and self._has_rows(*of_all_rows):
            raise CannotResize
        rows = {arg: self._of_one_row(arg, known) for arg in node.all_input_nodes if has_tensor(arg)}
        takes_sizes = REPEATS | TAKE_A_SHAPE
        return resized(self.graph, node, rows, self.sizes, (self.batch, sympy.Integer(1)), takes_sizes)

    def _has_rows(self, node: Any) -> bool:
        """Return whether a value has the rows of the batch in dimension 0, or that and others flattened, and nowhere
        else; raises `CannotResize` if elsewhere."""
        if not isinstance(node, fx.Node) or not has_tensor(node):
            return False
        symbols = self.batch.free_symbols
        has = [bool(size.free_symbols & symbols) for size in sizes(node)]
        if any(has[1:]) or (has[:1] == [True] and sympy.cancel(sizes(node)[0] / self.batch).free_symbols):
            raise CannotResize
        return has[:1] == [True]


def _parts(node: fx.Node) -> list[fx.Node]:
    """Return the values that are put together along dimension 1, also by several calls."""
    parts = []
    for part in node.args[0]:
        parts += _parts(part) if part.target is aten.cat.default and dim_of(part) == 1 else [part]
    return parts


class _Widened:
    """Values of the `length` tokens of one part, computed for all tokens: entry `start + t` is entry `t` of the old."""

    def __init__(self, joined: _Joined, start: sympy.Expr, length: sympy.Expr) -> None:
        self.joined, self.graph, self.start, self.length = joined, joined.graph, start, length
        self.index, self.is_own = joined.index(start, length), joined.is_within(start, length)
        self.known: dict[fx.Node, fx.Node] = {}

    def of(self, part: fx.Node) -> fx.Node:
        """Insert the value for all tokens of the part; raises `CannotResize`."""
        pending, needed, own = [part], {part}, self.length.free_symbols
        for node in pending:
            if not self._is_data(node) and not self._is_this_part(node):
                read = {arg for arg in node.all_input_nodes if any(size.has(*own) for size in all_sizes(arg))} - needed
                needed |= read
                pending += read
        for node in [node for node in self.graph.nodes if node in needed]:
            self.known[node] = self._replacement(node)
        return self.known[part]

    def _is_data(self, node: fx.Node) -> bool:
        """Return whether a value is computed from data alone, and its tokens are a dimension (are not flattened)."""
        if node in self.joined.with_gradient:
            return False
        own = self.length.free_symbols
        return all(size == self.length for size in all_sizes(node) if size.has(*own))

    def _replacement(self, node: fx.Node) -> fx.Node:
        if self._is_data(node):
            value = node
            for dim in (i for i, size in enumerate(sizes(node)) if size == self.length):
                value = self._of_all_tokens(value, dim)
            return value
        if self._is_this_part(node):
            return node.args[0]
        if not (node.target in COPIED or is_pointwise(node)):
            raise CannotResize
        change = (self.length, self.joined.tokens)
        return resized(self.graph, node, self.known, self.joined.sizes, change, TAKE_A_SHAPE)

    def _of_all_tokens(self, value: fx.Node, dim: int) -> fx.Node:
        """Insert data for all tokens; those of other parts have the first entry of the first row, and so are equal."""
        own = call(self.graph, aten.index_select.default, value, dim, self.index)
        first = call(self.graph, aten.slice.Tensor, value, dim, 0, 1)
        for row in (i for i, size in enumerate(sizes(value)) if size == self.joined.batch):
            first = call(self.graph, aten.slice.Tensor, first, row, 0, 1)
        shape = [-1 if i == dim else 1 for i in range(len(sizes(value)))]
        is_own = call(self.graph, aten.view.default, self.is_own, shape)
        return call(self.graph, aten.where.self, is_own, own, first)

    def _is_this_part(self, node: fx.Node) -> bool:
        """Return whether a slice `x[:, start:]` of all tokens has those of this part, at the same places."""
        part = slice_of(node)
        is_along = part is not None and part.dim == 1 and sizes(part.source)[1] == self.joined.tokens
        return is_along and part is not None and expression(value_of(part.start)) == self.start
