"""Chunks, the unit that one op of a schedule runs: slices of paths of the prefix tree."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """Tokens at depths `[start, stop)` of the path of `sequence`; prints as `s3[100:612]`."""

    sequence: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"s{self.sequence}[{self.start}:{self.stop}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Slices that one op runs together, all below one point of the stack.

    Prints with `+` before every branch: `s0[0:512]`, packed `s0[0:300]+s1[200:300]+s2[250:300]`, and without a spine
    `+s1[200:300]+s2[200:240]`.

    Attributes:
        spine: slice that continues the stack and is pushed onto it; None: nothing is pushed.
        branches: the other slices of a packed chunk. A branch continues a token of an earlier slice of the chunk, or
            the stack where the chunk starts. All descendants of a branch lie in the chunk, so its KV never goes onto
            the stack. Listed depth-first: descendants of a branch come right after it.
    """

    spine: Slice | None
    branches: tuple[Slice, ...] = ()

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Spine, if there is one, and branches."""
        return self.branches if self.spine is None else (self.spine, *self.branches)

    @property
    def start(self) -> int:
        """Depth at which the chunk continues the stack."""
        return (self.spine or self.branches[0]).start

    @property
    def tokens(self) -> int:
        """Number of tokens in all slices."""
        return sum(part.tokens for part in self.slices)

    def __str__(self) -> str:
        spine = "" if self.spine is None else str(self.spine)
        return spine + "".join(f"+{branch}" for branch in self.branches)
