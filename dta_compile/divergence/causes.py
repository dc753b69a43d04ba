"""Align two sequences, classify their differences (time stamps, identifiers, stripped thinking, ...), and undo them.

`compare` aligns every sequence with an earlier one; `losses` undoes all differences of a cause to count its tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dta_compile.data.tokenizer import common_prefix
from dta_compile.plan.tree.lexicographic import common_run

THINKING, REMOVED, INSERTED, REPLACED = "stripped thinking", "removed", "inserted", "replaced"
TIMES, IDS, TOOLS, ORDER, WHITESPACE = "time stamps", "ids and numbers", "tool order", "order", "whitespace"
ENCODED = "other tokens"

ADVICE = {
    THINKING: "keep the thinking of earlier turns in the prompts of later ones, or train without thinking",
    TIMES: "leave times out of prompts, make them coarser, or move them behind what is the same",
    IDS: "leave identifiers out of prompts, take the same ones in a group, or move them behind what is the same",
    TOOLS: "list tools, and the keys of each, always in one order (sort them)",
    ORDER: "put these parts always in one order",
    WHITESPACE: "strip or normalise white space where the prompt is made",
    ENCODED: "the text is the same: keep the token ids of earlier turns instead of encoding their text again",
    REMOVED: "later prompts lack what earlier ones had: keep it, or cut it off at the end only",
    INSERTED: "later prompts have something put in: append it at the end instead",
    REPLACED: "something differs before what is the same: move it behind that",
}

MARKS_OF_THINKING = re.compile(
    r"</?(think|thinking|thought|reasoning|reflection|scratchpad|seed:think)\b|\[/?THINK\]|<\|channel\|>\s*analysis"
    r"|<\|begin_of_thought\|>|<\|(START|END)_THINKING\|>|<unused9[45]>|reasoning_content",
    re.IGNORECASE,
)
_MONTHS = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DAYS = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_TIME = re.compile(
    rf"""\b\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}(?:[T ]\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?)?
    | \b\d{{1,2}}[-/.]\d{{1,2}}[-/.](?:\d{{4}}|\d{{2}})\b
    | \b\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?\s*(?:[ap]\.?m\b\.?)?
    | \b{_MONTHS}\.?\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?\b | \b\d{{1,2}}\s+{_MONTHS}\.?(?:,?\s+\d{{4}})?\b
    | \b{_MONTHS}\b | \b{_DAYS}\b | \b1[0-9]{{9}}(?:[0-9]{{3}}|\.[0-9]+)?\b
    | \b(?:UTC|GMT|CET|CEST|EST|EDT|PST|PDT)\b(?:[+-]\d{{1,2}}(?::?\d{{2}})?)? | (?<=\d)Z\b
    | (?<=:\d\d)[+-]\d{{2}}:?\d{{2}}\b""",
    re.IGNORECASE | re.VERBOSE,
)
# Words with a digit, such as numbers and UUIDs, and words of mixed case, such as random identifiers.
_ID = re.compile(r"(?<![A-Za-z0-9_\-])[A-Za-z_\-]*\d[A-Za-z0-9_\-]*|\b(?=[A-Za-z]*[a-z][A-Z])[A-Za-z]{8,}\b")
_TOOLS = re.compile(r'<tools?>|"parameters"|"function"|"inputSchema"|"input_schema"|"properties"|"description"')
_WORD_END, _WORD_BEGIN = re.compile(r"\S*\Z"), re.compile(r"\A\S*")
_PARTS = re.compile(r"[^\s,;{}\[\]()]+")
_LEAST_PARTS = 2  # fewest parts that can change order


class Difference(NamedTuple):
    """Text of a difference: equal text before it, both sides, equal text after it."""

    before: str
    left: str
    right: str
    after: str

    def words(self) -> tuple[str, str]:
        """Return both sides, extended to whole words."""
        # Both patterns match the empty string, so they always match.
        begin = match[0] if (match := _WORD_END.search(self.before)) else ""
        end = match[0] if (match := _WORD_BEGIN.search(self.after)) else ""
        return begin + self.left + end, begin + self.right + end


def cause_of_text(text: Difference) -> str:
    """Classify a difference by what has to be ignored for both sides to be equal."""
    left, right = text.words()
    if left == right:
        return ENCODED
    if re.sub(r"\s+", "", left) == re.sub(r"\s+", "", right):
        return WHITESPACE
    times = _TIME.sub("<time>", left), _TIME.sub("<time>", right)
    if _same(*times):
        return TIMES
    if _same(*(_ID.sub("<id>", side) for side in (left, right))):
        return IDS
    if _same(*(_ID.sub("<id>", side) for side in times)):  # times and ids differ: blame the first difference
        first = common_prefix(left, right)
        return TIMES if any(match.start() <= first < match.end() for match in _TIME.finditer(left)) else IDS
    if _same_parts(left, right):
        return TOOLS if _TOOLS.search(text.before + left + text.after) else ORDER
    if not text.right.strip():
        return THINKING if MARKS_OF_THINKING.search(text.left) else REMOVED
    if not text.left.strip():
        return INSERTED
    # A template that strips thinking may leave empty tags, or move the line break after them.
    marks = MARKS_OF_THINKING.search(text.left) is not None and len(text.left) > 2 * len(text.right)
    return THINKING if marks else REPLACED


def cause_of_tokens(left: list[int], right: list[int]) -> str:
    """Classify a difference by token ids alone: removed, inserted, reordered or replaced."""
    if not right:
        return REMOVED
    if not left:
        return INSERTED
    return ORDER if len(left) > _LEAST_PARTS and sorted(left) == sorted(right) else REPLACED


def is_about_tools(text: str) -> bool:
    """Return whether a text contains definitions of tools."""
    return _TOOLS.search(text) is not None


def _same(left: str, right: str) -> bool:
    """Return whether two texts are equal up to white space and repetitions of a placeholder."""

    def plain(text: str) -> str:
        return re.sub(r"(<time>|<id>)(?:[\s,+\-:.TZ]*\1)+", r"\1", " ".join(text.split()))

    return plain(left) == plain(right)


def _same_parts(left: str, right: str) -> bool:
    parts = _PARTS.findall(left)
    return len(parts) >= _LEAST_PARTS and Counter(parts) == Counter(_PARTS.findall(right))


Ints = NDArray[np.int64]


class Comparison(NamedTuple):
    """Comparison of a sequence with an earlier one.

    Attributes:
        sequence, reference: indices of both; a reference of -1 is none.
        shared: length of the common prefix.
        hunks: differences after it, up to where the sequences have contents of their own.
        causes: cause of every hunk.
    """

    sequence: int
    reference: int
    shared: int
    hunks: tuple[Hunk, ...] = ()
    causes: tuple[str, ...] = ()


class Rewritten(NamedTuple):
    """Rewritten sequence: new tokens, position in them of every old token boundary `[n + 1]`, whether it changed."""

    tokens: Ints
    places: Ints
    is_new: bool

    def part(self, start: int, stop: int) -> Ints:
        """Return the new tokens in place of the old tokens `[start, stop)`."""
        return self.tokens[self.places[start] : self.places[stop]]


def rewrite_all(
    arrays: Sequence[Ints], comparisons: Sequence[Comparison], undone: Callable[[str], bool]
) -> list[Rewritten]:
    """Rewrite all sequences with some causes undone: the reference's side of a hunk replaces the sequence's own.

    Args:
        comparisons: one per sequence, references before the sequences compared with them.
        undone: returns whether to undo a cause.
    """
    done: dict[int, Rewritten] = {}
    for comparison in comparisons:
        own = arrays[comparison.sequence]
        done[comparison.sequence] = _rewritten(own, done.get(comparison.reference), comparison, undone)
    return [done[i] for i in range(len(arrays))]


def _rewritten(own: Ints, model: Rewritten | None, comparison: Comparison, undone: Callable[[str], bool]) -> Rewritten:
    if model is None or not (model.is_new or any(map(undone, comparison.causes))):
        return Rewritten(own, np.arange(len(own) + 1), False)
    pieces: list[Ints] = []
    places: list[Ints] = []
    size = 0

    def add(tokens: Ints, offsets: Ints) -> None:
        """Add new tokens, with the offset in them of every old token in whose place they are."""
        nonlocal size
        pieces.append(tokens)
        places.append(size + offsets)
        size += len(tokens)

    def add_alike(a: int, count: int) -> None:
        add(model.part(a, a + count), model.places[a : a + count] - model.places[a])

    add_alike(0, comparison.shared)
    end = comparison.shared
    for hunk, cause in zip(comparison.hunks, comparison.causes, strict=True):
        if undone(cause):
            add(model.part(hunk.a0, hunk.a1), np.zeros(hunk.b1 - hunk.b0, np.int64))
        else:
            add(own[hunk.b0 : hunk.b1], np.arange(hunk.b1 - hunk.b0))
        add_alike(hunk.a1, hunk.run)
        end = hunk.b1 + hunk.run
    add(own[end:], np.arange(len(own) - end))
    return Rewritten(np.concatenate(pieces), np.append(np.concatenate(places), size), True)


Hashes = NDArray[np.uint64]

GRAM = 8  # tokens that have to be equal for an alignment to resume
SHORTEST_TAIL = 2  # ... or the last tokens of the first sequence, if there are at least 2 of them
WINDOWS = (64, 1024, 16384)  # tokens ahead that are searched, in turn; then all
CANDIDATES = 8  # nearest points to resume that are compared
PURE = 4.0  # weight of a pure deletion or insertion, which is likelier than a replacement
MOST_HUNKS = 256  # of an alignment; the rest becomes the last hunk

_FACTORS = np.random.default_rng(0).integers(1, 2**63, GRAM, dtype=np.uint64) | np.uint64(1)


class Hunk(NamedTuple):
    """Difference: tokens `[a0, a1)` of one sequence against `[b0, b1)` of the other, then `run` equal tokens."""

    a0: int
    a1: int
    b0: int
    b1: int
    run: int

    @property
    def is_last(self) -> bool:
        """Whether no equal tokens follow."""
        return self.run == 0


def align(a: Ints, b: Ints, start: int) -> list[Hunk]:
    """Align two sequences that are equal up to `start`: return hunks in order, each followed by a run of equal tokens.

    Greedy: after a difference it resumes where the most tokens are equal for the fewest skipped. The unequal rests at
    the ends form a hunk without a run.
    """
    hashes_a, hashes_b = gram_hashes(a[start:]), gram_hashes(b[start:])
    hunks: list[Hunk] = []
    i = j = start
    while i < len(a) and j < len(b) and len(hunks) < MOST_HUNKS:
        match = _resume(a, b, i, j, hashes_a[i - start :], hashes_b[j - start :])
        if match is None:
            break
        x, y, run = match
        hunks.append(Hunk(i, i + x, j, j + y, run))
        i, j = i + x + run, j + y + run
    if i < len(a) or j < len(b):
        hunks.append(Hunk(i, len(a), j, len(b), 0))
    return hunks


def gram_hashes(tokens: Ints) -> Hashes:
    """Hash every n-gram of `GRAM` tokens: `[max(n - GRAM + 1, 0)]`."""
    count = max(len(tokens) - GRAM + 1, 0)
    values = tokens.astype(np.uint64) + np.uint64(1)
    total = np.zeros(count, np.uint64)
    for offset, factor in enumerate(_FACTORS):
        part = values[offset : offset + count] * factor
        total += part ^ (part >> np.uint64(29))
    return total


def _resume(a: Ints, b: Ints, i: int, j: int, ahead_a: Hashes, ahead_b: Hashes) -> tuple[int, int, int] | None:
    """Return how many tokens to skip in each sequence and the equal run after that; None if there is no such run."""
    best: tuple[float, int, int, int] | None = None
    for x, y in _resume_offsets(a, b, i, j, ahead_a, ahead_b):
        run = common_run(a, b, i + x, j + y)
        weight = PURE if not (x and y) else 1.0
        score = weight * run / (x + y + GRAM)
        if run and (best is None or score > best[0]):
            best = (score, x, y, run)
    return None if best is None else best[1:]


def _resume_offsets(a: Ints, b: Ints, i: int, j: int, ahead_a: Hashes, ahead_b: Hashes) -> Iterator[tuple[int, int]]:
    """Yield candidate offsets at which both sequences may be equal again."""
    for window in (*WINDOWS, max(len(ahead_a), len(ahead_b), 1)):
        offsets = list(_common(ahead_a[:window], ahead_b[:window]))
        if offsets or window >= max(len(ahead_a), len(ahead_b)):
            yield from offsets
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
    """Yield offsets of the first occurrences of common hashes, nearest first."""
    left, first = np.unique(one, return_index=True)
    right, second = np.unique(other, return_index=True)
    _, at_left, at_right = np.intersect1d(left, right, assume_unique=True, return_indices=True)
    x, y = first[at_left], second[at_right]
    nearest: Any = np.argsort(x + y, kind="stable")[:CANDIDATES]
    yield from zip(x[nearest].tolist(), y[nearest].tolist(), strict=True)
