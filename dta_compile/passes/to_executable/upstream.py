"""Find the outputs whose gradient, in eager mode, has a part that comes by way of other outputs, and here has not.

What lies between two outputs and runs in the epilogue just as the user wrote it is differentiated as in eager mode. By
way of anything else (the tree, or operators that a pass has replaced) gradients reach the parameters, not the output:
neither a value that chunks compute, nor a weight that the epilogue computes a second time, nor a view that a pass has
looked through.
"""

from __future__ import annotations

import torch
from torch import fx

from dta_compile.passes.graphs.nodes import may_have_gradient
from dta_compile.passes.graphs.operators import aten
from dta_compile.passes.program import Program, operands


def upstream_outputs(program: Program) -> dict[int, tuple[int, ...]]:
    """Return by output those that it is computed from whose gradient lacks what comes by way of it."""
    number_of: dict[fx.Node, int] = {}
    caches = {value.node for value in program.frontier if value.is_cache}  # which refuse gradients
    for number, (node, output) in enumerate(zip(program.traced.outputs, program.outputs, strict=False)):
        if isinstance(node, fx.Node) and node.op != "placeholder" and output not in caches:
            number_of.setdefault(node, number)
    if len(number_of) < 2:
        return {}
    upstream, intact = dict[int, tuple[int, ...]](), _intact(program)
    for source, number in number_of.items():
        if stops_gradients(source):
            continue
        reached = _reached(program, source, intact)
        later = {node: is_intact for node, is_intact in reached.items() if node in number_of and node is not source}
        # Where gradients are noticed for one of them, for all: the epilogue reads a value before it is noticed.
        if not all(later.values()):
            upstream |= {number_of[node]: (*upstream.get(number_of[node], ()), number) for node in later}
    return upstream


def _intact(program: Program) -> set[fx.Node]:
    """Return the nodes outside the region that compute what they were traced to, and are returned if they were."""
    if program.rest is not None:
        return set()
    reads, pairs = program.traced.reads, zip(program.traced.outputs, program.outputs, strict=True)
    replaced = {traced for traced, output in pairs if isinstance(traced, fx.Node) and traced is not output}
    outside = set(program.graph.nodes) - program.region - replaced
    return {node for node in outside if reads.get(node) == operands(node)}


def _reached(program: Program, source: fx.Node, intact: set[fx.Node]) -> dict[fx.Node, bool]:
    """Return the nodes from which gradients reach `source`, with whether all of the way is intact."""
    is_returned = any(output is source for output in program.outputs)
    reached = {source: is_returned and program.rest is None}
    for node, reads in program.traced.reads.items():
        ways = [reached[arg] for arg in reads if arg in reached]
        if ways and node.op != "output" and not stops_gradients(node):
            reached[node] = node in intact and all(ways)
    return reached


def stops_gradients(node: fx.Node) -> bool:
    """Return whether no gradient gets through a node."""
    is_alone = isinstance(node.meta.get("val"), torch.Tensor)  # several results may be of several kinds
    return node.target is aten.detach.default or (is_alone and not may_have_gradient(node))
