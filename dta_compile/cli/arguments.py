"""The parser of the command line: whatever cannot be used is an `OptionError`, numbers out of range too."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from dta_compile.errors import OptionError

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
