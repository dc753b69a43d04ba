"""The compiled artefact of one captured call: frozen, plain data that can be pickled.

Inputs of the captured graph are referred to by number, and so are the *dense slots*, the values that the prologue
returns. Sizes are SymPy expressions; `Executable.symbols` says which input gives each of their symbols.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from dta_compile.executable.chunk import ChunkGraphs, Part
from dta_compile.executable.code import Code
from dta_compile.executable.layers import HasMixers, MixerLayer
from dta_compile.executable.layouts import Frame, Input, Layout

Shape = tuple[sympy.Expr, ...]
FLOAT = re.compile(r"(?<![\w.])-?\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)")  # in code


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a tensor, as known at compile time."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device


@dataclasses.dataclass(frozen=True)
class NumberSpec:
    """A number or bool that is an expression of sizes."""

    expr: sympy.Expr
    is_bool: bool = False


@dataclasses.dataclass(frozen=True)
class ChunkInput:
    """A dense value that chunks read or that is part of a prefix key: gathered by row, column or sequence, or whole.

    Attributes:
        slot: its dense slot.
        name: for messages.
        source: the user's name for it, or the operator that computes it.
        is_input: whether it is an unchanged input of the call.
        indexes: if it is an index to be checked against bounds: the number of entries, the user's name of the index,
            and the source line; otherwise None.
        by_depth: whether a token reads the entry of its number in its sequence, not of its column; see `ops.distances`.
    """

    slot: int
    layout: Layout
    name: str
    source: str
    is_input: bool
    indexes: tuple[int, str, str] | None = None
    by_depth: bool = False


@dataclasses.dataclass(frozen=True)
class Condition:
    """Test of a prologue value with one number per token: non-zero (`holds`) or zero (not `holds`).

    `source` is its dense slot; during the passes, its FX node.
    """

    source: Any
    layout: Layout
    holds: bool


@dataclasses.dataclass(frozen=True)
class Use:
    """Tokens at which a frontier value is used: those of `frame` where all `conditions` hold."""

    frame: Frame
    conditions: frozenset[Condition] = frozenset()

    def __str__(self) -> str:
        text = " and ".join(sorted(("" if c.holds else "not ") + str(c.source) for c in self.conditions))
        return f"[{self.frame.start}:+{self.frame.length}]" + (f" where {text}" if text else "")


@dataclasses.dataclass(frozen=True)
class FrontierValue:
    """A per-token value that leaves the token region: rows `[rows, *features]` of it become dense again.

    `memory_order` lists its dimensions from the widest stride to the narrowest, as in the trace of the epilogue.
    Tokens outside all `uses` need no row: the dense value is zero there and its gradient is ignored. If no entry
    of it is returned, it is `inner`: padding reads as a real token, since a logarithm of zeros would not be finite.
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
    inner: bool


@dataclasses.dataclass(frozen=True)
class Output:
    """An output of the call.

    Attributes:
        name, where: for messages: the value's name and the user's source line.
        value: its `TensorSpec` or `NumberSpec`, or the constant itself.
        input: number of the input that is returned unchanged, if it is one.
        slot: the dense slot that is returned, if it is one.
        is_cache: whether it is a KV cache.
        is_over_tokens: whether the size of a dimension depends on the number of tokens.
        follows_choice: whether it depends on a discrete choice (of an expert, a token) made by rounded values.
        reads: numbers of the frontier values that it is computed from.
        is_differentiated: gradients reach these by every way, so that a backward tells what it reads at padding.
        upstream: numbers of the outputs from which it is computed, whose gradient lacks what comes by way of it.
    """

    name: str
    where: str
    value: Any
    input: int | None = None
    slot: int | None = None
    is_cache: bool = False
    is_over_tokens: bool = False
    follows_choice: bool = False
    reads: tuple[int, ...] = ()
    is_differentiated: bool = False
    upstream: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Written:
    """Input that the call writes to, such as a counter of tokens.

    Attributes:
        input: position among the inputs.
        name: the user's name of it.
        frontier: the frontier values that its final value depends on.
    """

    input: int
    name: str
    frontier: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RowEpilogue:
    """The epilogue of one row of the batch: `(batch, *inputs, *frontier values, *dense values) -> outputs`.

    Attributes:
        input_dims, dense_dims: the dimension along which each is sliced to one row; None: it is taken whole.
    """

    code: Code
    input_dims: tuple[int | None, ...]
    dense_dims: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class NoRowEpilogue:
    """The reason why outputs cannot be computed row by row, and the user's source line."""

    reason: str
    where: str


OF_SEVERAL_BATCHES = "it runs the model on batches of several sizes, with masks of their own"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Facts about the captured program that the self-check needs.

    Attributes:
        incomparable: why two runs of the program may differ, or cannot be compared; "" if they can.
        precision: the least precise dtype of values that depend on parameters.
        guards, least: assumptions of the trace on sizes: expressions that hold, and lower bounds of symbols.
        indexed_by_data: symbols in the sizes of axes that are indexed by values computed from inputs.
        bytes: peak memory of both programs together: bytes by the shape whose product multiplies them.
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
        training: whether gradients are computed.
        codegen: backend of the chunk graphs, "eager" or "inductor".
        device: type of the device of the chunk graphs.
        inputs, values: the inputs of the call, and the compile-time spec of each.
        symbols: source of each size symbol: number of an input, and a dimension of it, or None if the input is a size.
        batch, tokens: number of sequences, and tokens per sequence.
        prologue: code from the inputs to the dense slots.
        mixers: the mixer layers, in order.
        mask_slots: dense slots of the tensors that masks read, by the name of the leaf.
        frontier: the values that leave the token region.
        trunk_inputs, head_inputs, constant_inputs: the dense values that chunks read, in the order of chunk inputs.
        trunk_keys, head_keys: values that decide whether two prefixes, or two uses of a token, are equal.
        region_parameters: the inputs that chunks read whole.
        joint: the graphs of a chunk.
        parts: the same graphs in parts: everything before the first mixer layer, each mixer layer, the head.
        epilogue: code from the inputs, the dense frontier values and the dense slots `epilogue_slots` to the outputs;
            None if `rest` runs in its place.
        epilogue_reads: the inputs of the call that the epilogue reads.
        row_epilogue: the epilogue of one row; None if nothing is trained.
        outputs: the outputs of the call, then the final values of the inputs that it writes to.
        written: these inputs.
        rest: if the function runs the model on further batches: the executable from the inputs and the dense frontier
            values to the outputs.
        comparison: facts for the self-check.
        regions: number of operators in the prologue, trunk, head and epilogue.
        dense_layer: the user's line of a layer that runs in the epilogue, over all sequences; None if there is none.
        chunk_digest: hash of the text of the chunk's graphs.
        seconds: time of each pass, by name.
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
    dense_layer: str | None
    chunk_digest: str
    seconds: Mapping[str, float]

    @functools.cached_property
    def whole(self) -> Part:
        """Return the whole chunk as one part."""
        frontier = tuple(range(len(self.frontier)))
        return Part(self.joint, tuple(range(self.joint.inputs)), tuple(range(len(self.mixers))), (), (), frontier)

    @functools.cached_property
    def numbers(self) -> list[list[str]]:
        """Return the floats in the code of each stage of a chunk, sorted: numbers of the model that are constants.

        Unlike sizes, they do not depend on the batches that a program is for.
        """
        kinds = [sorted({*FLOAT.findall(kind.forward_only.text)}) for kind in self.joint.kinds]
        return [kinds[stage.kind] for stage in self.joint.stages]

    def copies_of_written(self, args: Sequence[Any]) -> list[Any]:
        """Return the inputs of a call, with copies of those that it writes to."""
        positions = {written.input for written in self.written}
        return [arg.clone() if i in positions else arg for i, arg in enumerate(args)]

    @property
    def further(self) -> list[Executable]:
        """Return the executables of the further batches."""
        return [] if self.rest is None else [self.rest, *self.rest.further]
