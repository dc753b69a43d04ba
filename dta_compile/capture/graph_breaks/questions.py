"""Answer conditions about inputs while tracing, as `if (input_ids == image).any()` asks about placeholder tokens.

Dynamo would end the graph at such a condition, since it depends on data. If it is computed from nothing but one input
of integers or booleans, it is computed on this call's input, and a guard computes it for each later call: one whose
answer differs is traced anew. So there are as many graphs as answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dta_compile.capture.dynamo import running, sizes
from dta_compile.capture.graph_breaks import selections
from dta_compile.passes.program import ancestors, name_of
from dta_compile.torch_compat import frames

# Operators that have the same result for the same numbers, whenever they are asked.
KNOWN = {
    *selections.COMPARISONS,
    *selections.AS_MANY,
    *("any", "all", "sum", "count_nonzero", "max", "min", "amax", "amin", "diff", "isin", "numel", "size", "getitem"),
    *("and_", "or_", "xor", "invert", "logical_and", "logical_or", "logical_not", "bool", "int", "item"),
}


@dataclasses.dataclass(frozen=True)
class Question:
    """A condition that one input answers.

    Attributes:
        answer: in the call that is being compiled.
        ask: computes the condition from the input.
        source: of the input.
    """

    answer: bool
    ask: Callable[[torch.Tensor], torch.Tensor]
    source: Any

    def guarded(self, translator: Any) -> bool:
        """Return the answer, and have calls with another one traced anew."""

        def is_as_before(value: torch.Tensor) -> bool:
            return bool(self.ask(value)) == self.answer

        def guard_answer(builder: Any, guard: Any) -> None:
            where = f"a condition about {guard.name} is {self.answer}"
            builder.get_guard_manager(guard).add_lambda_guard(is_as_before, [where], guard.user_stack)

        translator.output.guards.add(self.source.make_guard(guard_answer))
        return self.answer


def asked(translator: Any, condition: fx.Node) -> Question | None:
    """Return what a condition asks about one input; None if it depends on other values."""
    nodes = ancestors([condition])
    inputs = [node for node in nodes if node.op == "placeholder"]
    is_known = all(name_of(node) in KNOWN and not node.kwargs for node in nodes if node not in inputs)
    if len(inputs) != 1 or not is_known or any(map(selections.is_written, nodes)) or not sizes.is_data(inputs[0]):
        return None
    argument = inputs[0].meta["grapharg"]
    is_ours = frames.is_ours(translator.output.compiler_fn)
    if not is_ours or argument.example.is_floating_point() or argument.example.is_complex():
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in translator.output.graph.nodes:
        if node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[condition])
    ask = fx.GraphModule({}, graph)
    with running.outside_of_trace(), torch.no_grad():
        return Question(bool(ask(argument.example)), ask, argument.source)
