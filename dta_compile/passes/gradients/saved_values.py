"""saved_values: which forward values a chunk keeps for its backward, and which ones the backward computes again.

A minimum cut of the forward graph. Keeping a value costs `TOUCHED_PER_SAVED` times its bytes; computing it again costs
the bytes that its operator reads and writes, as operators that run one by one are bound by memory bandwidth. So values
are recomputed where that touches less than `TOUCHED_PER_SAVED` bytes for every byte that is then not kept, a chain of
operators being paid for as a whole: `silu(gate) * up` is recomputed, a rotated query is kept, and so is the small
`rsqrt` of a normalisation, since a whole row is read to make it.

Matrix products, attention, softmax, sorting, and whatever else is not known to be cheap are never repeated. A view
costs nothing and is not kept beside the memory it is in. A view of a part (the values in a fused QKV projection) may be
copied, so that the rest of that memory is not kept alive.
"""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx
import torch
from torch import fx

from dta_compile.passes.chunk_bytes import ChunkSizes
from dta_compile.passes.graphs.min_cut import source_side
from dta_compile.passes.graphs.nodes import is_item, is_pointwise
from dta_compile.passes.graphs.operators import LOOKUPS, ONE_PASS, ROW_REDUCTIONS
from dta_compile.passes.graphs.storage import owner, view_source
from dta_compile.passes.program import has_tensor

TOUCHED_PER_SAVED = 8
NEVER = float("inf")
NOMINAL_ROWS = 1024  # costs are those of a chunk with as many tokens and head rows


def saved_values(
    forward: set[fx.Node], read: Iterable[fx.Node], states: Iterable[fx.Node], sizes: ChunkSizes
) -> list[fx.Node]:
    """The cheapest values to keep, in graph order.

    Args:
        forward: what the forward computes from the chunk's inputs, these included.
        read: those of `forward` that the backward reads.
        states: what mixers keep on the path; their memory is always kept.
    """
    return _Cut(forward, [*read, *states], {owner(node) for node in states}, sizes).solve()


class _Cut:
    """The network. A value is two nodes: "had" by the backward in whatever way, and "made" by the backward."""

    def __init__(self, forward: set[fx.Node], read: list[fx.Node], pinned: set[fx.Node], sizes: ChunkSizes) -> None:
        self.forward, self.read, self.pinned, self.sizes = forward, read, pinned, sizes
        self.bytes: dict[fx.Node, int] = {}
        self.network = nx.DiGraph()
        self.network.add_nodes_from(("source", "sink"))

    def solve(self) -> list[fx.Node]:
        pending = list(dict.fromkeys(self._stored(node) for node in self.read))
        for node in pending:
            self._edge("source", (node, "had"))
        added: dict[fx.Node, None] = {}
        while pending:
            node = pending.pop()
            if node not in added:
                added[node] = None
                pending += self._add(node)
        backward = source_side(self.network)
        return [node for node in added if (node, "had") in backward and (node, "made") not in backward]

    def _add(self, node: fx.Node) -> list[fx.Node]:
        """Add a value; returns the values that it is computed from, if it may be computed again."""
        keep, make = self._cost_of_keeping(node), self._cost_of_making(node)
        self._edge((node, "had"), (node, "made"), keep)
        if make == NEVER:
            self._edge((node, "made"), "sink")
            return []
        self._edge((node, "made"), "sink", make)
        sources = list(dict.fromkeys(self._stored(arg) for arg in node.all_input_nodes if arg in self.forward))
        for source in sources:
            self._edge((node, "made"), (source, "had"))
        return sources

    def _edge(self, tail: object, head: object, capacity: float = NEVER) -> None:
        self.network.add_edge(tail, head, **({} if capacity == NEVER else {"capacity": capacity}))

    def _stored(self, node: fx.Node) -> fx.Node:
        """The node that stands for a value: views of a whole value are as good as the value."""
        while (source := view_source(node)) is not None and not self._is_part(node):
            node = source
        return node

    def _is_part(self, node: fx.Node) -> bool:
        return not isinstance(node.meta["val"], (tuple, list)) and self._bytes(node) < self._bytes(view_source(node))

    def _cost_of_keeping(self, node: fx.Node) -> float:
        if not isinstance(node.meta["val"], torch.Tensor):
            return NEVER
        copy = 2 * self._bytes(node) if view_source(node) is not None else 0
        return TOUCHED_PER_SAVED * self._bytes(node) + copy

    def _cost_of_making(self, node: fx.Node) -> float:
        if node.op == "placeholder" or node in self.pinned:
            return NEVER
        if view_source(node) is not None or is_item(node) or not has_tensor(node):
            return 0
        read, written = sum(self._bytes(arg) for arg in node.all_input_nodes), self._bytes(node)
        if is_pointwise(node) or node.target in ONE_PASS:
            return read + written
        if node.target in LOOKUPS:
            return 2 * written
        return 2 * read + written if node.target in ROW_REDUCTIONS else NEVER

    def _bytes(self, node: fx.Node) -> int:
        if node not in self.bytes:
            self.bytes[node] = round(self.sizes.bytes(node.meta["val"]).at(NOMINAL_ROWS, NOMINAL_ROWS))
        return self.bytes[node]
