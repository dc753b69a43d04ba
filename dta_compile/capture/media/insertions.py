"""Find where a captured graph puts features at placeholder tokens which are not computed from the media."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import fx

from dta_compile.capture.dynamo.sizes import is_data
from dta_compile.passes.program import memory, name_of, writes_of
from dta_compile.passes.symbols import hint

SCATTERS = ("masked_scatter", "masked_scatter_")
PUTS = ("index_put", "index_put_")
SUMS = ("add", "add_", "iadd", "__add__", "__iadd__")


@dataclasses.dataclass(frozen=True)
class Insertion:
    """Node that puts features at the tokens of a mask.

    Attributes:
        features: the argument that has the features `[N, D]`, or `[images, N / images, D]`.
        mask: `[B, S]` or, for `masked_scatter`, over the entries `[B, S, D]` of the tokens.
        media: the data that the features are computed from.
    """

    node: fx.Node
    features: fx.Node
    mask: fx.Node
    media: frozenset[fx.Node]


def insertions_of(graph: fx.Graph, ids: Set[fx.Node] = frozenset()) -> Iterator[Insertion]:
    """Yield the nodes that put features at placeholder tokens which are not computed from the media.

    Args:
        ids: inputs that encoders look tokens up in, and that features do not depend on.
    """
    media: dict[fx.Node, frozenset[fx.Node]] = {}  # the data that a value depends on
    written: dict[Any, frozenset[fx.Node]] = {}  # the data that was written to memory
    if not any(True for node in graph.nodes for _ in _candidates(node)):
        return
    writes = writes_of(graph)

    def now(node: fx.Node) -> frozenset[fx.Node]:
        return media[node].union(*(written.get(part, ()) for part in memory(node)))

    for node in graph.nodes:
        is_medium = node.op == "placeholder" and is_data(node) and node.meta["example_value"].dim() > 0  # else of all
        own = {node} if is_medium else set()
        media[node] = frozenset(own.union(*map(now, node.all_input_nodes)))
        for features, mask in _candidates(node):
            of_features, of_mask = now(features) - ids, now(mask)
            is_of_media = of_features and of_mask and of_features.isdisjoint(of_mask)
            if is_of_media and _has_width_of(features, node.args[0]):
                yield Insertion(node, features, mask, of_features)
        for part in writes.get(node, ()):
            written[part] = written.get(part, frozenset()) | media[node]


def _has_width_of(features: fx.Node, tokens: fx.Node) -> bool:
    """Return whether features are vectors `[N, D]` or `[images, N / images, D]` as wide as the tokens `[..., D]`."""
    value, other = features.meta.get("example_value"), tokens.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor) or value.dim() < 2:
        return False
    is_as_wide = hint(value.shape[-1]) == hint(other.shape[-1]) and bool(value.shape[-1] == other.shape[-1])
    return value.is_floating_point() and is_as_wide


def _candidates(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield pairs of a value and the mask of the tokens that it is put at, as far as the node's form tells."""
    name = name_of(node)
    args = node.args
    if name in SCATTERS and len(args) == 3 and isinstance(args[2], fx.Node):
        yield args[2], args[1]
    elif node.target is operator.setitem or (name in PUTS and len(args) == 3 and not node.kwargs):
        mask = _mask_of_index(args[1])
        if mask is not None and isinstance(args[2], fx.Node):
            yield args[2], mask
    elif name in SUMS and len(args) == 2:
        for selected, features in (args, args[::-1]):
            if isinstance(selected, fx.Node) and selected.target is operator.getitem and isinstance(features, fx.Node):
                mask = _mask_of_index(selected.args[1])
                if mask is not None:
                    yield features, mask


def _mask_of_index(index: Any) -> fx.Node | None:
    """Return the mask of `x[mask]` and `x[mask, :]`; None for other indices."""
    first, *rest = index if isinstance(index, (tuple, list)) else (index,)
    if not isinstance(first, fx.Node) or any(part not in (slice(None), Ellipsis) for part in rest):
        return None
    value = first.meta.get("example_value")
    return first if isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.dim() > 1 else None
