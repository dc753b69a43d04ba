"""host_calls: transpose weights once per call, merge views, and add small gradients in one call.

Each of these calls takes the host about a third of the time of launching a matrix product, and with small chunks a GPU
waits for the host. Lowering and differentiation make a new view for every reader; the gradient of a normalisation layer
is only as long as a row, and adding it takes a kernel of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import fx

from dta_compile.passes.contracts import contract
from dta_compile.passes.graphs.nodes import behind
from dta_compile.passes.graphs.operators import KEEP_ORDER_IN_PLACE, VIEWS_OF_ORDER, aten
from dta_compile.passes.graphs.storage import storages, view_source
from dta_compile.passes.program import Program, output_node, writes_in_place
from dta_compile.passes.stage_graphs import StageGraphs
from dta_compile.passes.symbols import sizes

SMALL = 2**16  # entries of a gradient that is kept to the end of the graph: negligible beside activations


@contract(rewrites=["stages"], may_be_skipped=True)
def host_calls(program: Program) -> None:
    """Rewrite the executable graphs of `program.stages` with fewer calls."""
    stages = program.stages
    first = {stage.kind: stage for stage in reversed(stages.stages)}  # all stages of a kind read weights alike
    kinds = [
        dataclasses.replace(kind, transposed=_take_transposed(kind, stages.whole_reads(first[number])))
        for number, kind in enumerate(stages.kinds)
    ]
    program.stages = dataclasses.replace(stages, kinds=tuple(kinds))
    for module in program.stages.modules:
        _copy_only_if_strided(module.graph)
        _merge_views(module.graph)
        _group_additions(module.graph)
        module.recompile()


def _take_transposed(kind: StageGraphs, whole: Collection[int]) -> tuple[int, ...]:
    """Take inputs transposed whose transposes are all that is read: once per call instead of per chunk.

    Returns the positions of these inputs."""
    graphs = [module.graph for module in kind.modules if module is not kind.backward]
    inputs = [list(graph.find_nodes(op="placeholder"))[1:] for graph in graphs]
    positions = []
    for i, alike in enumerate(zip(*inputs, strict=True)):
        users = [user for node in alike for user in node.users]
        transposes = all(user.target is aten.t.default and user.args[0].meta["val"].dim() == 2 for user in users)
        if i in whole and users and transposes:
            positions.append(i)
            for user in users:
                user.args[0].meta["val"] = user.meta["val"]
                user.replace_all_uses_with(user.args[0])
                user.graph.erase_node(user)
    return tuple(positions)


def _copy_only_if_strided(graph: fx.Graph) -> None:
    """Replace contiguous clones by `contiguous`: whether attention's result is contiguous is known only at run time."""
    returned = {memory for node in output_node(graph).all_input_nodes for memory in storages(node)}
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        if node.kwargs == {"memory_format": torch.contiguous_format} and returned.isdisjoint(storages(node)):
            node.target, node.kwargs = aten.contiguous.default, {}


def _merge_views(graph: fx.Graph) -> None:
    """Merge equal views and views of views; a view aliases its argument, so in-place writes do not matter."""
    returned = set(output_node(graph).all_input_nodes)
    known: dict[Hashable, fx.Node] = {}
    views = list(filter(_is_view, graph.nodes))
    for node in views:
        if node.target in VIEWS_OF_ORDER:
            node.target, node.args = aten.view.default, (behind(node.args[0], KEEP_ORDER_IN_PLACE), *node.args[1:])
            if node not in returned and sizes(node) == sizes(node.args[0]):
                node.replace_all_uses_with(node.args[0])
                continue
        same = known.setdefault((node.target, node.args, tuple(node.kwargs.items())), node)
        if same is not node and node not in returned:
            node.replace_all_uses_with(same)
    for node in reversed(views):
        if not node.users:
            graph.erase_node(node)


def _is_view(node: fx.Node) -> bool:
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return is_tensor and node.op == "call_function" and view_source(node) is not None and not writes_in_place(node)


def _group_additions(graph: fx.Graph) -> None:
    """Add small gradients to their accumulators in one call at the end of the graph."""
    groups: dict[Hashable, dict[fx.Node, fx.Node]] = {}  # by dtypes: additions by accumulator
    for node in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        target, value = node.args
        if target.op == "placeholder" and not node.users and not node.kwargs and _is_small(target, value):
            kind = tuple((arg.meta["val"].dtype, arg.meta["val"].device) for arg in node.args)
            groups.setdefault(kind, {}).setdefault(target, node)
    for group in groups.values():
        if len(group) > 1:
            with graph.inserting_before(output_node(graph)):
                added = [[*group], [node.args[1] for node in group.values()]]
                graph.call_function(aten._foreach_add_.List, tuple(added))
            for node in group.values():
                graph.erase_node(node)


def _is_small(target: fx.Node, value: Any) -> bool:
    """Return whether two tensors have the same shape, of at most `SMALL` entries."""
    if not isinstance(value, fx.Node) or sizes(target) != sizes(value):
        return False
    entries = target.meta["val"].numel()
    return isinstance(entries, int) and entries <= SMALL
