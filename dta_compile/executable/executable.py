"""The compiled artefact of one captured call: frozen, plain data that pickles as it is.

What is an input is a number: the inputs of the captured graph have one each, and so have the *dense slots*, the values
that the prologue returns. Sizes are expressions over symbols, which `Executable.symbols` says how to read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from dta_compile.executable.chunk import ChunkGraphs, Part
from dta_compile.executable.code import Code
from dta_compile.executable.layers import HasMixers, MixerLayer
from dta_compile.executable.layouts import Frame, Input, Layout

Shape = tuple[sympy.Expr, ...]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor, as far as it is known before any call."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device


@dataclasses.dataclass(frozen=True)
class NumberSpec:
    """A number, or a truth value, that is an expression of sizes."""

    expr: sympy.Expr
    is_bool: bool = False


@dataclasses.dataclass(frozen=True)
class ChunkInput:
    """A dense value that chunks read or that is a part of a key: gathered by row, by column, by sequence, or whole.

    Attributes:
        slot: a dense slot.
        name: for people.
        source: what the user calls it, or the operator that computes it.
        is_input: it is an input of the call as it is.
        indexes: of an index that has to be in bounds, the entries that there are, what the user calls the index, and
            the line; None: it is none.
    """

    slot: int
    layout: Layout
    name: str
    source: str
    is_input: bool
    indexes: tuple[int, str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Condition:
    """A value of the prologue, one number a token, that is non-zero (`holds`) or zero (not `holds`).

    `source` is its dense slot; for the passes, its node.
    """

    source: Any
    layout: Layout
    holds: bool


@dataclasses.dataclass(frozen=True)
class Use:
    """Tokens that a frontier value is used at: those of `frame` where all `conditions` hold."""

    frame: Frame
    conditions: frozenset[Condition] = frozenset()

    def __str__(self) -> str:
        text = " and ".join(sorted(("" if c.holds else "not ") + str(c.source) for c in self.conditions))
        return f"[{self.frame.start}:+{self.frame.length}]" + (f" where {text}" if text else "")


@dataclasses.dataclass(frozen=True)
class FrontierValue:
    """A per-token value that leaves the token region: rows `[rows, *features]` of it become dense again.

    `memory_order` lists its dimensions from the widest stride to the narrowest, as the epilogue was traced with.
    Tokens that no one of `uses` covers need no row: the dense value is zero there and its gradient is ignored.
    """

    name: str
    layout: Layout
    shape: Shape
    features: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    memory_order: tuple[int, ...]
    is_cache: bool
    uses: tuple[Use, ...]


@dataclasses.dataclass(frozen=True)
class Output:
    """An output of the call.

    Attributes:
        name, where: for people: of the value, and the user's line that it comes from.
        value: what it is, as far as that is known before any call; a constant is itself.
        input: the input that it is.
        slot: the dense slot that it is.
        is_cache: it is a KV cache.
        is_over_tokens: a dimension's size depends on the number of tokens.
        follows_choice: it depends on a choice (of an expert, a token) by values that are rounded.
    """

    name: str
    where: str
    value: Any
    input: int | None = None
    slot: int | None = None
    is_cache: bool = False
    is_over_tokens: bool = False
    follows_choice: bool = False


@dataclasses.dataclass(frozen=True)
class Written:
    """An input of the call that is written to, a counter of tokens say.

    Attributes:
        input: its position.
        name: what the user calls it.
        frontier: the frontier values that what is written depends on.
    """

    input: int
    name: str
    frontier: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RowEpilogue:
    """The epilogue of one row of the batch: `(batch, *inputs, *frontier values, *dense values) -> outputs`.

    Attributes:
        input_dims, dense_dims: the dimension along which each is cut to a row; None: it is taken whole.
    """

    code: Code
    input_dims: tuple[int | None, ...]
    dense_dims: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class NoRowEpilogue:
    """Why outputs do not exist row by row, and the user's line that makes it so."""

    reason: str
    where: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What the self-check knows of the captured program.

    Attributes:
        incomparable: why two runs of it may differ; "": they do not.
        precision: the least precise dtype that values which depend on parameters are computed in.
        guards, least: what the trace assumed of its sizes: expressions that hold, and least values of symbols.
        indexed_by_data: symbols in the sizes of axes that are indexed by what is computed from inputs.
        bytes: what both programs hold at one time: bytes by the shape that they are multiplied with.
    """

    incomparable: str
    precision: torch.dtype
    guards: tuple[sympy.Basic, ...]
    least: Mapping[sympy.Symbol, sympy.Expr]
    indexed_by_data: frozenset[sympy.Symbol]
    bytes: Mapping[Shape, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Executable(HasMixers):
    """A compiled call.

    Attributes:
        training: gradients are wanted.
        codegen: "eager" or "inductor": what the graphs of a chunk run as.
        device: the type of the device that they run on.
        inputs, values: of the call; and what is known of each.
        symbols: where the inputs give each symbol: the input, and its dimension, or None if it is the number.
        batch, tokens: sequences, and the tokens of each.
        prologue: from the inputs to the dense slots.
        mixers: the layers that mix tokens, in order.
        mask_slots: the dense slot of what masks read, by the name of the leaf.
        frontier: what leaves the token region.
        trunk_inputs, head_inputs, constant_inputs: what chunks read of dense values, in their order.
        trunk_keys, head_keys: what makes two prefixes, and two uses of a token, the same.
        region_parameters: the inputs that chunks read whole.
        joint: the graphs of a chunk.
        parts: the same in parts: what comes before the first layer that mixes tokens, each such layer, the head.
        epilogue: from the inputs, the dense frontier values and the dense slots `epilogue_slots` to the outputs; None:
            `rest` runs in its place.
        epilogue_reads: the inputs of the call that it reads.
        row_epilogue: the same for one row; None: nothing is trained.
        outputs: of the call; then what is written to its inputs.
        written: these inputs.
        rest: of a function that runs the model on further batches: from the inputs and the dense frontier values.
        comparison: for the self-check.
        regions: how many operators are in the prologue, trunk, head and epilogue.
        chunk_digest: a hash of the text of the chunk's graph.
        seconds: what the passes took, by name.
    """

    training: bool
    codegen: str
    device: str
    inputs: tuple[Input, ...]
    values: tuple[TensorSpec | NumberSpec | None, ...]
    symbols: Mapping[sympy.Symbol, tuple[int, int | None]]
    batch: sympy.Expr | None
    tokens: sympy.Expr | None
    prologue: Code
    mixers: tuple[MixerLayer, ...]
    mask_slots: Mapping[str, int]
    frontier: tuple[FrontierValue, ...]
    trunk_inputs: tuple[ChunkInput, ...]
    head_inputs: tuple[ChunkInput, ...]
    constant_inputs: tuple[int, ...]
    trunk_keys: tuple[ChunkInput, ...]
    head_keys: tuple[ChunkInput, ...]
    region_parameters: tuple[Input, ...]
    joint: ChunkGraphs
    parts: tuple[Part, ...]
    epilogue: Code | None
    epilogue_slots: tuple[int, ...]
    epilogue_reads: tuple[int, ...]
    row_epilogue: RowEpilogue | NoRowEpilogue | None
    outputs: tuple[Output, ...]
    written: tuple[Written, ...]
    rest: Executable | None
    comparison: Comparison
    regions: Mapping[str, int]
    chunk_digest: str
    seconds: Mapping[str, float]

    @functools.cached_property
    def whole(self) -> Part:
        """All of a chunk as one part."""
        frontier = tuple(range(len(self.frontier)))
        return Part(self.joint, tuple(range(self.joint.inputs)), tuple(range(len(self.mixers))), (), (), frontier)

    def copies_of_written(self, args: Sequence[Any]) -> list[Any]:
        """The inputs of a call, with copies of those that it writes to."""
        positions = {one.input for one in self.written}
        return [arg.clone() if i in positions else arg for i, arg in enumerate(args)]

    @property
    def further(self) -> list[Executable]:
        """Those of the further batches."""
        return [] if self.rest is None else [self.rest, *self.rest.further]
