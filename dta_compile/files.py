"""File access: atomic writes, reads of regular files only, and files of code that no other user can have written."""

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


MOST_BYTES = 2**31  # of one text
PIECE = 2**24  # bytes per read
MOST_LINKS = 40  # symbolic links on the path of a folder


def write_whole(path: pathlib.Path, data: bytes, mode: int = 0o600) -> None:
    """Write a temporary file and rename it, so that concurrent readers see either the old or the new contents.

    Raises:
        OSError: the file cannot be written; no temporary file is left behind.
    """
    unfinished = path.with_name(f".{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with open(unfinished, "xb", opener=functools.partial(os.open, mode=mode)) as file:
            file.write(data)
        unfinished.replace(path)
    except OSError as error:
        if error.filename is not None:
            error.filename, error.filename2 = str(path), None  # the only name that the caller knows
        raise
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def write_output(path: str | os.PathLike[str], text: str) -> None:
    """Write an output that the user named: a file atomically, following links; a terminal or pipe directly.

    Raises:
        OSError: it cannot be written; an existing file is unchanged.
    """
    content = text.encode("utf-8", "backslashreplace")
    target = pathlib.Path(os.path.realpath(path))
    mode = target.stat().st_mode if target.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        target.write_bytes(content)
        return
    write_whole(target, content, 0o666)
    if mode is not None:
        target.chmod(stat.S_IMODE(mode))


def open_regular(path: pathlib.Path) -> IO[bytes]:
    """Open a file for reading.

    Raises:
        OSError: it cannot be read, or is a pipe or device, which might never end.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_text(source: str | os.PathLike[str] | IO[bytes], most: int = MOST_BYTES) -> str:
    """Read the text of a file or stream of at most `most` bytes, without a UTF-8 byte order mark.

    Raises:
        OSError: it cannot be read, or is larger.
        UnicodeError: it is not text.
    """
    if isinstance(source, (str, os.PathLike)):
        with open_regular(pathlib.Path(source)) as file:
            return read_text(file, most)
    pieces: list[bytes] = []
    while piece := source.read(PIECE):
        most -= len(piece)
        if b"\0" in piece:  # never in text, but an endless device may send nothing else
            raise UnicodeError("a NUL byte")
        if most < 0:
            raise OSError(errno.EFBIG, "too large", str(getattr(source, "name", "input")))
        pieces.append(piece)
    return b"".join(pieces).decode("utf-8-sig")


def read_own(path: pathlib.Path) -> bytes:
    """Read a file that holds code.

    Raises:
        ValueError: other users may have written it.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        if not is_ours_alone(os.fstat(file.fileno())):
            raise ValueError("others may have written it")
        return file.read()


def is_ours_alone(status: os.stat_result) -> bool:
    """Return whether a file or folder is writable by this user alone; False on systems without POSIX permissions."""
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return False
    return hasattr(os, "getuid") and status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def own_folder(path: pathlib.Path) -> pathlib.Path:
    """Find or create a folder for files that hold code; return its path with links resolved.

    Every parent folder is checked before its entries are. So nobody else can exchange the folder that is returned, and
    paths below it need no further check.

    Raises:
        ValueError: users other than this one and root may have written there, or can do so.
        OSError: the folder cannot be created.
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
        status = (here / part).lstat()
        if not stat.S_ISLNK(status.st_mode):
            here = here / part
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if not _belongs_here(status):
            raise ValueError(f"the link {here / part} is another user's")
        target = pathlib.Path(os.readlink(here / part))
        here = pathlib.Path("/") if target.is_absolute() else here
        pending += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    if not is_ours_alone(here.stat()):
        raise ValueError(f"others may write to {here}")
    return here


def require_own(path: pathlib.Path) -> None:
    """Raise `ValueError` if others may have written a file, or can exchange the entries of a folder.

    In a sticky folder, such as /tmp, users can exchange their own entries only.
    """
    status = path.lstat()
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    by_group = status.st_mode & stat.S_IWGRP and not _is_group_of_one(status.st_gid)
    if not _belongs_here(status) or ((by_group or status.st_mode & stat.S_IWOTH) and not is_sticky):
        raise ValueError(f"others may write to {path}")


def _belongs_here(status: os.stat_result) -> bool:
    return hasattr(os, "getuid") and status.st_uid in (0, os.getuid())


@functools.cache
def _is_group_of_one(group: int) -> bool:
    """Return whether a group is root's or this user's private group, the case where a umask of 002 is the default."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name in (user, "root") and set(entry.gr_mem) <= {user, "root"}
