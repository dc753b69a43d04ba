"""Argument parser shared by the subcommands of `dta`.

Every unusable argument, including a number out of range, raises OptionError.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from dta_compile.data import ReadOptions, Recorded, Recording, read
from dta_compile.data.recorded import LOSSES, TURNS
from dta_compile.data.tokenizer import from_json
from dta_compile.errors import OptionError
from dta_compile.estimate.predict import tree_of
from dta_compile.files import write_output
from dta_compile.options import MOST_BYTES, as_bytes

Number = TypeVar("Number", int, float)
MOST = 2**62  # largest count that an argument may have


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that raises OptionError instead of ending the process, for its own arguments alone."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; a parser of a subcommand leaves none to `dta`, whose help does not list them."""
        namespace, rest = super().parse_known_args(args, namespace)
        if hasattr(namespace, "settings") and not any(word.startswith("-") for word in rest):
            # argparse takes arguments of any number up to the first option only.
            namespace.settings, rest = [*namespace.settings, *rest], []
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return namespace, rest

    def error(self, message: str) -> NoReturn:
        """Raise OptionError with the message that argparse would print."""
        raise OptionError(message, hint=f"{self.prog} --help says what can be given")


def refuse_unused(
    arguments: argparse.Namespace, needs: Mapping[str, str], excludes: Mapping[str, Sequence[str]]
) -> None:
    """Refuse arguments that would be read and have no effect.

    Args:
        needs: by argument, the one without which it says nothing.
        excludes: by argument, those that say nothing beside it.

    Raises:
        OptionError: one of them is given, and is not what it is by default.
    """
    given = {name for name, value in vars(arguments).items() if value != arguments.parser.get_default(name)}
    alone = ((name, "without", other) for name, other in needs.items() if other not in given)
    beside = ((name, "with", other) for other, names in excludes.items() if other in given for name in names)
    for name, word, other in (*alone, *beside):
        if name in given:
            first, second = (f"--{flag.replace('_', '-')}" for flag in (name, other))
            raise OptionError(f"{first} has no effect {word} {second}", hint=f"leave out {first}, or see --help")


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """Return an argument type: integers in [least, most]."""
    return _between(int, least, most, f"an integer from {least} to {most}")


def real(least: float, most: float) -> Callable[[str], float]:
    """Return an argument type: finite numbers in [least, most]."""
    return _between(float, least, most, f"a number from {least:g} to {most:g}")


def _between(convert: Callable[[str], Number], least: float, most: float, expected: str) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        with contextlib.suppress(ValueError):
            if least <= (value := convert(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text[:40]!r}")

    return parse


def size(text: str) -> int:
    """Parse a number of bytes, such as 1024 or 8GB."""
    value = as_bytes(text)
    if value is None or value > MOST_BYTES:
        raise argparse.ArgumentTypeError(f"expected bytes, as a number or like 8GB or 1.5GiB, got {text[:40]!r}")
    return value


LONGEST = 1000  # most characters per line of a message


def visible(text: str) -> str:
    """Escape line breaks and control characters in untrusted text, so that it fits on one line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def message(text: str) -> str:
    """Escape and shorten every line of a message that may quote untrusted text."""
    lines = [visible(line) for line in text.split("\n")]
    return "\n".join(line if len(line) <= LONGEST else line[:LONGEST] + "..." for line in lines)


def write(target: str, text: str) -> None:
    """Write text to a file, atomically; `-` is standard output."""
    if target == "-":
        sys.stdout.write(text)
    else:
        write_output(target, text)


FILE = (
    "a rollout file (.npz), JSON lines (token ids, objects with tokens, routes and images, chat transcripts, verl's "
    "dumps), parquet (TRL's completions), a folder of these or of datasets' save_to_disk, or - for stdin"
)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Declare FILE and the options for reading it."""
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
    """Collect the options for reading FILE."""
    values = {}
    for pair in arguments.template_value:
        key, separator, value = pair.partition("=")
        if not separator:
            raise OptionError("bad value for --template-value", expected="KEY=VALUE", got=repr(pair))
        values[key] = from_json(value)
    return ReadOptions(
        arguments.tokenizer, arguments.chat_template, values, arguments.turns, arguments.loss, arguments.split
    )


def read_source(path: str, options: ReadOptions, leaf_only: bool = False) -> Recording:
    """Read the sequences of a file; with `leaf_only`, drop those that are strict prefixes of others."""
    recording = read(path, options)
    if leaf_only:
        recording = dataclasses.replace(recording, batches=tuple(map(leaves_only, recording.batches)))
    return recording


def leaves_only(sequences: list[Recorded]) -> list[Recorded]:
    """Drop sequences that are strict prefixes of others."""
    tree = tree_of(sequences)
    is_leaf = np.isin(tree.end_node, tree.leaves)
    return [sequence for sequence, leaf in zip(sequences, is_leaf.tolist(), strict=True) if leaf]
