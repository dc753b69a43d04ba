"""Write one self-contained HTML page: data, scripts and styles in a file that opens from disk without a network.

The data are one block: a JSON object, then the columns of numbers in little-endian order, plain or delta-encoded. The
block is deflated and written as base64, so that nothing in it can end a script or be taken for markup. `tokens_in`
selects and decodes the tokens of a page within a number of bytes.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from dta_compile.errors import PlanError

Column = npt.NDArray[Any]

MOST_PICTURE = 2**17  # bytes of a picture within the page
PICTURES = {"png": b"\x89PNG", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8", "webp": b"RIFF"}  # by type, how it begins
TYPES = {"u1": "Uint8Array", "u2": "Uint16Array", "u4": "Uint32Array", "i4": "Int32Array", "f8": "Float64Array"}
LEVEL = 6  # of zlib: 9 takes three times as long for 1% less

# Order matters: a script uses names that earlier scripts define.
SCRIPTS = (
    *("data.js", "theme.js", "colors.js", "viewport.js", "tree.js", "schedule.js", "timeline.js"),
    *("words.js", "details.js", "search.js", "main.js"),
)


def page(title: str, facts: Mapping[str, Any], columns: Mapping[str, Column]) -> str:
    """Return the text of the HTML file.

    Args:
        title: title of the page.
        facts: values that JSON can hold; read by the scripts in `assets/`.
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
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def data_url(picture: bytes, where: str) -> str:
    """Return a picture as a URL that holds it.

    Raises:
        PlanError: it is of another type than PNG, JPEG, GIF or WebP, or has more than 128 KiB.
    """
    kind = next((kind for kind, begins in PICTURES.items() if picture.startswith(begins)), None)
    if kind is None or len(picture) > MOST_PICTURE:
        raise PlanError(
            "a thumbnail that a page cannot hold",
            where=where,
            expected=f"PNG, JPEG, GIF or WebP, of at most {MOST_PICTURE // 1024} KiB",
            got=f"{len(picture):,} bytes of {'another type' if kind is None else kind}",
        )
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def compressed_size(*blocks: Column | str) -> int:
    """Return the bytes that columns and texts take in the file, before base64."""
    raw = (
        block.encode("utf-8", "replace") if isinstance(block, str) else _encoded(block)[0].tobytes() for block in blocks
    )
    return sum(len(zlib.compress(block, LEVEL)) for block in raw)


def _encoded(column: Column) -> tuple[Column, bool]:
    """Return a column, delta-encoded if that deflates better, and whether it is delta-encoded."""
    plain = _narrowed(column)
    if plain.dtype.kind == "f":
        return plain, False
    steps = _narrowed(np.diff(column.astype(np.int64), prepend=0))
    sizes = [len(zlib.compress(array.tobytes(), 1)) for array in (plain, steps)]
    return (steps, True) if sizes[1] < sizes[0] else (plain, False)


def _narrowed(column: Column) -> Column:
    """Cast a column to the narrowest type that the page can read."""
    if column.dtype.kind == "f":
        return column.astype("<f8")
    low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
    if low < -(2**31) or high >= 2**32 or (low < 0 and high >= 2**31):
        return column.astype("<f8")  # exact up to 2**53, like all numbers in JavaScript
    name = "i4" if low < 0 else "u1" if high < 2**8 else "u2" if high < 2**16 else "u4"
    return column.astype(f"<{name}")


def _packed(facts: Mapping[str, Any], columns: Mapping[str, Column]) -> bytes:
    """Pack the length of the JSON text (4 bytes), the text padded to 8 bytes, and columns padded to 8 bytes each."""
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

MOST_TOKENS = 8_000_000  # that a browser has to unpack
ENDS = (2048, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)  # tokens kept at each end of a segment, if not all are
UNKNOWN = "\ufffd"
LONGEST_CHARACTER = 4  # tokens, because a character has at most 4 bytes in UTF-8


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of segments, as indices into a vocabulary of the page.

    Attributes:
        entries: `[K]` vocabulary index of every kept token, segment after segment.
        ids: `[V]` token ids, most frequent first; an id may have several entries with different texts.
        texts: `[V]` text of every entry; empty: there is no tokenizer.
        ends: number of tokens kept at each end of a segment longer than twice this; None: all tokens are kept.
    """

    entries: Integers
    ids: Integers
    texts: tuple[str, ...]
    ends: int | None


def tokens_in(
    rows: npt.NDArray[Any],
    lengths: Integers,
    decode: Decode | None,
    most: int,
    units: Mapping[tuple[int, int], str] = MappingProxyType({}),
) -> Tokens:
    """Select as many tokens as fit in `most` deflated bytes, and decode them.

    Args:
        rows: token ids, segment after segment.
        lengths: `[M]` number of tokens of every segment.
        decode: decodes token ids to text; None: there is no tokenizer.
        most: bytes; the first and last token of every segment are kept even if they take more.
        units: texts of ranges of tokens that are shown as one, by start and stop; left out without a tokenizer.
    """
    for ends in (None, *ENDS):
        kept = np.ones(len(rows), np.bool_) if ends is None else _kept(lengths, ends)
        if ends == ENDS[-1]:
            break
        if np.count_nonzero(kept) > MOST_TOKENS:
            continue
        _, entries = _by_frequency(rows[kept])
        # Texts of the vocabulary take about 4 bytes an entry.
        if compressed_size(entries) + 4 * (int(entries.max(initial=-1)) + 1) <= most:
            break
    ids, entries = _by_frequency(rows[kept])
    if decode is None:
        return Tokens(entries, ids, (), ends)
    tokens = _with_texts(Tokens(entries, ids, (), ends), decode, _neighbours(lengths, kept))
    edges = np.searchsorted(np.flatnonzero(kept), np.array(list(units), np.int64).reshape(-1, 2)).tolist()
    return _spelled(tokens, zip(itertools.starmap(range, edges), units.values(), strict=True))


def _spelled(tokens: Tokens, spans: Iterable[tuple[Sequence[int] | Integers, str]]) -> Tokens:
    """Give the first token of each span (places among the kept tokens) the span's text, and its other tokens none."""
    entries, known = tokens.entries.copy(), len(tokens.ids)
    added: dict[tuple[int, str], int] = {}
    for places, text in spans:
        for place in places:
            piece = int(tokens.ids[tokens.entries[place]]), text if place == places[0] else ""
            entries[place] = added.setdefault(piece, known + len(added))
    ids = np.concatenate([tokens.ids, np.array([number for number, _ in added], np.int64)])
    return Tokens(entries, ids, (*tokens.texts, *(text for _, text in added)), tokens.ends)


def decoder(tokenizer: Any) -> Decode:
    """Return a function that decodes token ids to text, special tokens included; unknown ids have no text.

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
        except TypeError:  # the tokenizer has no such argument
            return str(decode(ids))

    def known_text(ids: list[int]) -> str:
        try:
            return text(ids)
        except Exception:  # an id that the tokenizer does not know, whatever it raises then; the page shows the number
            return ""

    return known_text


def _kept(lengths: Integers, ends: int) -> npt.NDArray[np.bool_]:
    """Mark the tokens that are among the first or last `ends` of their segment."""
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    inside = np.arange(len(first)) - first
    return (inside < ends) | (inside >= np.repeat(lengths, lengths) - ends)


def _neighbours(lengths: Integers, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Mark the kept tokens that directly follow the kept token before them, in the same segment."""
    positions = np.flatnonzero(kept)
    first = np.zeros(len(kept) + 1, np.bool_)
    first[np.cumsum(lengths) - lengths] = True
    continues = np.zeros(len(positions), np.bool_)
    continues[1:] = (np.diff(positions) == 1) & ~first[positions[1:]]
    return continues


def _by_frequency(tokens: npt.NDArray[Any]) -> tuple[Integers, Integers]:
    """Return distinct ids, most frequent first (so that most entries are small numbers), and every token's entry."""
    ids, entries, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(len(ids), np.int64)
    rank[order] = np.arange(len(ids))
    return ids[order].astype(np.int64), rank[entries.reshape(-1)]


def _with_texts(tokens: Tokens, decode: Decode, continues: npt.NDArray[np.bool_]) -> Tokens:
    ids = tokens.ids.tolist()
    texts = tuple(_texts(ids, decode))
    broken = np.array([UNKNOWN in text for text in texts], np.bool_)
    known: dict[tuple[int, ...], str] = {}
    return _spelled(
        dataclasses.replace(tokens, texts=texts),
        (
            (group[start:stop], text)
            for group in _runs(np.flatnonzero(broken[tokens.entries]), continues)
            for start, stop, text in _whole_characters([ids[entry] for entry in tokens.entries[group]], decode, known)
        ),
    )


def _texts(ids: Sequence[int], decode: Decode) -> Iterator[str]:
    """Yield the text of each token after another token: some tokenizers drop the leading space of a text."""
    anchor = next((token for token in ids if (text := decode([token])) and UNKNOWN not in text), None)
    before = "" if anchor is None else decode([anchor])
    for token in ids:
        text = "" if anchor is None else decode([anchor, token])
        rest = text[len(before) :] if before and text.startswith(before) else ""
        yield rest or decode([token])


def _runs(positions: Integers, continues: npt.NDArray[np.bool_]) -> list[Integers]:
    """Split positions into runs, wherever one does not continue the position before it."""
    cuts = np.flatnonzero((np.diff(positions) != 1) | ~continues[positions[1:]]) + 1
    return np.split(positions, cuts) if len(positions) else []


def _whole_characters(
    ids: Sequence[int], decode: Decode, known: dict[tuple[int, ...], str]
) -> Iterator[tuple[int, int, str]]:
    """Yield `(start, stop, text)` of the shortest ranges of tokens that together decode to whole characters."""
    start = 0
    while start < len(ids):
        for stop in range(start + 2, min(start + LONGEST_CHARACTER, len(ids)) + 1):
            key = tuple(ids[start:stop])
            text = known[key] if key in known else known.setdefault(key, decode(list(key)))
            if text and UNKNOWN not in text:
                yield start, stop, text
                start = stop
                break
        else:
            start += 1
