"""What the passes read and write: one captured call on its way from Dynamo's graph to executable regions."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

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

TORCH_FOLDER = str(pathlib.Path(torch.__file__).parent)
OUR_FOLDER = str(pathlib.Path(__file__).parents[1])


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A value whose tokens depend on each other (or that cannot be shown not to); `reason` says why."""

    reason: str
    node: fx.Node


Value = Layout | Mixed | tuple["Layout | Mixed", ...] | None


@dataclasses.dataclass
class ChunkInput:
    """A prologue value that chunks read: gathered by row, by column, by sequence, or whole."""

    node: fx.Node
    layout: Layout
    name: str


@dataclasses.dataclass(frozen=True)
class FrontierValue(executable.FrontierValue):
    """A per-token value that leaves the token region; conditions of its uses have nodes for sources."""

    node: fx.Node


@dataclasses.dataclass
class Program(HasMixers):
    """A captured call and all that the passes found out about it, in pass order; see `contracts` for who writes what.

    Containers are frozen once the pass that fills them has run.
    """

    captured: fx.GraphModule
    training: bool
    codegen: str = "eager"  # as in `Options`; what is done, once the pass of this name has run
    own_symbols: bool = False  # Dynamo gave every size a symbol of its own, also where sizes are equal
    # lower
    inputs: Sequence[Input] = ()
    module: fx.GraphModule = None
    placeholders: Sequence[fx.Node] = ()
    draws: Sequence[fx.Node] = ()  # nodes that draw random numbers, in order
    written: Sequence[int] = ()  # inputs that are written to: what they have in the end are the last outputs
    # token_axis
    batch: sympy.Expr | None = None
    tokens: sympy.Expr | None = None
    values: Mapping[fx.Node, Value] = dataclasses.field(default_factory=dict)
    input_layouts: Mapping[tuple[fx.Node, fx.Node], Layout] = dataclasses.field(default_factory=dict)
    parameter_dependent: Set[fx.Node] = frozenset()
    roots: Mapping[fx.Node, frozenset[fx.Node]] = dataclasses.field(default_factory=dict)
    other_batches: Set[fx.Node] = frozenset()  # leads to attention over other sizes only
    # mixers
    mixers: Sequence[MixerLayer] = ()  # in order; a layer's index is its place here
    mixer_nodes: Sequence[fx.Node] = ()  # their calls
    # regions
    region: Set[fx.Node] = frozenset()
    frontier: Sequence[FrontierValue] = ()
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
    row_epilogue: fx.GraphModule | Mixed | None = None  # of one row; Mixed: why there is none
    # other_batches
    rest: Program | None = None  # in place of the epilogue, if that has attention over a batch of other sizes
    # joint
    stages: ChunkStages = None  # type: ignore[assignment]
    # emit
    joint: ChunkGraphs = None  # type: ignore[assignment]
    parts: Sequence[Part] = ()
    # Of the runner: seconds by pass, and the fields that have been filled.
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    filled: Set[str] = frozenset({"captured", "training", "codegen", "own_symbols", "length"})
    # The size that stands for the number of tokens where the captured graph has a constant, see `lowering.one_length`.
    length: torch.SymInt | None = None

    @classmethod
    def lowered(
        cls,
        module: fx.GraphModule,
        training: bool,
        codegen: str,
        own_symbols: bool,
        inputs: Sequence[Input],
        placeholders: Sequence[fx.Node],
    ) -> Program:
        """A program whose captured graph is lowered already, and draws no random numbers."""
        program = cls(module, training, codegen, own_symbols, inputs, module, placeholders)
        program.filled |= {"inputs", "module", "placeholders", "draws", "written"}
        return program

    @property
    def graph(self) -> fx.Graph:
        """The lowered graph."""
        return self.module.graph

    @property
    def input_symbols(self) -> dict[sympy.Symbol, tuple[int, int | None]]:
        """Where the inputs of a call give each symbol: the input, and its dimension, or None if it is the number."""
        return symbol_sources(node.meta["val"] for node in self.placeholders)

    def layout(self, node: fx.Node) -> Layout:
        """The layout of a node that is known to be a token-wise single tensor."""
        value = self.values[node]
        assert isinstance(value, Layout), (node, value)
        return value

    @property
    def conditions(self) -> list[Condition]:
        """What the prologue has to hand over to tell where frontier values are used."""
        uses = [use for value in self.frontier for use in value.uses]
        return sorted({one for use in uses for one in use.conditions}, key=lambda one: one.source.name)

    @property
    def outputs(self) -> list[Any]:
        """The outputs of the call: nodes of the lowered graph, or constants."""
        return list(output_node(self.graph).args[0])


class GraphWithoutAttention(Exception):
    """Raised by a pass to say that the captured graph is not for the tree: it runs as it is.

    Attributes:
        log: a line to log (None: not worth one).
    """

    def __init__(self, log: str | None) -> None:
        super().__init__(log)
        self.log = log


class AmbiguousAxes(Exception):
    """Raised by a pass when a size may share its symbol with another one, so that the axes cannot be told apart.

    Attributes:
        refusal: the error if every size has a symbol of its own.
        length: of tokens, if that is a constant.
    """

    def __init__(self, refusal: RefusalError | None = None, length: int | None = None) -> None:
        super().__init__()
        self.refusal, self.length = refusal, length


def output_node(graph: fx.Graph) -> fx.Node:
    """The node of a graph that returns its results."""
    return next(iter(reversed(graph.nodes)))


def has_tensor(node: fx.Node) -> bool:
    """Whether the value of a node is a tensor, or a tuple with one in it."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (tuple, list)) and any(isinstance(item, torch.Tensor) for item in value)
    )


def writes_in_place(node: fx.Node) -> bool:
    """Whether an operator changes one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and _is_mutable(node.target)


@functools.cache
def _is_mutable(operator: torch._ops.OpOverload) -> bool:
    """Asking schemas again and again is slow."""
    return operator._schema.is_mutable


def ancestors(nodes: list[fx.Node], stop: Callable[[fx.Node], bool] = lambda node: False) -> set[fx.Node]:
    """`nodes` and everything they are computed from; the inputs of a node for which `stop` holds are not followed."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            if not stop(node):
                pending.extend(node.all_input_nodes)
    return found


def where(node: fx.Node) -> str:
    """The user's source line that a node came from: the innermost recorded frame outside torch and this package."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip() and not set(line.strip()) <= set("^~ ")]
    frames = [i for i, line in enumerate(lines) if line.startswith("File ")]
    if not frames:
        return f"node {node.name}"
    own = [i for i in frames if TORCH_FOLDER not in lines[i]] or frames
    own = [i for i in own if OUR_FOLDER not in lines[i]] or own
    return " | ".join(lines[own[-1] : own[-1] + 2])


def where_now() -> str:
    """The user's source line of the node that is being traced."""
    meta = fx.traceback.get_current_meta()
    probe = fx.Graph().placeholder("traced")
    probe.meta = dict(meta)
    return where(probe)
