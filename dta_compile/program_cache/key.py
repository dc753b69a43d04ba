"""Describe a captured graph as text, which is equal in two processes only if the passes have equal results.

It contains all that the passes may read: operators, arguments and values of the graph with the user's lines, sources of
inputs, knowledge of sizes, constants by value, state of torch, options, and versions of the packages involved. It omits
the sizes of the first call: conclusions of passes from them are guards, which are added again (`size_guards`). Objects
without such a text, like functions of other packages, whose code may change, raise `NotDescribed`.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib
import itertools
import os
import pathlib
import platform
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import networkx
import numpy as np
import sympy
import torch
import z3
from torch import fx

from dta_compile.ops.triton_use import has_triton, is_interpreted
from dta_compile.passes import Program
from dta_compile.passes.axes.tokenwise_operators import REGISTERED
from dta_compile.passes.graphs.source_lines import OUR_FOLDER, TORCH_FOLDER
from dta_compile.passes.lowering.repeated_calls import PLAIN
from dta_compile.passes.symbols import SYMBOLIC
from dta_compile.program_cache.size_guards import known_of_sizes, shape_env_of
from dta_compile.torch_compat.operators import (
    OPDEFS,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    definitions,
    implementations,
    registrations_of,
)
from dta_compile.torch_compat.sizes import config as symbolic_shape_config
from dta_compile.torch_compat.tensors import dispatch_modes, function_modes

NAMESPACES = ("aten", "prims", "prim", "dta")  # of operators that versions of torch and this package define
HIGHER_ORDER = ("tag_activation_checkpoint", "invoke_subgraph")  # their regions become part of the graph
C_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
)
OF_C = ("torch", "_operator", "math", "builtins")  # roots of modules with functions in C
OWN_FOLDERS = (TORCH_FOLDER + os.sep, OUR_FOLDER + os.sep)
MOST_BYTES = 2**24  # of a constant


class NotDescribed(Exception):
    """A graph cannot be compared with one of another process."""


def description(program: Program, skip: Collection[str]) -> str:
    """Return the text of a program before its first pass; raise `NotDescribed` if it has none."""
    if registered := [str(op) for op in REGISTERED if op.namespace in NAMESPACES]:
        raise NotDescribed(f"token rules were registered for {', '.join(registered)}")
    if operator := _defined_elsewhere():
        raise NotDescribed(operator)
    captured = program.captured
    values = [node.meta.get("example_value") for node in captured.graph.nodes]
    known = known_of_sizes(shape_env_of(captured)) if shape_env_of(captured) is not None else []
    parts: list[Iterable[str]] = [
        [f"dta_compile {our_source()}", *_versions()],
        [f"training {program.training}, codegen {program.codegen}, symbols {program.own_symbols}, skip {sorted(skip)}"],
        _state_of_torch({value.device.type for value in values if isinstance(value, torch.Tensor)}),
        known,
        _Graph(captured, "").lines(),
    ]
    return "\n".join(itertools.chain.from_iterable(parts)) + "\n"


@functools.cache
def our_source() -> str:
    """Hash the code of this package. Called on import, because the package may be upgraded while it runs."""
    digest, folder = hashlib.sha256(), pathlib.Path(OUR_FOLDER)
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


our_source()


def _versions() -> Iterator[str]:
    for module in (torch, sympy, z3, networkx, np):
        version = module.get_version_string() if module is z3 else module.__version__
        yield f"{module.__name__} {version}"
    yield f"git {torch.version.git_version}, python {platform.python_version()}, {platform.machine()}"


def _state_of_torch(devices: Collection[str]) -> Iterator[str]:
    """Yield the settings that change how operators are traced."""
    if others := [*function_modes(), *dispatch_modes()]:
        raise NotDescribed(f"a mode is on: {type(others[0]).__name__}")
    yield f"gradients {torch.is_grad_enabled()}, inference {torch.is_inference_mode_enabled()}"
    yield f"default {torch.get_default_dtype()} {torch.get_default_device()}"
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield f"deterministic {deterministic}, products {torch.get_float32_matmul_precision()}"
    einsum = torch.backends.opt_einsum
    yield f"einsum {einsum.is_available()} {einsum.enabled} {einsum.strategy}"
    yield f"kernels {has_triton()} {is_interpreted()}"
    yield f"symbolic shapes {symbolic_shape_config.get_hash().hex()}"
    for device in sorted({"cpu", *devices}):
        if torch.amp.is_autocast_available(device):
            yield f"autocast {device} {torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"
    if "cuda" in devices:
        yield f"cuda {torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"


_seen: set[str] = set()  # checked registrations from Python that are torch's or ours


def _defined_elsewhere() -> str:
    """Name an operator in our or torch's namespaces that other code defines or overrides; "" if there is none."""
    registered = {*implementations, *definitions} - _seen
    for entry in registered:
        namespace, _, name = entry.replace("::", "/", 1).partition("/")
        operator, _, key = name.partition("/")
        if namespace in NAMESPACES and key != "Meta":  # Meta computes nothing, and torch has a thousand
            dumped = registrations_of(f"{namespace}::{operator}")
            init = getattr(OPDEFS.get(f"{namespace}::{operator}"), "_init_fn", None)
            files = [*re.findall(r"registered at (\S+\.py):", dumped), *([init.__code__.co_filename] if init else [])]
            if others := [file for file in files if not file.startswith(OWN_FOLDERS) or file == torch.library.__file__]:
                return f"{namespace}::{operator} is registered at {others[0]}"
        _seen.add(entry)
    return ""


class _Graph:
    """Writes the lines of a graph and of its subgraphs."""

    def __init__(self, module: fx.GraphModule, indent: str) -> None:
        self.module, self.indent = module, indent
        self.storages: dict[int, int] = {}
        self.lines_of: dict[str, int] = {}
        self.expressions: dict[sympy.Basic, str] = {}

    def lines(self) -> Iterator[str]:
        """Yield one line per node with its value, then the user's stack trace, or its number if it is repeated."""
        if "_checkpoint_context_fn" in self.module.meta:
            raise NotDescribed("a checkpoint with a context of the user's")
        for node in self.module.graph.nodes:
            called = self._target(node) if node.op == "call_function" else repr(str(node.target))
            arguments = f"{self._text(node.args)} {self._text(node.kwargs)}"
            yield f"{self.indent}{node.name} = {node.op} {called} {arguments} -> {self._value(node)}"
            if trace := node.meta.get("stack_trace"):
                if trace not in self.lines_of:
                    yield repr(trace)
                yield f"{self.indent}at {self.lines_of.setdefault(trace, len(self.lines_of))}"
            if node.op == "get_attr":
                yield from self._attribute(node)

    def _attribute(self, node: fx.Node) -> Iterator[str]:
        value = attribute(self.module, str(node.target))
        if isinstance(value, fx.GraphModule):
            yield from _Graph(value, self.indent + "  ").lines()
            return
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if not is_plain or value.is_meta or self.indent:  # in a region a name does not identify it
            raise NotDescribed(f"a constant of type {type(value).__name__}")
        if value.nbytes > MOST_BYTES:
            raise NotDescribed(f"a constant of {value.nbytes} bytes")
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield f"{self.indent}{self._tensor(value)} {hashlib.sha256(data).hexdigest()}"

    def _value(self, node: fx.Node) -> str:
        value = node.meta.get("example_value")
        text = self._text(value)
        if node.op != "placeholder":
            return text
        grapharg = node.meta.get("grapharg")
        source, example = getattr(grapharg, "source", None), getattr(grapharg, "example", None)
        name = getattr(source, "name", None)
        parameter = isinstance(value, torch.nn.Parameter), isinstance(example, torch.nn.Parameter)
        memory = ""
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            number = self.storages.setdefault(int(value.untyped_storage()._cdata), len(self.storages))
            memory = f"memory {number} at {value.storage_offset()}, a leaf: {value.is_leaf}"
        return f"{text} {name() if callable(name) else name!r} {parameter} {memory}"

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{value.name}"
        if isinstance(value, enum.Enum):
            return f"{type(value).__module__}.{value}"
        if type(value) in PLAIN:
            return repr(value)
        if isinstance(value, SYMBOLIC):
            expr = value.node.expr
            if expr not in self.expressions:
                self.expressions[expr] = str(expr)
            return f"{type(value).__name__}({self.expressions[expr]})"
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (tuple, list)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return f"{kind}({', '.join(map(self._text, value))})"
        if isinstance(value, Mapping):
            items = (f"{self._text(key)}: {self._text(entry)}" for key, entry in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, slice):
            return f"slice({self._text(value.start)}, {self._text(value.stop)}, {self._text(value.step)})"
        raise NotDescribed(f"a value of type {type(value).__name__}")

    def _tensor(self, value: torch.Tensor) -> str:
        if value.layout is not torch.strided:
            raise NotDescribed(f"a tensor of layout {value.layout}")
        facts = value.dtype, value.device, value.requires_grad, value.is_conj(), value.is_neg()
        sizes = (", ".join(map(self._text, both)) for both in (value.shape, value.stride()))
        return f"{type(value).__name__}[{'; '.join(sizes)}]{facts}"

    def _target(self, node: fx.Node) -> str:
        target: Any = node.target
        if isinstance(target, (OpOverload, OpOverloadPacket)):
            name = str(target._qualified_op_name if isinstance(target, OpOverloadPacket) else target.name())
            if name.partition("::")[0] in NAMESPACES:
                return f"{type(target).__name__} {name}"
        elif isinstance(target, HigherOrderOperator):
            if target.name() in HIGHER_ORDER:
                return f"higher order {target.name()}"
        elif is_known_function(target):
            defaults = getattr(target, "__defaults__", None), getattr(target, "__kwdefaults__", None)
            return f"{target.__module__} {target.__qualname__} {fx.Node._pretty_print_target(target)} {defaults}"
        raise NotDescribed(f"a call of {target}")


def attribute(module: torch.nn.Module, target: str) -> Any:
    """Return the attribute that a `get_attr` node reads."""
    return functools.reduce(getattr, target.split("."), module)


def is_known_function(function: Any) -> bool:
    """Return whether a function is torch's, Python's or ours and can be imported by its name."""
    if isinstance(function, C_FUNCTIONS):
        owner = getattr(function, "__self__", None) or getattr(function, "__objclass__", None)
        module = getattr(function, "__module__", None) or getattr(owner, "__module__", None) or ""
        return module.partition(".")[0] in OF_C
    if any(function is kind for kind in (torch.Size, int, float, bool, slice)):
        return True
    if not isinstance(function, types.FunctionType):
        return False
    if not function.__code__.co_filename.startswith(OWN_FOLDERS):
        return False
    try:
        named = functools.reduce(
            getattr, function.__qualname__.split("."), importlib.import_module(function.__module__)
        )
    except (ImportError, AttributeError):
        return False
    return named is function
