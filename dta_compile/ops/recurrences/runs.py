"""What a recurrence runs over: runs of tokens that continue one another, all of them from one state."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from dta_compile.ops.recurrences.blocks import Blocks, Step
from dta_compile.plan.tree.segments import Segment

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

    def apart(self, tokens: Sequence[int]) -> Runs:
        """The same tokens in runs that end at every fork, before the kept states, and around some tokens.

        A block of such a run has no token that another one, which does not read it, is computed with.

        Args:
            tokens: ascending; each becomes a run of its own.
        """
        cuts = {0, *(token + after for token in tokens for after in (0, 1)), *self.kept}
        for part in self.segments:
            above = self.segments[part.parent] if part.parent >= 0 else None
            cuts |= {part.first, part.last, *([] if above is None else [above.first + part.depth - above.depth])}
        bounds = [*sorted(cut for cut in cuts if cut < self.tokens), self.tokens]
        found: list[Segment] = []
        for part in self.segments:
            parent = -1
            if part.parent >= 0:
                above = self.segments[part.parent]
                parent = bisect.bisect_right(bounds, above.first + part.depth - above.depth - 1) - 1
            while len(found) + 1 < len(bounds) and bounds[len(found)] < part.last:
                first, last = bounds[len(found)], bounds[len(found) + 1]
                found.append(Segment(first, last, part.end, part.depth + first - part.first, parent))
                parent = len(found) - 1
        return Runs(tuple(found), self.kept)

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


def new_states(initial: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """States `[1 + E, ...]`, of which the exits are to be written."""
    states = initial.new_empty((1 + blocks.exits, *initial.shape))
    states[0] = initial
    return states


def kept_states(states: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Those of `[1 + E, ...]` that are wanted as results."""
    return states.index_select(0, blocks.on(states.device).kept)


def kept_grads(grads: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Gradients `[1 + E, ...]` of all states from those of the kept ones."""
    total = grads.new_zeros((1 + blocks.exits, *grads.shape[1:]))
    if blocks.kept:
        total.index_copy_(0, blocks.on(grads.device).kept, grads)
    return total


def at_entries(states: torch.Tensor, step: Step, blocks: Blocks) -> torch.Tensor:
    """The states with which a step's blocks begin: `[m, ...]`, or `[1, ...]` if they share one."""
    if step.entries is not None:
        return states[step.entries]
    return states.index_select(0, blocks.on(states.device).entries[step.blocks])


def add_at_entries(grads: torch.Tensor, added: torch.Tensor, step: Step, blocks: Blocks) -> None:
    """Add to gradients of states what comes from a step's blocks: `[m, ...]`, or their sum `[1, ...]` if they share."""
    if step.entries is not None:
        grads[step.entries] += added
    else:
        grads.index_add_(0, blocks.on(grads.device).entries[step.blocks], added)


def by_exit(tensor: torch.Tensor, step: Step, blocks: Blocks) -> torch.Tensor:
    """`[m, ...]` by block of a step as `[e, ...]` by exit of it; `[1, ...]` stays."""
    if step.one_exit_each or tensor.shape[0] == 1:
        return tensor
    return tensor.index_select(0, blocks.on(tensor.device).sources[step.counted] - step.blocks.start)


def by_block(tensor: torch.Tensor, step: Step, blocks: Blocks) -> torch.Tensor:
    """`[e, ...]` by exit of a step, added up to `[m, ...]` by block of it."""
    if step.one_exit_each:
        return tensor
    total = tensor.new_zeros((step.blocks.stop - step.blocks.start, *tensor.shape[1:]))
    return total.index_add_(0, blocks.on(tensor.device).sources[step.counted] - step.blocks.start, tensor)
