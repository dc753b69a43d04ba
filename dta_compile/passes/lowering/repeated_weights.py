"""Multiply by weights themselves where they are repeated for every sequence before a batched product.

    w[:, None] @ x                  w [H, E, D], x [H, B, D, S]: a layer per head
    torch.bmm(w.expand(B, -1, -1), x)

Torch expands what it broadcasts and merges the dimensions: `[H * B, E, D]` times `[H * B, D, S]`. A product with a
repeated operand is one with the operand itself, of which the other operand's repetitions are further rows or columns.
"""

from __future__ import annotations

from torch import fx

from dta_compile.passes.graphs.nodes import call
from dta_compile.passes.graphs.operators import aten
from dta_compile.passes.lowering.attention.factors import (
    MOVES,
    Arranged,
    Arranger,
    Dim,
    Mismatch,
    leaves,
    product_dims,
    rewrite_products,
)
from dta_compile.passes.symbols import sizes


def multiply_unrepeated(graph: fx.Graph) -> None:
    """Rewrite the batched products of a graph, one operand of which is repeated as often as there are sequences."""
    rewrite_products(graph, _multiply)


def _is_repeated(node: fx.Node) -> bool:
    """Return whether moves of entries repeat a value a number of times that depends on the call."""
    while node.target in MOVES:
        before, after = sizes(node.args[0]), sizes(node)
        if node.target is aten.expand.default:
            known = (*(1,) * (len(after) - len(before)), *before)
            if any(size.free_symbols and own == 1 for own, size in zip(known, after, strict=True)):
                return True
        node = node.args[0]
    return False


def _multiply(arranger: Arranger, node: fx.Node) -> None:
    """Replace a batched product `[N, m, k] @ [N, k, n]`; raises `Mismatch`."""
    if not any(map(_is_repeated, node.args)):
        raise Mismatch("no operand that is repeated")
    left, right = map(Arranged.of, node.args)
    (batch,), *others = product_dims(left, right)
    batch, rows, depth, columns = map(leaves, (batch, *others))
    shared, of_left, of_right = Dim(), Dim(), Dim()
    for factor in batch:
        is_rows, is_columns = (factor.size.free_symbols and not other.has(factor) for other in (right, left))
        (of_left if is_rows else of_right if is_columns else shared).append(factor)
    if not of_left and not of_right:
        return
    dims = [shared] * bool(shared), [*of_left, *rows], [*of_right, *columns]
    operator = aten.bmm.default if shared else aten.mm.default
    first = arranger.arrange(left, [*dims[0], dims[1], depth])
    second = arranger.arrange(right, [*dims[0], depth, dims[2]])
    product = call(node.graph, operator, first, second)
    own = [*dims[0], *dims[1:]]
    node.replace_all_uses_with(arranger.arrange(Arranged(product, own, own), [batch, rows, columns]))
