"""The command `dta`: look at the plan of a batch of token sequences, divide GPUs, or run the demo.

`dta plan` and `dta split` need numpy, networkx and rich only; torch is imported by `dta demo` alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from dta_compile.cli.render import as_dot, as_json, levels, tree_view
from dta_compile.cli.split_command import add_split
from dta_compile.data import Rollout, load_rollouts
from dta_compile.errors import DTAError, PlanError
from dta_compile.options import CHOICES, Options
from dta_compile.plan import Plan, PrefixTree, plan
from dta_compile.plan.schedule import MODES
from dta_compile.plan.tree.split_prefixes import with_routes

# Segments and levels of the tree, and operations of the schedule, that are printed without --full.
MOST_NODES, MOST_LEVELS, MOST_OPS = 40, 10, 40
LABEL_WIDTH = 120  # columns for the longest label of a segment


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 0 on success, 2 for input or options that cannot be used, which are named on standard error."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except DTAError as error:
        print(f"dta: {error}", file=sys.stderr)
    except OSError as error:
        print(f"dta: {error.filename or 'input'}: {error.strerror or error}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dta", description="Train causal language models over prefix trees.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_plan(commands.add_parser("plan", help="plan a batch of token sequences and print what would be run"))
    add_split(commands.add_parser("split", help="divide GPUs between rollout generation and training"))
    _add_demo(commands.add_parser("demo", help="train a small model with eager and with dta side by side"))
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    defaults = Options()
    parser.set_defaults(run=_plan)
    parser.description = "Print summary, prefix tree and (with --schedule) the operations of the plan of FILE."
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a rollout file (.npz), JSON lines of token lists or of objects with tokens and routes, or - for stdin",
    )
    parser.add_argument("--chunk-size", type=int, default=defaults.chunk_tokens, help="default: %(default)s")
    for key in ("strategy", "order"):
        choices = ", ".join(CHOICES[key])
        parser.add_argument(f"--{key}", default=getattr(defaults, key), help=f"{choices} (default: %(default)s)")
    parser.add_argument("--mode", choices=MODES, default="transparent", help="how it is driven (default: %(default)s)")
    parser.add_argument("--memory-budget", type=int, metavar="BYTES", help="of activations kept (default: all of them)")
    parser.add_argument("--bytes-per-token", type=int, help="activations of one token, for a --memory-budget above 0")
    parser.add_argument("--kv-bytes-per-token", type=int, default=0, help="keys and values of one token, all layers")
    parser.add_argument("--leaf-only", action="store_true", help="leave out sequences that are prefixes of others")
    parser.add_argument("--schedule", action="store_true", help="print the operations too")
    parser.add_argument("--full", action="store_true", help="print tree and schedule to the end, however long")
    parser.add_argument("--json", metavar="OUT", help="write the plan as JSON to OUT (- for stdout) and print nothing")
    parser.add_argument("--dot", metavar="OUT", help="write the tree as Graphviz DOT to OUT (- for stdout) instead")
    parser.add_argument("--html", metavar="OUT", help="write a page to look at to OUT: tree, schedule, memory")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_demo)
    parser.description = "GRPO on bundled real rollouts: the same optimiser steps by eager and by dta, side by side."
    parser.add_argument("--turns", type=int, default=3, help="assistant turns per trajectory (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--chunk-size", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--micro-batch", type=int, default=1, help="rows per eager call (default: %(default)s)")
    parser.add_argument("--backend", default="dta", help="backend to compare with eager (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")


def _demo(arguments: argparse.Namespace) -> int:
    for name in ("turns", "steps", "micro_batch"):
        if getattr(arguments, name) < 1:
            raise PlanError(f"bad value for --{name.replace('_', '-')}", expected="1 or more")
    try:
        from dta_compile.cli import demo
    except ImportError as error:
        raise DTAError(f"the demo needs {error.name}", hint="pip install 'dta-compile[hf]'") from error
    given = {key: value for key, value in vars(arguments).items() if key != "run"}
    return demo.main(demo.Settings(**given), Console())


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.html == "-":
        raise PlanError("a page is not for the terminal", expected="--html with the name of a file")
    sequences = read_sequences(arguments.file, arguments.leaf_only)
    made = plan(
        [one.tokens for one in sequences],
        routes=_routes(sequences),
        mode=arguments.mode,
        chunk_size=arguments.chunk_size,
        strategy=arguments.strategy,
        order=arguments.order,
        memory_budget=arguments.memory_budget,
        bytes_per_token=arguments.bytes_per_token,
        kv_bytes_per_token=arguments.kv_bytes_per_token,
    )
    for target, render in ((arguments.json, as_json), (arguments.dot, as_dot)):
        if target:
            _write(target, render(made))
    if arguments.html:
        made.to_html(arguments.html, title=_name(arguments.file), **_known(sequences))
    if not (arguments.json or arguments.dot or arguments.html):
        _print(made, arguments)
    return 0


class Recorded(NamedTuple):
    """A token sequence, the routes `[n, ...]` of its tokens if they were recorded, and the sample of a rollout file."""

    tokens: Any
    routes: Any | None = None
    rollout: Rollout | None = None


def read_sequences(path: str, leaf_only: bool = False) -> list[Recorded]:
    """The sequences of a rollout file (`.npz`) or of JSON lines, "-" being standard input.

    Args:
        path: the file.
        leaf_only: leave out sequences that are strict prefixes of others.

    Raises:
        OSError: the file cannot be read.
        PlanError: a line has no list of token ids (naming the line), or the file is no rollout file.
    """
    if path.endswith(".npz"):
        sequences = [Recorded(rollout.tokens, rollout.routes, rollout) for rollout in load_rollouts(path)]
    else:
        sequences = list(_parse_lines(path, _read_text(path).splitlines()))
    if leaf_only:
        tokens, routes = [one.tokens for one in sequences], _routes(sequences)
        tree = PrefixTree.build(tokens) if routes is None else with_routes(tokens, routes)[0]
        leaves = set(tree.leaves)
        sequences = [sequence for sequence, end in zip(sequences, tree.end_node, strict=True) if int(end) in leaves]
    return sequences


def _routes(sequences: list[Recorded]) -> list[Any] | None:
    """The routes of all sequences; None if none were recorded."""
    if all(one.routes is None for one in sequences):
        return None
    missing = [number for number, one in enumerate(sequences) if one.routes is None]
    if missing:
        raise PlanError("routes are there for some sequences only", got=f"none for sequence {missing[0]}")
    return [one.routes for one in sequences]


def _known(sequences: list[Recorded]) -> dict[str, Any]:
    """What a page shows of the samples of a rollout file: rewards, tokens that are trained on, names."""
    rollouts = [one.rollout for one in sequences if one.rollout is not None]
    if len(rollouts) < len(sequences) or not sequences:
        return {}
    return {
        "rewards": [rollout.reward for rollout in rollouts],
        "loss_masks": [rollout.spans for rollout in rollouts],
        "names": [f"task {rollout.group} · trial {rollout.trial} · turn {rollout.turn}" for rollout in rollouts],
    }


def _name(path: str) -> str:
    return "standard input" if path == "-" else Path(path).name


def _read_text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(
            "not a text file", where=path, expected="a rollout file that ends in .npz, or JSON lines of token lists"
        ) from error


def _parse_lines(path: str, lines: Iterable[str]) -> Iterator[Recorded]:
    name = "standard input" if path == "-" else path
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        tokens, routes = (value.get("tokens"), value.get("routes")) if isinstance(value, dict) else (value, None)
        # JSON's true and false are ints to Python, but no token ids.
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise PlanError(
                "a line is not a list of token ids",
                where=f"{name}, line {number}",
                expected="a JSON list of integers, such as [151644, 8948, 198], or an object with tokens and routes",
                got=line if len(line) <= 60 else line[:57] + "...",
            )
        yield Recorded(tokens, None if routes is None else _as_routes(routes, f"{name}, line {number}"))


def _as_routes(value: Any, where: str) -> Any:
    try:
        routes = np.array(value)
    except ValueError:
        routes = None
    if not isinstance(value, list) or routes is None or (routes.size and routes.dtype.kind != "i"):
        raise PlanError(
            "routes are not integers of one shape for every token",
            where=where,
            expected='"routes": an entry for every token, such as the experts of every layer [[0, 5], [3, 1]]',
        )
    return routes


def _write(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def _print(made: Plan, arguments: argparse.Namespace) -> None:
    console = Console(highlight=False)
    console.print(str(made), markup=False, soft_wrap=True)
    console.print()
    if arguments.full:
        # Deep trees run past the edge of the terminal instead of being folded at it.
        console.width = max(console.width, LABEL_WIDTH + 4 * levels(made))
        console.print(tree_view(made), soft_wrap=True)
    else:
        console.print(tree_view(made, MOST_NODES, MOST_LEVELS), soft_wrap=True)
    if arguments.schedule:
        lines = str(made.schedule).splitlines()
        shown = lines if arguments.full else lines[: MOST_OPS + 1]
        console.print("", *shown, sep="\n", markup=False, soft_wrap=True)
        if len(shown) < len(lines):
            console.print(f"... and {len(lines) - len(shown):,} more operations (--full shows all)", style="dim")
