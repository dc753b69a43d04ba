"""Files: written as a whole or not at all, and read only where they are files; code, where nobody else wrote it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import secrets
import stat
from typing import IO

UNFINISHED = ".tmp"
NONBLOCK = getattr(os, "O_NONBLOCK", 0)


MOST_BYTES = 2**31  # of a text that is read as a whole
PIECE = 2**24  # bytes that are read at a time


def write_whole(path: pathlib.Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file aside and rename it, so that whoever reads meanwhile meets the file before or after.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    unfinished = path.with_name(f".{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with open(unfinished, "xb", opener=functools.partial(os.open, mode=mode)) as file:
            file.write(data)
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def write_output(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write what somebody asked for: a file as a whole, through links; a terminal or pipe as it comes.

    Raises:
        OSError: it cannot be written; a file that was there is as it was.
    """
    content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    target = pathlib.Path(os.path.realpath(path))
    mode = target.stat().st_mode if target.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        target.write_bytes(content)
        return
    write_whole(target, content, 0o666)
    if mode is not None:
        target.chmod(stat.S_IMODE(mode))


def open_regular(path: pathlib.Path) -> IO[bytes]:
    """Open a file to be read.

    Raises:
        OSError: it cannot be read, or is a pipe or device, which might never end.
    """
    file = open(path, "rb", opener=_not_waiting)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def _not_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | NONBLOCK)


def read_text(source: str | os.PathLike[str] | IO[bytes], most: int = MOST_BYTES) -> str:
    """The text of a file or stream of at most `most` bytes; a mark of UTF-8 at its beginning is no part of it.

    Raises:
        OSError: it cannot be read, or has more.
        UnicodeError: it is no text.
    """
    if isinstance(source, (str, os.PathLike)):
        with open_regular(pathlib.Path(source)) as file:
            return read_text(file, most)
    pieces: list[bytes] = []
    while piece := source.read(PIECE):
        most -= len(piece)
        if b"\0" in piece:  # never in text; devices may send nothing else, for ever
            raise UnicodeError("a NUL byte")
        if most < 0:
            raise OSError(errno.EFBIG, "too large", str(getattr(source, "name", "input")))
        pieces.append(piece)
    return b"".join(pieces).decode("utf-8-sig")


def read_own(path: pathlib.Path) -> bytes:
    """Read a file that holds code.

    Raises:
        ValueError: others may have written it.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        if not is_ours_alone(os.fstat(file.fileno())):
            raise ValueError("others may have written it")
        return file.read()


def is_ours_alone(found: os.stat_result) -> bool:
    """Of a file or folder: nobody else may write to it. Where there are no such rights, that is not known."""
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return False
    return hasattr(os, "getuid") and found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
