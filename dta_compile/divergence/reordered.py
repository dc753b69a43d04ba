"""Blocks that both sequences have, in another order: definitions of tools, keys of objects, retrieved documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dta_compile.divergence.align import Hunk
from dta_compile.divergence.batch import Batch, Ints
from dta_compile.divergence.causes import IDS, INSERTED, ORDER, REMOVED, REPLACED, TOOLS, is_about_tools

__all__ = ["reordered"]

SAME = 0.85  # of what differs in a stretch, token by token, from which on it is the same in another order
LEAST = 6  # tokens that differ in such a stretch, on either side
FARTHEST = 64  # hunks of one stretch
AROUND, MOST_TEXT = 64, 2048  # tokens beside a stretch, and of it, that are looked at for what they are about

_MAY_BEGIN = (None, REMOVED, INSERTED, REPLACED, ORDER, TOOLS)
_MAY_BE_WITHIN = (*_MAY_BEGIN, IDS)  # as in names that are counted up


def reordered(
    batch: Batch, reference: int, sequence: int, hunks: Sequence[Hunk], causes: Sequence[str | None]
) -> list[str | None]:
    """The causes of hunks, where stretches of them put together have the same tokens on both sides: order."""
    found = list(causes)
    first = 0
    while first < len(hunks):
        last = _stretch(batch.arrays[reference], batch.arrays[sequence], hunks, causes, first)
        if last is None:
            first += 1
            continue
        kind = _kind(batch, reference, hunks[first], hunks[last])
        found[first : last + 1] = [kind] * (last + 1 - first)
        first = last + 1
    return found


def _stretch(a: Ints, b: Ints, hunks: Sequence[Hunk], causes: Sequence[str | None], first: int) -> int | None:
    """The last hunk of the shortest stretch from `first` on that has the same on both sides; None if there is none."""
    left: list[Ints] = []
    right: list[Ints] = []
    for last in range(first, min(first + FARTHEST, len(hunks))):
        if causes[last] not in (_MAY_BEGIN if last == first else _MAY_BE_WITHIN):
            return None
        hunk = hunks[last]
        left.append(a[hunk.a0 : hunk.a1])
        right.append(b[hunk.b0 : hunk.b1])
        sizes = [sum(map(len, side)) for side in (left, right)]
        if min(sizes) >= max(LEAST, SAME * max(sizes)) and _share(left, right) >= SAME:
            return last
    return None


def _kind(batch: Batch, reference: int, first: Hunk, last: Hunk) -> str:
    if batch.decode is None:
        return ORDER
    stop = min(last.a1, first.a0 + MOST_TEXT) + AROUND
    return TOOLS if is_about_tools(batch.text(reference, first.a0 - AROUND, stop)) else ORDER


def _share(left: Sequence[Ints], right: Sequence[Ints]) -> float:
    """How many tokens of the larger side the other one has as well."""
    one, other = np.concatenate(left), np.concatenate(right)
    values, at = np.unique(np.concatenate([one, other]), return_inverse=True)
    counts = [np.bincount(part, minlength=len(values)) for part in (at[: len(one)], at[len(one) :])]
    return float(np.minimum(*counts).sum()) / max(len(one), len(other), 1)
