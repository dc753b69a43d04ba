"""Count the sharing that a batch loses by each cause, with examples, and the gain if the cause is removed."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dta_compile.data import Recorded
from dta_compile.divergence.causes import ADVICE, REMOVED, THINKING, Comparison, Hunk, rewrite_all
from dta_compile.divergence.compare import Batch, Decode, compare_all, difference
from dta_compile.plan import PrefixTree

EXAMPLES = 3  # places reported per cause
ALIKE = 0.8  # least share of removed blocks with the same first and last token for them to count as thinking
LEAST_BLOCKS = 3  # fewest such blocks
SHOWN = 40  # tokens of a difference that are reported, at each end


@dataclasses.dataclass(frozen=True)
class Place:
    """Place where two sequences diverge.

    Attributes:
        reference, sequence: indices of the earlier sequence, and of the one that could have shared more with it.
        depth, at: position of the first differing token in the reference, and in the sequence.
        run: number of equal tokens after the difference.
        before, left, right, after: equal text before, the reference's side, the sequence's side, equal text after;
            token ids if there is no tokenizer.
    """

    reference: int
    sequence: int
    depth: int
    at: int
    run: int
    before: str
    left: str
    right: str
    after: str


@dataclasses.dataclass(frozen=True)
class CauseOfLoss:
    """Cause of lost sharing, with the figures of the batch without it.

    Attributes:
        name: a key of `causes.ADVICE`.
        places: number of its occurrences.
        gained: tokens that would not have to be run without it.
        tokens, tree_tokens: tokens of all sequences, and of their tree, without it.
        examples: occurrences with the longest equal runs after them.
        advice: how to avoid it.
        again: tokens after its occurrences that are equal, and run again for it: `(sequence, start, stop)`.
    """

    name: str
    places: int
    gained: int
    tokens: int
    tree_tokens: int
    examples: tuple[Place, ...]
    advice: str
    again: tuple[tuple[int, int, int], ...] = ()

    @property
    def compression(self) -> float:
        """Compression of the sequences without the cause."""
        return self.tokens / self.tree_tokens if self.tree_tokens else 1.0


@dataclasses.dataclass(frozen=True)
class Losses:
    """Sharing that a batch loses.

    Attributes:
        sequences, tokens, tree_tokens: counts of the batch as it is.
        causes: causes, by tokens gained, most first.
        together: all causes at once; None: there are none.
        known: data that the causes were found by: "text", or "token ids" without a tokenizer.
    """

    sequences: int
    tokens: int
    tree_tokens: int
    causes: tuple[CauseOfLoss, ...]
    together: CauseOfLoss | None
    known: str

    @property
    def compression(self) -> float:
        """Compression of the batch as it is."""
        return self.tokens / self.tree_tokens if self.tree_tokens else 1.0


def find_losses(sequences: Sequence[Recorded], decode: Decode | None = None) -> Losses:
    """Find where sharing is lost, by comparing every sequence with an earlier one.

    A sequence is compared with the turn before it, or with the earlier sequences that have most of its contents. If
    both are equal again after a difference, the equal tokens are run twice because of it. Different answers of the
    policy are no loss. The cost of a cause is counted, not estimated: all its differences are undone, and a tree is
    built of the rewritten sequences.

    Args:
        sequences: sequences, with turns and the policy's spans as far as known.
        decode: decodes token ids; without it, causes are found by structure alone (removed, inserted, replaced).

    Raises:
        PlanError: a sequence is not a run of integers.
    """
    tree_tokens = PrefixTree.build([sequence.tokens for sequence in sequences]).num_rows
    arrays = [np.asarray(sequence.tokens, np.int64) for sequence in sequences]
    batch = Batch(sequences, arrays, decode, {})
    comparisons = _reclassify_thinking(batch, compare_all(batch))
    names = Counter(cause for comparison in comparisons for cause in comparison.causes)
    losses = [_loss_of(batch, comparisons, tree_tokens, name, names[name], name.__eq__) for name in names]
    causes = sorted((loss for loss in losses if loss.gained > 0), key=lambda loss: (-loss.gained, loss.name))
    together = None
    if causes:
        together = _loss_of(batch, comparisons, tree_tokens, "all of these", sum(names.values()), lambda name: True)
    tokens = sum(map(len, arrays))
    return Losses(len(arrays), tokens, tree_tokens, tuple(causes), together, "token ids" if decode is None else "text")


def _loss_of(
    batch: Batch, comparisons: Sequence[Comparison], before: int, name: str, places: int, undone: Callable[[str], bool]
) -> CauseOfLoss:
    changed = [rewritten.tokens for rewritten in rewrite_all(batch.arrays, comparisons, undone)]
    tree_tokens = PrefixTree.build(changed).num_rows
    examples = tuple(_examples(batch, comparisons, undone)) if name in ADVICE else ()
    tokens = sum(map(len, changed))
    again = tuple((pair.sequence, hunk.b1, hunk.b1 + hunk.run) for pair, hunk in _differences(comparisons, undone))
    return CauseOfLoss(name, places, before - tree_tokens, tokens, tree_tokens, examples, ADVICE.get(name, ""), again)


def _differences(
    comparisons: Sequence[Comparison], is_wanted: Callable[[str], bool]
) -> Iterator[tuple[Comparison, Hunk]]:
    """Yield the differences of some causes, each with its comparison."""
    for comparison in comparisons:
        for hunk, cause in zip(comparison.hunks, comparison.causes, strict=True):
            if is_wanted(cause):
                yield comparison, hunk


def _examples(batch: Batch, comparisons: Sequence[Comparison], undone: Callable[[str], bool]) -> Iterator[Place]:
    """Yield the occurrences with the longest equal runs after them, one per reference."""
    seen: set[int] = set()
    occurrences = _differences(comparisons, undone)
    for comparison, hunk in sorted(occurrences, key=lambda entry: (-entry[1].run, entry[0].sequence)):
        if comparison.reference not in seen:
            seen.add(comparison.reference)
            yield _place(batch, comparison, hunk)
        if len(seen) == EXAMPLES:
            return


def _place(batch: Batch, comparison: Comparison, hunk: Hunk) -> Place:
    pair = comparison.reference, comparison.sequence
    text = difference(batch, *pair, hunk, functools.partial(_text, batch.decode))
    return Place(*pair, hunk.a0, hunk.b0, hunk.run, *text)


def _text(decode: Decode | None, tokens: Sequence[int]) -> str:
    """Return the text of the tokens; if there are many, of their beginning and end."""
    show = decode or (lambda ids: " ".join(map(str, ids)))
    if len(tokens) <= 2 * SHOWN:
        return show(tokens) if tokens else ""
    return f"{show(tokens[:SHOWN])} ... {show(tokens[-SHOWN:])}"


def _reclassify_thinking(batch: Batch, comparisons: list[Comparison]) -> list[Comparison]:
    """Reclassify removed blocks as thinking if nearly all have the same first token and the same last token (its tags).

    For batches without a tokenizer, which would show the tags, and without the policy's spans, which `compare` uses.
    """
    removed = _differences(comparisons, REMOVED.__eq__)
    blocks = [batch.arrays[comparison.reference][hunk.a0 : hunk.a1] for comparison, hunk in removed]
    if batch.decode is not None or len(blocks) < LEAST_BLOCKS:
        return comparisons
    alike = [max(Counter(int(block[index]) for block in blocks).values()) for index in (0, -1)]
    if min(alike) < ALIKE * len(blocks):
        return comparisons
    return [
        comparison._replace(causes=tuple(THINKING if cause == REMOVED else cause for cause in comparison.causes))
        for comparison in comparisons
    ]
