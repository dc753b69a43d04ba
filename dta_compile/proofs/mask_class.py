"""The class of an attention mask as the result of a proof, with the assumptions that every call checks."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from dta_compile.proofs.terms import Term, shown

LONGEST_ROW = 2**24  # tokens; token positions are exact in float32
BOUND = 2**31  # bound on the absolute value of input integers in arithmetic
# Entries of additive masks of at most this hide a key. That holds in floating point if the scores of a query differ by
# less than about 9,900, which `runtime.attention.fillers` checks in every call for the mask's own numbers.
FORBIDDEN = -9984.0  # -1e4, as bfloat16 rounds it
CERTAIN = -1e30  # entries of at most this hide a key whatever the scores, which are never as large


class Bound(NamedTuple):
    """Value of each token that bounds its sequence: the last column of the sequence (`is_last`), or its first one.

    The bound is `term - offset`; for the last (first) sequence of a row it may lie behind (before) the sequence. No
    token, padding included, lies before a bound that is its first column.
    """

    term: Term
    is_last: bool
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class MaskClass:
    """Proven class of an attention mask: causal, within `window` tokens or chunks of `chunk` tokens if one is given.

    Tokens of a block read each other both ways. The terms are over "row" and "key"; what is said of them below are
    assumptions of the proof, which every call checks.

    Attributes:
        window: number of tokens attended to, including the token itself.
        kept: with `window`: whether a token stays visible beyond it (None: none do). That depends on the number of
            tokens of its sequence before it alone.
        chunk: length of chunks of a sequence; tokens attend only to tokens of their own chunk.
        counted: with `chunk`: a multiple of `chunk` at the first token of a sequence, which grows by one from each real
            token to the next. The number of a chunk is `counted // chunk`.
        valid: whether a token is real (None: all are); the others are padding, which no real token attends to.
        segments: two tokens of a row are in the same sequence if all of these are equal; sequences are contiguous.
        block: two tokens of a sequence are in the same block if these are equal; blocks are contiguous.
        in_block: with `block`: whether a token is in a block (None: all are).
        fits_window: whether blocks must be no longer than the window.
        bounds: values among `segments` that are the last, or the first, column of the sequence.
        positions: values that grow by one from each real token of a sequence to the next.
        binary: values that are zero or one.
        bias: values that are zero or at most -1e4.
        bounded: integers of absolute value less than 2**31.
        filler: largest finite entry of at most -1e4 besides those in `bias`; -inf if there is none.
    """

    window: int | None = None
    kept: Term | None = None
    chunk: int | None = None
    counted: Term | None = None
    valid: Term | None = None
    segments: tuple[Term, ...] = ()
    block: Term | None = None
    in_block: Term | None = None
    fits_window: bool = False
    bounds: tuple[Bound, ...] = ()
    positions: tuple[Term, ...] = ()
    binary: tuple[Term, ...] = ()
    bias: tuple[Term, ...] = ()
    bounded: tuple[Term, ...] = ()
    filler: float = -math.inf

    @property
    def terms(self) -> tuple[Term, ...]:
        """Return all terms in it."""
        single = tuple(term for term in (self.kept, self.counted, self.valid) if term is not None)
        return (*single, *self.of_blocks, *self.segments, *self.positions, *self.binary, *self.bias, *self.bounded)

    @property
    def of_blocks(self) -> tuple[Term, ...]:
        """Return the terms that tell blocks."""
        return tuple(term for term in (self.block, self.in_block) if term is not None)

    def __str__(self) -> str:
        parts = ["causal" if self.window is None else f"causal, window {self.window}"]
        if self.kept is not None:
            parts.append(f"and all keys where {shown(self.kept)}")
        if self.counted is not None:
            parts.append(f"chunks of {self.chunk} by {shown(self.counted)}")
        if self.valid is not None:
            parts.append(f"real tokens where {shown(self.valid)}")
        parts += [f"a sequence for each {shown(term)}" for term in self.segments]
        parts += [f"the {'last' if b.is_last else 'first'} column in {shown(b.term)}" for b in self.bounds]
        if self.block is not None:
            parts.append(f"both ways within each {shown(self.block)}")
            parts += [] if self.in_block is None else [f"where {shown(self.in_block)}"]
        parts += [f"consecutive {shown(term)}" for term in self.positions]
        return ", ".join(parts)
