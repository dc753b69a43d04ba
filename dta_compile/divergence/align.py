"""Two token sequences side by side: where they differ, and where they go on alike after that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]

GRAM = 8  # tokens that have to agree for two sequences to be alike again
SHORTEST_TAIL = 2  # ... or all that is left of the first one, if it is at least so much
WINDOWS = (64, 1024, 16384)  # tokens ahead that are searched, one after the other; then all
CANDIDATES = 8  # nearest places to go on that are compared
PURE = 4.0  # how much more likely something was only left out, or only put in
MOST_HUNKS = 256  # of one alignment; sequences that differ in more places are told apart no further

_FACTORS = np.random.default_rng(0).integers(1, 2**63, GRAM, dtype=np.uint64) | np.uint64(1)


class Hunk(NamedTuple):
    """Tokens `[a0, a1)` of one sequence in the place of `[b0, b1)` of the other, and how many are alike after them."""

    a0: int
    a1: int
    b0: int
    b1: int
    run: int

    @property
    def is_last(self) -> bool:
        """Whether the sequences are never alike again."""
        return self.run == 0


def align(a: Ints, b: Ints, start: int) -> list[Hunk]:
    """Where two sequences differ that are alike up to `start`: hunks in order, each followed by a run that is alike.

    A greedy comparison: after a difference both go on where, for the fewest tokens skipped, the most are alike. What
    is left at the ends is a hunk without a run.
    """
    hashes_a, hashes_b = gram_hashes(a[start:]), gram_hashes(b[start:])
    hunks: list[Hunk] = []
    i = j = start
    while i < len(a) and j < len(b) and len(hunks) < MOST_HUNKS:
        found = _resume(a, b, i, j, hashes_a[i - start :], hashes_b[j - start :])
        if found is None:
            break
        x, y, run = found
        hunks.append(Hunk(i, i + x, j, j + y, run))
        i, j = i + x + run, j + y + run
    if i < len(a) or j < len(b):
        hunks.append(Hunk(i, len(a), j, len(b), 0))
    return hunks


def common_run(a: Ints, b: Ints, i: int = 0, j: int = 0) -> int:
    """How many tokens are alike from `a[i]` and `b[j]` on."""
    size, done, step = min(len(a) - i, len(b) - j), 0, 64
    while done < size:
        step = min(step, size - done)
        different = np.flatnonzero(a[i + done : i + done + step] != b[j + done : j + done + step])
        if len(different):
            return done + int(different[0])
        done, step = done + step, step * 4
    return size


def gram_hashes(tokens: Ints) -> Hashes:
    """`[max(n - GRAM + 1, 0)]` a hash of every run of `GRAM` tokens."""
    count = max(len(tokens) - GRAM + 1, 0)
    values = tokens.astype(np.uint64) + np.uint64(1)
    total = np.zeros(count, np.uint64)
    for place, factor in enumerate(_FACTORS):
        part = values[place : place + count] * factor
        total += part ^ (part >> np.uint64(29))
    return total


def _resume(a: Ints, b: Ints, i: int, j: int, ahead_a: Hashes, ahead_b: Hashes) -> tuple[int, int, int] | None:
    """Tokens to skip in both and the run that follows; None if nothing that is left is alike."""
    best: tuple[float, int, int, int] | None = None
    for x, y in _places(a, b, i, j, ahead_a, ahead_b):
        run = common_run(a, b, i + x, j + y)
        weight = PURE if not (x and y) else 1.0
        score = weight * run / (x + y + GRAM)
        if run and (best is None or score > best[0]):
            best = (score, x, y, run)
    return None if best is None else best[1:]


def _places(a: Ints, b: Ints, i: int, j: int, ahead_a: Hashes, ahead_b: Hashes) -> Iterator[tuple[int, int]]:
    """Places at which both sequences may be alike again."""
    for window in (*WINDOWS, max(len(ahead_a), len(ahead_b), 1)):
        found = list(_common(ahead_a[:window], ahead_b[:window]))
        if found or window >= max(len(ahead_a), len(ahead_b)):
            yield from found
            break
    left_out = np.flatnonzero(ahead_a == ahead_b[0])[:1] if len(ahead_b) else np.zeros(0, int)
    put_in = np.flatnonzero(ahead_b == ahead_a[0])[:1] if len(ahead_a) else np.zeros(0, int)
    yield from ((int(x), 0) for x in left_out)
    yield from ((0, int(y)) for y in put_in)
    for tail in range(min(GRAM - 1, len(a) - i - 1, len(b) - j), SHORTEST_TAIL - 1, -1):
        if np.array_equal(a[len(a) - tail :], b[j : j + tail]):
            yield len(a) - tail - i, 0
            break


def _common(one: Hashes, other: Hashes) -> Iterator[tuple[int, int]]:
    """Offsets of hashes that both have, first occurrences, nearest first."""
    left, first = np.unique(one, return_index=True)
    right, second = np.unique(other, return_index=True)
    _, at_left, at_right = np.intersect1d(left, right, assume_unique=True, return_indices=True)
    x, y = first[at_left], second[at_right]
    nearest: Any = np.argsort(x + y, kind="stable")[:CANDIDATES]
    yield from zip(x[nearest].tolist(), y[nearest].tolist(), strict=True)
