"""The shape of a chunk: where it hangs on the stack and which of its tokens read which, for the host and the device."""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dta_compile.plan.tree.segments import Rectangle, Segment, rectangles
from dta_compile.runtime.rows.upload import upload

__all__ = ["LISTED_KEYS", "LISTED_QUERIES", "ChunkShape", "ChunkTable", "Limit"]

LISTED_QUERIES, LISTED_KEYS = 128, 64  # tokens of a block of queries, and of a block of keys that its list names
Numbers = TypeVar("Numbers", torch.Tensor, npt.NDArray[np.int64])


class Limit(NamedTuple):
    """How far up a token reads: down from depth `first`.

    Attributes:
        tokens: how many it reads at most, itself included.
        by_chunks: every sequence is divided into chunks of so many tokens, and a token reads those of its own chunk;
            else a sliding window. (A `ChunkShape` is of something else: what one op of a schedule runs.)
    """

    tokens: int
    by_chunks: bool = False

    def first(self, depths: Numbers) -> Numbers:
        """The depth of the first key that is read at each depth, or less than zero."""
        return depths // self.tokens * self.tokens if self.by_chunks else depths - self.tokens + 1


@dataclasses.dataclass(frozen=True)
class ChunkShape:
    """Where a chunk hangs and how its tokens relate.

    Attributes:
        start: tokens of the stack that it reads.
        spine: its first tokens that go onto the stack (0: none).
        segments: its slices, see `dta_compile.plan.tree.segments`.
        rectangles: what hangs from each slice against the slice.
        derived: what mixers derive from the shape once, for all layers, forward and backward.
    """

    start: int
    spine: int
    segments: tuple[Segment, ...]
    rectangles: tuple[Rectangle, ...]
    derived: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, start: int, spine: int, parts: Sequence[Segment]) -> ChunkShape:
        """The shape of a chunk with these slices."""
        return cls(start, spine, tuple(parts), tuple(rectangles(parts)))

    @classmethod
    def run(cls, start: int, tokens: int) -> ChunkShape:
        """One slice, all of it spine."""
        return cls.of(start, tokens, [Segment(0, tokens, tokens, start, -1)])

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return self.segments[-1].last

    @functools.cached_property
    def height(self) -> int:
        """Tokens of the longest path that ends in the chunk, from the root on."""
        return max(part.depth + part.last - part.first for part in self.segments)

    @functools.cached_property
    def depths(self) -> npt.NDArray[np.int64]:
        """`[tokens]` depth of every token."""
        return np.concatenate([part.depth + np.arange(part.last - part.first) for part in self.segments])

    @functools.cached_property
    def subtree_ends(self) -> npt.NDArray[np.int64]:
        """`[tokens]` one past the last token that reads each token: token i reads j if `j <= i < subtree_ends[j]`.

        That is so because chunks are in depth-first order: what hangs from a deeper token of a slice comes first.
        """
        ends = np.concatenate([np.full(part.last - part.first, part.last) for part in self.segments])
        for part in self.segments:
            if part.parent >= 0:
                above = self.segments[part.parent]
                reaches = ends[above.first : above.first + part.depth - above.depth]
                # Of what came before it, nothing may hang from a token above the one it hangs from.
                assert reaches[0] == reaches[-1] or reaches[-1] > part.first - 1, "not in depth-first order"
                reaches[:] = part.end
        return ends

    def cut_by(self, limit: Limit | None) -> Limit | None:
        """The limit, if it may keep a token of the chunk from reading all above it."""
        return limit if limit is not None and limit.tokens < self.height else None

    def table(self, device: torch.device) -> ChunkTable:
        """The shape as tensors; made once per device."""
        if (ChunkTable, device) not in self.derived:
            self.derived[ChunkTable, device] = ChunkTable(upload(self.table_rows(), device), self.tokens)
        table: ChunkTable = self.derived[ChunkTable, device]
        return table

    def table_rows(self) -> npt.NDArray[np.int32]:
        """What a `ChunkTable` holds."""
        whole, read = self._blocks_read()
        lists = np.argsort(np.where(whole, 0, np.where(read, 1, 2)), axis=1, kind="stable")
        counts = np.stack([whole.sum(1), read.sum(1)], 1)
        start = np.array([self.start])
        return np.concatenate([start, self.subtree_ends, self.depths, counts.ravel(), lists.ravel()]).astype(np.int32)

    def _blocks_read(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """`[query blocks, key blocks]` twice: whose every key each query of a block reads, and of which one reads one.

        Whatever reads a token lies between it and its end, without gaps, so a block of queries has a reader if its
        first one lies before the last of the ends.
        """
        keys, queries = np.arange(0, self.tokens, LISTED_KEYS), np.arange(0, self.tokens, LISTED_QUERIES)
        ends = self.subtree_ends
        after, last = keys + LISTED_KEYS, np.minimum(queries + LISTED_QUERIES, self.tokens)
        read = (keys < last[:, None]) & (np.maximum.reduceat(ends, keys) > queries[:, None])
        whole = (after <= queries[:, None]) & (np.minimum.reduceat(ends, keys) >= last[:, None])
        return whole, read

    def allowed(self, queries: range, keys: range, limit: Limit | None = None) -> npt.NDArray[np.bool_]:
        """`[queries, keys]`: which of the chunk's tokens `keys` the tokens `queries` read: ancestors and themselves.

        A limit leaves those that it does not cut off.
        """
        out = np.zeros((len(queries), len(keys)), np.bool_)
        number = bisect_right(self.segments, queries.start, key=lambda part: part.first) - 1
        while number < len(self.segments) and self.segments[number].first < queries.stop:
            part = self.segments[number]
            number += 1
            first, last = max(part.first, queries.start), min(part.last, queries.stop)
            rows = out[first - queries.start : last - queries.start]
            own = max(part.first, keys.start)
            width = min(last, keys.stop) - own
            if width > 0:
                rows[:, own - keys.start :][:, :width] = np.tri(last - first, width, first - own, np.bool_)
            child = part
            while child.parent >= 0:
                above = self.segments[child.parent]
                read = above.first + child.depth - above.depth  # one past the last token that `child` hangs from
                rows[:, max(above.first - keys.start, 0) : max(read - keys.start, 0)] = True
                child = above
        if limit is not None:
            begins = limit.first(self.depths[queries.start : queries.stop])
            out &= self.depths[keys.start : keys.stop] >= begins[:, None]
        return out


class ChunkTable(NamedTuple):
    """A chunk's shape in device memory: kernels that read it there can be replayed for another chunk.

    Attributes:
        numbers: int32 `[size(tokens)]`: the chunk's start, then `subtree_ends`, then depths; then for every block of
            128 queries how many blocks of 64 keys they all read whole, and how many any of them reads; then for every
            block of queries the numbers of all blocks of keys, in this order.
        tokens: of the chunk, padding included.
    """

    numbers: torch.Tensor
    tokens: int

    @staticmethod
    def size(tokens: int) -> int:
        """How many numbers there are for so many tokens."""
        queries, keys = -(-tokens // LISTED_QUERIES), -(-tokens // LISTED_KEYS)
        return 1 + 2 * tokens + queries * (2 + keys)

    @property
    def start(self) -> torch.Tensor:
        """`[1]`"""
        return self.numbers[:1]

    @property
    def ends(self) -> torch.Tensor:
        """`[tokens]`"""
        return self.numbers[1 : 1 + self.tokens]

    @property
    def depths(self) -> torch.Tensor:
        """`[tokens]`"""
        return self.numbers[1 + self.tokens : 1 + 2 * self.tokens]
