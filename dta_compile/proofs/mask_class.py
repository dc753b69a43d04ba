"""What is proven of an attention mask, and within which bounds: every call checks what a proof takes for granted."""

from __future__ import annotations

import dataclasses

from dta_compile.proofs.terms import Term, shown

LONGEST_ROW = 2**24  # tokens; exact in float32
BOUND = 2**31  # integers of inputs that are computed with are less, of either sign
# An additive mask of this or less is taken to leave no weight. That is so in floating point if the scores of a query
# differ by less than about 9,900, and with -1e9 for all scores that occur. Not checked: the older models that write
# -1e4 take it for granted, too.
FORBIDDEN = -1e4


@dataclasses.dataclass(frozen=True)
class MaskClass:
    """What an attention mask was proven to be: causal, within `window` tokens or by chunks if one is not None.

    The terms are over "row" and "key". What is said of them is what the proof takes for granted; every call checks it.

    Attributes:
        chunk: tokens attend to those of their own chunk of so many tokens of the sequence.
        counted: with `chunk`: a multiple of it at the first token of a sequence, one more from each real token to the
            next. Chunks are where this number, divided by `chunk` and rounded down, is the same.
        valid: which tokens are real (None: all); the others are padding, which no real token attends to.
        segments: two tokens of a row are of one sequence if they have all of these in common; the tokens of a sequence
            are next to each other.
        positions: grow by one from token to token between the real tokens of a sequence.
        binary: zero or one.
        bias: zero or at most -1e4.
        bounded: integers less than 2**31, of either sign.
    """

    window: int | None = None
    chunk: int | None = None
    counted: Term | None = None
    valid: Term | None = None
    segments: tuple[Term, ...] = ()
    positions: tuple[Term, ...] = ()
    binary: tuple[Term, ...] = ()
    bias: tuple[Term, ...] = ()
    bounded: tuple[Term, ...] = ()

    @property
    def terms(self) -> tuple[Term, ...]:
        """All that it says something of."""
        single = tuple(term for term in (self.counted, self.valid) if term is not None)
        return (*single, *self.segments, *self.positions, *self.binary, *self.bias, *self.bounded)

    def __str__(self) -> str:
        parts = ["causal" if self.window is None else f"causal, window {self.window}"]
        if self.counted is not None:
            parts.append(f"chunks of {self.chunk} by {shown(self.counted)}")
        if self.valid is not None:
            parts.append(f"real tokens where {shown(self.valid)}")
        parts += [f"a sequence for each {shown(term)}" for term in self.segments]
        parts += [f"consecutive {shown(term)}" for term in self.positions]
        return ", ".join(parts)
