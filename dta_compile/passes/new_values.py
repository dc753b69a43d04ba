"""Entry by entry writes over values that nothing else reads, as the new values that they amount to.

Composite operators of torch write over their own temporaries (`rms_norm` adds its epsilon so, on CPUs). Undoing that in
the graph saves tracing all of it once more with functionalisation, which other writes need.
"""

from __future__ import annotations

import torch
from torch import fx

from dta_compile.passes.nodes import call
from dta_compile.passes.program import writes_in_place
from dta_compile.passes.storage import same_memory_format, view_source


def write_to_new_values(graph: fx.Graph) -> bool:
    """Replace such writes; False: there are others."""
    return all(_replaced(node) for node in list(graph.nodes) if writes_in_place(node))


def _replaced(node: fx.Node) -> bool:
    functional = _functional(node.target)
    if functional is None or not _is_read_by_nothing_else(node.args[0], node):
        return False
    with node.graph.inserting_before(node):
        new = call(node.graph, functional, *node.args, **node.kwargs)
    if not same_memory_format(new.meta["val"], node.meta["val"]):  # wider numbers were added, say
        node.graph.erase_node(new)
        return False
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return True


def _functional(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """`aten.add.Scalar` for `aten.add_.Scalar`; None where there is no such operator, or it mixes entries."""
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    found = getattr(packet, target._overloadname, None)
    return found if torch.Tag.pointwise in getattr(found, "tags", ()) else None


def _is_read_by_nothing_else(value: fx.Node, reader: fx.Node) -> bool:
    return value.op == "call_function" and view_source(value) is None and set(value.users) == {reader}
