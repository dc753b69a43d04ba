"""Causal depthwise convolutions that are written out: `conv1d` over a sequence with `k - 1` zeros before it.

    conv1d(x, weight, bias, padding=k - 1, groups=D)[..., :S]        x [B, D, S], weight [D, 1, k]
    conv1d(pad(x, (k - 1, 0)), weight, bias, groups=D)

In a graph for the tree both become our operator.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from dta_compile.capture.recurrences import causal_convolution
from dta_compile.passes.symbols import expression

PADS = (F.pad, torch._C._nn.pad)
ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def with_our_convolutions(module: fx.GraphModule) -> fx.GraphModule:
    """A graph whose causal depthwise convolutions are calls of ours; the same graph if it has none."""
    if not any(_convolved(node) for node in module.graph.nodes):
        return module
    result = fx.GraphModule(module, copy.deepcopy(module.graph))
    for node in list(result.graph.nodes):
        if (found := _convolved(node)) is not None:
            _replace(node, found)
    result.graph.eliminate_dead_code()
    result.recompile()
    return result


def _convolved(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a causal depthwise convolution, its input without padding; None for anything else."""
    if node.op != "call_function" or node.target not in (torch.conv1d, F.conv1d):
        return None
    given = {**dict(zip(ARGUMENTS, node.args, strict=False)), **node.kwargs}
    value, weight = given["input"], given["weight"]
    if not all(isinstance(one, fx.Node) and "example_value" in one.meta for one in (value, weight)):
        return None
    shape, (channels, per_group, width) = _sizes(value), weight.meta["example_value"].shape
    is_plain = _one(given.get("stride", 1)) == 1 and _one(given.get("dilation", 1)) == 1
    if not is_plain or per_group != 1 or len(shape) != 3 or given.get("groups", 1) != channels or shape[1] != channels:
        return None
    padding = _one(given.get("padding", 0))
    if padding == width - 1 and width > 1:
        return given if node.users and all(_is_first_part(user, node, shape[2]) for user in node.users) else None
    if padding == 0 and (source := _padded_before(value, width - 1)) is not None:
        return {**given, "input": source}
    return None


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    return tuple(map(expression, node.meta["example_value"].shape))


def _one(number: Any) -> Any:
    """Of a number for each dimension, that for the only one."""
    return number[0] if isinstance(number, (tuple, list)) and len(number) == 1 else number


def _is_first_part(user: fx.Node, value: fx.Node, tokens: Any) -> bool:
    """Whether a node is `value[..., :tokens]`."""
    if user.op != "call_function" or getattr(user.target, "__name__", "") != "getitem" or user.args[0] is not value:
        return False
    index = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
    *others, last = index
    whole = all(one is Ellipsis or one == slice(None) for one in others) and (Ellipsis in others or len(index) == 3)
    if not whole or not isinstance(last, slice) or last.start not in (None, 0) or last.step not in (None, 1):
        return False
    return bool(_sizes(user)[2] == tokens)


def _padded_before(value: fx.Node, count: int) -> fx.Node | None:
    """The `x` of `pad(x, (count, 0))`."""
    if value.op != "call_function" or value.target not in PADS:
        return None
    given = {**dict(zip(("input", "pad", "mode", "value"), value.args, strict=False)), **value.kwargs}
    zeros = given.get("mode", "constant") == "constant" and not given.get("value")
    return given["input"] if zeros and tuple(given["pad"]) == (count, 0) else None


def _replace(node: fx.Node, given: dict[str, Any]) -> None:
    users = list(node.users) if _one(given.get("padding", 0)) else [node]
    with node.graph.inserting_after(node):
        ours = node.graph.call_function(causal_convolution, (given["input"], given["weight"], given.get("bias")))
    ours.meta = {**node.meta, "example_value": users[0].meta["example_value"]}
    for user in users:
        user.replace_all_uses_with(ours)
