"""Entry point `read`: detect the format of a file or folder by its content and read its token sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from dta_compile.data.file_formats import Row, is_saved_dataset, json_rows, parquet_rows, saved_rows, sorted_files
from dta_compile.data.recorded import ReadOptions, Recorded
from dta_compile.data.rollouts import load_rollouts
from dta_compile.data.rows import RowReader
from dta_compile.data.tokenizer import Tokenizer, load_tokenizer
from dta_compile.errors import PlanError
from dta_compile.files import open_regular

ZIP, PARQUET = b"PK\x03\x04", b"PAR1"  # magic bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """Result of `read`.

    Attributes:
        batches: the token sequences by file, in file order; trainers dump one batch per file of a folder.
        kind: description of the detected format.
        tokenizer: the tokenizer named in the options; None: none was named.
    """

    batches: tuple[list[Recorded], ...]
    kind: str
    tokenizer: Tokenizer | None

    @cached_property
    def sequences(self) -> list[Recorded]:
        """The sequences of all files."""
        return [sequence for batch in self.batches for sequence in batch]


def read(path: str, options: ReadOptions | None = None) -> Recording:
    """Read the token sequences of a file or folder; "-" is standard input.

    Supported are rollout files (`.npz`, see `load_rollouts`); JSON lines of token ids, of objects with `tokens` (and
    `routes`, `images`, `spans`, ...), of chat transcripts (`messages`, optionally `tools`) and of prompts with
    completions, like verl's dumps; parquet files with such columns, like TRL's completions; folders written by
    `datasets.save_to_disk`; and folders of such files.

    Raises:
        OSError: the file cannot be read.
        PlanError: a line or row has an unknown format; the error names it.
        OptionError: the file has text but no tokenizer is named, or several splits and none of them is named.
        MissingPackageError: reading needs a package that is not installed.
    """
    options = options or ReadOptions()
    tokenizer = load_tokenizer(options.tokenizer, options.chat_template) if options.tokenizer is not None else None
    reader = RowReader(options, tokenizer)
    files = _files(path)
    batches: list[list[Recorded]] = []
    kinds: list[str] = []
    for file in files:
        is_rollouts = file != "-" and Path(file).is_file() and _begins(file) == ZIP
        content = _rollouts(file) if is_rollouts else list(reader.read(_rows(file, options)))
        kinds += ["rollout files"] if is_rollouts else []
        # Trajectory numbers are unique only within a file.
        batches.append([_of_file(item, file) for item in content] if len(files) > 1 else content)
    kinds = [*dict.fromkeys(kinds), *(f"{count:,} {kind}" for kind, count in reader.kinds.items())]
    if len(files) > 1:
        kinds = [f"{len(files)} files", *kinds]
    return Recording(tuple(batches), ", ".join(kinds) or "nothing", tokenizer)


def _files(path: str) -> list[str]:
    folder = Path(path)
    if path == "-" or not folder.is_dir() or is_saved_dataset(folder):
        return [path]
    files = [str(file) for file in sorted_files(folder)]
    if not files:
        raise PlanError(
            "a folder without anything to read",
            where=path,
            expected="files .jsonl, .json, .parquet or .npz, or a folder of datasets' save_to_disk",
        )
    return files


def _rows(path: str, options: ReadOptions) -> Iterator[Row]:
    if path == "-":
        return json_rows(path)
    if Path(path).is_dir():
        return saved_rows(path, options.split)
    return parquet_rows(path) if _begins(path) == PARQUET else json_rows(path)


def _begins(path: str) -> bytes:
    with open_regular(Path(path)) as file:
        return file.read(4)


def _rollouts(path: str) -> list[Recorded]:
    return [
        Recorded(
            *(rollout.tokens, rollout.routes, rollout.spans, rollout.trajectory, rollout.turn, rollout.reward),
            name=f"task {rollout.group} · trial {rollout.trial} · turn {rollout.turn}",
        )
        for rollout in load_rollouts(path)
    ]


def _of_file(row: Recorded, file: str) -> Recorded:
    return row if row.trajectory is None else dataclasses.replace(row, trajectory=f"{file}: {row.trajectory}")
