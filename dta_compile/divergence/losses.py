"""What sharing is lost in a batch, by cause, with the places where it is lost and what would be gained."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dta_compile.data import Recorded
from dta_compile.divergence.causes import ADVICE, REMOVED, THINKING, Comparison, Hunk, rewrite_all
from dta_compile.divergence.compare import AROUND, Batch, Decode, Ints, compare_all
from dta_compile.plan import PrefixTree

EXAMPLES = 3  # places that are kept of a cause
ALIKE = 0.8  # of removed blocks that begin and end with the same tokens, from which on they are thinking
LEAST_BLOCKS = 3
SHOWN = 40  # tokens of a difference that are kept, at each end


@dataclasses.dataclass(frozen=True)
class Place:
    """Where two sequences part.

    Attributes:
        reference, sequence: the earlier one, and the one that could have shared more with it.
        depth: the first token of the reference that differs, and that of the sequence in `at`.
        run: tokens that are alike again after the difference.
        before, left, right, after: texts of what is alike, of the reference's side, of the sequence's side, of what is
            alike again; token ids where there is no tokenizer.
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
    """A cause, and what would be without it.

    Attributes:
        name: one of `causes.CAUSES`.
        places: how often it occurs.
        gained: tokens that would not have to be run.
        tokens, tree_tokens: of all sequences, and of their tree, without it.
        examples: places where most is alike after it.
        advice: what to do.
    """

    name: str
    places: int
    gained: int
    tokens: int
    tree_tokens: int
    examples: tuple[Place, ...]
    advice: str

    @property
    def compression(self) -> float:
        """Of the sequences without the cause."""
        return self.tokens / self.tree_tokens if self.tree_tokens else 1.0


@dataclasses.dataclass(frozen=True)
class Losses:
    """What is lost in a batch.

    Attributes:
        sequences, tokens, tree_tokens: of the batch as it is.
        causes: most tokens gained first.
        together: all of them at once; None: there are none.
        known: what causes were told by: "text", or "token ids" where there is no tokenizer.
    """

    sequences: int
    tokens: int
    tree_tokens: int
    causes: tuple[CauseOfLoss, ...]
    together: CauseOfLoss | None
    known: str

    @property
    def compression(self) -> float:
        """Of the batch as it is."""
        return self.tokens / self.tree_tokens if self.tree_tokens else 1.0


def find_losses(sequences: Sequence[Recorded], decode: Decode | None = None) -> Losses:
    """Where sharing is lost, by a comparison of every sequence with an earlier one.

    A sequence is compared with the turn before it, or with what brought most of its contents. Where both are alike
    again after a difference, what is alike is run twice because of it. What the policy wrote differently is no loss.
    What a cause costs is counted: all its differences are undone, and a tree is built of what comes of that.

    Args:
        sequences: with whatever is known of their turns and of what the policy wrote.
        decode: the text of token ids; without it causes are told by structure (removed, inserted, replaced).

    Raises:
        PlanError: a sequence is not a run of integers.
    """
    now = PrefixTree.build([one.tokens for one in sequences]).num_rows
    arrays = [np.asarray(one.tokens, np.int64) for one in sequences]
    batch = Batch(sequences, arrays, decode, {})
    comparisons = _with_thinking(batch, compare_all(batch))
    names = Counter(cause for one in comparisons for cause in one.causes)
    found = [_without(batch, comparisons, now, name, names[name], name.__eq__) for name in names]
    causes = sorted((one for one in found if one.gained > 0), key=lambda one: (-one.gained, one.name))
    together = None
    if causes:
        together = _without(batch, comparisons, now, "all of these", sum(names.values()), lambda name: True)
    tokens = sum(map(len, arrays))
    return Losses(len(arrays), tokens, now, tuple(causes), together, "token ids" if decode is None else "text")


def _without(
    batch: Batch,
    comparisons: Sequence[Comparison],
    now: int,
    name: str,
    places: int,
    undone: Callable[[str], bool],
) -> CauseOfLoss:
    changed = [one.tokens for one in rewrite_all(batch.arrays, comparisons, undone)]
    tree_tokens = PrefixTree.build(changed).num_rows
    examples = tuple(_examples(batch, comparisons, undone)) if name in ADVICE else ()
    tokens = sum(map(len, changed))
    return CauseOfLoss(name, places, now - tree_tokens, tokens, tree_tokens, examples, ADVICE.get(name, ""))


def _examples(batch: Batch, comparisons: Sequence[Comparison], undone: Callable[[str], bool]) -> Iterator[Place]:
    """Places with the longest runs after them, of different references where there are several."""
    found = [
        (hunk.run, one, hunk)
        for one in comparisons
        for hunk, cause in zip(one.hunks, one.causes, strict=True)
        if undone(cause)
    ]
    found.sort(key=lambda entry: (-entry[0], entry[1].sequence))
    seen: set[int] = set()
    for _, one, hunk in found:
        if one.reference not in seen:
            seen.add(one.reference)
            yield _place(batch, one, hunk)
        if len(seen) == EXAMPLES:
            return


def _place(batch: Batch, one: Comparison, hunk: Hunk) -> Place:
    a, b = batch.arrays[one.reference].tolist(), batch.arrays[one.sequence].tolist()
    return Place(
        one.reference,
        one.sequence,
        hunk.a0,
        hunk.b0,
        hunk.run,
        _text(batch.decode, a[max(hunk.a0 - AROUND, 0) : hunk.a0]),
        _text(batch.decode, a[hunk.a0 : hunk.a1]),
        _text(batch.decode, b[hunk.b0 : hunk.b1]),
        _text(batch.decode, a[hunk.a1 : hunk.a1 + AROUND]),
    )


def _text(decode: Decode | None, tokens: list[int]) -> str:
    """The text of a few tokens; of many, their beginning and end."""
    show = decode or (lambda ids: " ".join(map(str, ids)))
    if len(tokens) <= 2 * SHOWN:
        return show(tokens) if tokens else ""
    return f"{show(tokens[:SHOWN])} ... {show(tokens[-SHOWN:])}"


def _with_thinking(batch: Batch, comparisons: list[Comparison]) -> list[Comparison]:
    """Blocks that were removed are thinking if nearly all begin with one token and end with one, as with its marks.

    For batches of which neither texts nor the policy's tokens are known.
    """
    blocks = [
        batch.arrays[one.reference][hunk.a0 : hunk.a1]
        for one in comparisons
        for hunk, cause in zip(one.hunks, one.causes, strict=True)
        if cause == REMOVED
    ]
    if batch.decode is not None or len(blocks) < LEAST_BLOCKS or not all(map(_is_enclosed(blocks), (0, -1))):
        return comparisons
    return [
        one._replace(causes=tuple(THINKING if cause == REMOVED else cause for cause in one.causes))
        for one in comparisons
    ]


def _is_enclosed(blocks: Sequence[Ints]) -> Callable[[int], bool]:
    def same_at(place: int) -> bool:
        (_, count), *_ = Counter(int(block[place]) for block in blocks).most_common(1)
        return count >= ALIKE * len(blocks)

    return same_at
