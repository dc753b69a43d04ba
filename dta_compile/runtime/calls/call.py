"""A call before planning: its inputs and the dense values of the prologue, with the quantities derived from them.

`Engine.begin` makes a `Call`; `planned_call.plan_call` turns it into a `PlannedCall`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from dta_compile.executable.chunk import Part
from dta_compile.executable.executable import ChunkInput, Executable, NumberSpec
from dta_compile.executable.layouts import Frame
from dta_compile.integrations.fully_shard_by_layer import LayerGroups
from dta_compile.options import Options
from dta_compile.plan import Plan
from dta_compile.runtime.calls.masks import ReadMasks, read_masks
from dta_compile.runtime.calls.ranks import Ranks
from dta_compile.runtime.cuda_graphs.arenas import ReplayCache
from dta_compile.runtime.measure.budget import keep_freed_pages
from dta_compile.runtime.measure.calibration import Calibration
from dta_compile.runtime.measure.stopwatch import Stopwatch
from dta_compile.runtime.rows.batch_rows import Booleans, Integers
from dta_compile.runtime.rows.dense_to_tree import key_codes, used_tokens


class Sizes:
    """Evaluator of size expressions (sympy over SymInt symbols), given which inputs of a call define the symbols."""

    def __init__(self, symbols: Mapping[sympy.Symbol, tuple[int, int | None]]) -> None:
        """`symbols`: by symbol, the input (and dimension) that defines it, see `Executable.symbols`."""
        self._sources = symbols

    def evaluate(self, expr: sympy.Expr | None, args: Sequence[object]) -> int:
        """Return the integer value of a size expression; 1 for None."""
        return 1 if expr is None else int(self.value(expr, args))

    def number(self, spec: NumberSpec, args: Sequence[object]) -> int | float | bool:
        """Return the value of a number output."""
        return bool(self._substituted(spec.expr, args)) if spec.is_bool else self.value(spec.expr, args)

    def shape(self, shape: Sequence[sympy.Expr], args: Sequence[object]) -> list[int]:
        """Return the integer sizes of a symbolic shape."""
        return [int(self.value(size, args)) for size in shape]

    def value(self, expr: sympy.Expr, args: Sequence[object]) -> int | float:
        """Return the value of an expression: an `int` if it is integral, else a `float`."""
        number = self._substituted(expr, args)
        return int(number) if number.is_integer else float(number)

    def values(self, args: Sequence[object]) -> dict[sympy.Symbol, int]:
        """Return the values of all symbols that inputs define."""
        return {symbol: self._value(symbol, args) for symbol in self._sources}

    def _substituted(self, expr: sympy.Expr, args: Sequence[object]) -> sympy.Expr:
        if expr.is_Atom:  # `subs` takes 0.1 ms
            return sympy.sympify(self._value(expr, args)) if expr.is_Symbol else expr
        return expr.subs({symbol: self._value(symbol, args) for symbol in expr.free_symbols})

    def _value(self, symbol: Any, args: Sequence[Any]) -> int:
        index, dim = self._sources[symbol]
        return args[index] if dim is None else int(args[index].shape[dim])


@dataclasses.dataclass(frozen=True)
class CallContext:
    """State of an engine that its calls share.

    Attributes:
        executable, options: the compiled program and the user's options.
        sizes: values of the program's size symbols.
        replays: CUDA graphs of chunks; None: replay is off.
        calibration: returns the cost model's calibration for a device, with generated code or without.
        note_run: called with the plan, the stopwatch and the device of a schedule that has been run.
        note_plan: called with a plan that replaces the call's first one.
        ranks: tensor-parallel ranks that run the call together.
        has_checkpoints: the user's program has activation checkpoints.
        layers: gathers sharded parameters layer by layer; None: all parameters are gathered.
    """

    executable: Executable
    options: Options
    sizes: Sizes
    replays: ReplayCache | None
    calibration: Callable[[torch.device, bool], Calibration]
    note_run: Callable[[Plan, Stopwatch, torch.device], None]
    note_plan: Callable[[Plan], None]
    ranks: Ranks
    has_checkpoints: bool = False
    layers: LayerGroups | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """Call before planning.

    Attributes:
        args: inputs of the captured graph.
        dense: outputs of the prologue, by dense slot.
        batch, tokens: B and S: number of rows, and of tokens in each.
        device: device of the parameters.
    """

    context: CallContext
    args: Sequence[Any]
    dense: Sequence[torch.Tensor]
    batch: int
    tokens: int
    device: torch.device

    @classmethod
    def begin(cls, context: CallContext, args: Sequence[Any], dense: Sequence[torch.Tensor]) -> Call:
        """Return the call for these inputs and dense values."""
        executable, sizes = context.executable, context.sizes
        device = next((args[spec.index].device for spec in executable.region_parameters), torch.device("cpu"))
        if device.type == "cpu":
            keep_freed_pages()
        batch, tokens = (sizes.evaluate(size, args) for size in (executable.batch, executable.tokens))
        return cls(context, args, dense, batch, tokens, device)

    @property
    def executable(self) -> Executable:
        """Executable that is called."""
        return self.context.executable

    def parameters(self, part: Part) -> list[torch.Tensor]:
        """Return the region parameters that a part reads: the first of its inputs."""
        specs = self.executable.region_parameters
        return [self.args[specs[i].index] for i in part.inputs if i < len(specs)]

    def window(self, frame: Frame | None) -> tuple[int, int]:
        """Return `(start, length)` of a frame; `(0, 1)` for None."""
        if frame is None:
            return 0, 1
        start, length = (self.context.sizes.evaluate(size, self.args) for size in (frame.start, frame.length))
        return start, length

    def read_masks(self) -> ReadMasks:
        """Read the attention masks of the call; raises the errors of `masks.read_masks`."""
        leaves = {name: self.dense[slot] for name, slot in self.executable.mask_slots.items()}
        return read_masks(self.executable.mixers, leaves, self._number, (self.batch, self.tokens))

    def codes(self, item: ChunkInput) -> Integers:
        """Return `[B, S]` integer codes of a prefix-key or head-key input."""
        return key_codes(item, self.dense[item.slot], self.batch, self.tokens, self.window(item.layout.frame))

    def used(self) -> list[Booleans]:
        """Return for each frontier value the `[B, S]` tokens at which it is used."""
        frontier = self.executable.frontier
        return [used_tokens(value, self.dense, self.batch, self.tokens, self.window) for value in frontier]

    def reread(self) -> list[torch.Tensor]:
        """Return the dense values (inputs of the call included) that chunks may read again in the backward."""
        executable = self.executable
        slots = [item.slot for item in (*executable.trunk_inputs, *executable.head_inputs)]
        values = [self.dense[slot] for slot in dict.fromkeys([*slots, *executable.constant_inputs])]
        return [value for value in values if not value.is_inference()]  # inference tensors have no version

    def _number(self, expr: sympy.Expr) -> int | float:
        return self.context.sizes.value(expr, self.args)
