"""Files that processes share: written as a whole, and read only where nobody else can have written them."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import secrets
import stat

UNFINISHED = ".tmp"
NONBLOCK = getattr(os, "O_NONBLOCK", 0)


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """Write a file aside and rename it, so that whoever reads meanwhile meets the file before or after.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    unfinished = path.with_suffix(f".{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with open(unfinished, "xb", opener=functools.partial(os.open, mode=0o600)) as file:
            file.write(data)
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def read_own(path: pathlib.Path) -> bytes:
    """Read a file that holds code.

    Raises:
        ValueError: others may have written it.
        OSError: it cannot be read.
    """
    # Not to wait for what is no file.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | NONBLOCK)) as file:
        if not is_ours_alone(os.fstat(file.fileno())):
            raise ValueError("others may have written it")
        return file.read()


def is_ours_alone(found: os.stat_result) -> bool:
    """Of a file or folder: nobody else may write to it. Where there are no such rights, that is not known."""
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return False
    return hasattr(os, "getuid") and found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
