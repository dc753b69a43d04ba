"""Compare every sequence of a batch with the earlier one that it could have shared most with.

`References` proposes earlier sequences, `causes` aligns two sequences and classifies hunks, and `reordered` finds
stretches of hunks that contain the same tokens in another order.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dta_compile.data import Recorded
from dta_compile.data.recorded import mask_of_spans
from dta_compile.divergence.causes import (
    IDS,
    INSERTED,
    ORDER,
    REMOVED,
    REPLACED,
    THINKING,
    TOOLS,
    Comparison,
    Difference,
    Hunk,
    Ints,
    align,
    cause_of_text,
    cause_of_tokens,
    gram_hashes,
    is_about_tools,
)
from dta_compile.plan import PrefixTree
from dta_compile.plan.tree.lexicographic import common_run

AROUND = 24  # tokens decoded before and after a difference
LEAST_RUN = 32  # fewest equal tokens after a replacement, which needs as many as it has; else sequences go apart there
MOST_TEXT = 4096  # most tokens of a difference that is decoded
ROUNDS = 3  # most comparisons of all sequences, each in a better order
AT_BEGIN = 4  # most tokens between the begin of a turn and its thinking


def compare_all(batch: Batch) -> list[Comparison]:
    """Compare all sequences; return the comparisons, references first.

    If turns are not known, a prompt without thinking may be shorter than the turn before it. Sequences that turn out to
    be earlier than their reference are moved before it, and all sequences are compared again.
    """
    order = order_of(batch.sequences, batch.arrays)
    comparisons = _in_order(batch, order)
    for _ in range(ROUNDS):
        earlier = [(pair.sequence, pair.reference) for pair in comparisons if _is_earlier(batch, pair)]
        if not earlier:
            break
        order = moved_before(order, earlier)
        comparisons = _in_order(batch, order)
    return comparisons


def _in_order(batch: Batch, order: list[int]) -> list[Comparison]:
    references = References(batch.sequences, batch.arrays, order)
    comparisons = []
    for sequence in order:
        comparison = _best(batch, references, sequence)
        comparisons.append(comparison)
        references.add(sequence)
        _record_written(batch, comparison)
    return comparisons


def _is_earlier(batch: Batch, comparison: Comparison) -> bool:
    """Return whether a sequence is an earlier turn: its reference continues it, but has fewer tokens up to its end."""
    if not comparison.hunks or batch.sequences[comparison.sequence].turn is not None:
        return False
    last = comparison.hunks[-1]
    more = sum((hunk.b1 - hunk.b0) - (hunk.a1 - hunk.a0) for hunk in comparison.hunks)
    ends = last.b1 + last.run == len(batch.arrays[comparison.sequence])
    return more > 0 and ends and last.a1 + last.run < len(batch.arrays[comparison.reference])


def _best(batch: Batch, references: References, sequence: int) -> Comparison:
    """Compare with the earlier sequence that has most equal tokens beyond the longest shared prefix."""
    shared, previous = references.shared[sequence], references.previous_turn[sequence]
    best, gain = Comparison(sequence, references.nearest[sequence], shared), 0
    if shared == len(batch.arrays[sequence]):
        return best
    for reference in _candidates(references, sequence):
        comparison = _compare(batch, reference, sequence)
        ends = (hunk.b1 + hunk.run for hunk in comparison.hunks)
        equal = sum(min(hunk.run, max(end - shared, 0)) for hunk, end in zip(comparison.hunks, ends, strict=True))
        if equal > gain:
            best, gain = comparison, equal
        if gain and reference == previous:
            break
    return best


def _candidates(references: References, sequence: int) -> Iterator[int]:
    """Yield earlier sequences that may have the same contents, likeliest first."""
    previous = references.previous_turn[sequence]
    if previous >= 0:
        yield previous
    others = dict.fromkeys([*references.similar(sequence), references.nearest[sequence]])
    yield from (other for other in others if other not in (-1, previous))


def _compare(batch: Batch, reference: int, sequence: int) -> Comparison:
    a, b = batch.arrays[reference], batch.arrays[sequence]
    shared = common_run(a, b)
    hunks: list[Hunk] = []
    causes: list[str | None] = []
    for hunk in align(a, b, shared):
        if hunk.is_last or _is_own(batch, reference, sequence, hunk):
            break
        hunks.append(hunk)
        causes.append(_cause(batch, reference, sequence, hunk))
    causes = reordered(batch, reference, sequence, hunks, causes)
    known = next((i for i, cause in enumerate(causes) if cause is None), len(causes))
    return Comparison(sequence, reference, shared, tuple(hunks[:known]), tuple(filter(None, causes[:known])))


def _cause(batch: Batch, reference: int, sequence: int, hunk: Hunk) -> str | None:
    """Return the cause of a difference; None if no sharing is lost, as the sequences have other contents after it."""
    left = batch.arrays[reference][hunk.a0 : hunk.a1].tolist()
    right = batch.arrays[sequence][hunk.b0 : hunk.b1].tolist()
    if batch.decode is None or len(left) + len(right) > MOST_TEXT:
        cause = cause_of_tokens(left, right)
    else:
        cause = cause_of_text(difference(batch, reference, sequence, hunk, batch.decode))
    if cause == REMOVED and _begins_a_turn(batch, reference, hunk):
        return THINKING  # only the first tokens that the policy wrote in the turn are missing
    is_enough = hunk.run >= max(LEAST_RUN, len(left), len(right))
    return cause if cause != REPLACED or is_enough else None


def difference(batch: Batch, reference: int, sequence: int, hunk: Hunk, show: Decode) -> Difference:
    """Return a difference as text; `show` decodes token ids."""
    a, b = batch.arrays[reference], batch.arrays[sequence]
    before, after = a[max(hunk.a0 - AROUND, 0) : hunk.a0], a[hunk.a1 : hunk.a1 + AROUND]
    parts = before, a[hunk.a0 : hunk.a1], b[hunk.b0 : hunk.b1], after
    return Difference(*(show(part.tolist()) for part in parts))


def _is_own(batch: Batch, reference: int, sequence: int, hunk: Hunk) -> bool:
    """Return whether a difference is between two answers of the policy, where no sharing is lost."""
    trajectories = [batch.sequences[index].trajectory for index in (reference, sequence)]
    are_known = None not in trajectories
    if are_known and trajectories[0] == trajectories[1]:
        return False
    left = bool(batch.wrote[reference][hunk.a0 : hunk.a1].any())
    spans = batch.sequences[sequence].spans or ()
    right = any(start < hunk.b1 and hunk.b0 < stop for start, stop in spans)
    return left or right if are_known else left and right


def _begins_a_turn(batch: Batch, reference: int, hunk: Hunk) -> bool:
    """Return whether the reference's side holds the first tokens, but not the last, that the policy wrote in a turn."""
    wrote = batch.wrote[reference]
    if hunk.a1 >= len(wrote) or not wrote[hunk.a0 : hunk.a1].all() or not wrote[hunk.a1]:
        return False
    return hunk.a0 < AT_BEGIN or not wrote[hunk.a0 - AT_BEGIN]


def _record_written(batch: Batch, comparison: Comparison) -> None:
    """Record the tokens of a sequence that the policy wrote: its spans, and those aligned with written ones before."""
    sequence, reference = comparison.sequence, comparison.reference
    recorded = batch.sequences[sequence]
    wrote = mask_of_spans(recorded.spans or (), len(recorded))
    if reference >= 0:
        before = batch.wrote[reference]
        wrote[: comparison.shared] |= before[: comparison.shared]
        for hunk in comparison.hunks:
            wrote[hunk.b1 : hunk.b1 + hunk.run] |= before[hunk.a1 : hunk.a1 + hunk.run]
    batch.wrote[sequence] = wrote


Decode = Callable[[Sequence[int]], str]


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of a batch, and what is known of them.

    Attributes:
        arrays: tokens of the sequences.
        decode: decodes token ids; None: there is no tokenizer.
        wrote: by sequence, mask of the tokens that the policy wrote, as far as known; filled in by `compare_all`.
    """

    sequences: Sequence[Recorded]
    arrays: Sequence[Ints]
    decode: Decode | None
    wrote: dict[int, NDArray[np.bool_]]

    def text(self, sequence: int, start: int, stop: int) -> str:
        """Return the text of tokens of a sequence; requires a tokenizer."""
        assert self.decode is not None
        return self.decode(self.arrays[sequence][max(start, 0) : stop].tolist())


SAME = 0.85  # least share of common tokens for the two sides of a stretch to count as reordered
LEAST = 6  # fewest differing tokens of a reordered stretch, on either side
FARTHEST = 64  # most hunks of a stretch
BESIDE_STRETCH, STRETCH_TEXT = 64, 2048  # tokens beside a stretch, and of it, searched for definitions of tools

_MAY_BEGIN = (None, REMOVED, INSERTED, REPLACED, ORDER, TOOLS)
_MAY_BE_WITHIN = (*_MAY_BEGIN, IDS)  # reordered parts may have numbered names


def reordered(
    batch: Batch, reference: int, sequence: int, hunks: Sequence[Hunk], causes: Sequence[str | None]
) -> list[str | None]:
    """Return the causes of the hunks, after marking stretches with the same tokens on both sides as reordered."""
    marked = list(causes)
    first = 0
    while first < len(hunks):
        last = _stretch(batch.arrays[reference], batch.arrays[sequence], hunks, causes, first)
        if last is None:
            first += 1
            continue
        kind = _kind(batch, reference, hunks[first], hunks[last])
        marked[first : last + 1] = [kind] * (last + 1 - first)
        first = last + 1
    return marked


def _stretch(a: Ints, b: Ints, hunks: Sequence[Hunk], causes: Sequence[str | None], first: int) -> int | None:
    """Return the last hunk of the shortest reordered stretch that begins with hunk `first`; None if there is none."""
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
    stop = min(last.a1, first.a0 + STRETCH_TEXT) + BESIDE_STRETCH
    return TOOLS if is_about_tools(batch.text(reference, first.a0 - BESIDE_STRETCH, stop)) else ORDER


def _share(left: Sequence[Ints], right: Sequence[Ints]) -> float:
    """Return the share of the larger side's tokens that the other side has as well, whatever their order."""
    left_counts, right_counts = (Counter(np.concatenate(side).tolist()) for side in (left, right))
    return (left_counts & right_counts).total() / max(left_counts.total(), right_counts.total(), 1)


SAMPLED = np.uint64(4)  # one in 4 n-grams is indexed, chosen by its hash
MOST_OWNERS = 16  # sequences indexed per n-gram
MOST_VOTED, MOST_COMPARED = 32, 2  # sequences with common n-grams that are ranked; compared by each criterion


class References:
    """Index of the sequences so far, by sampled n-grams of their new contents.

    Add the sequences one by one, earlier turns first.

    Attributes:
        shared: by sequence, the longest prefix that it shares with an earlier one, in tokens.
        nearest: by sequence, the earlier sequence with that prefix; -1 if there is none.
        previous_turn: by sequence, the previous turn of the same trajectory; -1 if there is none, or it is not known.
    """

    def __init__(self, sequences: Sequence[Recorded], arrays: Sequence[Ints], order: list[int]) -> None:
        self._arrays = arrays
        self.shared, self.nearest = _nearest_earlier(PrefixTree.build(arrays), order)
        self.previous_turn = _previous_turns(sequences, order)
        self._owners: dict[int, list[int]] = {}  # by hash of an n-gram: the first sequences with it

    def similar(self, sequence: int) -> list[int]:
        """Return earlier sequences with n-grams of its unshared tail: those with the longest prefix, and with most."""
        votes = Counter(owner for gram in self._samples(sequence) for owner in self._owners.get(gram, ()))
        own = self._arrays[sequence]
        owners = [owner for owner, _ in votes.most_common(MOST_VOTED)]
        longest = sorted(owners, key=lambda owner: -common_run(self._arrays[owner], own))
        return list(dict.fromkeys([*longest[:MOST_COMPARED], *owners[:MOST_COMPARED]]))

    def add(self, sequence: int) -> None:
        """Index the unshared tail of a sequence."""
        for gram in self._samples(sequence):
            owners = self._owners.setdefault(gram, [])
            if len(owners) < MOST_OWNERS and sequence not in owners:
                owners.append(sequence)

    def _samples(self, sequence: int) -> list[int]:
        hashes = gram_hashes(self._arrays[sequence][self.shared[sequence] :])
        samples: list[int] = hashes[hashes % SAMPLED == 0].tolist()
        return samples


def order_of(sequences: Sequence[Recorded], arrays: Sequence[Ints]) -> list[int]:
    """Sort sequences by turn where it is known, else by how little they share with neighbours, then by length."""
    tree = PrefixTree.build(arrays)
    depth = np.zeros(len(arrays), np.int64)
    depth[tree.order] = np.maximum(tree.common, np.append(tree.common[1:], 0)) if len(arrays) else 0

    def key(sequence: int) -> tuple[int, int, int, int]:
        turn, size = sequences[sequence].turn, len(arrays[sequence])
        return (turn, 0, size, sequence) if turn is not None else (0, int(depth[sequence]), size, sequence)

    return sorted(range(len(arrays)), key=key)


def moved_before(order: list[int], pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Move the first sequence of every pair right before the second one, unless it is earlier already."""
    ranks: dict[int, float] = {sequence: rank for rank, sequence in enumerate(order)}
    for first, second in pairs:
        ranks[first] = min(ranks[first], ranks[second] - 0.5)
    return sorted(order, key=lambda sequence: ranks[sequence])


def _previous_turns(sequences: Sequence[Recorded], order: list[int]) -> list[int]:
    latest: dict[int | str, int] = {}
    previous = [-1] * len(sequences)
    for sequence in order:
        trajectory = sequences[sequence].trajectory
        if trajectory is not None:
            previous[sequence] = latest.get(trajectory, -1)
            latest[trajectory] = sequence
    return previous


def _nearest_earlier(tree: PrefixTree, order: list[int]) -> tuple[list[int], list[int]]:
    """Return, for every sequence, its longest shared prefix with a sequence before it in `order`, and that sequence.

    Removes sequences from a doubly linked list in lexicographic order, the last of `order` first. When a sequence is
    removed, only earlier ones are left, and the nearest is one of its neighbours in the list.
    """
    count = len(order)
    position = np.empty(count, np.int64)
    position[tree.order] = np.arange(count)
    before, after = list(range(-1, count - 1)), list(range(1, count + 1))
    common = [*tree.common.tolist(), 0]  # tokens shared with the previous sequence in the list
    shared, nearest = [0] * count, [-1] * count
    for sequence in reversed(order):
        at = int(position[sequence])
        left, right = before[at], after[at]
        with_left, with_right = (common[at] if left >= 0 else -1), (common[right] if right < count else -1)
        best = left if with_left >= with_right else right
        if max(with_left, with_right) >= 0:
            shared[sequence], nearest[sequence] = max(with_left, with_right), int(tree.order[best])
        if left >= 0:
            after[left] = right
        if right < count:
            before[right] = left
            common[right] = min(common[at], common[right])
    return shared, nearest
