"""Cut the attention of a chunk into calls of torch's CPU flash kernel, each with few masked query-key pairs.

A call is full, causal or masked. The parts of a chunk are
* the stack: one full call for all queries;
* blocks on the diagonal: slices (causal), and neighbouring small subtrees together (masked);
* long slices in strips of rows of their causal square (the first is causal, the others are masked), because torch's
  causal kernel computes blocks of up to 512 keys whole; very long slices, for which its query blocks are larger, are
  one call;
* descendants of a slice against the slice: full, or masked where neighbours that hang from different tokens are joined.
With an attention span (window or chunks), every call is masked, over the keys that its queries reach. So is every call
but that of the stack where tokens of a unit read each other.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dta_compile.plan.tree.segments import Rectangle, Segment
from dta_compile.runtime.path.chunk_shape import ChunkShape, Limit

# Measured with torch 2.13 on two AVX-512 cores, of AMD and of Intel, heads of 64 and 128.
_CALL_PAIRS = 1024  # query-key pairs of all heads that cost about as much as one more call
_BLOCK = 48  # most tokens of joined neighbouring subtrees
_SUBTREE = 128  # most tokens of a slice joined with its descendants
_PIECE = 128  # queries of a call under a limit; more would have too many masked keys
_ONE_CALL = 256  # most tokens of a slice in one causal call
_LARGE_BLOCKS = 768  # from so many queries on, torch's kernel has blocks of 256; else of 64, and of 32 below 192
_ROWS = 192  # rows of a strip


class Part(NamedTuple):
    """Kernel call: the chunk's queries `[first, last)` against ranges of keys.

    Attributes:
        spans: ranges of keys; the stack's keys are `[0, start)`, the chunk's follow.
        causal: query `first + k` reads the keys up to the k-th.
        mask: `[queries, keys]`, added to the scores.
        fresh: first part of its queries; later parts are merged into its result.
        fresh_keys: first part of its keys: it writes their gradients, later parts add to them. All keys of a chunk
            have such a part, or, under a limit or with units, none has.
        plain: computed by plain math, so that keys that are not read cannot spread NaN.
    """

    first: int
    last: int
    spans: tuple[tuple[int, int], ...]
    causal: bool = False
    mask: torch.Tensor | None = None
    fresh: bool = False
    fresh_keys: bool = False
    plain: bool = False

    @property
    def full(self) -> bool:
        """Whether every query reads every key."""
        return self.mask is None and not self.causal


def parts_of(chunk: ChunkShape, limit: Limit | None, units: bool, dtype: torch.dtype) -> list[Part]:
    """Return the parts of a chunk, the fresh ones first; made once per shape."""
    limit, units = chunk.cut_by(limit), units and bool(chunk.units)
    derived, key = chunk.derived, (Part, limit, units, dtype)
    if key not in derived:
        is_plain = limit is None and not units
        derived[key] = list(_parts(chunk, dtype) if is_plain else _limited(chunk, limit, units, dtype))
    parts: list[Part] = derived[key]
    return parts


def _parts(chunk: ChunkShape, dtype: torch.dtype) -> Iterator[Part]:
    blocks = list(_blocks(chunk.segments))
    for first, last, is_slice in blocks:
        if is_slice:
            yield from _slice(chunk, first, last, dtype)
        else:
            yield _masked(chunk, range(first, last), range(first, last), dtype, fresh=True)
    for joined, same_keys in _joined(_outside(chunk.rectangles, blocks)):
        queries, keys = range(joined.query_first, joined.query_last), range(joined.key_first, joined.key_last)
        if same_keys:
            yield Part(queries.start, queries.stop, ((chunk.start + keys.start, chunk.start + keys.stop),))
        else:
            yield _masked(chunk, queries, keys, dtype)
    if chunk.start:
        yield Part(0, chunk.tokens, ((0, chunk.start),))


def _blocks(segments: Sequence[Segment]) -> Iterator[tuple[int, int, bool]]:
    """Yield the blocks `(first, last, is_slice)` on the diagonal, in order."""
    number = 0
    while number < len(segments):
        part = segments[number]
        number += 1
        first, last = part.first, part.end if part.end - part.first <= _SUBTREE else part.last
        while number < len(segments) and (
            segments[number].first < last or (last >= part.end and segments[number].end - first <= _BLOCK)
        ):
            last = max(last, segments[number].end)
            number += 1
        yield first, last, last == part.last


def _outside(rectangles: Sequence[Rectangle], blocks: Sequence[tuple[int, int, bool]]) -> list[Rectangle]:
    """Return the rectangles that no block covers, sorted by first key, then by queries."""
    joined = [(first, last) for first, last, is_slice in blocks if not is_slice]
    outside = []
    for rectangle in rectangles:
        index = bisect_right(joined, rectangle.key_first, key=lambda block: block[0]) - 1
        if index < 0 or rectangle.query_last > joined[index][1]:
            outside.append(rectangle)
    return sorted(outside, key=lambda r: (r.key_first, r.query_first))


def _joined(rectangles: Sequence[Rectangle]) -> Iterator[tuple[Rectangle, bool]]:
    """Join neighbours of one parent if cheaper than another call; yield them, and whether all read the same keys."""
    if not rectangles:
        return
    joined, same = rectangles[0], True
    for new in rectangles[1:]:
        key_last = max(joined.key_last, new.key_last)
        rows, more = joined.query_last - joined.query_first, new.query_last - new.query_first
        waste = rows * (key_last - joined.key_last) + more * (key_last - new.key_last)
        if (joined.query_last, joined.key_first) == (new.query_first, new.key_first) and waste <= _CALL_PAIRS:
            same = same and joined.key_last == new.key_last
            joined = Rectangle(joined.query_first, new.query_last, joined.key_first, key_last)
        else:
            yield joined, same
            joined, same = new, True
    yield joined, same


def _slice(chunk: ChunkShape, first: int, last: int, dtype: torch.dtype) -> Iterator[Part]:
    tokens, below = last - first, chunk.start + first
    rows = _ROWS if _ONE_CALL < tokens < _LARGE_BLOCKS else tokens
    for end in range(tokens, 0, -rows):  # widest strip first: it has the keys of all strips
        begin, is_first = max(end - rows, 0), end == tokens
        mask = _staircase(rows, end, dtype) if begin else None
        span = below, below + end
        yield Part(first + begin, first + end, (span,), not begin, mask, fresh=True, fresh_keys=is_first)


def _staircase(rows: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the last rows of the causal mask of `tokens` tokens, a view of one shared mask, which stays in cache."""
    shared = _shared_staircase(2 ** (tokens - 1).bit_length(), dtype)
    skipped = shared.shape[1] - tokens - (shared.shape[0] - rows)
    return shared[:rows, skipped : skipped + tokens]


@functools.cache
def _shared_staircase(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    width = tokens + _ROWS + 16  # not a power of two, where all rows would map to the same cache sets
    return torch.full((_ROWS, width), float("-inf"), dtype=dtype, device="cpu").triu_(width - _ROWS + 1)


def _masked(chunk: ChunkShape, queries: range, keys: range, dtype: torch.dtype, fresh: bool = False) -> Part:
    """Return a masked part; `fresh`: it is a block on the diagonal."""
    mask = _additive(chunk.allowed(queries, keys), dtype)
    span = chunk.start + keys.start, chunk.start + keys.stop
    return Part(queries.start, queries.stop, (span,), mask=mask, fresh=fresh, fresh_keys=fresh)


def _limited(chunk: ChunkShape, limit: Limit | None, units: bool, dtype: torch.dtype) -> Iterator[Part]:
    """Yield a part per piece of the queries, with all keys that any of them reaches in the chunk and, if there is a
    limit, on the stack; without one, a part for all of the stack."""
    for first in range(0, chunk.tokens, _PIECE):
        last = min(first + _PIECE, chunk.tokens)
        begins = np.full(last - first, chunk.start) if limit is None else limit.first(chunk.depths[first:last])
        reach = min(max(int(begins.min()), 0), chunk.start)
        prefix = np.arange(reach, chunk.start) >= begins[:, None]
        own_keys = int(np.searchsorted(chunk.begins, last)) if units else last
        own = chunk.allowed(range(first, last), range(own_keys), limit, units)
        needed = np.flatnonzero(np.diff(own.any(0), prepend=False, append=False)).reshape(-1, 2).tolist()
        spans = [(reach, chunk.start)] if reach < chunk.start else []
        spans += [(chunk.start + begin, chunk.start + end) for begin, end in needed]
        allowed = np.concatenate([prefix, *(own[:, begin:end] for begin, end in needed)], 1)
        yield Part(first, last, tuple(spans), mask=_additive(allowed, dtype), fresh=True)
    if limit is None and chunk.start:
        yield Part(0, chunk.tokens, ((0, chunk.start),))


def _additive(allowed: npt.NDArray[np.bool_], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device="cpu").masked_fill_(torch.from_numpy(~allowed), float("-inf"))
