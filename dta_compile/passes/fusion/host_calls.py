"""host_calls: weights are transposed once, views of views become one view, and small gradients are added in one call.

None of these computes much, but each takes the host about a third of the time that launching a matrix product takes,
and a GPU waits for the host where chunks are small. Lowering and differentiation view a value anew for every reader;
the gradient of a normalisation layer is as long as a row, and adding it is one more kernel.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Hashable, Iterable
from typing import Any

import torch
from torch import fx

from dta_compile.passes.contracts import contract
from dta_compile.passes.graphs.operators import KEEP_ORDER_IN_PLACE, VIEWS_OF_ORDER
from dta_compile.passes.graphs.storage import storages, view_source
from dta_compile.passes.program import Program, output_node, writes_in_place
from dta_compile.passes.stage_graphs import StageGraphs

aten = torch.ops.aten

SMALL = 2**16  # entries of a gradient that may wait for the others: next to nothing beside activations


@contract(rewrites=["stages"], may_be_skipped=True)
def host_calls(program: Program) -> None:
    """Rewrite the executable graphs of `program.stages`."""
    stages = program.stages
    first = {stage.kind: stage for stage in reversed(stages.stages)}  # which reads such values as the others do
    kinds = [
        dataclasses.replace(kind, transposed=_take_transposed(kind, stages.whole_reads(first[number])))
        for number, kind in enumerate(stages.kinds)
    ]
    program.stages = dataclasses.replace(stages, kinds=tuple(kinds))
    for module in program.stages.modules:
        _copy_if_need_be(module.graph)
        _merge_views(module.graph)
        _add_together(module.graph)
        module.recompile()


def _take_transposed(kind: StageGraphs, whole: Collection[int]) -> tuple[int, ...]:
    """Inputs whose transposes alone are read are taken so: a parameter is transposed once a call, not per chunk."""
    graphs = [module.graph for module in kind.modules if module is not kind.backward]
    inputs = [list(graph.find_nodes(op="placeholder"))[1:] for graph in graphs]
    found = []
    for i, alike in enumerate(zip(*inputs, strict=True)):
        users = [user for node in alike for user in node.users]
        transposes = all(user.target is aten.t.default and user.args[0].meta["val"].dim() == 2 for user in users)
        if i in whole and users and transposes:
            found.append(i)
            for user in users:
                user.args[0].meta["val"] = user.meta["val"]
                user.replace_all_uses_with(user.args[0])
                user.graph.erase_node(user)
    return tuple(found)


def _copy_if_need_be(graph: fx.Graph) -> None:
    """What attention returns may lie in memory as its readers want it already: only the run can tell."""
    returned = {memory for node in output_node(graph).all_input_nodes for memory in storages(node)}
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        if node.kwargs == {"memory_format": torch.contiguous_format} and returned.isdisjoint(storages(node)):
            node.target, node.kwargs = aten.contiguous.default, {}


def _merge_views(graph: fx.Graph) -> None:
    """Views are in the memory of their argument, so that one serves all readers, wherever these write."""
    returned = set(output_node(graph).all_input_nodes)
    known: dict[Hashable, fx.Node] = {}
    views = list(filter(_is_view, graph.nodes))
    for node in views:
        if node.target in VIEWS_OF_ORDER:
            node.target, node.args = aten.view.default, (_origin(node), *node.args[1:])
            if node not in returned and _shape(node) == _shape(node.args[0]):
                node.replace_all_uses_with(node.args[0])
                continue
        same = known.setdefault((node.target, node.args, tuple(node.kwargs.items())), node)
        if same is not node and node not in returned:
            node.replace_all_uses_with(same)
    for node in reversed(views):
        if not node.users:
            graph.erase_node(node)


def _is_view(node: fx.Node) -> bool:
    one = isinstance(node.meta.get("val"), torch.Tensor)
    return one and node.op == "call_function" and view_source(node) is not None and not writes_in_place(node)


def _origin(node: fx.Node) -> fx.Node:
    """What a view in the order of its argument may be taken of as well."""
    source: fx.Node = node.args[0]
    while source.target in KEEP_ORDER_IN_PLACE:
        source = source.args[0]
    return source


def _shape(node: fx.Node) -> list[str]:
    return [str(size) for size in node.meta["val"].shape]


def _add_together(graph: fx.Graph) -> None:
    """Small gradients wait for each other until the graph ends."""
    groups: dict[Hashable, dict[fx.Node, fx.Node]] = {}  # by dtypes: additions by accumulator
    for node in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        target, value = node.args
        if target.op == "placeholder" and not node.users and not node.kwargs and _is_small(target, value):
            groups.setdefault(_kind(node.args), {}).setdefault(target, node)
    for group in groups.values():
        if len(group) > 1:
            with graph.inserting_before(output_node(graph)):
                added = [[*group], [node.args[1] for node in group.values()]]
                graph.call_function(aten._foreach_add_.List, tuple(added))
            for node in group.values():
                graph.erase_node(node)


def _is_small(target: fx.Node, value: Any) -> bool:
    """Whether two tensors have the same numbers of entries, and few."""
    if not isinstance(value, fx.Node) or _shape(target) != _shape(value):
        return False
    entries = target.meta["val"].numel()
    return isinstance(entries, int) and entries <= SMALL


def _kind(nodes: Iterable[fx.Node]) -> Hashable:
    values = [node.meta["val"] for node in nodes]
    return tuple(itertools.chain.from_iterable((value.dtype, value.device) for value in values))
