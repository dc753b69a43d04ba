"""The FILE of a command: its options, and the sequences that are read from it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import numpy as np

from dta_compile.data import ReadOptions, Recorded, Recording, read
from dta_compile.data.recorded import LOSSES, TURNS
from dta_compile.errors import OptionError, PlanError
from dta_compile.plan import PrefixTree
from dta_compile.plan.tree.split_prefixes import with_routes

__all__ = ["add_source", "leaves_only", "read_options", "read_source", "routes_of"]

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
    return dataclasses.replace(recording, sequences=leaves_only(recording.sequences))


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
