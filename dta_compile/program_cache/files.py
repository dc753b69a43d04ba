"""Files of analysed programs: written as a whole, checked when they are read, bounded in number of bytes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pathlib

from dta_compile.files import UNFINISHED, own_folder, read_own, write_whole

FOLDER = "programs"  # in the folder of calibrations
FORMAT = b"dta_compile program 3\n"
MOST_BYTES = 2**28  # of all files; those that were not read for longest are removed
SUFFIX = ".program"
ABANDONED = 3600.0  # seconds after which a file that a process was writing is nobody's
HASH = 32  # bytes of a SHA-256

logger = logging.getLogger("dta_compile")


def open_folder(cache: pathlib.Path) -> pathlib.Path | None:
    """The folder for programs; None where there can be none, or others could have put files there: they hold code."""
    try:
        return own_folder(cache / FOLDER)
    except (OSError, ValueError) as error:
        _say_once(cache / FOLDER, str(error))
        return None


@functools.cache
def _say_once(folder: pathlib.Path, reason: str) -> None:
    logger.info("dta: no programs are kept in %s: %s", folder, reason)


class ProgramFile:
    """What is kept of one program: a hash of its description, and bytes.

    Args:
        folder: as `open_folder` gave it.
        description: of the program; its hash is the name of the file, too.
    """

    def __init__(self, folder: pathlib.Path, description: str) -> None:
        hashed = hashlib.sha256(description.encode())
        self.described = hashed.digest()
        self.path = folder / f"{hashed.hexdigest()[:40]}{SUFFIX}"

    def read(self) -> bytes | None:
        """The bytes; None if there is no file. Raises `OSError` or `ValueError` for a file that is not ours."""
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
        """Note that it was of use."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def write(self, data: bytes) -> None:
        """Keep these. Raises `OSError`."""
        if len(data) > MOST_BYTES // 4:
            raise OSError(f"{len(data)} bytes are too many")
        body = self.described + data
        write_whole(self.path, FORMAT + hashlib.sha256(body).digest() + body)
        self._make_room()

    def remove(self) -> None:
        """For the next process to write it anew."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _make_room(self) -> None:
        """Remove what others may have removed already."""
        found = []
        for path in self.path.parent.iterdir():
            with contextlib.suppress(OSError):
                known = path.stat()
                found.append((known.st_mtime, known.st_size, path))
        now, total = max(found, default=(0.0,))[0], 0
        for written, size, path in sorted(found, reverse=True):
            total += size
            is_abandoned = path.suffix == UNFINISHED and now - written > ABANDONED
            is_last = path.suffix == SUFFIX and total > MOST_BYTES
            if path != self.path and (is_abandoned or is_last):
                with contextlib.suppress(OSError):
                    path.unlink()
