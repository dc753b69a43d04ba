"""One self-contained HTML page: data, scripts and styles in one file that opens from disk and asks no network.

Data are packed as one block: a JSON object, then columns of numbers one after the other in little-endian order, or of
the differences between them. All of it is deflated and written as base64, so that nothing in it can end a script or be
taken for markup.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from dta_compile.errors import PlanError

Column = npt.NDArray[Any]

TYPES = {"u1": "Uint8Array", "u2": "Uint16Array", "u4": "Uint32Array", "i4": "Int32Array", "f8": "Float64Array"}
LEVEL = 6  # of zlib: 9 takes three times as long for 1% less

# In this order: a script uses what those before it define.
SCRIPTS = (
    *("data.js", "theme.js", "colors.js", "viewport.js", "tree.js", "schedule.js", "timeline.js"),
    *("words.js", "details.js", "search.js", "main.js"),
)


def page(title: str, facts: Mapping[str, Any], columns: Mapping[str, Column]) -> str:
    """The text of the file.

    Args:
        title: of the page.
        facts: what JSON can hold; read by the scripts in `assets/`.
        columns: one-dimensional arrays of numbers, by name.
    """
    parts = {
        "title": html.escape(title),
        "style": _asset("page.css"),
        "licence": _asset("d3/LICENSE"),
        "d3": _asset("d3/d3.min.js"),
        "data": base64.b64encode(_packed(facts, columns)).decode("ascii"),
        "scripts": "\n".join(map(_asset, SCRIPTS)),
    }
    text = _asset("page.html")
    head, *rest = text.split("{{")
    pieces = [head]
    for piece in rest:
        name, _, after = piece.partition("}}")
        pieces += [parts[name], after]
    return "".join(pieces)


def compressed_size(*blocks: Column | str) -> int:
    """Bytes that columns and texts take in the file, before base64."""
    raw = (
        block.encode("utf-8", "replace") if isinstance(block, str) else _encoded(block)[0].tobytes() for block in blocks
    )
    return sum(len(zlib.compress(block, LEVEL)) for block in raw)


def _encoded(column: Column) -> tuple[Column, bool]:
    """The numbers of a column, or the differences between them if these deflate better, and whether it is these."""
    plain = _narrowed(column)
    if plain.dtype.kind == "f":
        return plain, False
    steps = _narrowed(np.diff(column.astype(np.int64), prepend=0))
    sizes = [len(zlib.compress(one.tobytes(), 1)) for one in (plain, steps)]
    return (steps, True) if sizes[1] < sizes[0] else (plain, False)


def _narrowed(column: Column) -> Column:
    """The same numbers in the narrowest type that the page can read."""
    if column.dtype.kind == "f":
        return column.astype("<f8")
    low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
    if low < -(2**31) or high >= 2**32 or (low < 0 and high >= 2**31):
        return column.astype("<f8")  # exact to 2**53, as all numbers of the page
    name = "i4" if low < 0 else "u1" if high < 2**8 else "u2" if high < 2**16 else "u4"
    return column.astype(f"<{name}")


def _packed(facts: Mapping[str, Any], columns: Mapping[str, Column]) -> bytes:
    """Length of the JSON text (4 bytes), the text padded to 8 bytes, then the columns, each padded to 8 bytes."""
    described, blocks, offset = [], [], 0
    for name, column in columns.items():
        numbers, are_steps = _encoded(column)
        block, kind = numbers.tobytes(), TYPES[numbers.dtype.str[1:]]
        described.append({"name": name, "type": kind, "steps": are_steps, "offset": offset, "length": len(numbers)})
        blocks.append(block + bytes(-len(block) % 8))
        offset += len(blocks[-1])
    text = json.dumps({**facts, "columns": described}, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    head = len(text).to_bytes(4, "little") + text
    return zlib.compress(b"".join([head, bytes(-len(head) % 8), *blocks]), LEVEL)


def _asset(name: str) -> str:
    return (resources.files("dta_compile.views") / "assets" / name).read_text(encoding="utf-8")


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
