"""Print a program as text: every node of every graph, with the pass that made it and the user's source line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from dta_compile.passes.contracts import FIELDS, Pass
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.program import Program
from dta_compile.torch_compat.operators import OpOverload

MADE_BY = "made_by"  # key of `node.meta`: the name of the pass that made the node


def listing(program: Program) -> str:
    """Return all graphs of a program as text."""
    return "\n\n".join(f"# {name}\n{_text(graph)}" for name, graph in graphs(program).items())


def graphs(program: Program) -> dict[str, fx.Graph]:
    """Return the graphs of a program by name; those of generated code have the names of their pieces."""
    stages = program.stages
    modules = {
        "lowered": program.module,
        "chunk": program.chunk,
        "prologue": program.prologue,
        "epilogue": program.epilogue,
        "row_epilogue": program.row_epilogue,
    }
    for number, kind in enumerate(stages.kinds if stages else ()):
        modules |= {f"{name}_{number}": module for name, module in kind.graphs.items()}
    by_name = {name: module.graph for name, module in modules.items() if isinstance(module, fx.GraphModule)}
    by_name |= {piece.__name__: body.graph for piece, body in stages.bodies.items()} if stages else {}
    return by_name


def field_of(graph: str) -> str:
    """Return the field of a program that has the graph of this name."""
    return {"lowered": "module"}.get(graph, graph if graph in FIELDS else "stages")


def sign(program: Program, step: Pass) -> None:
    """Record in `node.meta` the pass that made each node: the first one that wrote its graph."""
    pass_name = step.name
    for name, graph in graphs(program).items():
        for node in graph.nodes if field_of(name) in step.writes else ():
            node.meta.setdefault(MADE_BY, pass_name)


def _text(graph: fx.Graph) -> str:
    rows = [(_statement(node), "  ".join(_origins(node))) for node in graph.nodes]
    width = min(max((len(statement) for statement, _ in rows), default=0), 100)
    return "\n".join(f"{statement:<{width}}  # {origin}".rstrip(" #") for statement, origin in rows)


def _statement(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_shown(node.args[0])}"
    name = f"{node.name}: {_kind(node.meta.get('val'))}"
    match node.op:
        case "placeholder":
            return f"{name} = input"
        case "get_attr":
            return f"{name} = self.{node.target}"
        case "call_method":
            called = f"{_shown(node.args[0])}.{node.target}"
            arguments = node.args[1:]
        case _:
            called, arguments = _name(node.target), node.args
    shown = [_shown(arg) for arg in arguments] + [f"{key}={_shown(value)}" for key, value in node.kwargs.items()]
    return f"{name} = {called}({', '.join(shown)})"


def _name(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))


def _shown(value: Any) -> str:
    match value:
        case fx.Node():
            return value.name
        case list() | tuple():
            inside = ", ".join(map(_shown, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return str(value)


def _kind(value: Any) -> str:
    match value:
        case torch.Tensor():
            return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
        case list() | tuple():
            return f"({', '.join(map(_kind, value))})"
        case None:
            return "?"
    return type(value).__name__


def _origins(node: fx.Node) -> Iterator[str]:
    if MADE_BY in node.meta:
        yield f"[{node.meta[MADE_BY]}]"
    if "source" in node.meta:
        yield str(node.meta["source"])
    elif node.meta.get("stack_trace"):
        yield where(node)
