"""`Program`, the data that passes read and write: a captured call between Dynamo's graph and its `Executable`.

Also the few questions about nodes that every pass asks: `ancestors`, `has_tensor`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.executable import executable
from dta_compile.executable.chunk import ChunkGraphs, Part
from dta_compile.executable.executable import Condition
from dta_compile.executable.layers import HasMixers, MixerLayer
from dta_compile.executable.layouts import Input, Layout
from dta_compile.passes.stage_graphs import ChunkStages
from dta_compile.passes.symbols import symbol_sources
from dta_compile.torch_compat.autograd import get_unwrapped, is_functorch_wrapped_tensor
from dta_compile.torch_compat.operators import OpOverload
from dta_compile.torch_compat.tensors import tree_leaves

ASSIGNED = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
IN_PLACE = {"setitem", *(f"i{name}" for name in ASSIGNED)}  # functions of `operator` that write to their first argument


class Advice(NamedTuple):
    """What the refusal of a value that mixes tokens says beside the reason; empty: as `NEIGHBOURS` of axes/refusals."""

    hint: str
    what: str = ""
    expected: str = ""


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A value whose tokens depend on each other, or cannot be proven not to; `reason` says why."""

    reason: str
    node: fx.Node
    advice: Advice | None = None


Value = Layout | Mixed | tuple["Layout | Mixed", ...] | None


def items_of(value: Value) -> tuple[Layout | Mixed | None, ...]:
    """Return the values of an operator's results: several for a tuple."""
    return value if isinstance(value, tuple) else (value,)


@dataclasses.dataclass
class ChunkInput:
    """A prologue value that chunks read: gathered by token `[B, S]`, by column `[S]`, by sequence `[B]`, or whole."""

    node: fx.Node
    layout: Layout
    name: str


@dataclasses.dataclass(frozen=True)
class FrontierValue(executable.FrontierValue):
    """A per-token value that leaves the token region; the sources of its uses' conditions are FX nodes."""

    node: fx.Node


@dataclasses.dataclass(frozen=True)
class Folding:
    """Copies of layers that a captured graph was left without, see `copies.fold`.

    Attributes:
        chains: indices of the parameters and buffers that copies read one after the other, with those left out.
        left_out: number of copies that are left out.
    """

    chains: tuple[tuple[int, ...], ...]
    left_out: int


@dataclasses.dataclass(frozen=True)
class Traced:
    """The graph before anything was rewritten in it.

    Attributes:
        reads: in order, the tensor operands of every node.
        outputs: the outputs of the call.
    """

    reads: Mapping[fx.Node, Sequence[fx.Node]] = dataclasses.field(default_factory=dict)
    outputs: Sequence[Any] = ()

    @classmethod
    def of(cls, graph: fx.Graph) -> Traced:
        """Return what a graph is now."""
        return cls({node: operands(node) for node in graph.nodes}, tuple(output_node(graph).args[0]))


@dataclasses.dataclass
class Program(HasMixers):
    """A captured call and the results of the passes, in pass order; each pass declares the fields that it writes.

    Containers are frozen once the pass that fills them has run.
    """

    captured: fx.GraphModule
    training: bool
    codegen: str = "eager"  # the option; after the pass of this name, what was generated
    own_symbols: bool = False  # traced without duck shaping: equal sizes have different symbols
    is_rest: bool = False  # the epilogue of another program, over a batch of other sizes
    # lower
    inputs: Sequence[Input] = ()
    module: fx.GraphModule = None
    placeholders: Sequence[fx.Node] = ()
    draws: Sequence[fx.Node] = ()  # random operators, in graph order
    asserted: Sequence[fx.Node] = ()  # assertions of the model about inputs alone
    written: Sequence[int] = ()  # inputs that are written to; their final values are the last outputs
    traced: Traced = Traced()  # the graph as the user wrote it, for what lies between outputs
    # token_axis
    batch: sympy.Expr | None = None
    tokens: sympy.Expr | None = None
    values: Mapping[fx.Node, Value] = dataclasses.field(default_factory=dict)
    input_layouts: Mapping[tuple[fx.Node, fx.Node], Layout] = dataclasses.field(default_factory=dict)
    parameter_dependent: Set[fx.Node] = frozenset()
    roots: Mapping[fx.Node, frozenset[fx.Node]] = dataclasses.field(default_factory=dict)
    other_batches: Set[fx.Node] = frozenset()  # nodes that mixers over other sizes depend on, and no other mixers
    # mixers
    mixers: Sequence[MixerLayer] = ()  # in graph order; a layer's index is its position here
    mixer_nodes: Sequence[fx.Node] = ()  # their calls
    # regions
    region: Set[fx.Node] = frozenset()
    frontier: Sequence[FrontierValue] = ()
    dense_layer: str | None = None  # the line of a layer that runs in the epilogue, over all sequences
    # prefix_key
    trunk: Set[fx.Node] = frozenset()
    trunk_inputs: Sequence[ChunkInput] = ()
    head_inputs: Sequence[ChunkInput] = ()
    constant_inputs: Sequence[fx.Node] = ()
    trunk_keys: Sequence[ChunkInput] = ()
    head_keys: Sequence[ChunkInput] = ()
    # chunk_graph
    region_parameters: Sequence[Input] = ()
    chunk: fx.GraphModule = None
    # dense_graphs
    prologue_nodes: Sequence[fx.Node] = ()
    prologue: fx.GraphModule = None
    epilogue: fx.GraphModule = None
    epilogue_dense_inputs: Sequence[fx.Node] = ()
    row_epilogue: fx.GraphModule | Mixed | None = None  # the epilogue of one row; Mixed: why there is none
    # other_batches
    rest: Program | None = None  # replaces an epilogue that has attention over a batch of other sizes
    # joint
    stages: ChunkStages = None  # type: ignore[assignment]
    copied_mixers: range = range(0)  # the mixers of the copy that stands for those left out
    # emit
    joint: ChunkGraphs = None  # type: ignore[assignment]
    parts: Sequence[Part] = ()
    # Written by `run_passes`: seconds by pass, and the fields that have been filled.
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    filled: Set[str] = frozenset({"captured", "training", "codegen", "own_symbols", "is_rest", "length", "folding"})
    # The symbolic number of tokens of a graph that was captured with a constant one, see `lowering.one_length`.
    length: torch.SymInt | None = None
    folding: Folding | None = None

    @property
    def graph(self) -> fx.Graph:
        """Return the lowered graph."""
        return self.module.graph

    @property
    def input_symbols(self) -> dict[sympy.Symbol, tuple[int, int | None]]:
        """By symbol, the input of a call that defines it and the dimension of it; None: the input is that number."""
        return symbol_sources(node.meta["val"] for node in self.placeholders)

    def layout(self, node: fx.Node) -> Layout:
        """Return the layout of a node that is known to be one token-wise tensor."""
        value = self.values[node]
        assert isinstance(value, Layout), (node, value)
        return value

    @property
    def conditions(self) -> list[Condition]:
        """Return the conditions of all uses of frontier values, each once; the prologue computes their sources."""
        uses = [use for value in self.frontier for use in value.uses]
        return sorted(
            {condition for use in uses for condition in use.conditions}, key=lambda condition: condition.source.name
        )

    @property
    def outputs(self) -> list[Any]:
        """Return the outputs of the call: nodes of the lowered graph, or constants."""
        return list(output_node(self.graph).args[0])


FEW_TOKENS = "rows of one or two tokens share next to nothing: such calls run as captured"


class GraphWithoutAttention(Exception):
    """Raised by a pass when the captured graph is not for the tree: it runs as captured.

    Attributes:
        log: a line to log; None: log nothing.
    """

    def __init__(self, log: str | None) -> None:
        super().__init__(log)
        self.log = log


class AmbiguousAxes(Exception):
    """Raised by a pass when two equal sizes may share a symbol (duck shaping), so that axes cannot be told apart.

    Attributes:
        refusal: the error to raise if every size has a symbol of its own already.
        length: the number of tokens, if it is a constant.
    """

    def __init__(self, refusal: RefusalError | None = None, length: int | None = None) -> None:
        super().__init__()
        self.refusal, self.length = refusal, length


def output_node(graph: fx.Graph) -> fx.Node:
    """Return the output node of a graph."""
    return next(iter(reversed(graph.nodes)))


def all_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a captured graph, and of the graphs inside it, such as checkpoints."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def is_boolean(node: fx.Node) -> bool:
    """Return whether the value of a captured graph's node is a tensor of booleans."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def has_tensor(node: fx.Node) -> bool:
    """Return whether the value of a node is a tensor, or a tuple with a tensor in it."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (tuple, list)) and any(isinstance(item, torch.Tensor) for item in value)
    )


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the tensor operands of a node, each once: not sizes, which passes take from elsewhere."""
    return [arg for arg in node.all_input_nodes if has_tensor(arg)]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested value, such as the results of an operator."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def writes_in_place(node: fx.Node) -> bool:
    """Return whether a node's operator mutates one of its arguments."""
    return is_mutable(node.target)


def memory(node: fx.Node) -> frozenset[Any]:
    """Return what names the memory of a captured graph's value: equal for views of one tensor."""
    values = tensors_of(node.meta.get("example_value"))
    tensors = [value for value in values if value.layout is torch.strided]
    return frozenset(_unbatched(tensor).untyped_storage()._cdata for tensor in tensors) or frozenset({node})


def _unbatched(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the memory of one within `vmap`."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def writes_of(graph: fx.Graph) -> dict[fx.Node, frozenset[Any]]:
    """Return the calls of a captured graph that write in place, in order, and the memory that each writes to."""
    written = {node: [memory(target) for target in written_by(node)] for node in graph.nodes}
    return {node: frozenset().union(*parts) for node, parts in written.items() if parts}


def name_of(node: fx.Node) -> str:
    """Return the name of a node's function, operator or method, without an overload; "" if it has none."""
    name: str = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.partition(".")[0]


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the values that a node of a captured graph writes to."""
    name = name_of(node)
    has_suffix = name.endswith("_") and not name.endswith("__") and node.target not in (operator.and_, operator.or_)
    is_in_place = has_suffix or name.strip("_") in IN_PLACE
    written = [node.args[:1] if is_in_place or _is_told_inplace(node) else None, node.kwargs.get("out")]
    if writes_in_place(node):
        for i, formal in enumerate(node.target._schema.arguments):
            if formal.alias_info is not None and formal.alias_info.is_write:
                written.append(node.args[i] if i < len(node.args) else node.kwargs.get(formal.name))
    targets: list[fx.Node] = []
    fx.map_arg(written, targets.append)
    return targets


def _is_told_inplace(node: fx.Node) -> bool:
    """Return whether a function is called with `inplace`, by name or by its place."""
    if "inplace" in node.kwargs or not isinstance(node.target, types.FunctionType):
        return bool(node.kwargs.get("inplace"))
    names = list(inspect.signature(node.target).parameters)
    return "inplace" in names and node.args[names.index("inplace") :][:1] not in ((), (False,))


def with_writes(nodes: Iterable[fx.Node], writes: Mapping[fx.Node, frozenset[Any]]) -> set[fx.Node]:
    """Return `nodes` and all that they are computed from, also by writes in place, through whichever view."""
    needed = ancestors(list(nodes))
    while True:
        read = frozenset().union(*map(memory, needed))
        more = [node for node, written in writes.items() if node not in needed and not read.isdisjoint(written)]
        if not more:
            return needed
        needed |= ancestors(more)


@functools.cache
def is_mutable(target: Any) -> bool:
    """Return whether an operator mutates one of its arguments; cached, since asking schemas is slow."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def ancestors(nodes: Iterable[fx.Node], stop: Callable[[fx.Node], bool] | None = None) -> set[fx.Node]:
    """Return `nodes` and all that they are computed from; inputs of a node for which `stop` holds are not followed."""
    reached = set(nodes)
    pending = list(reached)
    while pending:
        node = pending.pop()
        if stop is None or not stop(node):
            new = [arg for arg in node.all_input_nodes if arg not in reached]
            reached.update(new)
            pending += new
    return reached
