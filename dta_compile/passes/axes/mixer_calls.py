"""The calls of mixers in a lowered graph, and how many sequences and tokens they are over."""

from __future__ import annotations

import sympy
from torch import fx

from dta_compile.ops.mixer import MIXERS
from dta_compile.passes.symbols import sizes


def mixer_calls(graph: fx.Graph) -> list[fx.Node]:
    """The calls, in order."""
    return [node for node in graph.nodes if node.target in MIXERS]


def batch_and_tokens(call: fx.Node) -> tuple[sympy.Expr, sympy.Expr]:
    """The sizes that a call is over, by its first operand: for attention, the query `[B, heads, S, D]`."""
    mixer, shape = MIXERS[call.target], sizes(call.args[0])
    return shape[mixer.batch_dim], shape[mixer.token_dim]
