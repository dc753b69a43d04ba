"""Rows of JSON lines, parquet files and `datasets` folders as dictionaries, each with its origin."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dta_compile.errors import DTAError, MissingPackageError, OptionError, PlanError
from dta_compile.files import read_text

Row = tuple[str, Any]
"""Origin (file and line or row) and value."""

SHOWN = 60  # characters of a bad line that an error quotes
PARQUET_BATCH = 512  # rows decoded at a time
SUFFIXES = (".jsonl", ".json", ".parquet", ".npz")


def json_rows(path: str) -> Iterator[Row]:
    """Yield the values of JSON lines, or of one JSON list of rows; "-" is standard input.

    Raises:
        OSError: the file cannot be read.
        PlanError: the file is not text, or a line is not JSON.
    """
    name = "standard input" if path == "-" else path
    try:
        text = stdin_text() if path == "-" else read_text(path)
    except UnicodeError as error:
        raise PlanError(
            "neither text nor a kind of file that is known",
            where=name,
            expected="a rollout file (.npz), JSON lines, a parquet file, or a folder of datasets' save_to_disk",
        ) from error
    whole = _whole(text)
    if whole is not None:
        yield from ((f"{name}, entry {number}", value) for number, value in enumerate(whole, start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON strings may contain U+2028 etc.
        if line.strip():
            yield f"{name}, line {number}", _parsed(line, f"{name}, line {number}")


def stdin_text() -> str:
    """Read all of standard input (see `read_text`)."""
    stream = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if stream is None else read_text(stream)


@contextlib.contextmanager
def _reading(what: str, path: str) -> Iterator[None]:
    """Convert any exception of a third-party reader into a PlanError that names the damaged file."""
    try:
        yield
    except (DTAError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        raise PlanError(what, where=path, got=f"{type(error).__name__}: {error}") from error


def _whole(text: str) -> list[Any] | None:
    """Parse a text that is one JSON list of objects or lists; return None for anything else, such as JSON lines."""
    if not re.match(r"\s*\[\s*[\[{]", text):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_messages = all(isinstance(item, dict) and ("role" in item or {"from", "value"} <= item.keys()) for item in value)
    return [value] if is_messages else value


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PlanError(
            "a line is no JSON",
            where=where,
            expected="token ids such as [151644, 8948], or an object with tokens, messages, or prompt and completion",
            got=line if len(line) <= SHOWN else line[: SHOWN - 3] + "...",
        ) from error


def parquet_rows(path: str) -> Iterator[Row]:
    """Yield the rows of a parquet file as dictionaries.

    Raises:
        MissingPackageError: pyarrow is not installed.
        PlanError: the file is not valid parquet.
    """
    parquet = optional("pyarrow.parquet", "reading parquet files", "pyarrow")
    number = 0
    with _reading("not a parquet file that can be read", path):
        for batch in parquet.ParquetFile(path).iter_batches(PARQUET_BATCH):
            for row in batch.to_pylist():
                yield f"{path}, row {number}", row
                number += 1


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `save_to_disk` of the package `datasets` wrote this folder."""
    return any((folder / name).exists() for name in ("dataset_dict.json", "dataset_info.json", "state.json"))


def saved_rows(path: str, split: str | None = None) -> Iterator[Row]:
    """Yield the rows of a folder written by `save_to_disk`; of one split if it has several.

    Raises:
        MissingPackageError: datasets is not installed.
        OptionError: the folder has several splits and `split` names none of them.
        PlanError: the folder cannot be read.
    """
    datasets = optional("datasets", "reading a folder of save_to_disk")
    with _reading("not a dataset that can be read", path):
        dataset = datasets.load_from_disk(path)
    if isinstance(dataset, datasets.DatasetDict):
        names = list(dataset)
        if (split or (names[0] if len(names) == 1 else None)) not in names:
            raise OptionError(
                "a folder of several splits", expected=f"--split with one of {', '.join(names)}", got=repr(split)
            )
        dataset = dataset[split or names[0]]
    with _reading("not a dataset that can be read", path):
        for number, row in enumerate(dataset.with_format(None)):  # lists, where a trainer has set tensors
            yield f"{path}, row {number}", row


def sorted_files(folder: Path) -> list[Path]:
    """List the readable files of a folder, sorted by the numbers in their names (`2.jsonl` before `10.jsonl`)."""
    files = [file for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file()]
    return sorted(files, key=lambda file: [int(w) if w.isdecimal() else w for w in re.split(r"(\d+)", file.name)])


def optional(module: str, purpose: str, install: str = "") -> Any:
    """Import a module of an optional package; `purpose` says what needs it ("reading parquet files").

    Raises:
        MissingPackageError: the package is not installed; the error says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = install or module.split(".")[0]
        raise MissingPackageError(
            f"{purpose} needs the package {package}", got=str(error), hint=f"pip install {package}"
        ) from error
