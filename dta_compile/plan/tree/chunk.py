"""Chunks: what one operation of a schedule runs, as slices of paths of the prefix tree."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """The tokens at depths `[start, stop)` of the path of `sequence`; printed `s3[100:612]`."""

    sequence: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"s{self.sequence}[{self.start}:{self.stop}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """What one op runs: slices that hang below one point of the stack.

    Printed with `+` before every branch: `s0[0:512]`, packed `s0[0:300]+s1[200:300]+s2[250:300]`, and without a spine
    `+s1[200:300]+s2[200:240]`.

    Attributes:
        spine: starts at the top of the stack and goes onto it; None: nothing does.
        branches: the rest of a packed chunk. A branch continues a token of an earlier slice of the chunk, or the stack
            where the chunk starts. All that continues a branch lies in the chunk, so its KV never goes onto the stack.
            Listed depth-first: what hangs below a branch comes right after it.
    """

    spine: Slice | None
    branches: tuple[Slice, ...] = ()

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The spine, if there is one, and the branches."""
        return self.branches if self.spine is None else (self.spine, *self.branches)

    @property
    def start(self) -> int:
        """Depth of the stack that the chunk continues."""
        return self.slices[0].start

    @property
    def tokens(self) -> int:
        """How many tokens all its slices have."""
        return sum(part.tokens for part in self.slices)

    def __str__(self) -> str:
        spine = "" if self.spine is None else str(self.spine)
        return spine + "".join(f"+{branch}" for branch in self.branches)
