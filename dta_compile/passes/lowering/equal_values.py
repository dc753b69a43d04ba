"""What no parameter goes into is there once: positions, rotary tables and masks are often written in every layer.

Each such value is an input of chunks, whose rows are gathered for every chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from dta_compile.ops.draw_capture import is_random
from dta_compile.passes.graphs.nodes import First, descendants
from dta_compile.passes.graphs.storage import owner
from dta_compile.passes.program import output_node

__all__ = ["merge_equal_values"]


def merge_equal_values(graph: fx.Graph, parameters: Iterable[fx.Node]) -> None:
    """Values that `parameters` go into stay as they are, and so do those that the graph returns: their memory is the
    caller's."""
    kept = descendants(graph, parameters) | {owner(value) for value in output_node(graph).all_input_nodes}
    first = First(kept | {node for node in graph.nodes if not _gives_the_same(node)})
    for node in list(graph.nodes):
        if node.op == "call_function" and (same := first.like(node)) is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _gives_the_same(node: fx.Node) -> bool:
    """Whether a node computes the same whenever it is run for the same arguments, and nothing besides."""
    target = node.target
    is_torchs_own = not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims")
    return is_torchs_own and not is_random(target) and not node.is_impure()
