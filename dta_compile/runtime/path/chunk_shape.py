"""Shape of a chunk: its start on the path stack and the ancestor relation of its tokens, on the host and the device.

Executors make a `ChunkShape` per chunk; attention providers and recurrences read it, or its `ChunkTable`.
"""

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

LISTED_QUERIES, LISTED_KEYS = 128, 64  # tokens of a block of queries and of a block of keys in `ChunkTable`
Numbers = TypeVar("Numbers", torch.Tensor, npt.NDArray[np.int64])


class Limit(NamedTuple):
    """Attention span: a sliding window or chunked attention.

    Attributes:
        tokens: most tokens that a token reads, itself included.
        by_chunks: chunked attention: sequences are divided into chunks of `tokens` tokens, and a token reads those of
            its own; else a sliding window. (Not the chunks of a schedule, which `ChunkShape` describes.)
        kept: depths of tokens that all later ones read, ascending, beside a sliding window (StreamingLLM's first ones).
    """

    tokens: int
    by_chunks: bool = False
    kept: tuple[int, ...] = ()

    @property
    def range(self) -> Limit:
        """Return the one range of keys that a token reads, without those that are kept."""
        return self._replace(kept=())

    def first(self, depths: Numbers) -> Numbers:
        """Return the depth of the first key that a token at each depth reads; may be negative."""
        return depths // self.tokens * self.tokens if self.by_chunks else depths - self.tokens + 1


@dataclasses.dataclass(frozen=True)
class ChunkShape:
    """Position of a chunk on the stack and structure of its tokens.

    Attributes:
        start: number of stack tokens that it reads.
        spine: number of its first tokens that go onto the stack (0: none).
        segments: its slices, see `dta_compile.plan.tree.segments`.
        rectangles: blocks of (queries, keys) between each slice and its descendants.
        units: tokens `[first, last)` that read each other both ways, in layers that do so.
        derived: cache of what mixers derive from the shape, shared by all layers, forward and backward.
    """

    start: int
    spine: int
    segments: tuple[Segment, ...]
    rectangles: tuple[Rectangle, ...]
    units: tuple[tuple[int, int], ...] = ()
    derived: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, start: int, spine: int, parts: Sequence[Segment], units: Sequence[tuple[int, int]] = ()) -> ChunkShape:
        """Return the shape of a chunk with the given slices."""
        return cls(start, spine, tuple(parts), tuple(rectangles(parts)), tuple(units))

    @classmethod
    def run(cls, start: int, tokens: int) -> ChunkShape:
        """Return the shape of a single slice that is all spine."""
        return cls.of(start, tokens, [Segment(0, tokens, tokens, start, -1)])

    @functools.cached_property
    def tokens(self) -> int:
        """Number of tokens of the chunk."""
        return self.segments[-1].last

    @functools.cached_property
    def height(self) -> int:
        """Number of tokens of the longest root path that ends in the chunk."""
        return max(part.depth + part.last - part.first for part in self.segments)

    @functools.cached_property
    def depths(self) -> npt.NDArray[np.int64]:
        """`[tokens]` depth of every token."""
        return np.concatenate([part.depth + np.arange(part.last - part.first) for part in self.segments])

    @functools.cached_property
    def begins(self) -> npt.NDArray[np.int64]:
        """`[tokens]` the first token that reads each token where units do: the first of its unit, else itself."""
        begins = np.arange(self.tokens)
        for first, last in self.units:
            begins[first:last] = first
        return begins

    @functools.cached_property
    def subtree_ends(self) -> npt.NDArray[np.int64]:
        """`[tokens]` one past the last token that reads each token: token i reads j if `j <= i < subtree_ends[j]`; in
        layers where units read each other, if `begins[j] <= i < subtree_ends[j]`.

        Holds because chunks are in depth-first order: subtrees that hang from deeper tokens of a slice come first.
        """
        ends = np.concatenate([np.full(part.last - part.first, part.last) for part in self.segments])
        for part in self.segments:
            if part.parent >= 0:
                above = self.segments[part.parent]
                reaches = ends[above.first : above.first + part.depth - above.depth]
                # No earlier subtree may hang from a token above the one that this segment hangs from.
                assert reaches[0] == reaches[-1] or reaches[-1] > part.first - 1, "not in depth-first order"
                reaches[:] = part.end
        return ends

    @functools.cached_property
    def trunk(self) -> int:
        """Number of its first tokens that all of its later tokens read: a root path above branches; 0: none."""
        root = self.segments[0]
        if root.end < self.tokens:
            return 0
        return min((part.depth - root.depth for part in self.segments if part.parent == 0), default=0)

    @functools.cached_property
    def divided(self) -> tuple[ChunkShape, ChunkShape]:
        """The shape of `trunk`, and that of the tokens after it, with the trunk on the stack."""
        trunk, root = self.trunk, self.segments[0]
        from_trunk = [part.parent == 0 and part.depth == root.depth + trunk for part in self.segments]
        left = []
        if root.last > trunk:  # the rest of the first slice, with the branches that hang from it
            end = self.segments[from_trunk.index(True)].first
            left.append(Segment(0, root.last - trunk, end - trunk, root.depth + trunk, -1))
        dropped = 1 - len(left)
        for part, is_from_trunk in list(zip(self.segments, from_trunk, strict=True))[1:]:
            parent = -1 if is_from_trunk else part.parent - dropped
            left.append(Segment(part.first - trunk, part.last - trunk, part.end - trunk, part.depth, parent))
        return ChunkShape.run(self.start, trunk), ChunkShape.of(self.start + trunk, 0, left)

    def cut_by(self, limit: Limit | None) -> Limit | None:
        """Return the limit if it cuts off any token of the chunk; else None."""
        return limit if limit is not None and limit.tokens < self.height else None

    def table(self, device: torch.device) -> ChunkTable:
        """Return the shape as tensors, uploaded once per device."""
        if (ChunkTable, device) not in self.derived:
            self.derived[ChunkTable, device] = ChunkTable(upload(self.table_rows(), device), self.tokens)
        table: ChunkTable = self.derived[ChunkTable, device]
        return table

    def table_rows(self) -> npt.NDArray[np.int32]:
        """Return the numbers of a `ChunkTable`."""
        whole, read = self._blocks_read()
        rows, columns = whole.shape
        edges = np.diff(np.pad(whole, ((0, 0), (1, 1))).astype(np.int8), axis=1)
        lists = np.zeros((rows, 2 * columns + 2), np.int64)
        runs = (edges > 0).sum(1)
        inside = np.arange(columns + 1) < runs[:, None]
        for column, sign in enumerate((1, -1)):
            lists[:, column::2][inside] = np.nonzero(edges == sign)[1]
        parts = np.argsort(~(read & ~whole), axis=1, kind="stable")
        counts = np.stack([runs, (read & ~whole).sum(1)], 1)
        start, of_tokens = np.array([self.start]), (self.subtree_ends, self.depths, self.begins)
        numbers = (start, *of_tokens, counts.ravel(), lists.ravel(), parts.ravel())
        return np.concatenate(numbers).astype(np.int32)

    def _blocks_read(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return two masks `[query blocks, key blocks]`: blocks that are read whole, and blocks that are read at all,
        the former in layers without units, the latter in layers with them.

        The readers of a token are contiguous, from the token to its end. So a block of keys is read by a block of
        queries if the first query lies before the largest end of the keys.
        """
        keys, queries = np.arange(0, self.tokens, LISTED_KEYS), np.arange(0, self.tokens, LISTED_QUERIES)
        ends = self.subtree_ends
        after, last = keys + LISTED_KEYS, np.minimum(queries + LISTED_QUERIES, self.tokens)
        read = (self.begins[keys] < last[:, None]) & (np.maximum.reduceat(ends, keys) > queries[:, None])
        whole = (after <= queries[:, None]) & (np.minimum.reduceat(ends, keys) >= last[:, None])
        return whole, read

    def allowed(
        self, queries: range, keys: range, limit: Limit | None = None, units: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Return the mask `[queries, keys]` of chunk tokens: each reads its ancestors and itself, within `limit`, and
        with `units` all of its unit."""
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
                read = above.first + child.depth - above.depth  # one past the token that `child` hangs from
                rows[:, max(above.first - keys.start, 0) : max(read - keys.start, 0)] = True
                child = above
        for first, last in self.units if units else ():
            below, after = max(first - queries.start, 0), max(last - queries.start, 0)
            out[below:after, max(first - keys.start, 0) : max(last - keys.start, 0)] = True
        if limit is not None:
            begins = limit.first(self.depths[queries.start : queries.stop])
            out &= self.depths[keys.start : keys.stop] >= begins[:, None]
        return out


class ChunkTable(NamedTuple):
    """Shape of a chunk in device memory, so that recorded kernels can be replayed for another chunk.

    Attributes:
        numbers: int32 `[size(tokens)]`: the chunk's start; `subtree_ends`; depths; begins; for every block of 128
            queries the number of runs of blocks of 64 keys that it reads whole, and of blocks that it reads in part;
            for every block of queries these runs, each the index of its first block and of one past its last; and the
            indices of all key blocks, first those read in part.
        tokens: number of tokens of the chunk, padding included.
    """

    numbers: torch.Tensor
    tokens: int

    @staticmethod
    def size(tokens: int) -> int:
        """Return the length of `numbers` for a number of tokens."""
        queries, keys = -(-tokens // LISTED_QUERIES), -(-tokens // LISTED_KEYS)
        return 1 + 3 * tokens + queries * (2 + 2 * (keys + 1) + keys)

    @property
    def start(self) -> torch.Tensor:
        """`[1]` start of the chunk."""
        return self.numbers[:1]

    @property
    def ends(self) -> torch.Tensor:
        """`[tokens]` subtree ends."""
        return self.numbers[1 : 1 + self.tokens]

    @property
    def depths(self) -> torch.Tensor:
        """`[tokens]` depths."""
        return self.numbers[1 + self.tokens : 1 + 2 * self.tokens]

    @property
    def begins(self) -> torch.Tensor:
        """`[tokens]` first readers of each token where units read each other."""
        return self.numbers[1 + 2 * self.tokens : 1 + 3 * self.tokens]
