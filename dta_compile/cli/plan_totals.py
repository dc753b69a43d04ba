"""Totals of `dta plan` over several batches, and two variants of one command side by side."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dta_compile.cli.arguments import read_options, read_source, visible, whole
from dta_compile.data import Recorded, Recording
from dta_compile.errors import OptionError
from dta_compile.estimate.predict import tree_of
from dta_compile.plan import Plan, PrefixTree

ARRANGEMENTS = ("file", "shuffled", "length", "prefix")
SEED = 0  # seed of the shuffle
MakePlan = Callable[[list[Recorded], argparse.Namespace], Plan]

# Keys of --compare: FILE, the options that a key is named after, and short for --chat-template.
KEYS = (
    *("file", "template", "chat-template", "tokenizer", "turns", "split", "rows", "arrange", "order", "strategy"),
    "chunk-size",
)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Figures summed over all batches.

    Attributes:
        batches, sequences, tokens: counts.
        tree_tokens: tokens that are run.
        forwarded_twice: forward work beyond one forward of the trees.
        pairs: query-key pairs of the trees, forward.
        peak_stack_tokens: peak of the batch with the largest stack.
        together: tokens of one tree over all sequences.
        seconds: estimate by the cost model's defaults, which know no device: only for comparison.
    """

    batches: int
    sequences: int
    tokens: int
    tree_tokens: int
    forwarded_twice: int
    pairs: int
    peak_stack_tokens: int
    together: int
    seconds: float

    @property
    def compression(self) -> float:
        """Ratio of sequence tokens to tokens that are run."""
        return self.tokens / self.tree_tokens if self.tree_tokens else 1.0

    def to_json(self) -> str:
        """Return all figures as a JSON object."""
        return json.dumps({**dataclasses.asdict(self), "compression": self.compression}, indent=1) + "\n"


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Declare the options that form batches and compare variants."""
    batches = parser.add_argument_group("batches")
    batches.add_argument("--rows", type=whole(1), metavar="N", help="sequences of a batch (default: those of a file)")
    batches.add_argument(
        "--arrange",
        choices=ARRANGEMENTS,
        default=ARRANGEMENTS[0],
        help="in which order batches are filled: as in FILE, shuffled, by length, or by prefix (default: %(default)s)",
    )
    batches.add_argument(
        "--compare",
        metavar="KEY=VALUE",
        nargs="+",
        help=f"beside it, the same with something else: {', '.join(KEYS)}; template=keep.jinja, arrange=shuffled",
    )


def totals(recording: Recording, arguments: argparse.Namespace, make_plan: MakePlan) -> Totals:
    """Plan all batches of what a command reads and sum their figures."""
    sequences = recording.sequences
    if arguments.rows is None and arguments.arrange == ARRANGEMENTS[0]:
        batches: Sequence[list[Recorded]] = recording.batches
    else:
        batches = _batches(sequences, arguments.rows, arguments.arrange)
    plans = [make_plan(batch, arguments) for batch in batches]
    stats = [plan.stats for plan in plans]
    return Totals(
        batches=len(plans),
        sequences=len(sequences),
        tokens=sum(batch.tokens for batch in stats),
        tree_tokens=sum(batch.tree_tokens for batch in stats),
        forwarded_twice=sum(batch.tokens_forwarded_twice for batch in stats),
        pairs=sum(plan.simulation.forward.pairs for plan in plans),
        peak_stack_tokens=max((batch.peak_stack_tokens for batch in stats), default=0),
        together=tree_of(sequences).num_rows,
        seconds=sum(plan.estimates.seconds for plan in plans),
    )


def compare(arguments: argparse.Namespace, other: argparse.Namespace, make_plan: MakePlan, console: Console) -> str:
    """Print a command and its variant side by side and return the figures of both as JSON.

    Raises:
        OptionError: both read standard input, each in its own way.
    """
    sources = [(one.file, read_options(one), one.leaf_only) for one in (arguments, other)]
    if sources[0] != sources[1] and sources[0][0] == sources[1][0] == "-":
        raise OptionError("standard input can be read once", hint="write it to a file, to compare ways of reading it")
    first = read_source(*sources[0])
    second = first if sources[0] == sources[1] else read_source(*sources[1])
    variants = [totals(first, arguments, make_plan), totals(second, other, make_plan)]
    if not arguments.json:
        print_totals(["as given", escape(visible(" ".join(arguments.compare)))], variants, console)
    return f"[{','.join(variant.to_json() for variant in variants)}]\n"


def print_totals(titles: Sequence[str], variants: Sequence[Totals], console: Console) -> None:
    """Print a table with one column per variant and, for two variants, their ratio."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for title in titles:
        table.add_column(title, justify="right", overflow="fold")
    if len(variants) > 1:
        table.add_column("", justify="right", style="dim")
    rows: list[tuple[str, Callable[[Totals], float], str]] = [
        ("batches", lambda variant: variant.batches, ",d"),
        ("sequences", lambda variant: variant.sequences, ",d"),
        ("tokens", lambda variant: variant.tokens, ",d"),
        ("tokens to run", lambda variant: variant.tree_tokens, ",d"),
        ("C", lambda variant: variant.compression, ".2f"),
        ("in one batch, C", lambda variant: variant.tokens / variant.together if variant.together else 1.0, ".2f"),
        ("query-key pairs", lambda variant: variant.pairs, ",d"),
        ("forwarded twice", lambda variant: variant.forwarded_twice, ",d"),
        ("most on the stack", lambda variant: variant.peak_stack_tokens, ",d"),
    ]
    for label, value, form in rows:
        values = [value(variant) for variant in variants]
        ratio = [f"x{values[1] / values[0]:.2f}" if values[0] else ""] if len(values) == 2 else []
        table.add_row(label, *(format(number, form) for number in values), *ratio)
    if len(variants) > 1 and variants[0].seconds:
        table.add_row("estimated time", "1.00", f"{variants[1].seconds / variants[0].seconds:.2f}", "not calibrated")
    console.print(table)


def changed(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with the changes of `--compare`, which are parsed like the options that they stand for.

    Raises:
        OptionError: `--compare` names a key or value that is not supported.
    """
    other = copy.copy(arguments)
    for pair in arguments.compare:
        key, separator, value = pair.partition("=")
        if not separator or key not in KEYS:
            expected = f"KEY=VALUE with a key of {', '.join(KEYS)}"
            raise OptionError("bad value for --compare", expected=expected, got=repr(pair))
        option = [] if key == "file" else [f"--{'chat-template' if key == 'template' else key}={value}"]
        arguments.parser.parse_args([*option, "--", value if key == "file" else other.file], other)
    return other


def _batches(sequences: list[Recorded], rows: int | None, arrange: str) -> list[list[Recorded]]:
    order = list(range(len(sequences)))
    if arrange == "shuffled":
        order = np.random.default_rng(SEED).permutation(len(sequences)).tolist()
    elif arrange == "length":
        order.sort(key=lambda i: len(sequences[i]))
    elif arrange == "prefix":
        order = PrefixTree.build([sequence.tokens for sequence in sequences]).order.tolist()
    arranged = [sequences[i] for i in order]
    if rows is None:
        return [arranged]
    return [arranged[first : first + rows] for first in range(0, len(arranged), rows)] or [[]]
