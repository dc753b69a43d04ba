"""Masks that a call of attention states in words of its own, numbers of segments and a window: nothing to be proven."""

from __future__ import annotations

import dataclasses

import sympy
import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.passes.mixer_layers import MaskClass
from dta_compile.passes.program import Program, where
from dta_compile.passes.symbols import sizes
from dta_compile.passes.terms import Terms

aten = torch.ops.aten


@dataclasses.dataclass(eq=False)
class StatedMask:
    """See `AttentionMask`; its class is the same for every call."""

    constant: MaskClass | None
    leaves: set[fx.Node]
    numbers: list[sympy.Expr] = dataclasses.field(default_factory=list)
    scalars: set[fx.Node] = dataclasses.field(default_factory=set)
    tables: set[fx.Node] = dataclasses.field(default_factory=set)
    items: dict[sympy.Symbol, fx.Node] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.constant)


def stated_mask(program: Program, call: fx.Node, segments: fx.Node | None, window: int) -> StatedMask:
    """The mask of a causal call with `segments` `[B, S]` (see `ops.attention.Masking`) and a window.

    Raises:
        RefusalError: the segments are computed from parameters, or are not one number for each token.
    """
    if segments is None:
        return StatedMask(MaskClass(window=window or None), set())
    if segments in program.parameter_dependent:
        raise _refusal(call, "segments that are computed from parameters")
    shape = sizes(segments)
    if len(shape) != 2 or shape[1] != program.tokens or shape[0] not in (1, program.batch):
        raise _refusal(call, f"segments {list(shape)}")
    terms = Terms()
    row = terms.const(0) if shape[0] == 1 else terms.index("row")
    number = terms.entry(segments, (row, terms.index("key")))
    if number.dtype is torch.bool:
        return StatedMask(MaskClass(window=window or None, valid=number), {segments})
    valid = terms.apply(aten.ne.Scalar, number, 0)
    return StatedMask(MaskClass(window=window or None, valid=valid, segments=(number,)), {segments})


def _refusal(call: fx.Node, got: str) -> RefusalError:
    return RefusalError(
        "the segments of attention are not numbers of the batch's tokens",
        where=where(call),
        expected="a tensor [batch, tokens] of integers, computed from inputs",
        got=got,
    )
