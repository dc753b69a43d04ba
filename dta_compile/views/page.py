"""One self-contained HTML page: data, scripts and styles in one file that opens from disk and asks no network.

Data are packed as one block: a JSON object, then columns of numbers one after the other in little-endian order, or of
the differences between them. All of it is deflated and written as base64, so that nothing in it can end a script or be
taken for markup.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

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
