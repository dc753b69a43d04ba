"""Sequences as they would be without a cause: what a difference made of them is undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dta_compile.divergence.align import Hunk

__all__ = ["Comparison", "Rewritten", "rewrite_all"]

Ints = NDArray[np.int64]


class Comparison(NamedTuple):
    """A sequence compared with an earlier one.

    Attributes:
        sequence, reference: their numbers; no reference is -1.
        shared: tokens that are alike from the beginning.
        hunks: where they differ after that, as far as they could be alike.
        causes: of every hunk.
    """

    sequence: int
    reference: int
    shared: int
    hunks: tuple[Hunk, ...] = ()
    causes: tuple[str, ...] = ()


class Rewritten(NamedTuple):
    """New tokens, where the boundaries `[n + 1]` between the old ones are among them, and whether any differ."""

    tokens: Ints
    places: Ints
    is_new: bool

    def part(self, start: int, stop: int) -> Ints:
        """What became of the old tokens `[start, stop)`."""
        return self.tokens[self.places[start] : self.places[stop]]


def rewrite_all(
    arrays: Sequence[Ints], comparisons: Sequence[Comparison], undone: Callable[[str], bool]
) -> list[Rewritten]:
    """All sequences with some causes undone: the reference's side of a hunk takes the place of the sequence's own.

    Args:
        comparisons: in an order in which references come first.
        undone: whether a cause is.
    """
    done: dict[int, Rewritten] = {}
    for one in comparisons:
        own = arrays[one.sequence]
        done[one.sequence] = _rewritten(own, done.get(one.reference), one, undone)
    return [done[i] for i in range(len(arrays))]


def _rewritten(own: Ints, model: Rewritten | None, comparison: Comparison, undone: Callable[[str], bool]) -> Rewritten:
    if model is None or not (model.is_new or any(map(undone, comparison.causes))):
        return Rewritten(own, np.arange(len(own) + 1), False)
    pieces: list[Ints] = []
    places = np.zeros(len(own) + 1, np.int64)
    size = 0

    def alike(a: int, b: int, count: int) -> None:
        nonlocal size
        pieces.append(model.part(a, a + count))
        places[b : b + count + 1] = size + model.places[a : a + count + 1] - model.places[a]
        size += len(pieces[-1])

    def as_it_was(start: int, stop: int) -> None:
        nonlocal size
        pieces.append(own[start:stop])
        places[start : stop + 1] = size + np.arange(stop - start + 1)
        size += stop - start

    alike(0, 0, comparison.shared)
    end = comparison.shared
    for hunk, cause in zip(comparison.hunks, comparison.causes, strict=True):
        if undone(cause):
            pieces.append(model.part(hunk.a0, hunk.a1))
            places[hunk.b0 : hunk.b1] = size
            size += len(pieces[-1])
        else:
            as_it_was(hunk.b0, hunk.b1)
        alike(hunk.a1, hunk.b1, hunk.run)
        end = hunk.b1 + hunk.run
    as_it_was(end, len(own))
    return Rewritten(np.concatenate(pieces), places, True)
