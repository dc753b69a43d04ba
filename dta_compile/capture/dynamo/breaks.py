"""Why and where Dynamo ended a graph or gave up on a function, as refusals and warnings say it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from dta_compile.capture.dynamo import restarts
from dta_compile.capture.dynamo.running import modules_at_hand
from dta_compile.torch_compat import frames
from dta_compile.torch_compat.dynamo import OutputGraph

# The latest function that Dynamo could not trace: its compiler, and the first reason.
_given_up: list[tuple[Any, str]] = []
# The latest graph break, unless Dynamo could not trace a function since: what a refusal of a later graph names.
last_break: list[str] = []
GIVEN_UP = "given up"  # on a function of the running compilation


def note_given_up(compiler: Any, error: Exception, modules: Iterable[torch.nn.Module]) -> None:
    """Note the first reason why Dynamo cannot trace a function of the running compilation."""
    if not restarts.is_noted(GIVEN_UP) and "No ops traced" not in str(error):  # else there is nothing to compile
        restarts.note(GIVEN_UP)
        last_break.clear()
        _given_up[:] = [(compiler, cause(error) + _hooked(modules, str(error)))]


def given_up() -> str | None:
    """Return why and where Dynamo gave up on a caller of the function being compiled, for example at a break in a loop.

    The functions that the caller calls are then compiled one by one, for the same compiled callable.
    """
    here = getattr(frames.calling(OutputGraph), "compiler_fn", None)
    return next((reason for compiler, reason in _given_up if compiler is here), None)


def cause(error: BaseException) -> str:
    """Return the reason why Dynamo cannot trace a function, with the user's line."""
    while error.__cause__ is not None and getattr(error.__cause__, "real_stack", None):
        error = error.__cause__
    return _with_line(_reason(str(error)), getattr(error, "real_stack", None))


def graph_break(module: fx.GraphModule) -> str | None:
    """Return the reason of the graph break that ends a graph, with the user's line; None without a break."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    root, text = getattr(frames.calling(OutputGraph), "root_tx", None), str(reason.reason)
    return _with_line(_reason(text), reason.user_stack) + _hooked(modules_at_hand(root) if root else (), text)


def _hooked(modules: Iterable[torch.nn.Module], reason: str) -> str:
    """Name the modules with backward hooks, if these are the reason why Dynamo cannot trace a function."""
    named = {module: name for root in modules for name, module in root.named_modules() if name}
    hooked = [f"{named[m]} ({type(m).__name__})" for m in named if m._backward_hooks or m._backward_pre_hooks]
    names = ", ".join(hooked) or "all modules (torch.nn.modules.module.register_module_full_backward_hook)"
    return f"; backward hooks are on {names}" if "backwards hooks" in reason else ""


def _reason(text: str) -> str:
    """Return the first line of a message of Dynamo's, with the reason that its explanation may give."""
    first, *others = text.strip().splitlines() or [""]
    _, _, why = next((line for line in others if line.lstrip().startswith("Explanation:")), "").partition("Reason: ")
    return f"{first}: {why.partition('. ')[0].rstrip('.')}" if why and why not in first else first


def _with_line(reason: str, stack: Any) -> str:
    """Return a reason with the user's line: the innermost one outside of torch."""
    line = next((line for line in reversed(stack or ()) if torch.nn.modules.__path__[0] not in line.filename), None)
    line = line or (stack[-1] if stack else None)
    return f"{reason} at {line.filename}:{line.lineno}: {line.line}" if line is not None else reason


def resumes_after_a_break() -> bool:
    """Return whether the graph being compiled continues the user's function after a graph break."""
    output_graph = frames.calling(OutputGraph)
    code = getattr(getattr(output_graph, "root_tx", None), "f_code", None)
    return code is not None and code.co_name.startswith("torch_dynamo_resume_in_")
