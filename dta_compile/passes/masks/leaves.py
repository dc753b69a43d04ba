"""Values of the lowered graph as leaves of terms, and back."""

from __future__ import annotations

from torch import fx

from dta_compile.passes.program import Program, ancestors, has_tensor
from dta_compile.proofs.terms import Leaf


def leaf_of(program: Program, node: fx.Node) -> Leaf:
    """The leaf that a tensor of the lowered graph is."""
    sources = ancestors([node])
    inputs = [(place, one) for place, one in enumerate(program.placeholders) if one in sources and has_tensor(one)]
    texts = tuple((place, one.meta.get("source") or one.name) for place, one in inputs)
    return Leaf(node.name, node.meta["val"].dtype, node.meta.get("source", ""), texts)


def leaves_of_masks(program: Program) -> list[fx.Node]:
    """What has to be known of a call to read its masks, by name."""
    names = {leaf.name for layer in program.mixers for leaf in layer.leaves}
    return sorted((node for node in program.graph.nodes if node.name in names), key=lambda node: node.name)
