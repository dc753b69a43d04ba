"""A program that all passes have run on as bytes, and back.

It is a pickle, but for what belongs to a process: nodes, graphs, fake tensors, symbolic sizes, constants of the
captured graph. Each of these is written as a call of a method of `Builder`, which makes its counterpart among what the
new process's own trace knows. Nodes of a graph are written in its order, so that their arguments are there before them.

Of nodes, what the runtime asks for is kept: values, sources and the user's lines of the lowered graphs, nothing of
graphs that are only run. Fake tensors of one kind become one object.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import types
from collections.abc import Callable, Container, Iterable
from typing import Any, ClassVar

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import CodeGen

from dta_compile.passes import Program
from dta_compile.passes.chunk.chunk_inputs import free_sizes
from dta_compile.passes.cuts.other_batches import programs_of
from dta_compile.passes.graph_module import graph_module
from dta_compile.passes.symbols import expression, free_symbols
from dta_compile.program_cache.assumptions import shape_env_of
from dta_compile.program_cache.description import C_FUNCTIONS, NAMESPACES, attribute, is_known_function

KEPT = ("val", "source", "stack_trace")
PYTHON_TYPES: dict[Any, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
# Besides functions and classes of these, which are known by the versions that a description names.
PACKAGES = (
    "dta_compile",
    "torch",
    "sympy",
    "mpmath",
    "operator",
    "_operator",
    "math",
    "builtins",
    "collections",
    "copyreg",
    "types",
)


class NotEncoded(Exception):
    """Part of a program means nothing in another process."""


def encoded(program: Program, symbols: Container[sympy.Symbol]) -> bytes:
    """A program over sizes of these symbols; raises an exception of any kind if it cannot be written."""
    stream = io.BytesIO()
    _Pickler(stream, program, symbols).dump((_modules(program), program))
    return stream.getvalue()


def decoded(data: bytes, captured: fx.GraphModule, mode: Any) -> Program:
    """The program, over the sizes of the captured graph of this process; raises an exception of any kind."""
    with mode.shape_env.suppress_guards():
        program: Program = _Unpickler(io.BytesIO(data), Builder(captured, mode)).load()[1]
    program.captured = captured
    return program


def _modules(program: Program) -> list[fx.GraphModule]:
    """Those with nodes that other parts of a program refer to; they come first."""
    return [one.module for one in programs_of(program)]


class Builder:
    """Makes what belongs to a process.

    Args:
        captured: the graph that Dynamo has traced here.
        mode: of its fake tensors.
    """

    def __init__(self, captured: fx.GraphModule, mode: Any) -> None:
        self.captured, self.modes = captured, [mode]

    def graph(self) -> fx.Graph:
        """An empty one."""
        return fx.Graph()

    def node(
        self, graph: fx.Graph, op: str, name: str, target: Any, args: Any, kwargs: Any, meta: dict[str, Any]
    ) -> fx.Node:
        """The next one of a graph."""
        node = graph.create_node(op, target, args, kwargs, name)
        if node.name != name:
            raise NotEncoded(f"{name} would be {node.name}")
        node.meta = meta
        return node

    def module(self, graph: fx.Graph, nodes: list[fx.Node], attributes: dict[str, Any]) -> fx.GraphModule:
        """A graph, once all its nodes are there."""
        return graph_module(attributes, graph)

    def operator(self, namespace: str, name: str, overload: str) -> Any:
        """An operator of torch or ours."""
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)

    def of_torch(self, name: str) -> Any:
        """What torch calls so: pickle would look for it in whatever is imported."""
        return getattr(torch, name)

    def constant(self, name: str) -> Any:
        """A tensor of the captured graph."""
        return attribute(self.captured, name)

    def mapping(self, items: dict[Any, Any]) -> types.MappingProxyType[Any, Any]:
        """One that cannot be changed."""
        return types.MappingProxyType(items)

    def size(self, mode: int, kind: Any, expr: sympy.Basic) -> Any:
        """A symbolic number."""
        while len(self.modes) <= mode:
            env = ShapeEnv()
            free_sizes(env)  # as in a joint trace
            self.modes.append(FakeTensorMode(shape_env=env, allow_non_fake_inputs=True))
        env = self.modes[mode].shape_env
        if not expr.free_symbols <= env.var_to_range.keys():
            raise NotEncoded(f"sizes {expr}")
        return kind(SymNode(expr, env, PYTHON_TYPES[kind], None))

    def fake(
        self, mode: int, shape: tuple[Any, ...], stride: tuple[Any, ...], dtype: Any, device: Any, trained: bool
    ) -> torch.Tensor:
        """A fake tensor."""
        sizes, strides = (
            [int(size) if size.is_number else self.size(mode, torch.SymInt, size) for size in both]
            for both in (shape, stride)
        )
        with self.modes[mode]:
            value = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
        return value.requires_grad_() if trained else value


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, program: Program, known: Container[sympy.Symbol]) -> None:
        super().__init__(stream, protocol=5)
        self.known = known
        self.captured = program.captured
        self.envs: list[Any] = [shape_env_of(program.captured)]
        self.referred = {module.graph for module in _modules(program)}
        self.opened: set[fx.Graph] = set()
        self.fakes: dict[Any, FakeTensor] = {}
        constants = program.captured.graph.find_nodes(op="get_attr")
        self.constants = {id(attribute(program.captured, str(node.target))): str(node.target) for node in constants}

    def reducer_override(self, value: Any) -> Any:
        """Called for everything but Python's own containers, numbers and texts."""
        for kind, reduce in self.REDUCERS:
            if isinstance(value, kind):
                return reduce(self, value)
        return NotImplemented

    def _node(self, node: fx.Node) -> Any:
        if node._erased:  # referred to by its name, value or line
            meta = self._kept(node.meta)
            return Builder.node, (fx.Graph(), node.op, node.name, node.target, (), {}, meta)
        if node.graph not in self.opened:  # it would be written before the nodes that precede it
            raise NotEncoded(f"{node.name} of another graph")
        meta = self._kept(node.meta) if node.graph in self.referred else {}
        args, kwargs = _plain(node.args), _plain(node.kwargs)
        return Builder.node, (node.graph, node.op, node.name, node.target, args, kwargs, meta)

    def _kept(self, meta: dict[str, Any]) -> dict[str, Any]:
        return {key: self._alike(meta[key]) for key in KEPT if key in meta}

    def _alike(self, value: Any) -> Any:
        """One fake tensor for all of a kind; one text for all that are equal."""
        if isinstance(value, (tuple, list)):
            return tuple(map(self._alike, value))
        if isinstance(value, FakeTensor):
            return self.fakes.setdefault(self._fake(value)[1], value)
        return sys.intern(value) if isinstance(value, str) else value

    def _graph(self, graph: fx.Graph) -> Any:
        if type(graph._codegen) is not CodeGen:
            raise NotEncoded("a graph with code of another kind")
        return Builder.graph, ()

    def _module(self, module: fx.GraphModule) -> Any:
        read = {str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")}
        attributes = {name: attribute(module, name) for name in read}
        for name, value in attributes.items():
            if not isinstance(value, (torch.Tensor, fx.GraphModule)):
                raise NotEncoded(f"{name} of type {type(value).__name__}")
        self.opened.add(module.graph)
        return Builder.module, (module.graph, list(module.graph.nodes), attributes)

    def _tensor(self, value: torch.Tensor) -> Any:
        if (name := self.constants.get(id(value))) is not None:
            return Builder.constant, (name,)
        if isinstance(value, FakeTensor):
            return self._fake(value)
        if type(value) is not torch.Tensor:
            raise NotEncoded(f"a tensor of type {type(value).__name__}")
        return NotImplemented

    def _fake(self, value: FakeTensor) -> tuple[Any, Any]:
        if value.layout is not torch.strided:
            raise NotEncoded(f"a tensor of layout {value.layout}")
        shape, stride = (tuple(map(expression, sizes)) for sizes in (value.shape, value.stride()))
        symbols = free_symbols((*shape, *stride))
        number = self._number(value.fake_mode.shape_env, symbols) if symbols else 0
        return Builder.fake, (number, shape, stride, value.dtype, value.device, value.requires_grad)

    def _size(self, value: Any) -> Any:
        expr = value.node.expr
        return Builder.size, (self._number(value.node.shape_env, expr.free_symbols), type(value), expr)

    def _number(self, env: Any, symbols: Iterable[sympy.Symbol]) -> int:
        """Of what knows these symbols: 0 for Dynamo's trace, others are of joint traces."""
        if env not in self.envs:
            self.envs.append(env)
        number = self.envs.index(env)
        if number == 0 and not all(symbol in self.known for symbol in symbols):
            raise NotEncoded(f"sizes that the passes found: {symbols}")
        return number

    def _operator(self, operator: torch._ops.OpOverload) -> Any:
        namespace, _, name = operator._schema.name.partition("::")
        if namespace not in NAMESPACES:
            raise NotEncoded(f"{operator}")
        return Builder.operator, (namespace, name, operator._overloadname)

    def _mapping(self, mapping: types.MappingProxyType[Any, Any]) -> Any:
        return Builder.mapping, (dict(mapping),)

    def _program(self, program: Program) -> Any:
        state = dict(program.__dict__)
        if program.captured is self.captured:
            del state["captured"]
        return copyreg.__newobj__, (Program,), state  # type: ignore[attr-defined]

    def _constant_of_torch(self, value: Any) -> Any:
        return Builder.of_torch, (str(value).removeprefix("torch."),)

    def _function(self, function: Any) -> Any:
        if not is_known_function(function):
            raise NotEncoded(f"a call of {function}")
        if getattr(function, "__module__", None) is not None:
            return NotImplemented
        name: str = function.__name__
        if getattr(torch, name, None) is not function:
            raise NotEncoded(f"a call of {function}")
        return Builder.of_torch, (name,)

    def _class(self, kind: type) -> Any:
        if kind.__module__.partition(".")[0] not in PACKAGES:
            raise NotEncoded(f"{kind}")
        return NotImplemented

    def _refused(self, value: Any) -> Any:
        raise NotEncoded(type(value).__name__)

    # What is met most often comes first.
    REDUCERS: ClassVar[tuple[tuple[Any, Callable[[Any, Any], Any]], ...]] = (
        (fx.Node, _node),
        (torch._ops.OpOverload, _operator),
        (torch.Tensor, _tensor),
        ((torch.SymInt, torch.SymFloat, torch.SymBool), _size),
        ((torch.dtype, torch.layout, torch.memory_format), _constant_of_torch),
        (fx.Graph, _graph),
        (fx.GraphModule, _module),
        (types.MappingProxyType, _mapping),
        (Program, _program),
        ((types.FunctionType, *C_FUNCTIONS), _function),
        (type, _class),
        ((ShapeEnv, FakeTensorMode, torch.nn.Module, types.MethodType), _refused),
    )


def _plain(value: Any) -> Any:
    """Arguments of a node in Python's own containers, which nodes make immutable again."""
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return tuple(map(_plain, value))
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, builder: Builder) -> None:
        super().__init__(stream)
        self.builder = builder

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name.startswith("Builder."):
            return getattr(self.builder, name.removeprefix("Builder."))
        if module.partition(".")[0] not in PACKAGES:
            raise NotEncoded(f"{module}.{name}")
        return super().find_class(module, name)
