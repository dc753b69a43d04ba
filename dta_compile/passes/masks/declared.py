"""Masks that a call of attention declares, by numbers of segments and a window: nothing is left to be proven."""

from __future__ import annotations

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.executable.masks import MaskProgram
from dta_compile.passes.masks.leaves import leaf_of
from dta_compile.passes.program import Program, where
from dta_compile.passes.symbols import sizes
from dta_compile.proofs.mask_class import MaskClass
from dta_compile.proofs.terms import Terms

aten = torch.ops.aten


def declared_mask(program: Program, call: fx.Node, segments: fx.Node | None, window: int) -> MaskProgram:
    """The mask of a causal call with `segments` `[B, S]` (see `ops.attention.Masking`) and a window.

    Raises:
        RefusalError: the segments are computed from parameters, or are not one number for each token.
    """
    if segments is None:
        return MaskProgram(MaskClass(window=window or None), frozenset())
    if segments in program.parameter_dependent:
        raise _refusal(call, "segments that are computed from parameters")
    shape = sizes(segments)
    if len(shape) != 2 or shape[1] != program.tokens or shape[0] not in (1, program.batch):
        raise _refusal(call, f"segments {list(shape)}")
    terms, leaf = Terms(), leaf_of(program, segments)
    row = terms.const(0) if shape[0] == 1 else terms.index("row")
    number = terms.entry(leaf, (row, terms.index("key")))
    if number.dtype is torch.bool:
        return MaskProgram(MaskClass(window=window or None, valid=number), frozenset([leaf]))
    valid = terms.apply(aten.ne.Scalar, number, 0)
    return MaskProgram(MaskClass(window=window or None, valid=valid, segments=(number,)), frozenset([leaf]))


def _refusal(call: fx.Node, got: str) -> RefusalError:
    return RefusalError(
        "the segments of attention are not numbers of the batch's tokens",
        where=where(call),
        expected="a tensor [batch, tokens] of integers, computed from inputs",
        got=got,
    )
