"""What a recurrence runs over: runs of tokens that continue one another, all of them from one state."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from dta_compile.plan.tree.segments import Segment

__all__ = ["Runs"]

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Runs:
    """A forest of runs of tokens; tokens are numbered through it, run after run.

    Attributes:
        segments: the runs; one with parent -1 starts from the initial state.
        kept: ascending numbers n: the state after the first n tokens of the first run is asked for.
        rows: number and length of the runs, where they are equal rows of a batch.
        derived: what recurrences derive from it once, for all layers, forward and backward.
    """

    segments: tuple[Segment, ...]
    kept: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    derived: dict[Hashable, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """Tokens of all runs."""
        return self.segments[-1].last if self.segments else 0

    def derive(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, made once."""
        if key not in self.derived:
            self.derived[key] = make()
        made: Made = self.derived[key]
        return made

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Runs:
        """Runs one after the other, each from the initial state."""
        segments, first = [], 0
        for length in lengths:
            if length:
                segments.append(Segment(first, first + length, first + length, 0, -1))
                first += length
        return cls(tuple(segments))

    @classmethod
    def of_rows(cls, batch: int, tokens: int, segments: torch.Tensor | None = None) -> Runs:
        """The rows of a batch, in which sequences begin where `segments` `[B, S]` change."""
        if segments is None:
            return _rows(batch, tokens)
        numbers = segments.expand(batch, tokens).cpu()
        changes = torch.ones(batch, tokens, dtype=torch.bool)
        changes[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        begins = [*changes.reshape(-1).nonzero()[:, 0].tolist(), batch * tokens]
        return cls.of_lengths([after - begin for begin, after in itertools.pairwise(begins)])


@functools.lru_cache(maxsize=8)
def _rows(batch: int, tokens: int) -> Runs:
    """The same object for all layers of a model, and what they derive from it."""
    return dataclasses.replace(Runs.of_lengths([tokens] * batch), rows=(batch, tokens))
