"""Files of the program cache: written atomically, checked when read, and bounded in total bytes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pathlib

from dta_compile.files import UNFINISHED, own_folder, read_own, write_whole

FOLDER = "programs"  # in the cache folder
FORMAT = b"dta_compile program 3\n"
MOST_BYTES = 2**28  # of all files; the least recently used are removed
SUFFIX = ".program"
ABANDONED = 3600.0  # seconds after which an unfinished file is removed
HASH = 32  # bytes of a SHA-256

logger = logging.getLogger("dta_compile")


def open_folder(cache: pathlib.Path) -> pathlib.Path | None:
    """Return the folder for programs; None if it is unusable or writable by others, since the files hold code."""
    try:
        return own_folder(cache / FOLDER)
    except (OSError, ValueError) as error:
        _say_once(cache / FOLDER, str(error))
        return None


@functools.cache
def _say_once(folder: pathlib.Path, reason: str) -> None:
    logger.info("dta: no programs are kept in %s: %s", folder, reason)


class ProgramFile:
    """File of one program: a checksum, the hash of its description, and the data.

    Args:
        folder: result of `open_folder`.
        description: text of the program; its hash also names the file.
    """

    def __init__(self, folder: pathlib.Path, description: str) -> None:
        hashed = hashlib.sha256(description.encode())
        self.described = hashed.digest()
        self.path = folder / f"{hashed.hexdigest()[:40]}{SUFFIX}"

    def read(self) -> bytes | None:
        """Return the data; None if there is no file. Raises `OSError` or `ValueError` for an unusable file."""
        try:
            data = read_own(self.path)
        except FileNotFoundError:
            return None
        start = len(FORMAT)
        hashed, body = data[start : start + HASH], data[start + HASH :]
        if not data.startswith(FORMAT) or hashlib.sha256(body).digest() != hashed:
            raise ValueError("it is torn")
        if body[:HASH] != self.described:
            raise ValueError("it is of another program")
        return body[HASH:]

    def touch(self) -> None:
        """Mark the file as recently used."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def write(self, data: bytes) -> None:
        """Write the data. Raises `OSError`."""
        if len(data) > MOST_BYTES // 4:
            raise OSError(f"{len(data)} bytes are too many")
        body = self.described + data
        write_whole(self.path, FORMAT + hashlib.sha256(body).digest() + body)
        self._make_room()

    def remove(self) -> None:
        """Remove the file, so that the next process writes it again."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _make_room(self) -> None:
        """Remove abandoned and least recently used files, which other processes may also be removing."""
        files = []
        for path in self.path.parent.iterdir():
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        now, total = max(files, default=(0.0,))[0], 0
        for written, size, path in sorted(files, reverse=True):
            total += size
            is_abandoned = path.suffix == UNFINISHED and now - written > ABANDONED
            is_last = path.suffix == SUFFIX and total > MOST_BYTES
            if path != self.path and (is_abandoned or is_last):
                with contextlib.suppress(OSError):
                    path.unlink()
