"""FX graphs as the text of Python functions that call torch's Python bindings directly.

A call of `torch.ops.aten.mul.Tensor` looks up four names, enters a Python frame, and boxes its arguments by the
operator's schema; `torch.mul` reaches the same operator through a generated argument parser in about half of the host
time. The graph of a chunk (a few thousand tokens) calls a thousand operators, so slow calls would leave the GPU waiting
for the host.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import linecache
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.torch_compat.operators import functions_of_nn
from dta_compile.torch_compat.tracing import BoxedCodeGen

aten = torch.ops.aten
_CALL = re.compile(r"\btorch\.ops\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)\(")
_VIEW = re.compile(r"\btorch\.ops\.aten\.view\.default\((\w+), \[([\w, -]+)\]\)")
_numbers = itertools.count()

# Overloads whose Python function (or method) has their name, and takes the same positional and keyword arguments.
FUNCTIONS = (
    aten.add.Tensor, aten.bmm.default, aten.cat.default, aten.div.Tensor, aten.embedding.default, aten.exp.default,
    aten.index_select.default, aten.mean.dim, aten.mm.default, aten.mul.Scalar, aten.mul.Tensor, aten.neg.default,
    aten.permute.default, aten.pow.Tensor_Scalar, aten.rsqrt.default, aten.sigmoid.default, aten.sub.Tensor,
    aten.sum.dim_IntList, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
)  # fmt: skip
METHODS = (
    aten.add_.Tensor, aten.addmm_.default, aten.contiguous.default, aten.div_.Scalar, aten.div_.Tensor,
    aten.expand.default, aten.mul_.Scalar, aten.mul_.Tensor, aten.neg_.default, aten.view.default,
)  # fmt: skip
BINDINGS: dict[Any, Callable[..., Any]] = {
    **{overload: getattr(torch, overload._schema.name.removeprefix("aten::")) for overload in FUNCTIONS},
    **{overload: getattr(torch.Tensor, overload._schema.name.removeprefix("aten::")) for overload in METHODS},
    aten.silu.default: functions_of_nn.silu,
}


@dataclasses.dataclass(frozen=True)
class Module:
    """Reference to a module by its name."""

    name: str


Names = tuple[tuple[str, Any], ...]


def text_of(graph: fx.Graph) -> tuple[str, Names]:
    """Return a graph as the text of a function `forward(self, ...)`, and the global names in it with their values."""
    code = graph.python_code("self")
    used = set(re.findall(r"\w+", code.src))
    values = ((name, value) for name, value in sorted(code.globals.items()) if name in used)
    names = ((name, Module(x.__name__) if isinstance(x, types.ModuleType) else x) for name, x in values)
    return code.src, tuple(names)


def _loaded(names: Names) -> dict[str, Any]:
    return {name: importlib.import_module(x.name) if isinstance(x, Module) else x for name, x in names}


@dataclasses.dataclass(frozen=True, eq=False)
class Code:
    """A function as text, compiled on first use.

    Attributes:
        text: source of a function `forward(self, ...)`.
        names: global names in the text with their values; modules as `Module`.
        attributes: attributes of `self`: constant tensors and submodules for autograd functions.
    """

    text: str
    names: Names
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, module: fx.GraphModule, boxed: bool = False) -> Code:
        """Generate the code of a module's graph, without hooks of its submodules.

        Args:
            boxed: the function takes a list and empties it, so that arguments are freed after their last use.
        """
        graph = module.graph
        if boxed:
            graph = fx.Graph()
            graph.output(graph.graph_copy(module.graph, {}))
            graph.set_codegen(BoxedCodeGen())
        constants = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
        return cls(*text_of(graph), {name: getattr(module, name) for name in sorted(constants)})

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """Compile the text; the function takes the graph's inputs."""
        names = _loaded(self.names)

        def name(match: re.Match[str]) -> str:
            namespace, operator, overload = match.groups()
            target = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
            bound = f"_{namespace}_{operator}_{overload}"
            names[bound] = BINDINGS.get(target, target)
            return f"{bound}("

        # `view` becomes `reshape`: an elementwise operator may return other strides than were traced, for which no view
        # exists. The copy changes nothing: what is written in place has no other alias that is read later. Separate
        # sizes are parsed faster than a list.
        source = _CALL.sub(name, _VIEW.sub(r"\1.reshape(\2)", self.text))
        file = f"<dta graph {next(_numbers)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
        exec(compile(source, file, "exec"), names)  # like FX itself
        run: Callable[..., Any] = names["forward"].__get__(types.SimpleNamespace(**self.attributes))
        return run

    def __getstate__(self) -> dict[str, Any]:
        """Leave the compiled function out."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True)
class Input:
    """Tensor argument of generated code; sizes and strides are integers or expressions of `size_symbols`."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | sympy.Expr, ...]
    strides: tuple[int | sympy.Expr, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """Text of a function from sizes, then tensors, to a tuple of new tensors. Equal sources are compiled once.

    Attributes:
        text: source of a function `forward(self, size_0, ..., input_0, ...)`.
        names: global names in the text with their values; modules as `Module`.
        sizes: number of size arguments.
        inputs: the tensor arguments.
        default_dtype: torch's default dtype, which the result of `mask * 0.1` depends on.
    """

    text: str
    names: Names
    sizes: int
    inputs: tuple[Input, ...]
    default_dtype: torch.dtype = dataclasses.field(default_factory=torch.get_default_dtype)

    @property
    def devices(self) -> set[str]:
        """Return the device types of the inputs."""
        return {value.device.type for value in self.inputs}

    def function(self) -> Callable[..., Sequence[torch.Tensor]]:
        """Compile the text to a function of sizes and tensors."""
        names = _loaded(self.names)
        exec(self.text, names)
        run: Callable[..., Sequence[torch.Tensor]] = names["forward"]
        return functools.partial(run, None)


@dataclasses.dataclass(frozen=True)
class CppSource:
    """C++ functions that are compiled without changes."""

    text: str

    @property
    def devices(self) -> set[str]:
        """Return the device types that the functions run on."""
        return {"cpu"}


AnySource = Source | CppSource


def size_symbols(count: int) -> list[sympy.Symbol]:
    """Return the symbols of the size arguments in shapes and strides of a `Source`."""
    return [sympy.Symbol(f"size_{i}", integer=True, positive=True) for i in range(count)]
