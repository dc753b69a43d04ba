"""What a difference between two sequences is: time stamps, identifiers, thinking that was left out, ..."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dta_compile.divergence.align import Hunk

THINKING, REMOVED, INSERTED, REPLACED = "stripped thinking", "removed", "inserted", "replaced"
TIMES, IDS, TOOLS, ORDER, WHITESPACE = "time stamps", "ids and numbers", "tool order", "order", "whitespace"

CAUSES = (THINKING, TIMES, IDS, TOOLS, ORDER, WHITESPACE, REMOVED, INSERTED, REPLACED)

ADVICE = {
    THINKING: "keep the thinking of earlier turns in the prompts of later ones, or train without thinking",
    TIMES: "leave times out of prompts, make them coarser, or move them behind what is the same",
    IDS: "leave identifiers out of prompts, take the same ones in a group, or move them behind what is the same",
    TOOLS: "list tools, and the keys of each, always in one order (sort them)",
    ORDER: "put these parts always in one order",
    WHITESPACE: "strip or normalise white space where the prompt is made",
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
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
# Hexadecimal words; words with a digit in them; numbers; and words of mixed case as random identifiers have them.
_ID = re.compile(
    rf"{_UUID}|\b0x[0-9a-fA-F]+\b|[A-Za-z0-9_\-]*\d[A-Za-z0-9_\-]*|\b(?=[A-Za-z]*[a-z][A-Z])[A-Za-z]{{8,}}\b",
    re.IGNORECASE,
)
_TOOLS = re.compile(r'<tools?>|"parameters"|"function"|"inputSchema"|"input_schema"|"properties"|"description"')
_WORD_END, _WORD_BEGIN = re.compile(r"\S*\Z"), re.compile(r"\A\S*")
_PARTS = re.compile(r"[^\s,;{}\[\]()]+")
_LEAST_PARTS = 2  # words that a change of order needs


class Difference(NamedTuple):
    """The text of a difference: what is alike before it, both sides, what is alike after it."""

    before: str
    left: str
    right: str
    after: str

    def words(self) -> tuple[str, str]:
        """Both sides with the rest of the words in which they begin and end."""
        # An empty alternative always matches.
        begin = match[0] if (match := _WORD_END.search(self.before)) else ""
        end = match[0] if (match := _WORD_BEGIN.search(self.after)) else ""
        return begin + self.left + end, begin + self.right + end


def cause_of_text(text: Difference) -> str:
    """The cause of a difference, by what has to be disregarded for both sides to be the same."""
    left, right = text.words()
    if _without(left, r"\s+", "") == _without(right, r"\s+", ""):
        return WHITESPACE
    times = _TIME.sub("<time>", left), _TIME.sub("<time>", right)
    if _same(*times):
        return TIMES
    if _same(*(_ID.sub("<id>", one) for one in (left, right))):
        return IDS
    if _same(*(_ID.sub("<id>", one) for one in times)):  # of both: what comes first is what splits
        first = _first_difference(left, right)
        return TIMES if any(match.start() <= first < match.end() for match in _TIME.finditer(left)) else IDS
    if _same_parts(left, right):
        return TOOLS if _TOOLS.search(text.before + left + text.after) else ORDER
    if not text.right.strip():
        return THINKING if MARKS_OF_THINKING.search(text.left) else REMOVED
    if not text.left.strip():
        return INSERTED
    # Of thinking a template may leave empty marks, or put the break after them elsewhere.
    marks = MARKS_OF_THINKING.search(text.left) is not None and len(text.left) > 2 * len(text.right)
    return THINKING if marks else REPLACED


def cause_of_tokens(left: list[int], right: list[int]) -> str:
    """The cause as far as ids alone show it: by what was removed, inserted or replaced."""
    if not right:
        return REMOVED
    if not left:
        return INSERTED
    return ORDER if len(left) > _LEAST_PARTS and sorted(left) == sorted(right) else REPLACED


def is_about_tools(text: str) -> bool:
    """Whether a text has definitions of tools in it."""
    return _TOOLS.search(text) is not None


def _without(text: str, pattern: str, instead: str) -> str:
    return re.sub(pattern, instead, text)


def _same(left: str, right: str) -> bool:
    """Alike but for white space and for how often something disregarded occurs in a row."""

    def plain(text: str) -> str:
        return re.sub(r"(<time>|<id>)(?:[\s,+\-:.TZ]*\1)+", r"\1", " ".join(text.split()))

    return plain(left) == plain(right)


def _same_parts(left: str, right: str) -> bool:
    parts = _PARTS.findall(left)
    return len(parts) >= _LEAST_PARTS and Counter(parts) == Counter(_PARTS.findall(right))


def _first_difference(left: str, right: str) -> int:
    size = min(len(left), len(right))
    return next((i for i in range(size) if left[i] != right[i]), size)


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
