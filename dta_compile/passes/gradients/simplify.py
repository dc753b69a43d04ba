"""Simplify a functional graph by exact identities, for patterns of derivative formulas. Called by the pass `joint`.

The derivative of `x.pow(2).mean(-1)` is traced as `s.expand(...) / n * (2.0 * x.pow(1.0))`: four passes over values of
full size where `(s / n * 2.0).expand(...) * x` needs one. That of a rotation pads two halves with zeros and adds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dta_compile.ops.collectives import SAME_ON_RANKS
from dta_compile.passes.graphs.nodes import call, erase_unused, filled_with, is_pointwise, replace_nodes
from dta_compile.passes.graphs.operators import ALIASES, EXCHANGES, SCALINGS
from dta_compile.passes.graphs.storage import same_memory_format
from dta_compile.passes.symbols import sizes

aten = torch.ops.aten


def simplify(graph: fx.Graph) -> None:
    """Apply the identities to every node in graph order, so that arguments are simplified before their users."""

    def simplified(node: fx.Node) -> fx.Node | None:
        replacement = next(filter(None, (rule(node) for rule in IDENTITIES)), None)
        return replacement if replacement is not None and _fits(node, replacement) else None

    replace_nodes(graph, simplified)
    erase_unused(graph)


def _fits(node: fx.Node, replacement: fx.Node) -> bool:
    """Return whether a replacement has the memory format of the node, or every user gives the same result with it.

    Users may view the replaced value in ways in which an expanded one cannot be viewed.
    """
    value = replacement.meta["val"]
    return same_memory_format(value, node.meta["val"]) or all(
        _keeps_its_result(user, node, value) for user in node.users
    )


def _keeps_its_result(user: fx.Node, node: fx.Node, value: torch.Tensor) -> bool:
    """Return whether the result of `user` keeps its memory format if `value` replaces `node`."""
    if not is_pointwise(user):
        return False
    args, kwargs = fx.node.map_arg((user.args, user.kwargs), lambda arg: value if arg is node else arg.meta["val"])
    return same_memory_format(user.target(*args, **kwargs), user.meta["val"])


def _same(node: fx.Node) -> fx.Node | None:
    """Replace `x.detach()`, autograd's alias since torch 2.14, and `SAME_ON_RANKS` by x: derivatives are traced."""
    return node.args[0] if node.target in ALIASES or node.target is SAME_ON_RANKS else None


def _first_power(node: fx.Node) -> fx.Node | None:
    """Replace `x.pow(1.0)` by x."""
    if node.target is not aten.pow.Tensor_Scalar or node.args[1] != 1:
        return None
    return node.args[0] if node.args[0].meta["val"].dtype == node.meta["val"].dtype else None


def _transposed_twice(node: fx.Node) -> fx.Node | None:
    if node.target not in EXCHANGES or node.args[0].target is not node.target:
        return None
    return node.args[0].args[0] if node.args[0].args[1:] == node.args[1:] else None


def _scaled_after_expand(node: fx.Node) -> fx.Node | None:
    """Replace `s.expand(...) / n` by `(s / n).expand(...)`."""
    if node.target not in SCALINGS or node.args[0].target is not aten.expand.default:
        return None
    small, *shape = node.args[0].args
    return call(node.graph, aten.expand.default, call(node.graph, node.target, small, *node.args[1:]), *shape)


def _doubling_moved(node: fx.Node) -> fx.Node | None:
    """Replace `s.expand(...) * (2.0 * x)` by `(2.0 * s).expand(...) * x`: powers of two do not round."""
    if node.target is not aten.mul.Tensor or not all(isinstance(arg, fx.Node) for arg in node.args):
        return None
    expanded, doubled = node.args
    if expanded.target is not aten.expand.default or not _is_doubling(doubled):
        return None
    small, *shape = expanded.args
    x, factor = doubled.args
    small = call(node.graph, aten.expand.default, call(node.graph, aten.mul.Scalar, small, factor), *shape)
    return call(node.graph, aten.mul.Tensor, small, x)


def _is_doubling(node: fx.Node) -> bool:
    if node.target is not aten.mul.Scalar or node.args[0].meta["val"].dtype != node.meta["val"].dtype:
        return False
    return isinstance(node.args[1], (int, float)) and abs(math.frexp(node.args[1])[0]) == 0.5


def _parts_joined(node: fx.Node) -> fx.Node | None:
    """Replace the sum of two parts of a dimension, padded with zeros to all of it, by their concatenation."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(_is_padded(arg) for arg in node.args):
        return None
    first, second = sorted(node.args, key=_start)
    dim, start = second.args[2], second.args[3]
    size = second.meta["val"].shape[dim]
    covers = _start(first) == 0 and first.args[4] == start and isinstance(size, int) and second.args[4] >= size
    if not covers or first.args[2] != dim or sizes(first) != sizes(second):
        return None
    return call(node.graph, aten.cat.default, [first.args[0], second.args[0]], dim)


def _is_padded(node: Any) -> bool:
    """Return whether a node is `slice_backward(part, sizes, dim, start, stop, step)` with constants after the sizes."""
    if not isinstance(node, fx.Node) or node.target is not aten.slice_backward.default:
        return False
    return all(isinstance(arg, int) and arg >= 0 for arg in node.args[2:]) and node.args[5] == 1


def _start(padded: fx.Node) -> int:
    return padded.args[3]


def _sparse_log_softmax_gradient(node: fx.Node) -> fx.Node | None:
    """Scatter the gradient of a gathered log-softmax, `G - exp(y) * sum(G)`: few entries of G are not zero.

    Scattering the entries onto `exp(y) * -sum(entries)` saves two values of the vocabulary's size.
    """
    if node.target is not aten._log_softmax_backward_data.default:
        return None
    gradient, output, dim, dtype = node.args
    if gradient.target is not aten.scatter_add.default or len(gradient.users) > 1 or node.meta["val"].dtype != dtype:
        return None
    zeros, scattered, index, entries = gradient.args
    rank = output.meta["val"].dim()
    same = sizes(zeros) == sizes(output) and zeros.meta["val"].dtype == output.meta["val"].dtype == dtype
    if not same or scattered % rank != dim % rank or filled_with(zeros) != 0 or sizes(index) != sizes(entries):
        return None
    others = [i for i in range(rank) if i != dim % rank]
    if any(sizes(index)[i] != sizes(output)[i] for i in others):  # a gather may leave rows out
        return None
    total = call(node.graph, aten.neg.default, call(node.graph, aten.sum.dim_IntList, entries, [dim], True))
    dense = call(node.graph, aten.mul.Tensor, call(node.graph, aten.exp.default, output), total)
    return call(node.graph, aten.scatter_add.default, dense, dim, index, entries)


IDENTITIES: tuple[Callable[[fx.Node], fx.Node | None], ...] = (
    _same,
    _first_power,
    _transposed_twice,
    _scaled_after_expand,
    _doubling_moved,
    _parts_joined,
    _sparse_log_softmax_gradient,
)
