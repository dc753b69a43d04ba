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
MOST_LINKS = 40  # on the way to a folder


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


def own_folder(path: pathlib.Path) -> pathlib.Path:
    """Find a folder for files that hold code, or make it; with links followed.

    Every folder on the way is looked at before what is in it. So nobody else can put anything in the place of what is
    found in the end, and paths below it may be used without another look.

    Raises:
        ValueError: other users than this one and root may have put something there, or can do so.
        OSError: it cannot be made.
    """
    here, pending, links = pathlib.Path("/"), list(reversed(path.absolute().parts[1:])), 0
    while pending:
        require_own(here)
        part = pending.pop()
        if part == os.pardir:
            here = here.parent
            continue
        with contextlib.suppress(FileExistsError):
            if not os.path.lexists(here / part):
                (here / part).mkdir(mode=0o700)
        found = (here / part).lstat()
        if not stat.S_ISLNK(found.st_mode):
            here = here / part
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if not _belongs_here(found):
            raise ValueError(f"the link {here / part} is another user's")
        target = pathlib.Path(os.readlink(here / part))
        here = pathlib.Path("/") if target.is_absolute() else here
        pending += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    if not is_ours_alone(here.stat()):
        raise ValueError(f"others may write to {here}")
    return here


def require_own(path: pathlib.Path) -> None:
    """Raise `ValueError` where others may have written a file, or can exchange what is in a folder.

    In a sticky folder, as /tmp, everybody can exchange what is their own alone.
    """
    found = path.lstat()
    is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    by_group = found.st_mode & stat.S_IWGRP and not _is_group_of_one(found.st_gid)
    if not _belongs_here(found) or ((by_group or found.st_mode & stat.S_IWOTH) and not is_sticky):
        raise ValueError(f"others may write to {path}")


def _belongs_here(found: os.stat_result) -> bool:
    return hasattr(os, "getuid") and found.st_uid in (0, os.getuid())


@functools.cache
def _is_group_of_one(group: int) -> bool:
    """Whether a group is root's or this user's own, as where a umask of 002 is the default."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name in (user, "root") and set(found.gr_mem) <= {user, "root"}
