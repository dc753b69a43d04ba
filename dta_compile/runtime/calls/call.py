"""One call of a compiled program: its inputs, and what the prologue made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from dta_compile.executable.chunk import Part
from dta_compile.executable.executable import ChunkInput, Executable
from dta_compile.executable.layouts import Frame
from dta_compile.integrations.layer_groups import LayerGroups
from dta_compile.options import Options
from dta_compile.plan import Plan
from dta_compile.runtime.calls.masks import ReadMasks, read_masks
from dta_compile.runtime.calls.ranks import Ranks
from dta_compile.runtime.calls.sizes import Sizes
from dta_compile.runtime.measure.budget import keep_freed_pages
from dta_compile.runtime.measure.calibration import Calibration
from dta_compile.runtime.measure.stopwatch import Stopwatch
from dta_compile.runtime.replay.lease import ReplayCache
from dta_compile.runtime.rows.batch_rows import Booleans, Integers
from dta_compile.runtime.rows.dense_to_tree import key_codes, used_tokens


@dataclasses.dataclass(frozen=True)
class CallContext:
    """What an engine gives each of its calls.

    Attributes:
        executable, options: what was compiled, and how it is to run.
        sizes: numbers for the program's size symbols.
        replays: CUDA graphs of its chunks, if there are to be any.
        calibration: what runs on a device have taken so far, with generated code or without.
        note_run: takes the plan, the stopwatch and the device of a schedule that has been run.
        note_plan: takes a plan that the call goes on with in place of its first one.
        ranks: those that run the call together.
        layers: what gathers parameters of other ranks layer by layer; None: all that are read are there.
    """

    executable: Executable
    options: Options
    sizes: Sizes
    replays: ReplayCache | None
    calibration: Callable[[torch.device, bool], Calibration]
    note_run: Callable[[Plan, Stopwatch, torch.device], None]
    note_plan: Callable[[Plan], None]
    ranks: Ranks
    layers: LayerGroups | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call before it is planned.

    Attributes:
        args: the inputs of the captured graph.
        dense: what the prologue returned, by dense slot.
        batch, tokens: its sequences, and the tokens of each.
        device: of the parameters.
    """

    context: CallContext
    args: Sequence[Any]
    dense: Sequence[torch.Tensor]
    batch: int
    tokens: int
    device: torch.device

    @classmethod
    def begin(cls, context: CallContext, args: Sequence[Any], dense: Sequence[torch.Tensor]) -> Call:
        """A call with these inputs and dense values."""
        executable, sizes = context.executable, context.sizes
        device = next((args[spec.index].device for spec in executable.region_parameters), torch.device("cpu"))
        if device.type == "cpu":
            keep_freed_pages()
        batch, tokens = (sizes.evaluate(size, args) for size in (executable.batch, executable.tokens))
        return cls(context, args, dense, batch, tokens, device)

    @property
    def executable(self) -> Executable:
        """What was compiled."""
        return self.context.executable

    def parameters(self, part: Part) -> list[torch.Tensor]:
        """What a part reads of the region's parameters: the first of its inputs."""
        specs = self.executable.region_parameters
        return [self.args[specs[i].index] for i in part.inputs if i < len(specs)]

    def window(self, frame: Frame | None) -> tuple[int, int]:
        """`(start, length)` of a frame."""
        return self.context.sizes.window(frame, self.args) if frame is not None else (0, 1)

    def read_masks(self) -> ReadMasks:
        """The masks of the call; raises as `masks.read_masks` does."""
        leaves = {name: self.dense[slot] for name, slot in self.executable.mask_slots.items()}
        return read_masks(self.executable.mixers, leaves, self._number, (self.batch, self.tokens))

    def codes(self, item: ChunkInput) -> Integers:
        """`[B, S]` codes of a value that is a part of a key."""
        return key_codes(item, self.dense[item.slot], self.batch, self.tokens, self.window(item.layout.frame))

    def used(self) -> list[Booleans]:
        """`[B, S]` tokens at which each frontier value is used."""
        frontier = self.executable.frontier
        return [used_tokens(value, self.dense, self.batch, self.tokens, self.window) for value in frontier]

    def reread(self) -> list[torch.Tensor]:
        """Dense values, inputs of the call among them, that chunks may read again in the backward."""
        executable = self.executable
        slots = [item.slot for item in (*executable.trunk_inputs, *executable.head_inputs)]
        values = [self.dense[slot] for slot in dict.fromkeys([*slots, *executable.constant_inputs])]
        return [value for value in values if not value.is_inference()]  # those have no version

    def _number(self, expr: sympy.Expr) -> int | float:
        return self.context.sizes.value(expr, self.args)
