"""The sequences that are compared, with what is known of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dta_compile.data import Recorded

__all__ = ["Batch", "Decode", "Ints"]

Ints = NDArray[np.int64]
Decode = Callable[[Sequence[int]], str]


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Sequences with what is known of them.

    Attributes:
        sequences: as they were read.
        arrays: their tokens.
        decode: text of token ids; None: there is no tokenizer.
        wrote: by sequence, which tokens the policy wrote, as far as that is known; filled in by `compare_all`.
    """

    sequences: Sequence[Recorded]
    arrays: Sequence[Ints]
    decode: Decode | None
    wrote: dict[int, NDArray[np.bool_]]

    def text(self, sequence: int, start: int, stop: int) -> str:
        """The text of some tokens of a sequence; there has to be a tokenizer."""
        assert self.decode is not None
        return self.decode(self.arrays[sequence][max(start, 0) : stop].tolist())

    def are_of_one(self, one: int, other: int) -> bool:
        """Whether two sequences are known to be of one trajectory."""
        trajectory = self.sequences[one].trajectory
        return trajectory is not None and trajectory == self.sequences[other].trajectory

    def are_of_two(self, one: int, other: int) -> bool:
        """Whether two sequences are known to be of different trajectories."""
        known = {self.sequences[one].trajectory, self.sequences[other].trajectory}
        return len(known) == 2 and None not in known
