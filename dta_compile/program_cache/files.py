"""Files of analysed programs: written as a whole, checked when they are read, bounded in number of bytes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import secrets
import stat

FOLDER = "programs"  # in the folder of calibrations
FORMAT = b"dta_compile program 1\n"
MOST_BYTES = 2**28  # of all files; those that were not read for longest are removed
SUFFIX, UNFINISHED = ".program", ".tmp"
NONBLOCK = getattr(os, "O_NONBLOCK", 0)
ABANDONED = 3600.0  # seconds after which a file that a process was writing is nobody's

logger = logging.getLogger("dta_compile")


def open_folder(cache: pathlib.Path) -> pathlib.Path | None:
    """The folder for programs; None where there can be none, or others could have put files there: they hold code."""
    folder = cache / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_safe = _is_ours_alone(folder.stat())
    except OSError as error:
        _say_once(folder, str(error))
        return None
    if not is_safe:
        _say_once(folder, "others may write to it")
    return folder if is_safe else None


def _is_ours_alone(found: os.stat_result) -> bool:
    """Of a file or folder: nobody else may write to it. Where there are no such rights, that is not known."""
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return False
    return hasattr(os, "getuid") and found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@functools.cache
def _say_once(folder: pathlib.Path, reason: str) -> None:
    logger.info("dta: no programs are kept in %s: %s", folder, reason)


class ProgramFile:
    """What is kept of one program: parts that are bytes.

    Args:
        folder: as `open_folder` gave it.
        description: of the program; its hash is the name of the file.
    """

    def __init__(self, folder: pathlib.Path, description: str) -> None:
        name = hashlib.sha256(description.encode()).hexdigest()[:40]
        self.path = folder / f"{name}{SUFFIX}"

    def read(self) -> list[bytes] | None:
        """The parts; None if there is no file. Raises `OSError` or `ValueError` for a file that is not ours."""
        try:
            # Not to wait for what is no file.
            with open(self.path, "rb", opener=lambda path, flags: os.open(path, flags | NONBLOCK)) as file:
                if not _is_ours_alone(os.fstat(file.fileno())):
                    raise ValueError("others may have written it")
                data = file.read()
        except FileNotFoundError:
            return None
        hashed, body = data[len(FORMAT) : len(FORMAT) + 32], data[len(FORMAT) + 32 :]
        if not data.startswith(FORMAT) or hashlib.sha256(body).digest() != hashed:
            raise ValueError("it is torn")
        parts = []
        while body:
            size = int.from_bytes(body[:8], "little")
            parts.append(body[8 : 8 + size])
            body = body[8 + size :]
        return parts

    def touch(self) -> None:
        """Note that it was of use."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def write(self, parts: list[bytes]) -> None:
        """Keep these; whoever reads meanwhile meets the file before or after. Raises `OSError`."""
        body = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        if len(body) > MOST_BYTES // 4:
            raise OSError(f"{len(body)} bytes are too many")
        unfinished = self.path.with_suffix(f".{secrets.token_hex(4)}{UNFINISHED}")
        try:
            with open(unfinished, "xb", opener=functools.partial(os.open, mode=0o600)) as file:
                file.write(FORMAT + hashlib.sha256(body).digest() + body)
            unfinished.replace(self.path)
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink()
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
