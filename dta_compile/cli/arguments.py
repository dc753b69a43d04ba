"""The parser of the command line: whatever cannot be used is an `OptionError`, numbers out of range too."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from dta_compile.data import ReadOptions, Recorded, Recording, read
from dta_compile.data.recorded import LOSSES, TURNS
from dta_compile.errors import OptionError, PlanError
from dta_compile.files import write_output
from dta_compile.options import MOST_BYTES, as_bytes
from dta_compile.plan import PrefixTree
from dta_compile.plan.tree.split_prefixes import with_routes

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


def size(text: str) -> int:
    """A type of argument: bytes, as a number or like 8GB."""
    value = as_bytes(text)
    if value is None or value > MOST_BYTES:
        raise argparse.ArgumentTypeError(f"expected bytes, as a number or like 8GB or 1.5GiB, got {text[:40]!r}")
    return value


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


FILE = (
    "a rollout file (.npz), JSON lines (token ids, objects with tokens and routes, chat transcripts, verl's dumps), "
    "parquet (TRL's completions), a folder of these or of datasets' save_to_disk, or - for stdin"
)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Declare FILE and how it is read."""
    parser.add_argument("file", metavar="FILE", help=FILE)
    text = parser.add_argument_group("text", "how transcripts and texts become tokens")
    text.add_argument("--tokenizer", metavar="NAME_OR_FOLDER", help="for transformers, or a tokenizer.json")
    text.add_argument("--chat-template", metavar="FILE", help="instead of the tokenizer's own")
    text.add_argument(
        "--template-value",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="given to the template, such as enable_thinking=false; may be repeated",
    )
    text.add_argument(
        "--turns",
        choices=TURNS,
        default=TURNS[0],
        help="each assistant turn is a sample, or the whole transcript (default: %(default)s)",
    )
    text.add_argument(
        "--loss",
        choices=LOSSES,
        help="the last assistant turn of a sample counts, or all (default: last for each, all for whole)",
    )
    text.add_argument("--split", help="of a folder of several splits")


def read_options(arguments: argparse.Namespace) -> ReadOptions:
    """How FILE is to be read."""
    values = {}
    for given in arguments.template_value:
        key, separator, value = given.partition("=")
        if not separator:
            raise OptionError("bad value for --template-value", expected="KEY=VALUE", got=repr(given))
        try:
            values[key] = json.loads(value)
        except (ValueError, RecursionError):
            values[key] = value
    return ReadOptions(
        arguments.tokenizer, arguments.chat_template, values, arguments.turns, arguments.loss, arguments.split
    )


def read_source(path: str, options: ReadOptions, leaf_only: bool = False) -> Recording:
    """The sequences of a file, without those that are strict prefixes of others if only leaves are wanted."""
    recording = read(path, options)
    if not leaf_only:
        return recording
    batches = tuple(map(leaves_only, recording.batches))
    return dataclasses.replace(recording, sequences=[one for batch in batches for one in batch], batches=batches)


def leaves_only(sequences: list[Recorded]) -> list[Recorded]:
    """Those that are no strict prefixes of others."""
    tokens, routes = [one.tokens for one in sequences], routes_of(sequences)
    tree = PrefixTree.build(tokens) if routes is None else with_routes(tokens, routes)[0]
    is_leaf = np.isin(tree.end_node, tree.leaves)
    return [sequence for sequence, kept in zip(sequences, is_leaf.tolist(), strict=True) if kept]


def routes_of(sequences: list[Recorded]) -> list[Any] | None:
    """The routes of all sequences; None if none were recorded.

    Raises:
        PlanError: some have routes and some have not.
    """
    if all(one.routes is None for one in sequences):
        return None
    missing = [number for number, one in enumerate(sequences) if one.routes is None]
    if missing:
        raise PlanError("routes are there for some sequences only", got=f"none for sequence {missing[0]}")
    return [one.routes for one in sequences]
