"""The parser of the command line: whatever cannot be used is an `OptionError`, numbers out of range too."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import NoReturn

from dta_compile.errors import OptionError
from dta_compile.files import write_output

__all__ = ["Parser", "real", "whole"]

MOST = 2**62  # of what is counted


class Parser(argparse.ArgumentParser):
    """As argparse's, but errors are raised."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print before it ends the process."""
        raise OptionError(message, hint=f"{self.prog} --help says what can be given")


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """A type of argument: integers in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected an integer from {least} to {most}, got {text[:40]!r}")
        return value

    return parse


def real(least: float, most: float) -> Callable[[str], float]:
    """A type of argument: finite numbers in a range."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a number from {least:g} to {most:g}, got {text[:40]!r}")
        return value

    return parse


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
