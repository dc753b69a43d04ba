"""Make Dynamo trace a call once more, in another way, and note what a compilation leaves out until it ends."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import fx

from dta_compile.passes.program import output_node
from dta_compile.torch_compat import frames
from dta_compile.torch_compat.dynamo import (
    CompileContext,
    OutputGraph,
    TensorifyScalarRestartAnalysis,
    UnspecializeRestartAnalysis,
    callback_handler,
)

ASKED = "dta_requires_grad"  # in the meta of a node of a computed value: `requires_grad_()` was called
# What a trace may leave out: there the graph ends, or each layer is traced by itself.
SELECTIONS, BRANCHES = "selections of rows", "branches over selected rows"
LEAVES, REGIONS = "requires_grad_() of computed values", "regions"
_noted: set[tuple[Any, str]] = set()  # ids of running compilations, each with what was noted about it


class TraceAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """Restart Dynamo's trace from within a backend.

    The first base passes through Dynamo's backend wrapper. The second makes Dynamo forget where it tried graph breaks,
    because symbolic sizes add calls to the graph and so further instructions to try.
    """


def note(what: str) -> None:
    """Note something about the running compilation until its end, where Dynamo calls `_clear`: ids may come again."""
    if _clear not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_clear)
    _noted.add((CompileContext.current_compile_id(), what))


def is_noted(what: str) -> bool:
    """Return whether something was noted about the running compilation."""
    return (CompileContext.current_compile_id(), what) in _noted


def _clear(*_: Any) -> None:
    _noted.clear()


def trace_again_with(what: str) -> NoReturn:
    """Make Dynamo trace once more after a change of ours, which `what` names."""
    raise TraceAgain(f"dta: trace with {what}")


def trace_again_without(what: str) -> NoReturn:
    """Make Dynamo trace once more, and leave something out in all traces of the running compilation."""
    note(what)
    raise TraceAgain(f"dta: trace without {what}")


def traces_selections(output_graph: Any) -> bool:
    """Whether a trace of ours has sizes that depend on data, which Dynamo has not been set to allow."""
    return bool(getattr(output_graph, "_dta_selects", False))


def trace_again_without_selections(output_graph: Any = None) -> None:
    """Make Dynamo trace once more with its own setting, breaking the graph where rows are selected by a condition."""
    if traces_selections(output_graph or frames.calling(OutputGraph)):
        trace_again_without(SELECTIONS)


def takes_branches(output_graph: Any) -> bool:
    """Whether a trace takes branches that the model skips where nothing is selected (`selected_branches`)."""
    return traces_selections(output_graph) and not is_noted(BRANCHES)


def traces_requires_grad(output_graph: Any) -> bool:
    """Whether a trace goes on at `requires_grad_()` of a computed value, which then gets no gradient of its own."""
    return frames.is_ours(output_graph.compiler_fn) and not is_noted(LEAVES)


def trace_again_if_a_leaf_is_returned(graph: fx.Graph) -> None:
    """Make Dynamo trace once more if a value is returned that was asked to require a gradient: its own may be read."""
    if any(ASKED in node.meta for node in output_node(graph).all_input_nodes):
        trace_again_without(LEAVES)
