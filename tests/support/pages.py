"""Read the data packed in a file of `Plan.to_html`, like the page's own scripts.

page = read_page(path)
page.facts["ops"], page.columns["stop"]
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"Uint8Array": "u1", "Uint16Array": "<u2", "Uint32Array": "<u4", "Int32Array": "<i4", "Float64Array": "<f8"}


@dataclasses.dataclass(frozen=True)
class Page:
    """Parts of a page.

    Attributes:
        title: title of the browser window.
        tags: every tag of the markup with its attributes, in order.
        facts: the JSON object.
        columns: arrays by name.
    """

    title: str
    tags: list[tuple[str, dict[str, str | None]]]
    facts: dict[str, Any]
    columns: dict[str, np.ndarray]


class _Markup(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text: str) -> None:
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        key = attributes.get("id") or tag
        self.texts.setdefault(key, text)


def read_page(path: Path) -> Page:
    """Read the parts of a page."""
    markup = _Markup()
    markup.feed(path.read_text(encoding="utf-8"))
    packed = zlib.decompress(base64.b64decode(markup.texts["data"]))
    size = int.from_bytes(packed[:4], "little")
    facts = json.loads(packed[4 : 4 + size])
    base = (4 + size + 7) // 8 * 8
    columns = {}
    for column in facts["columns"]:
        numbers = np.frombuffer(packed, TYPES[column["type"]], column["length"], base + column["offset"])
        columns[column["name"]] = numbers.cumsum(dtype=np.int64) if column["steps"] else numbers
    return Page(markup.texts["title"], markup.tags, facts, columns)
