"""Distribute the product with values over what is linear in softmax weights, so that `recognise` sees attention.

    (p - factor * r) @ v                p @ v - factor * (r @ v), for a factor that does not depend on the key
    p[:, :, 0] @ v                      (p @ v[:, :, None])[:, :, 0], a part of the heads

Differential attention is the difference of the weights of two halves of the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from dta_compile.passes.graphs.arguments import run_of, select_of
from dta_compile.passes.graphs.nodes import call, is_float
from dta_compile.passes.graphs.operators import CASTS, RESHAPES, aten
from dta_compile.passes.graphs.source_lines import copy_stack_trace
from dta_compile.passes.lowering.attention.distances import cast
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
    unify,
    whole,
)
from dta_compile.passes.program import has_tensor
from dta_compile.passes.symbols import sizes

SPLITS = (aten.split.Tensor, aten.unbind.int)


def distribute_products(graph: fx.Graph, are_weights: Callable[[fx.Node], bool]) -> None:
    """Replace products of values with what is made of softmax weights, for which `are_weights` holds."""
    distributing = _Distributing(graph, are_weights)
    pending = [node for node in reversed(graph.nodes) if node.target is aten.bmm.default]
    while pending:
        product = pending.pop()
        with graph.inserting_before(product):
            try:
                new = distributing.distributed(product)
            except Mismatch:
                continue
        if new is not None:
            copy_stack_trace(product)
            product.replace_all_uses_with(new[0])
            distributing.replaced[product] = new[0]
            pending += reversed(new[1])
    graph.eliminate_dead_code(fx.Node.is_impure)


class _Distributing:
    def __init__(self, graph: fx.Graph, are_weights: Callable[[fx.Node], bool]) -> None:
        self.graph, self.are_weights, self.arranger = graph, are_weights, Arranger(graph)
        self.of_all: dict[Any, fx.Node] = {}  # products of values with the weights of all heads
        self.replaced: dict[fx.Node, fx.Node] = {}

    def distributed(self, product: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
        """Return what a product is equal to, and the products that it is made of; None if nothing is distributed."""
        left, right = product.args
        if self.are_weights(left):
            return self._distributed(left, right)
        if not self.are_weights(right):
            return None
        new = self._distributed(*(self._call(aten.transpose.int, operand, 1, 2) for operand in (right, left)))
        return None if new is None else (self._call(aten.transpose.int, new[0], 1, 2), new[1])

    def _distributed(self, combined: fx.Node, values: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
        moves = list[fx.Node]()
        while combined.target in MOVES | CASTS:
            if combined.target is aten.slice.Tensor and _part(combined) is not None:
                break
            if not is_float(combined):  # each term would be rounded by itself
                return None
            moves.insert(0, combined)
            combined = combined.args[0]
        if combined.target in (aten.add.Tensor, aten.sub.Tensor):
            terms = [arg for arg in combined.args if isinstance(arg, fx.Node) and self.are_weights(arg)]
            if len(terms) != 2 or any(sizes(term) != sizes(combined) for term in terms):
                return None
            products = [self._product(self._moved(moves, term), values) for term in terms]
            return self._call(combined.target, *products, **combined.kwargs), products
        if combined.target is aten.neg.default:
            single = self._product(self._moved(moves, combined.args[0]), values)
            return self._call(aten.neg.default, single), [single]
        if combined.target is aten.mul.Tensor:
            return self._scaled(combined, moves, values)
        return None if (part := _part(combined)) is None else self._of_part(combined, *part, moves, values)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.graph, target, *args, **kwargs)

    def _product(self, weights: fx.Node, values: fx.Node) -> fx.Node:
        return self._call(aten.bmm.default, weights, values)

    def _moved(self, moves: list[fx.Node], node: fx.Node) -> fx.Node:
        for move in moves:
            target = aten.reshape.default if move.target in RESHAPES else move.target  # in other storage
            node = self._call(target, node, *move.args[1:], **move.kwargs)
        return node

    def _scaled(self, combined: fx.Node, moves: list[fx.Node], values: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
        """Multiply the result by a factor of the weights instead, unless it depends on the key."""
        weights, factor = combined.args
        if not isinstance(weights, fx.Node) or not self.are_weights(weights):
            weights, factor = factor, weights
        if sizes(weights) != sizes(combined) or (isinstance(factor, fx.Node) and self.are_weights(factor)):
            return None
        if weights.meta["val"].dtype != combined.meta["val"].dtype:
            return None
        product = self._product(self._moved(moves, weights), values)
        result, shape = product, None
        number = number_of(factor)
        if number is not None:
            factor = number
        elif isinstance(factor, fx.Node) and has_tensor(factor):
            own, dims = _dims(combined, moves)
            value = Arranged.within(factor, own)
            if any(map(value.has, leaves(own[-1]))):
                return None
            apart = [[leaf] for leaf in leaves(dims[0])]
            factor = cast(
                self.arranger.arrange(value, [*apart, leaves(dims[1]), []], broadcast=True), values.meta["val"].dtype
            )
            last = leaves([Factor(sizes(values)[-1])])
            shape = [self.arranger.size(dim) for dim in (dims[0], dims[1], last)]
            result = self._call(aten.reshape.default, product, [*map(self.arranger.size, apart), *shape[1:]])
        result = self._call(aten.mul.Tensor, result, factor)
        return (result if shape is None else self._call(aten.reshape.default, result, shape)), [product]

    def _of_part(
        self, combined: fx.Node, source: fx.Node, axis: int, number: int, moves: list[fx.Node], values: fx.Node
    ) -> tuple[fx.Node, list[fx.Node]] | None:
        """Weigh the values by all heads, and take a part of the result."""
        shape, part = list(sizes(source)), sizes(combined)
        if axis >= len(shape) - 2:
            return None
        parts = Factor(shape[axis] / (1 if len(part) < len(shape) else part[axis]))
        own, dims = _dims(combined, moves)
        arranged = Arranged.of(values)
        unify([dims[0], dims[2]], arranged.dims[:2])
        all_dims = [*own[:axis], [parts], *own[axis:]]
        if len(part) == len(shape):
            all_dims = [*own[:axis], [parts, *own[axis]], *own[axis + 1 :]]
        outer: Dim = [parts, *leaves(dims[0])]
        wanted = [outer, leaves(dims[1]), leaves(dims[2])]
        how = tuple((move.target, repr(move.args[1:])) for move in moves)
        if (key := (source, values, axis, parts.size, how)) not in self.of_all:
            weights = self.arranger.arrange(Arranged(source, all_dims, all_dims), wanted)
            weights = cast(weights, values.meta["val"].dtype)
            every = self.arranger.arrange(arranged, [outer, leaves(dims[2]), leaves(arranged.dims[2])])
            self.of_all[key] = self._product(weights, every)
        product = self.of_all[key]
        size = [
            self.arranger.size(dim) for dim in ([parts], leaves(dims[0]), leaves(dims[1]), leaves(arranged.dims[2]))
        ]
        by_part = self._call(aten.reshape.default, self.replaced.get(product, product), size)
        return self._call(aten.select.int, by_part, 0, number), [product]


def _dims(node: fx.Node, moves: list[fx.Node]) -> tuple[list[Dim], list[Dim]]:
    """Return the dimensions of a node, and behind moves that keep the last one; raises `Mismatch` for others."""
    dims = own = whole(node)
    for move in moves:
        dims = moved(move, dims) if move.target in MOVES else dims
    if leaves(dims[-1]) != leaves(own[-1]):
        raise Mismatch("weights whose keys are moved")
    return own, dims


def _part(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return source, axis and number of the one of several equal parts along an axis that a node is; or None."""
    if (selected := select_of(node)) is not None:
        source, axis, start = selected
        length = 1
    elif (run := run_of(node)) is not None:
        source, axis, start, length = run
    else:
        return None
    count = sizes(source)[axis]
    if not length or not count.is_Integer or count % length or start % length or count == length:
        return None
    return source, axis, start % int(count) // length
