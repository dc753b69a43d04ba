"""The user's source line of a node: recorded by tracing in `meta["stack_trace"]`, and named by errors."""

from __future__ import annotations

import pathlib

import torch
from torch import fx

TORCH_FOLDER = str(pathlib.Path(torch.__file__).parent)
OUR_FOLDER = str(pathlib.Path(__file__).parents[2])


def where(node: fx.Node) -> str:
    """Return the user's source line of a node: the innermost recorded frame outside torch and this package.

    An input has no line, but a name.
    """
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip() and not set(line.strip()) <= set("^~ ")]
    frames = [i for i, line in enumerate(lines) if line.startswith("File ")]
    if not frames:
        return f"input {node.meta['source']}" if "source" in node.meta else f"node {node.name}"
    own = [i for i in frames if TORCH_FOLDER not in lines[i]] or frames
    own = [i for i in own if OUR_FOLDER not in lines[i]] or own
    return " | ".join(lines[own[-1] : own[-1] + 2])


def where_now() -> str:
    """Return the user's source line of the node that is being traced."""
    meta = fx.traceback.get_current_meta()
    probe = fx.Graph().placeholder("traced")
    probe.meta = dict(meta)
    return where(probe)


def copy_stack_trace(node: fx.Node) -> None:
    """Give new nodes right before a node its stack trace."""
    new = node.prev
    while new.op == "call_function" and "stack_trace" not in new.meta:
        new.meta["stack_trace"] = node.meta.get("stack_trace")
        new = new.prev


def inherit_line(new: fx.Node, node: fx.Node) -> None:
    """Give a new node the line of the node that it stands for, unless it has one."""
    new.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
