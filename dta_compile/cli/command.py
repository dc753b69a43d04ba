"""The command `dta`, with its command `plan` and the arguments of `demo`; the others have files of their own.

Only `dta demo` and `dta estimate --calibration` import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx
from rich.console import Console

from dta_compile.cli.arguments import (
    Parser,
    add_source,
    message,
    read_options,
    read_source,
    refuse_unused,
    size,
    visible,
    whole,
    write,
)
from dta_compile.cli.check import add_check
from dta_compile.cli.estimate_command import add_estimate
from dta_compile.cli.plan_ranks import add_ranks, plan_over_ranks, print_ranks
from dta_compile.cli.plan_totals import add_compare, changed, compare, print_totals, totals
from dta_compile.cli.split import add_split
from dta_compile.cli.why_command import add_why
from dta_compile.data import Recorded, Recording
from dta_compile.divergence import find_losses
from dta_compile.errors import DTAError, OptionError, PlanError
from dta_compile.estimate.devices import DEVICES, device_named
from dta_compile.estimate.over_ranks import RanksStep
from dta_compile.estimate.predict import OPTIMIZERS, Ranks, keys_of, model_shape, plan_on
from dta_compile.options import CHOICES, MOST_CHUNK_TOKENS, Options
from dta_compile.plan import Plan, plan
from dta_compile.plan.schedule import MODES
from dta_compile.views.texts import as_dot, as_json, tree_view

# Number of largest tree segments and of schedule ops that are printed without --full.
MOST_NODES, MOST_OPS = 10, 40
# Arguments of `dta plan` that are read with another one only, that are for one batch, and that a model says itself.
NEEDS = {"rank": "ranks", "link": "ranks", "device": "config", "optimizer": "config", "thumbnails": "html"}
NEEDS |= {"arrange": "rows"}
OF_ONE_BATCH = ("html", "dot", "schedule", "full", "config", "ranks")
PER_TOKEN = ("bytes_per_token", "kv_bytes_per_token")
UNFORESEEN = "the input cannot be used, or there is an error in dta"
MOST_STEPS = 2**20  # limit on the counts of the demo
LABEL_WIDTH = 120  # columns reserved for the longest segment label


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, 2 after printing an error on standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # file names may contain bytes that are not valid text
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except BrokenPipeError:  # the reader of the output (head, less) has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except DTAError as error:
        refused = error
    except OSError as error:
        name, reason = error.filename or "", error.strerror or str(error)
        refused = DTAError("a file cannot be read or written", where=os.fsdecode(name), got=reason)
    except Exception as error:  # last resort: file readers raise errors of their own that say more
        if os.environ.get("DTA_DEBUG"):
            raise
        refused = DTAError(
            UNFORESEEN,
            where="dta " + " ".join(words),
            got=f"{type(error).__name__}: {error}",
            hint="if nothing is wrong with the files that are named there, report it; with DTA_DEBUG=<folder> in the "
            "environment, the traceback is shown",
        )
    print(f"dta: {message(str(refused))}", file=sys.stderr)
    return 2


def _run(words: list[str]) -> int:
    bad = next((word for word in words if "\0" in word), None)
    if bad is not None:
        raise OptionError("a NUL character in the command line", got=repr(bad))
    arguments = _parser().parse_args(words)
    code: int = arguments.run(arguments)
    sys.stdout.flush()
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="dta", description="Train causal language models over prefix trees.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_plan(commands.add_parser("plan", help="plan a batch of token sequences and print what would be run"))
    add_why(commands.add_parser("why", help="where prefixes could be shared and are not, and why"))
    add_estimate(commands.add_parser("estimate", help="predict time and memory of a step from a model's configuration"))
    add_check(commands.add_parser("check", help="what a trainer's settings leave of the sharing, and what to set"))
    add_split(commands.add_parser("split", help="divide GPUs between rollout generation and training"))
    _add_demo(commands.add_parser("demo", help="train a small model with eager and with dta side by side"))
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    defaults = Options()
    parser.set_defaults(run=_plan, parser=parser)
    parser.description = "Print summary, prefix tree and (with --schedule) the operations of the plan of FILE."
    add_source(parser)
    size_help = f"default: {defaults.chunk_tokens}, and with --ranks as the cost model chooses"
    parser.add_argument("--chunk-size", type=int, help=size_help)
    for key in ("strategy", "order"):
        choices = ", ".join(CHOICES[key])
        parser.add_argument(f"--{key}", default=getattr(defaults, key), help=f"{choices} (default: %(default)s)")
    parser.add_argument("--mode", choices=MODES, default="transparent", help="how it is driven (default: %(default)s)")
    parser.add_argument(
        "--memory-budget", type=size, metavar="SIZE", help="of activations kept, such as 8GB (default: all)"
    )
    parser.add_argument(
        "--bytes-per-token", type=whole(0), help="activations of one token, for a --memory-budget above 0"
    )
    parser.add_argument(
        "--kv-bytes-per-token", type=whole(0), default=0, help="keys and values of one token, all layers"
    )
    parser.add_argument("--config", help="config.json of a model: with it memory is of a device, as in dta estimate")
    parser.add_argument("--device", default="h100", help=f"for --config: {', '.join(DEVICES)} (default: %(default)s)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="none", help="for --config: in the memory too")
    add_compare(parser)
    add_ranks(parser)
    parser.add_argument("--leaf-only", action="store_true", help="leave out sequences that are prefixes of others")
    parser.add_argument("--schedule", action="store_true", help="print the operations too")
    parser.add_argument("--full", action="store_true", help="print tree and schedule to the end, however long")
    parser.add_argument("--json", metavar="OUT", help="write the plan as JSON to OUT (- for stdout) and print nothing")
    parser.add_argument("--dot", metavar="OUT", help="write the tree as Graphviz DOT to OUT (- for stdout) instead")
    parser.add_argument("--html", metavar="OUT", help="write a page to look at to OUT: tree, schedule, memory")
    parser.add_argument("--thumbnails", metavar="FOLDER", help="for --html: small pictures, by the images' names")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_demo)
    parser.description = "GRPO on bundled real rollouts: the same optimiser steps by eager and by dta, side by side."
    parser.add_argument(
        "--turns", type=whole(1, MOST_STEPS), default=3, help="assistant turns per trajectory (default: %(default)s)"
    )
    parser.add_argument("--steps", type=whole(1, MOST_STEPS), default=3, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--chunk-size", type=whole(1, MOST_CHUNK_TOKENS), default=2048, help="default: %(default)s")
    parser.add_argument(
        "--micro-batch", type=whole(1, MOST_STEPS), default=1, help="rows per eager call (default: %(default)s)"
    )
    parser.add_argument("--backend", default="dta", help="backend to compare with eager (default: %(default)s)")
    parser.add_argument("--threads", type=whole(1, MOST_STEPS // 1024), help="CPU threads (default: torch's)")
    parser.add_argument(
        "--html", metavar="OUT", default="dta_demo.html", help="page of the plan (default: %(default)s)"
    )


def _demo(arguments: argparse.Namespace) -> int:
    try:
        from dta_compile.cli import demo
    except ImportError as error:
        raise DTAError(f"the demo needs {error.name}", hint="pip install 'dta-compile[hf]'") from error
    settings = {key: value for key, value in vars(arguments).items() if key != "run"}
    return demo.main(demo.Settings(**settings), Console())


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.html == "-":
        raise PlanError("a page is not for the terminal", expected="--html with the name of a file")
    if arguments.json == arguments.dot == "-":
        raise OptionError("--json and --dot cannot both be written to standard output", hint="name a file for one")
    _refuse_unused(arguments)
    if arguments.compare or arguments.rows is not None:
        return _plan_batches(arguments)
    recording = read_source(arguments.file, read_options(arguments), arguments.leaf_only)
    if len(recording.batches) > 1:
        if any(getattr(arguments, name) for name in OF_ONE_BATCH):
            raise PlanError(
                "a tree is of one batch, and a folder of dumps has one in each file",
                got=f"{len(recording.batches)} files",
                hint="name one of its files",
            )
        return _plan_batches(arguments, recording)
    device: tuple[str, float, float] | None = None
    steps: dict[str, RanksStep] = {}
    if arguments.ranks:
        batch_plan, steps = plan_over_ranks(recording.sequences, arguments)
    elif arguments.config:
        batch_plan, device = _plan_on_device(recording.sequences, arguments)
    else:
        batch_plan = _make_plan(recording.sequences, arguments)
    for target, render in ((arguments.json, as_json), (arguments.dot, as_dot)):
        if target:
            write(target, render(batch_plan))
    say = print if "-" not in (arguments.json, arguments.dot) else lambda text: None
    if arguments.html:
        facts = {"title": _name(arguments.file), "device": device, **_page_facts(recording)}
        facts["sequences"] = [sequence.tokens for sequence in recording.sequences]
        facts["images"] = keys_of(recording.sequences).get("images")
        if arguments.thumbnails:
            facts["thumbnails"] = _thumbnails(recording.sequences, Path(arguments.thumbnails).resolve())
        batch_plan.to_html(arguments.html, **facts)
        written = Path(arguments.html)
        size_text = f"{written.stat().st_size / 1e6:.1f} MB, opens in a browser from disk"
        say(f"{visible(str(written.resolve()))}: {size_text}")
    if not (arguments.json or arguments.dot or arguments.html):
        if steps:
            print_ranks(batch_plan, steps, arguments.link, Console(highlight=False))
        _print(batch_plan, arguments)
    if device:
        name, memory, peak = device
        text = f"{name}: {peak / 1e9:.1f} of {memory / 1e9:.0f} GB at the peak, swept by chunks with the model in it"
        say(f"{text}; dta estimate says what other sweeps and budgets take")
    return 0


def _refuse_unused(arguments: argparse.Namespace) -> None:
    of_device = PER_TOKEN if arguments.ranks else (*PER_TOKEN, "mode")
    refuse_unused(arguments, NEEDS, {"compare": OF_ONE_BATCH, "rows": OF_ONE_BATCH, "config": of_device})


def _thumbnails(sequences: list[Recorded], folder: Path) -> dict[int | str, Path]:
    """Return the files in a folder that have the names of images; a name cannot leave the folder."""
    if not folder.is_dir():
        raise OptionError("no folder of thumbnails", got=visible(str(folder)))
    names = {image for sequence in sequences for *_, image in sequence.images}
    files = {name: (folder / str(name)).resolve() for name in names if "\0" not in str(name)}
    return {name: file for name, file in files.items() if file.is_relative_to(folder) and file.is_file()}


def _make_plan(sequences: list[Recorded], arguments: argparse.Namespace) -> Plan:
    names = ("mode", "chunk_size", "strategy", "order", "memory_budget", "bytes_per_token", "kv_bytes_per_token")
    options = {name: getattr(arguments, name) for name in names} | keys_of(sequences)
    return plan([sequence.tokens for sequence in sequences], **options)


def _plan_on_device(sequences: list[Recorded], arguments: argparse.Namespace) -> tuple[Plan, tuple[str, float, float]]:
    """Plan for a model on a device; return the plan, the device's name and bytes, and the predicted peak bytes."""
    device = device_named(arguments.device)
    names = ("chunk_size", "strategy", "order", "memory_budget")
    options = Options(**{name: getattr(arguments, name) for name in names})
    options = dataclasses.replace(options, chunk_size=options.chunk_tokens)
    ranks = Ranks(optimizer=arguments.optimizer)
    batch_plan, peak = plan_on(sequences, model_shape(arguments.config), device, options, ranks)
    return batch_plan, (device.name, device.memory, peak)


def _plan_batches(arguments: argparse.Namespace, recording: Recording | None = None) -> int:
    """Print the figures of several batches, or of two variants side by side; neither tree nor schedule."""
    console = Console(highlight=False)
    if arguments.compare:
        other = changed(arguments)
        _refuse_unused(other)
        text = compare(arguments, other, _make_plan, console)
    else:
        recording = recording or read_source(arguments.file, read_options(arguments), arguments.leaf_only)
        sums = totals(recording, arguments, _make_plan)
        text = sums.to_json()
        if not arguments.json:
            title = "a file a batch" if arguments.rows is None else f"{arguments.rows} rows a batch"
            print_totals([title], [sums], console)
    if arguments.json:
        write(arguments.json, text)
    return 0


def _page_facts(recording: Recording) -> dict[str, Any]:
    """Return the facts for the HTML page (tokenizer, rewards, loss spans, names) that every sequence has."""
    sequences = recording.sequences
    decode = recording.tokenizer.decode if recording.tokenizer else None
    facts: dict[str, Any] = {"tokenizer": recording.tokenizer, "losses": find_losses(sequences, decode)}
    for key, name in (("rewards", "reward"), ("loss_masks", "spans"), ("names", "name")):
        values = [getattr(sequence, name) for sequence in sequences]
        if sequences and None not in values:
            facts[key] = values
    return facts


def _name(path: str) -> str:
    return "standard input" if path == "-" else visible(Path(path).name)


def _print(batch_plan: Plan, arguments: argparse.Namespace) -> None:
    console = Console(highlight=False)
    console.print(str(batch_plan), markup=False, soft_wrap=True)
    console.print()
    if arguments.full:
        # Let deep trees run past the edge of the terminal instead of folding them.
        segments = len(networkx.dag_longest_path(batch_plan.tree))
        console.width = max(console.width, LABEL_WIDTH + 4 * segments)
        console.print(tree_view(batch_plan), soft_wrap=True)
    else:
        console.print(tree_view(batch_plan, MOST_NODES), soft_wrap=True)
        console.print("--full shows all of it, and --html PAGE draws it", style="dim")
    if arguments.schedule:
        lines = str(batch_plan.schedule).splitlines()
        shown = lines if arguments.full else lines[: MOST_OPS + 1]
        console.print("", *shown, sep="\n", markup=False, soft_wrap=True)
        if len(shown) < len(lines):
            console.print(f"... and {len(lines) - len(shown):,} more operations (--full shows all)", style="dim")
