"""Captured graphs as trees: activation checkpoints are graphs inside of a graph (`tag_activation_checkpoint`)."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable

from torch import fx

from dta_compile.executable.as_captured import TAG_ACTIVATION_CHECKPOINT
from dta_compile.passes.program import all_nodes, output_node


def rewritten(
    module: fx.GraphModule, is_concerned: Callable[[fx.Node], object], rewrite: Callable[[fx.Graph], None]
) -> fx.GraphModule:
    """Return a copy of a captured graph with `rewrite` applied to it and the regions inside; itself without such nodes.

    Results and operands of regions that nobody reads are dropped, so that `rewrite` meets neither.
    """
    if not any(map(is_concerned, all_nodes(module))):
        return module
    result = _copied(module)
    _rewrite(result, rewrite)
    return result


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    result = fx.GraphModule(module, copy.deepcopy(module.graph))
    result.meta = module.meta
    for name, part in module.named_children():
        if isinstance(part, fx.GraphModule):
            setattr(result, name, _copied(part))
    return result


def _rewrite(module: fx.GraphModule, rewrite: Callable[[fx.Graph], None]) -> None:
    calls = module.graph.find_nodes(op="call_function", target=TAG_ACTIVATION_CHECKPOINT)
    called_once = [(call, getattr(module, call.args[0].target)) for call in calls if len(call.args[0].users) == 1]
    for call, region in called_once:
        _drop_unread_results(call, region)
    for _, part in module.named_children():
        if isinstance(part, fx.GraphModule):
            _rewrite(part, rewrite)
    for call, region in called_once:
        _drop_unused_operands(call, region)
    rewrite(module.graph)
    module.recompile()


def _drop_unread_results(call: fx.Node, region: fx.GraphModule) -> None:
    if all(user.target is operator.getitem for user in call.users):
        read = {user.args[1] for user in call.users}
        output = output_node(region.graph)
        output.args = (tuple(value if i in read else None for i, value in enumerate(output.args[0])),)


def _drop_unused_operands(call: fx.Node, region: fx.GraphModule) -> None:
    body, *operands = call.args
    inputs = region.graph.find_nodes(op="placeholder")
    call.args = (body, *(operand for operand, inside in zip(operands, inputs, strict=True) if inside.users))
    for inside in inputs:
        if not inside.users:
            region.graph.erase_node(inside)
    region.recompile()
