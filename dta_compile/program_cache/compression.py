"""Compress the rows of executables, so that common parts of layers are pickled once.

A row is stored as its shape (everything but its numbers, including those in texts), which equal rows share, and the
differences of its numbers from the previous row of this shape. From layer to layer these differences are nearly always
the same, so that a model with many layers takes hardly more bytes than one with a few: of a small Qwen3, 64 layers take
1.08 times the bytes of 8, and 1.82 times without this.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from dta_compile.executable.chunk import ChunkGraphs, Part, Stage
from dta_compile.executable.executable import Executable
from dta_compile.executable.layouts import Input

WITH_TABLES = (Executable, ChunkGraphs)
ROWS = (Input, Part, Stage)
LEAST_ROWS = 4
NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")


class Table(NamedTuple):
    """Rows of one field: the shapes, and for each row the index of its shape and the differences of its numbers."""

    shapes: tuple[Any, ...]
    kinds: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]


def as_tables(value: Any) -> Any:
    """Reduce an object of one of `WITH_TABLES` for pickle."""
    return from_tables, (type(value), *(_table(getattr(value, field.name)) for field in dataclasses.fields(value)))


def from_tables(kind: type, *fields: Any) -> Any:
    """Rebuild the object of `as_tables`."""
    return kind(*(tuple(_rows(field)) if isinstance(field, Table) else field for field in fields))


def _table(field: Any) -> Any:
    """Convert a field to a table; return it unchanged if it has too few rows or unhashable ones."""
    if not isinstance(field, tuple) or len(field) < LEAST_ROWS:
        return field
    shapes: dict[Hashable, int] = {}
    last: dict[int, list[int]] = {}
    same: dict[tuple[int, ...], tuple[int, ...]] = {}
    kinds, steps = [], []
    for row in field:
        numbers: list[int] = []
        try:
            kind = shapes.setdefault(_shape(row, numbers), len(shapes))
        except TypeError:
            return field
        step = tuple(map(int.__sub__, numbers, last.get(kind, [0] * len(numbers))))
        kinds.append(kind)
        steps.append(same.setdefault(step, step))
        last[kind] = numbers
    return Table(tuple(shapes), tuple(kinds), tuple(steps))


def _rows(table: Table) -> Iterator[Any]:
    last: dict[int, list[int]] = {}
    for kind, step in zip(table.kinds, table.steps, strict=True):
        last[kind] = list(map(int.__add__, last.get(kind, [0] * len(step)), step))
        yield _filled(table.shapes[kind], iter(last[kind]))


def _shape(value: Any, numbers: list[int]) -> Hashable:
    """Return a value without its numbers, which are appended to `numbers`; raise `TypeError` if it is unhashable."""
    if type(value) is int:
        numbers.append(value)
        return "number", ()
    if type(value) is str:
        texts = NUMBER.split(value)
        numbers += map(int, texts[1::2])
        return "text", tuple(texts[::2])
    if type(value) is tuple:
        return "tuple", tuple(_shape(part, numbers) for part in value)
    if type(value) in ROWS:
        return type(value), tuple(_shape(getattr(value, field.name), numbers) for field in dataclasses.fields(value))
    hash(value)
    return "value", (value, type(value).__name__, repr(value) if isinstance(value, float) else "")  # 0.0 == -0.0


def _filled(shape: Any, numbers: Iterator[int]) -> Any:
    kind, parts = shape
    if kind == "number":
        return next(numbers)
    if kind == "text":
        return parts[0] + "".join(f"{next(numbers)}{text}" for text in parts[1:])
    if kind == "value":
        return parts[0]
    values = [_filled(part, numbers) for part in parts]
    return tuple(values) if kind == "tuple" else kind(*values)
