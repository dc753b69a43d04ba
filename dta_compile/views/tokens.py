"""The tokens of a tree in a bounded number of bytes, with their texts if there is a tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dta_compile.errors import PlanError
from dta_compile.views.page import compressed_size

Integers = npt.NDArray[np.int64]
Decode = Callable[[list[int]], str]

MOST_TOKENS = 8_000_000  # that a browser is asked to unpack
ENDS = (2048, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)  # tokens kept at either end of a segment, if not all are
UNKNOWN = "\ufffd"
LONGEST_CHARACTER = 4  # tokens: a character has at most so many bytes in UTF-8


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of segments, as numbers of a vocabulary's entries.

    Attributes:
        entries: `[K]` the kept tokens, segment after segment.
        ids: `[V]` token ids, the most frequent first; one id may have several entries with different texts.
        texts: `[V]` what each entry reads; empty: there is no tokenizer.
        ends: of a segment longer than twice this, so many first and as many last tokens are kept; None: all are.
    """

    entries: Integers
    ids: Integers
    texts: tuple[str, ...]
    ends: int | None


def tokens_in(rows: npt.NDArray[Any], lengths: Integers, decode: Decode | None, most: int) -> Tokens:
    """As many tokens as fit in `most` bytes, deflated.

    Args:
        rows: token ids, segment after segment.
        lengths: `[M]` tokens of every segment.
        decode: token ids to their text.
        most: bytes; the first and last token of every segment are there even if they take more.
    """
    for ends in (None, *ENDS):
        kept = np.ones(len(rows), np.bool_) if ends is None else _kept(lengths, ends)
        if ends == ENDS[-1]:
            break
        if np.count_nonzero(kept) > MOST_TOKENS:
            continue
        _, entries = _by_frequency(rows[kept])
        # Texts of a vocabulary take about 4 bytes an entry.
        if compressed_size(entries) + 4 * (int(entries.max(initial=-1)) + 1) <= most:
            break
    ids, entries = _by_frequency(rows[kept])
    if decode is None:
        return Tokens(entries, ids, (), ends)
    return _with_texts(Tokens(entries, ids, (), ends), decode, _neighbours(lengths, kept))


def decoder(tokenizer: Any) -> Decode:
    """Token ids to their text, special tokens included.

    Args:
        tokenizer: anything with `decode(list[int]) -> str`, such as a tokenizer of transformers or a
            `tokenizers.Tokenizer`.

    Raises:
        PlanError: it has no such method.
    """
    decode = getattr(tokenizer, "decode", None)
    if not callable(decode):
        raise PlanError(
            "the tokenizer cannot decode",
            expected="an object with decode(list[int]) -> str, such as a tokenizers.Tokenizer",
            got=type(tokenizer).__name__,
        )

    def text(ids: list[int]) -> str:
        try:
            return str(decode(ids, skip_special_tokens=False))
        except TypeError:  # no such switch
            return str(decode(ids))

    return text


def _kept(lengths: Integers, ends: int) -> npt.NDArray[np.bool_]:
    """Which tokens are among the first or last `ends` of their segment."""
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    inside = np.arange(len(first)) - first
    kept: npt.NDArray[np.bool_] = (inside < ends) | (inside >= np.repeat(lengths, lengths) - ends)
    return kept


def _neighbours(lengths: Integers, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """By kept token, whether it continues the kept token before it."""
    places = np.flatnonzero(kept)
    first = np.zeros(len(kept) + 1, np.bool_)
    first[np.cumsum(lengths) - lengths] = True
    continues = np.zeros(len(places), np.bool_)
    continues[1:] = (np.diff(places) == 1) & ~first[places[1:]]
    return continues


def _by_frequency(tokens: npt.NDArray[Any]) -> tuple[Integers, Integers]:
    """Distinct ids, the most frequent first, so that most entries are small numbers; and the entry of every token."""
    ids, entries, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(len(ids), np.int64)
    rank[order] = np.arange(len(ids))
    return ids[order].astype(np.int64), rank[entries.reshape(-1)]


def _with_texts(tokens: Tokens, decode: Decode, continues: npt.NDArray[np.bool_]) -> Tokens:
    ids = tokens.ids.tolist()
    texts = list(_texts(ids, decode))
    entries = tokens.entries.copy()
    broken = np.array([UNKNOWN in text for text in texts], np.bool_)
    added: dict[tuple[int, str], int] = {}
    known: dict[tuple[int, ...], str] = {}
    for group in _runs(np.flatnonzero(broken[entries]) if broken.any() else np.zeros(0, np.int64), continues):
        for start, stop, text in _whole_characters([ids[entry] for entry in tokens.entries[group]], decode, known):
            for place in range(start, stop):
                piece = (int(tokens.ids[tokens.entries[group[place]]]), text if place == start else "")
                entries[group[place]] = added.setdefault(piece, len(ids) + len(added))
    more = np.array([number for number, _ in added], np.int64)
    return Tokens(entries, np.concatenate([tokens.ids, more]), (*texts, *(text for _, text in added)), tokens.ends)


def _texts(ids: Sequence[int], decode: Decode) -> Iterator[str]:
    """What each token reads behind another one: at the beginning of a text some tokenizers leave its space out."""
    anchor = next((one for one in ids if (text := _decoded([one], decode)) and UNKNOWN not in text), None)
    before = "" if anchor is None else _decoded([anchor], decode)
    for one in ids:
        text = "" if anchor is None else _decoded([anchor, one], decode)
        found = text[len(before) :] if before and text.startswith(before) else ""
        yield found or _decoded([one], decode)


def _decoded(ids: list[int], decode: Decode) -> str:
    try:
        return decode(ids)
    except Exception:  # whatever a tokenizer raises for an id that it does not know, which is then shown as a number
        return ""


def _runs(places: Integers, continues: npt.NDArray[np.bool_]) -> list[Integers]:
    """Places cut wherever one does not continue the one before it."""
    cuts = np.flatnonzero((np.diff(places) != 1) | ~continues[places[1:]]) + 1
    return np.split(places, cuts) if len(places) else []


def _whole_characters(
    ids: Sequence[int], decode: Decode, known: dict[tuple[int, ...], str]
) -> Iterator[tuple[int, int, str]]:
    """Ranges of tokens that are parts of characters, as short as they have a text."""
    start = 0
    while start < len(ids):
        for stop in range(start + 2, min(start + LONGEST_CHARACTER, len(ids)) + 1):
            key = tuple(ids[start:stop])
            text = known[key] if key in known else known.setdefault(key, _decoded(list(key), decode))
            if text and UNKNOWN not in text:
                yield start, stop, text
                start = stop
                break
        else:
            start += 1
