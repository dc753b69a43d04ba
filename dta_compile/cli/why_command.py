"""The command `dta why`: report where sequences of a file could share more of their prefixes, and why they do not."""

from __future__ import annotations

import argparse
import dataclasses
import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dta_compile.cli.arguments import add_source, read_options, read_source, visible, whole, write
from dta_compile.divergence import CauseOfLoss, Losses, Place, find_losses

CONTEXT = 60  # characters of common text shown on either side of a difference
SIDE = 160  # characters shown of each variant
SMALL = 0.001  # fraction of the tree tokens; smaller causes are summed up in one line


def add_why(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dta why`."""
    parser.set_defaults(run=_run)
    parser.description = (
        "Where sharing of prefixes is lost: differences after which sequences are alike again, by cause, with the text "
        "around the first token that differs, and what would be gained without each cause. Of token ids alone: images "
        "and replayed routes split prefixes, too, which `dta plan` counts."
    )
    add_source(parser)
    parser.add_argument("--examples", type=whole(0), default=1, metavar="N", help="places shown of each cause, up to 3")
    parser.add_argument("--json", metavar="OUT", help="write it as JSON to OUT (- for stdout) and print nothing")


def _run(arguments: argparse.Namespace) -> int:
    recording = read_source(arguments.file, read_options(arguments))
    tokenizer = recording.tokenizer
    losses = find_losses(recording.sequences, tokenizer.decode if tokenizer else None)
    if arguments.json:
        write(arguments.json, json.dumps(as_json(losses), indent=1) + "\n")
    else:
        console = Console(highlight=False)
        _print(losses, recording.kind, arguments.examples, console)
        if any(sequence.images or sequence.routes is not None for sequence in recording.sequences):
            console.print("images and routes are left out here: `dta plan` counts what they split", style="dim")
    return 0


def as_json(losses: Losses) -> dict[str, object]:
    """Return all figures and differences as JSON fields."""
    fields = dataclasses.asdict(losses)
    for fields_of_cause, cause in zip(fields["causes"], losses.causes, strict=True):
        fields_of_cause["compression"] = cause.compression
        del fields_of_cause["again"]
    (fields["together"] or {}).pop("again", None)
    return {**fields, "compression": losses.compression}


def _print(losses: Losses, kind: str, examples: int, console: Console) -> None:
    size = f"{losses.sequences:,} sequences, {losses.tokens:,} tokens, {losses.tree_tokens:,} to run"
    console.print(f"dta why: {size} (C {losses.compression:.2f}), read from {kind}", markup=False, soft_wrap=True)
    if losses.together is None:
        console.print("nothing is lost: where sequences part, their contents part")
        return
    main = losses.causes[0]
    share = main.gained / max(losses.tree_tokens, 1)
    console.print(
        f"main cause: {main.name}. {main.gained:,} of the tokens that are run ({share:.1%}) are run again for it",
        markup=False,
        soft_wrap=True,
    )
    shown = [cause for cause in losses.causes if cause is main or cause.gained >= SMALL * losses.tree_tokens]
    console.print(_table(losses, shown))
    if len(shown) < len(losses.causes):
        rest = ", ".join(cause.name for cause in losses.causes[len(shown) :])
        console.print(f"less than {SMALL:.1%} each: {rest}", style="dim")
    for cause in shown:
        console.print(f"\n{cause.name}: {cause.advice}", markup=False, soft_wrap=True)
        for place in cause.examples[:examples]:
            _print_place(place, console)
    if losses.known != "text":
        console.print(
            "\nwithout a tokenizer causes are told by structure alone: --tokenizer names them by their text",
            style="dim",
        )


def _table(losses: Losses, shown: list[CauseOfLoss]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("without", "places", "tokens gained", "tokens to run", "fewer by", "C"):
        table.add_column(title, justify="left" if title == "without" else "right")
    together = [losses.together] if losses.together is not None and len(losses.causes) > 1 else []
    for cause in [*shown, *together]:
        table.add_row(
            cause.name,
            f"{cause.places:,}",
            f"{cause.gained:,}",
            f"{cause.tree_tokens:,}",
            f"{losses.tree_tokens / max(cause.tree_tokens, 1):.2f}x",
            f"{cause.compression:.2f}",
        )
    return table


def _print_place(place: Place, console: Console) -> None:
    console.print(
        f"  s{place.sequence} parts from s{place.reference} at token {place.at:,}, then {place.run:,} tokens are alike",
        markup=False,
        soft_wrap=True,
    )
    before, after = visible(place.before)[-CONTEXT:], visible(place.after)[:CONTEXT]
    for name, side, style in ((place.reference, place.left, "red"), (place.sequence, place.right, "green")):
        text = f"[{style}]{escape(_short(visible(side)))}[/]" if side else "[dim](nothing)[/]"
        console.print(
            f"    s{name:<6} [dim]{escape(before)}[/]|{text}|[dim]{escape(after)}[/]", soft_wrap=True, emoji=False
        )


def _short(text: str) -> str:
    return text if len(text) <= SIDE else f"{text[: SIDE // 2]} ... {text[-SIDE // 2 :]}"
