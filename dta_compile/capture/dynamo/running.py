"""What is asked of the trace that Dynamo is running: its graph, its modules, the values of the call."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from dta_compile.attributes import attribute_set
from dta_compile.integrations import tracing
from dta_compile.passes.symbols import hint
from dta_compile.torch_compat import frames
from dta_compile.torch_compat.dynamo import CompileContext, InstructionTranslator, OutputGraph
from dta_compile.torch_compat.tensors import unset_fake_temporarily


def modules_at_hand(translator: Any) -> Iterator[torch.nn.Module]:
    """Yield the modules that the function to be traced can name.

    These are arguments (also in `*args` and `**kwargs`), free and global variables, owners of methods, and attributes
    of other objects that the function reads.
    """
    names = translator.f_code.co_names
    named = [translator.f_globals[name] for name in names if name in translator.f_globals]
    arguments = [*translator.f_locals.values()]
    packed = [value for value in arguments if type(value) in (tuple, dict)]
    arguments += [part for value in packed for part in (value.values() if isinstance(value, dict) else value)]
    for value in (*arguments, *frames.contents_of(translator.closure), *named):
        owner = value.__self__ if isinstance(value, types.MethodType) else value
        is_other = not isinstance(owner, (torch.nn.Module, types.ModuleType, type))
        attributes = [frames.own_attributes(owner).get(name) for name in names] if is_other else []
        for part in (owner, *attributes):
            if isinstance(part, torch.nn.Module) and "_modules" in vars(part):  # else its constructor is still running
                yield part


def is_given_a_cache() -> bool:
    """Return whether the function being compiled was called with a KV cache of transformers, empty or not."""
    root = getattr(frames.calling(OutputGraph), "root_tx", None)
    pending = [*getattr(root, "f_locals", {}).values()]
    while pending:
        value = pending.pop()
        if hasattr(type(value), "get_seq_length"):
            return True
        if type(value) in (dict, list, tuple):
            pending += value.values() if isinstance(value, dict) else value
    return False


def _traces_for_this_backend() -> bool:
    translator = frames.calling(InstructionTranslator)
    return translator is not None and frames.is_ours(translator.output.compiler_fn)


tracing.answer_with(_traces_for_this_backend)


def graph_being_traced() -> fx.Graph:
    """Return the graph that the running trace adds nodes to."""
    return frames.calling(InstructionTranslator).output.graph  # type: ignore[union-attr]


def is_tracing() -> bool:
    """Return whether Dynamo traces, for whichever backend."""
    return frames.calling(InstructionTranslator) is not None


@torch.compiler.assume_constant_result
def is_in_nested_graph() -> bool:
    """Return whether the running trace is in a checkpoint, or another graph inside of the graph."""
    return len(frames.calling(InstructionTranslator).output.tracers) > 1  # type: ignore[union-attr]


@contextlib.contextmanager
def outside_of_trace() -> Iterator[None]:
    """Run code while Dynamo traces as it runs without Dynamo: on real tensors, and not told that it is compiled."""
    with attribute_set(torch.compiler, "_is_compiling_flag", False), unset_fake_temporarily():
        yield


def examples(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the values that tensors of the running trace have in the call that is being compiled."""
    graph = graph_being_traced()
    nodes = [node for node in graph.nodes if "example_value" in node.meta]
    values: dict[fx.Node, Any] = {}

    def value_of(node: fx.Node) -> Any:
        if node in values:
            return values[node]
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        if node.op == "placeholder":
            value = node.meta["grapharg"].example
            value = value if isinstance(value, torch.Tensor) else hint(value)
        elif node.op == "call_method":
            value = getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            value = node.target(*args, **kwargs)
        values[node] = value
        return value

    with torch.no_grad():
        return [value_of(next(n for n in nodes if n.meta["example_value"] is tensor)) for tensor in tensors]


def compiling() -> tuple[types.CodeType, Any] | None:
    """Return the code of the function being compiled, and the id of the compilation."""
    translator = getattr(frames.calling(OutputGraph), "root_tx", None)
    return None if translator is None else (translator.f_code, CompileContext.current_compile_id())
