"""Random numbers: with the same seed a compiled call has eager's: each is drawn once, over the same shape, in order.

The prologue runs before the epilogue and both run once a call, so order is kept as long as nothing that chunks need is
drawn after something that only the epilogue can draw. Chunks never draw: tokens that rollouts share are computed once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.ops.draw_capture import is_random
from dta_compile.passes.graphs.nodes import descendants
from dta_compile.passes.program import Program, ancestors, where

aten = torch.ops.aten
EAGER = "random numbers in the order in which eager execution draws them"


def drawing(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that draw random numbers, in their order."""
    return [node for node in graph.nodes if _draws(node)]


def _draws(node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(node.graph.owning_module.get_submodule(node.target), "draws", False))
    return is_random(node.target)


@dataclasses.dataclass(frozen=True)
class Draws:
    """Where random numbers are drawn; `late`: what reads no parameter, but has to wait for the epilogue's draws."""

    prologue: Sequence[fx.Node]
    epilogue: Sequence[fx.Node]
    late: set[fx.Node]


def place_draws(program: Program, chunks_need: Iterable[fx.Node]) -> Draws:
    """Raises `RefusalError` where the order, or the number of draws, would not be that of eager execution."""
    draws = program.draws
    for node in draws:
        if node in program.region:
            raise _refusal(node, "random numbers for a parameter, which every chunk would draw anew")
        if node.target is aten.rrelu_with_noise_functional.default:
            raise _refusal(node, "a randomised leaky ReLU, whose noise cannot be kept for its derivative")
    first = next((i for i, node in enumerate(draws) if node in program.parameter_dependent), len(draws))
    late = descendants(program.graph, draws[first:]) - program.parameter_dependent
    for node in program.graph.nodes:
        if node in late and _draws(node) and node in ancestors(list(chunks_need)):
            raise _refusal(node, f"{node.target}, needed before {draws[first].target}, which comes first")
    return Draws(draws[:first], draws[first:], late)


def _refusal(node: fx.Node, got: str) -> RefusalError:
    return RefusalError(
        "random numbers cannot be drawn here as eager execution draws them",
        where=where(node),
        expected=EAGER,
        got=got,
        hint="draw them outside of the compiled function and pass them in",
    )
