"""Writes over values that nothing else reads, as the new values that they amount to.

Composite operators of torch write over their own temporaries (`rms_norm` adds its epsilon so, on CPUs). Undoing that in
the graph saves tracing all of it once more with functionalisation, which other writes need.
"""

from __future__ import annotations

from torch import fx

from dta_compile.passes.graphs.nodes import call
from dta_compile.passes.graphs.operators import FUNCTIONAL_VARIANTS
from dta_compile.passes.graphs.storage import same_memory_format, view_source
from dta_compile.passes.program import writes_in_place


def write_to_new_values(graph: fx.Graph) -> bool:
    """Replace such writes; False: there are others."""
    return all(_replaced(node) for node in list(graph.nodes) if writes_in_place(node))


def _replaced(node: fx.Node) -> bool:
    functional = FUNCTIONAL_VARIANTS.get(node.target)
    if functional is None or node.kwargs or not _is_read_by_nothing_else(node.args[0], node):
        return False
    with node.graph.inserting_before(node):
        new = call(node.graph, functional, *node.args)
    if not same_memory_format(new.meta["val"], node.meta["val"]):  # wider numbers were added, say
        node.graph.erase_node(new)
        return False
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return True


def _is_read_by_nothing_else(value: fx.Node, reader: fx.Node) -> bool:
    return value.op == "call_function" and view_source(value) is None and set(value.users) == {reader}
