"""Cut a forest of runs of tokens into blocks, and order them into steps that a recurrence computes at once.

A state after some token of a block is an *exit* if another block continues from it or the caller asks for it. States
are numbered: 0 is the common initial state, then come the exits. A block starts from one state, its *entry*. Its level
is one more than the level of its entry's block, so that all blocks of a level can be computed at once.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from dta_compile.plan.tree.segments import Segment

Numbers = npt.NDArray[np.int64]

SIZES = (64, 32, 16)
COST_OF_BLOCK = 32  # cost of reading and writing states, in tokens
SIBLINGS = 4  # least number of blocks with the same entry that get a step of their own


class Step(NamedTuple):
    """Blocks that are computed at once.

    Attributes:
        blocks: the numbers of the blocks.
        exits: the state numbers of their exits, from 1 on.
        entries: the state numbers of their entries if consecutive, one number if `shared`; otherwise None.
        shared: whether all blocks have the same entry.
        one_exit_each: whether every block has exactly one exit, in the order of the blocks.
    """

    blocks: slice
    exits: slice
    entries: slice | None
    shared: bool
    one_exit_each: bool

    @property
    def counted(self) -> slice:
        """Return the numbers of the exits counted from 0, without the initial state."""
        return slice(self.exits.start - 1, self.exits.stop - 1)


class Tables(NamedTuple):
    """Index tensors on a device, for `n` blocks of `L` places, `E` exits and `c` tokens.

    Attributes:
        tokens: `[n * L]`, the token at each place of each block; arbitrary at padding.
        padding: the padding places.
        places: `[c]`, the place of each token.
        entries: `[n]`, the state number of each block's entry.
        sources: `[E]`, the block of each exit.
        lasts: `[E]`, the place within its block of the token right before each exit.
        by_place: `[E]`, the exits sorted by `lasts`.
        kept: the state numbers to return.
    """

    tokens: torch.Tensor
    padding: torch.Tensor
    places: torch.Tensor
    entries: torch.Tensor
    sources: torch.Tensor
    lasts: torch.Tensor
    by_place: torch.Tensor
    kept: torch.Tensor


class Blocks:
    """A forest cut into blocks; built once, then used by all layers.

    Attributes:
        tokens: number of tokens, `c`.
        count, length: number of blocks, `n`, and places per block, `L`.
        exits: number of states besides the initial one, `E`.
        kept: number of states to return.
        in_order: whether the exits are those of the first `E` blocks, one each.
        place_bounds: bounds of the exits at each place, in the order of `Tables.by_place`.
    """

    def __init__(self, segments: Sequence[Segment], kept: Sequence[int] = (), size: int = 64) -> None:
        """Cut segments into blocks of at most `size` tokens.

        Args:
            segments: segments in the order of their tokens. Each continues after `depth - parent's depth` tokens of its
                parent, at least one; those without a parent start from the initial state.
            kept: numbers of tokens of the first segment, ascending, at least 1, after which the state is returned.
        """
        columns = np.array([(s.first, s.last, s.depth, s.parent) for s in segments], np.int64).reshape(-1, 4)
        first, last, depth, parent = columns.T
        above = np.where(parent >= 0, depth - depth[parent], 0)  # tokens of the parent
        levels = levels_of(parent, (above - 1) // size + 1)
        befores = np.where(parent >= 0, first[parent] + above - 1, -1)  # the token before each segment; -1: none
        kept_tokens = np.asarray(kept, np.int64) - 1
        counts = -(-(last - first) // size)
        total = int(counts.sum())
        index = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)  # within the segment
        starts = np.repeat(first, counts) + index * size
        lengths = np.minimum(np.repeat(last, counts) - starts, size)
        before = np.where(index > 0, starts - 1, np.repeat(befores, counts))
        level = np.repeat(levels, counts) + index
        order = _order(level, before)
        starts, lengths, before, level = starts[order], lengths[order], before[order], level[order]

        self.tokens, self.count, self.length = int(lengths.sum()), total, int(lengths.max(initial=1))
        places = np.arange(self.length)
        table = starts[:, None] + places
        is_padding = places >= lengths[:, None]
        self._table, self._padding = np.where(is_padding, 0, table).ravel(), np.flatnonzero(is_padding)
        self._places = np.empty(self.tokens, np.int64)
        self._places[table[~is_padding]] = np.flatnonzero(~is_padding)

        # An exit is identified by the token before it; exits are numbered in the order of the places.
        wanted = np.unique(np.concatenate([before[before >= 0], kept_tokens]))
        wanted = wanted[np.argsort(self._places[wanted])]
        numbers = np.zeros(self.tokens + 1, np.int64)  # state numbers by the token before; the last is for token -1
        numbers[wanted] = np.arange(len(wanted)) + 1
        self.exits, self.kept = len(wanted), len(kept)
        self._sources, self._lasts = np.divmod(self._places[wanted], self.length)
        self._entries, self._kept = numbers[before], numbers[kept_tokens]
        self._bounds = self._groups(level)
        self._steps: dict[int, tuple[Step, ...]] = {}
        self.place_bounds = np.searchsorted(np.sort(self._lasts), np.arange(self.length + 1)).tolist()
        self.in_order = np.array_equal(self._sources, np.arange(self.exits))
        # Number of equal rows that blocks are taken of in turn; 1: a chain; 0: neither.
        are_alike = (parent < 0).all() and (last - first == last[:1] - first[:1]).all()
        are_whole = lengths.min(initial=self.length) == self.length
        is_chain = np.array_equal(self._places, np.arange(self.tokens))
        self._rows = 1 if is_chain else len(segments) if are_alike and are_whole else 0
        self._tables: dict[torch.device, Tables] = {}

    def _groups(self, level: Numbers) -> list[int]:
        """Return the bounds of levels, and within them of groups of siblings; see `_order`."""
        group = np.where(_has_siblings(self._entries), self._entries, -1)
        cuts = np.flatnonzero((np.diff(level) != 0) | (np.diff(group) != 0)) + 1
        return [0, *cuts.tolist(), self.count]

    def steps(self, most: int = 2**62) -> tuple[Step, ...]:
        """Return the steps in the order of levels, with at most `most` blocks each."""
        if most not in self._steps:
            bounds = [start for low, high in pairwise(self._bounds) for start in range(low, high, most)] + [self.count]
            exits = (np.searchsorted(self._sources, bounds) + 1).tolist()
            ranges = zip(pairwise(bounds), pairwise(exits), strict=True)
            self._steps[most] = tuple(self._step(slice(*block), slice(*exit)) for block, exit in ranges)
        return self._steps[most]

    def _step(self, blocks: slice, exits: slice) -> Step:
        entries = self._entries[blocks]
        low, number = int(entries[0]), len(entries)
        shared = bool((entries == low).all())
        consecutive = bool((entries == low + np.arange(number)).all())
        sources = self._sources[exits.start - 1 : exits.stop - 1]
        return Step(
            blocks,
            exits,
            slice(low, low + 1) if shared else slice(low, low + number) if consecutive else None,
            shared,
            len(sources) == number and bool((sources == np.arange(blocks.start, blocks.stop)).all()),
        )

    def on(self, device: torch.device) -> Tables:
        """Return the tables on a device; copied there once."""
        if device not in self._tables:
            host = (
                self._table,
                self._padding,
                self._places,
                self._entries,
                self._sources,
                self._lasts,
                np.argsort(self._lasts, kind="stable"),
                self._kept,
            )
            self._tables[device] = Tables(*(uploaded(table, device) for table in host))
        return self._tables[device]

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cut `[c, ...]` into `[n, L, ...]` with zeros at padding; a view if possible."""
        shape = tensor.shape[1:]
        if self._rows == 1:
            missing = self.count * self.length - self.tokens
            padded = F.pad(tensor, (0, 0) * len(shape) + (0, missing)) if missing else tensor
            return padded.reshape(self.count, self.length, *shape)
        if self._rows:
            return tensor.view(self._rows, -1, self.length, *shape).transpose(0, 1).flatten(0, 1)
        tables = self.on(tensor.device)
        blocks = tensor.index_select(0, tables.tokens)
        if len(self._padding):
            blocks.index_fill_(0, tables.padding, 0)
        return blocks.view(self.count, self.length, *shape)

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join `[n, L, ...]` to `[c, ...]`, without the padding."""
        shape = tensor.shape[2:]
        if self._rows == 1:
            return tensor.reshape(-1, *shape)[: self.tokens]
        if self._rows:
            return tensor.unflatten(0, (-1, self._rows)).transpose(0, 1).reshape(-1, *shape)
        return tensor.reshape(-1, *shape).index_select(0, self.on(tensor.device).places)

    def places_first(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cut `[c, ...]` into `[L, n, ...]`, contiguous and in another dtype."""
        return self.cut(tensor).transpose(0, 1).to(dtype).contiguous()

    def tokens_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join `[L, n, ...]` to `[c, ...]`."""
        return self.join(tensor.transpose(0, 1))

    def new_states(self, initial: torch.Tensor) -> torch.Tensor:
        """Allocate states `[1 + E, ...]`, with the initial state set and the exits uninitialised."""
        states = initial.new_empty((1 + self.exits, *initial.shape))
        states[0] = initial
        return states

    def kept_states(self, states: torch.Tensor) -> torch.Tensor:
        """Select the states to return from `[1 + E, ...]`."""
        return states.index_select(0, self.on(states.device).kept)

    def kept_grads(self, grads: torch.Tensor) -> torch.Tensor:
        """Scatter the gradients of the kept states to those of all states `[1 + E, ...]`."""
        total = grads.new_zeros((1 + self.exits, *grads.shape[1:]))
        if self.kept:
            total.index_copy_(0, self.on(grads.device).kept, grads)
        return total

    def at_entries(self, states: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the entry states of a step's blocks: `[m, ...]`, or `[1, ...]` if they share one."""
        if step.entries is not None:
            return states[step.entries]
        return states.index_select(0, self.on(states.device).entries[step.blocks])

    def add_at_entries(self, grads: torch.Tensor, added: torch.Tensor, step: Step) -> None:
        """Add gradients of a step's entry states: `[m, ...]`, or their sum `[1, ...]` if the blocks share one."""
        if step.entries is not None:
            grads[step.entries] += added
        else:
            grads.index_add_(0, self.on(grads.device).entries[step.blocks], added)

    def by_exit(self, tensor: torch.Tensor, step: Step) -> torch.Tensor:
        """Gather `[m, ...]` by block of a step to `[e, ...]` by exit; `[1, ...]` is returned as it is."""
        if step.one_exit_each or tensor.shape[0] == 1:
            return tensor
        return tensor.index_select(0, self.on(tensor.device).sources[step.counted] - step.blocks.start)

    def by_block(self, tensor: torch.Tensor, step: Step) -> torch.Tensor:
        """Sum `[e, ...]` by exit of a step to `[m, ...]` by block."""
        if step.one_exit_each:
            return tensor
        total = tensor.new_zeros((step.blocks.stop - step.blocks.start, *tensor.shape[1:]))
        return total.index_add_(0, self.on(tensor.device).sources[step.counted] - step.blocks.start, tensor)

    def propagate(self, states: torch.Tensor, through: torch.Tensor, added: torch.Tensor) -> None:
        """Compute the exits among `states`: that of the entry times `through`, plus `added`, both `[E, ...]`."""
        for step in self.steps():
            if step.exits.stop > step.exits.start:
                entry = self.by_exit(self.at_entries(states, step), step)
                torch.addcmul(added[step.counted], through[step.counted], entry, out=states[step.exits])

    def propagate_back(self, grads: torch.Tensor, through: torch.Tensor, at_entry: torch.Tensor) -> None:
        """Add to the gradients of states what comes from later ones; `at_entry` `[n, ...]` has that from outputs."""
        for step in reversed(self.steps()):
            added = at_entry[step.blocks]
            if step.exits.stop > step.exits.start:
                added += self.by_block(grads[step.exits] * through[step.counted], step)
            self.add_at_entries(grads, added.sum(0, keepdim=True) if step.shared else added, step)


def uploaded(table: Numbers, device: torch.device) -> torch.Tensor:
    """Copy a table to a device, from pinned memory so that the host does not wait for queued GPU work."""
    tensor = torch.from_numpy(table)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def choose_size(segments: Sequence[Segment]) -> int:
    """Return the cheapest block size: smaller blocks have less padding, but more states."""
    lengths = np.array([s.last - s.first for s in segments], np.int64)
    longest = int(lengths.max(initial=1))

    def cost(size: int) -> int:
        return int((-(-lengths // size)).sum()) * (min(size, longest) + COST_OF_BLOCK)

    return min(SIZES, key=cost)


def levels_of(parent: Numbers, deeper: Numbers) -> Numbers:
    """Return levels that are `deeper` by number than those of parents, which come first; 0 without one (-1)."""
    levels: list[int] = []
    for above, more in zip(parent.tolist(), deeper.tolist(), strict=True):
        levels.append(levels[above] + more if above >= 0 else 0)
    return np.array(levels, np.int64)


def _has_siblings(entries: Numbers) -> npt.NDArray[np.bool_]:
    """Return which blocks share their entry with at least `SIBLINGS` blocks, themselves included."""
    _, inverse, counts = np.unique(entries, return_inverse=True, return_counts=True)
    has_siblings: npt.NDArray[np.bool_] = counts[inverse] >= SIBLINGS
    return has_siblings


def _order(level: Numbers, before: Numbers) -> Numbers:
    """Order blocks by level; within a level, blocks with many siblings come last, siblings together."""
    if (np.diff(before) > 0).all() and (np.diff(level) >= 0).all():
        return np.arange(len(level))  # a chain
    return np.lexsort((before, _has_siblings(before), level)).astype(np.int64)


Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Runs:
    """A forest of runs of tokens; tokens are numbered run after run.

    Attributes:
        segments: the runs; those with parent -1 start from the initial state.
        kept: numbers of tokens of the first run, ascending, after which the state is returned.
        derived: cache of objects that recurrences derive from it, for all layers, forward and backward.
    """

    segments: tuple[Segment, ...]
    kept: tuple[int, ...] = ()
    derived: dict[Hashable, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all runs."""
        return self.segments[-1].last if self.segments else 0

    def derive(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the result of `make`, cached under `key`."""
        if key not in self.derived:
            self.derived[key] = make()
        result: Made = self.derived[key]
        return result

    def apart(self, tokens: Sequence[int]) -> Runs:
        """Return the same tokens in runs that end at every fork, at the kept states, and around some tokens.

        Then no block computes a token or an exit together with one of these tokens that it does not read.

        Args:
            tokens: ascending; each becomes a run of its own.
        """
        cuts = {0, *(token + after for token in tokens for after in (0, 1)), *self.kept}
        for part in self.segments:
            above = self.segments[part.parent] if part.parent >= 0 else None
            cuts |= {part.first, part.last, *([] if above is None else [above.first + part.depth - above.depth])}
        bounds = [*sorted(cut for cut in cuts if cut < self.tokens), self.tokens]
        runs: list[Segment] = []
        for part in self.segments:
            parent = -1
            if part.parent >= 0:
                above = self.segments[part.parent]
                parent = bisect.bisect_right(bounds, above.first + part.depth - above.depth - 1) - 1
            while len(runs) + 1 < len(bounds) and bounds[len(runs)] < part.last:
                first, last = bounds[len(runs)], bounds[len(runs) + 1]
                runs.append(Segment(first, last, part.end, part.depth + first - part.first, parent))
                parent = len(runs) - 1
        return Runs(tuple(runs), self.kept)

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Runs:
        """Build consecutive runs of these lengths, each from the initial state."""
        segments, first = [], 0
        for length in lengths:
            if length:
                segments.append(Segment(first, first + length, first + length, 0, -1))
                first += length
        return cls(tuple(segments))

    @classmethod
    def of_rows(cls, batch: int, tokens: int, segments: torch.Tensor | None = None) -> Runs:
        """Build the runs of a batch: its rows, split where `segments` `[B, S]` change."""
        if segments is None:
            return _of_rows(batch, tokens)
        numbers = segments.expand(batch, tokens).cpu()
        changes = torch.ones(batch, tokens, dtype=torch.bool)
        changes[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        begins = [*changes.reshape(-1).nonzero()[:, 0].tolist(), batch * tokens]
        return cls.of_lengths([after - begin for begin, after in itertools.pairwise(begins)])


@functools.lru_cache(maxsize=8)
def _of_rows(batch: int, tokens: int) -> Runs:
    """Return one object for all layers of a model, so that they share what they derive from it."""
    return Runs.of_lengths([tokens] * batch)
