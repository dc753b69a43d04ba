"""Tell whether a branch over selected rows may run although none is selected, by what it computes of them.

What has a row for each selected one is empty then, and so is its part of every gradient. Other values are not: of no
rows a maximum is an error and a mean is NaN, and 0 * NaN is the gradient of a parameter that this multiplies.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import fx

from dta_compile.capture.graph_breaks import selections
from dta_compile.passes.program import name_of
from dta_compile.passes.symbols import depends_on_data, expression
from dta_compile.torch_compat.sizes import free_unbacked_symbols

# Operators that make a value that is not empty of empty ones without an error: these NaN, infinity, or no derivative,
UNDEFINED = {"mean", "nanmean", "std", "var", "std_mean", "var_mean", "logsumexp", "norm", "vector_norm"}
# and these numbers.
DEFINED = {
    *("sum", "nansum", "prod", "any", "all", "count_nonzero", "bincount", "size", "numel", "sym_size", "sym_numel"),
    *("matmul", "mm", "bmm", "dot", "einsum", "tensordot", "cat", "concat", "new_zeros", "new_ones", "new_full"),
    *("getattr", "setitem", "index_add", "index_copy", "index_put", "index_fill", "scatter", "scatter_add"),
}
# Operators without a finite derivative, or value, where a count or a sum is zero, or all of a row is hidden.
DIVIDING = {
    *("div", "divide", "true_divide", "truediv", "itruediv", "reciprocal", "pow", "sqrt", "rsqrt", "log", "log2"),
    *("log10", "softmax", "log_softmax", "logsumexp", "norm", "vector_norm", "normalize", "std", "var"),
}


def are_harmless(own: Iterable[fx.Node], selection: Hashable, condition: fx.Node | None) -> bool:
    """Return whether nodes of a branch raise no error over no rows, and add zeros to the gradients of what they read.

    `condition` is the one that the branch depends on, if any.
    """
    own = dict.fromkeys(own)
    depending = _depending(own, selection, condition)
    empty = _Emptiness(selection, depending)
    within, escaping, undefined = set[fx.Node](), set[fx.Node](), set[fx.Node]()  # `within`: of empty values alone
    for node in sorted(depending):
        if empty(node):
            continue
        name, inputs = name_of(node).rstrip("_"), node.all_input_nodes
        is_of_rows = any(map(empty, inputs))
        if is_of_rows and node in own and name not in UNDEFINED | DEFINED:
            return False
        if (is_of_rows and name in UNDEFINED) or name in DIVIDING or undefined.intersection(inputs):
            undefined.add(node)
        if all(empty(arg) or arg in within for arg in inputs if _has_gradient(arg)):
            within.add(node)
        elif node in undefined and _has_gradient(node):
            escaping.add(node)
    return not any(arg in escaping for node in own for arg in (node, *node.all_input_nodes))


def _depending(own: Iterable[fx.Node], selection: Hashable, condition: fx.Node | None) -> set[fx.Node]:
    """Return the nodes that depend on what is selected: of a branch, and of what its condition is computed from."""

    def is_about(node: fx.Node) -> bool:
        return any(
            name(node) == selection for name in (selections.selection_of, selections.counted, selections.mask_of)
        )

    pending = [node for node in own if is_about(node)]
    above = list(condition.all_input_nodes) if condition is not None else []
    while above:
        node = above.pop()
        if is_about(node):
            pending.append(node)
            above += node.all_input_nodes
    depending = set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in depending:
            depending.add(node)
            pending += node.users
    return depending


class _Emptiness:
    """Whether values are empty if nothing is selected: the sizes that count what is selected are zero then."""

    def __init__(self, selection: Hashable, nodes: Iterable[fx.Node]) -> None:
        indices = [node for node in nodes if selections.selection_of(node) == selection]
        values = [node.meta.get("example_value") for node in indices]
        shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        sizes = [size for shape in shapes for size in shape if depends_on_data(size)]
        self.zeros = {symbol: 0 for size in sizes for symbol in free_unbacked_symbols(size)}

    def __call__(self, node: fx.Node) -> bool:
        return self._is_empty(node.meta.get("example_value"))

    def _is_empty(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return bool(value) and all(map(self._is_empty, value))
        sizes = map(expression, value.shape) if isinstance(value, torch.Tensor) else ()
        return any(size.subs(self.zeros) == 0 for size in sizes)


def _has_gradient(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad
