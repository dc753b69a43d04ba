"""Every sequence of a batch compared with the earlier one that it could have shared most with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dta_compile.divergence.align import Hunk, align, common_run
from dta_compile.divergence.batch import Batch
from dta_compile.divergence.causes import (
    REMOVED,
    REPLACED,
    THINKING,
    Difference,
    cause_of_text,
    cause_of_tokens,
)
from dta_compile.divergence.references import References, moved_before, order_of
from dta_compile.divergence.reordered import reordered
from dta_compile.divergence.rewrite import Comparison

__all__ = ["compare_all"]

AROUND = 24  # tokens of text before and after a difference that are looked at
LEAST_RUN = 32  # tokens that have to be alike after what is simply other text, and no fewer than that
MOST_TEXT = 4096  # tokens of a difference that are decoded
ROUNDS = 3  # of comparing again in another order
AT_BEGIN = 4  # tokens between the begin of a turn and its thinking


def compare_all(batch: Batch) -> list[Comparison]:
    """All sequences, references first.

    Where turns are not known, a prompt without thinking may be shorter than the turn before it. Sequences that turn out
    to be earlier than their reference are put before it, and all are compared again.
    """
    order = order_of(batch.sequences, batch.arrays)
    comparisons = _in_order(batch, order)
    for _ in range(ROUNDS):
        earlier = [(one.sequence, one.reference) for one in comparisons if _is_earlier(batch, one)]
        if not earlier:
            break
        order = moved_before(order, earlier)
        comparisons = _in_order(batch, order)
    return comparisons


def _in_order(batch: Batch, order: list[int]) -> list[Comparison]:
    references = References(batch.sequences, batch.arrays, order)
    found = []
    for sequence in order:
        comparison = _best(batch, references, sequence)
        found.append(comparison)
        references.add(sequence)
        _note_writing(batch, comparison)
    return found


def _is_earlier(batch: Batch, comparison: Comparison) -> bool:
    """Whether a sequence has more in it than its reference, which otherwise continues it: an earlier turn."""
    if not comparison.hunks or batch.sequences[comparison.sequence].turn is not None:
        return False
    last = comparison.hunks[-1]
    more = sum((hunk.b1 - hunk.b0) - (hunk.a1 - hunk.a0) for hunk in comparison.hunks)
    ends = last.b1 + last.run == len(batch.arrays[comparison.sequence])
    return more > 0 and ends and last.a1 + last.run < len(batch.arrays[comparison.reference])


def _best(batch: Batch, references: References, sequence: int) -> Comparison:
    shared, nearest = references.shared(sequence), references.nearest(sequence)
    best, gain = Comparison(sequence, nearest, shared), 0
    if shared == len(batch.arrays[sequence]):
        return best
    for reference in _candidates(references, sequence):
        comparison = _compare(batch, reference, sequence)
        ends = (hunk.b1 + hunk.run for hunk in comparison.hunks)
        again = sum(min(hunk.run, max(end - shared, 0)) for hunk, end in zip(comparison.hunks, ends, strict=True))
        if again > gain:
            best, gain = comparison, again
        if gain and reference == references.previous_turn(sequence):
            break
    return best


def _candidates(references: References, sequence: int) -> Iterator[int]:
    """Earlier sequences that may have the same contents, likeliest first."""
    tried = {-1}
    for choose in (references.previous_turn, references.similar, references.nearest):
        chosen = choose(sequence)
        for reference in chosen if isinstance(chosen, list) else [chosen]:
            if reference not in tried:
                tried.add(reference)
                yield reference


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
    """The cause of a difference; None if nothing was lost by it: from there on the sequences have their own content."""
    left = batch.arrays[reference][hunk.a0 : hunk.a1].tolist()
    right = batch.arrays[sequence][hunk.b0 : hunk.b1].tolist()
    if batch.decode is None or len(left) + len(right) > MOST_TEXT:
        cause = cause_of_tokens(left, right)
    else:
        cause = cause_of_text(_difference(batch, reference, sequence, hunk))
    if cause == REMOVED and _begins_a_turn(batch, reference, hunk):
        return THINKING  # what the policy wrote first is gone, what it wrote then is still there
    is_enough = hunk.run >= max(LEAST_RUN, len(left), len(right))
    return cause if cause != REPLACED or is_enough else None


def _difference(batch: Batch, reference: int, sequence: int, hunk: Hunk) -> Difference:
    return Difference(
        batch.text(reference, hunk.a0 - AROUND, hunk.a0),
        batch.text(reference, hunk.a0, hunk.a1),
        batch.text(sequence, hunk.b0, hunk.b1),
        batch.text(reference, hunk.a1, hunk.a1 + AROUND),
    )


def _is_own(batch: Batch, reference: int, sequence: int, hunk: Hunk) -> bool:
    """Whether the policy wrote something else in each: not a loss, they are different answers."""
    if batch.are_of_one(reference, sequence):
        return False
    left = batch.wrote[reference][hunk.a0 : hunk.a1]
    spans = batch.sequences[sequence].spans or ()
    right = any(start < hunk.b1 and hunk.b0 < stop for start, stop in spans)
    if batch.are_of_two(reference, sequence):
        return right or bool(left.any())
    return right and bool(left.any())


def _begins_a_turn(batch: Batch, reference: int, hunk: Hunk) -> bool:
    """Whether the tokens on the reference's side are the first that the policy wrote in a turn, but not the last."""
    wrote = batch.wrote[reference]
    if hunk.a1 >= len(wrote) or not wrote[hunk.a0 : hunk.a1].all() or not wrote[hunk.a1]:
        return False
    return hunk.a0 < AT_BEGIN or not wrote[hunk.a0 - AT_BEGIN]


def _note_writing(batch: Batch, comparison: Comparison) -> None:
    """What the policy wrote in a sequence: its own spans, and what is alike to what it wrote in the reference."""
    sequence, reference = comparison.sequence, comparison.reference
    one = batch.sequences[sequence]
    wrote = one.loss_mask() if one.spans is not None else np.zeros(len(one), bool)
    if reference >= 0:
        before = batch.wrote[reference]
        wrote[: comparison.shared] |= before[: comparison.shared]
        for hunk in comparison.hunks:
            wrote[hunk.b1 : hunk.b1 + hunk.run] |= before[hunk.a1 : hunk.a1 + hunk.run]
    batch.wrote[sequence] = wrote
