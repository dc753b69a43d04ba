"""What commands write: files as a whole, texts of others without what a terminal would obey."""

from __future__ import annotations

import sys

from dta_compile.files import write_output

__all__ = ["visible", "write"]

LONGEST = 1000  # characters of a line of a message


def visible(text: str) -> str:
    """Text of somebody else's on one line: breaks and control characters as their escapes."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def message(text: str) -> str:
    """Lines that may have anything in them, for people."""
    lines = [visible(line) for line in text.split("\n")]
    return "\n".join(line if len(line) <= LONGEST else line[:LONGEST] + "..." for line in lines)


def write(target: str, text: str) -> None:
    """To a file, which has all of it or is as it was; `-` is standard output."""
    if target == "-":
        sys.stdout.write(text)
    else:
        write_output(target, text)
