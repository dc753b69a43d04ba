"""Which earlier sequence one has to be compared with, to see what it could have shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dta_compile.data import Recorded
from dta_compile.divergence.align import common_run, gram_hashes
from dta_compile.plan import PrefixTree

__all__ = ["References", "moved_before", "order_of"]

SAMPLED = np.uint64(4)  # one in so many runs of tokens is remembered, chosen by what it is
MOST_OWNERS = 16  # sequences that are remembered for bringing the same tokens
MOST_VOTED, MOST_COMPARED = 32, 2  # sequences with something in common; of these, compared by each criterion


class References:
    """The sequences so far, and where their contents were first seen.

    Add the sequences one by one in an order in which earlier turns come first.
    """

    def __init__(self, sequences: Sequence[Recorded], arrays: Sequence[NDArray[np.int64]], order: list[int]) -> None:
        self._arrays = arrays
        self._shared, self._nearest = _nearest_earlier(PrefixTree.build(arrays), order)
        self._previous = _previous_turns(sequences, order)
        self._owners: dict[int, list[int]] = {}  # by the hash of some tokens, the first sequences that brought them

    def shared(self, sequence: int) -> int:
        """Tokens that it shares with an earlier one, as it is."""
        return int(self._shared[sequence])

    def nearest(self, sequence: int) -> int:
        """The earlier one that it shares most with; -1 if there is none."""
        return int(self._nearest[sequence])

    def previous_turn(self, sequence: int) -> int:
        """The turn before it of its own trajectory; -1 if there is none, or that is not known."""
        return self._previous[sequence]

    def similar(self, sequence: int) -> list[int]:
        """Earlier ones that brought what it does not share: those with most of it, and those alike for longest."""
        votes = Counter(owner for one in self._samples(sequence) for owner in self._owners.get(one, ()))
        own = self._arrays[sequence]
        found = [owner for owner, _ in votes.most_common(MOST_VOTED)]
        longest = sorted(found, key=lambda owner: -common_run(self._arrays[owner], own))
        return list(dict.fromkeys([*longest[:MOST_COMPARED], *found[:MOST_COMPARED]]))

    def add(self, sequence: int) -> None:
        """Remember what it brings."""
        for one in self._samples(sequence):
            owners = self._owners.setdefault(one, [])
            if len(owners) < MOST_OWNERS and sequence not in owners:
                owners.append(sequence)

    def _samples(self, sequence: int) -> list[int]:
        hashes = gram_hashes(self._arrays[sequence][self.shared(sequence) :])
        samples: list[int] = hashes[hashes % SAMPLED == 0].tolist()
        return samples


def order_of(sequences: Sequence[Recorded], arrays: Sequence[NDArray[np.int64]]) -> list[int]:
    """Earlier turns first, where they are known; else what shares less with others, then what is shorter."""
    tree = PrefixTree.build(arrays)
    depth = np.zeros(len(arrays), np.int64)
    depth[tree.order] = np.maximum(tree.common, np.append(tree.common[1:], 0)) if len(arrays) else 0

    def key(sequence: int) -> tuple[int, int, int, int]:
        turn, size = sequences[sequence].turn, len(arrays[sequence])
        return (turn, 0, size, sequence) if turn is not None else (0, int(depth[sequence]), size, sequence)

    return sorted(range(len(arrays)), key=key)


def moved_before(order: list[int], pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The order with the first one of every pair put right before the second one."""
    places: dict[int, float] = {sequence: place for place, sequence in enumerate(order)}
    for first, second in pairs:
        places[first] = min(places[first], places[second] - 0.5)
    return sorted(order, key=lambda sequence: places[sequence])


def _previous_turns(sequences: Sequence[Recorded], order: list[int]) -> list[int]:
    latest: dict[int | str, int] = {}
    found = [-1] * len(sequences)
    for one in order:
        trajectory = sequences[one].trajectory
        if trajectory is not None:
            found[one] = latest.get(trajectory, -1)
            latest[trajectory] = one
    return found


def _nearest_earlier(tree: PrefixTree, order: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every sequence the most tokens that it shares with one before it in `order`, and which one that is.

    In lexicographic order that is the next or the previous one of those that are left when all later ones are taken
    away, the last one first.
    """
    count = len(order)
    position = np.empty(count, np.int64)
    position[tree.order] = np.arange(count)
    before, after = list(range(-1, count - 1)), list(range(1, count + 1))
    common = [*tree.common.tolist(), 0]  # with the one before it that is left
    shared, nearest = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    for sequence in reversed(order):
        place = int(position[sequence])
        left, right = before[place], after[place]
        with_left, with_right = (common[place] if left >= 0 else -1), (common[right] if right < count else -1)
        best = left if with_left >= with_right else right
        if max(with_left, with_right) >= 0:
            shared[sequence], nearest[sequence] = max(with_left, with_right), tree.order[best]
        if left >= 0:
            after[left] = right
        if right < count:
            before[right] = left
            common[right] = min(common[place], common[right])
    return shared, nearest
