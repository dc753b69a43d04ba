"""The command `dta split`: how to divide GPUs between rollout and training, for one system or several side by side."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dta_compile.cli.arguments import whole
from dta_compile.cli.output import visible, write
from dta_compile.cli.split import MOST_GPUS, Cell, Split, Sweep, System, sweep
from dta_compile.data.tables import stdin_text
from dta_compile.errors import DTAError, OptionError
from dta_compile.files import read_text, write_output

__all__ = ["add_split"]

_EXAMPLE = """\
example:
  dta split --gpus 8 --system tree --train 40.3 --roll 41.1 2=56.8 --system dense --train 13.5 --roll 40.8

FILE holds the same figures, and any of them may be left out:
  {"gpus": 8, "unit": "K tokens/s", "systems": {
    "tree": {"train": 40.3, "roll": {"1": 41.1, "2": 56.8}, "measured": {"5/3": 66.7}}}}
"""


def add_split(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dta split`."""
    parser.set_defaults(run=_run, systems=[])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "The split of GPUs between rollout and training that makes an asynchronous pipeline fastest: the throughput\n"
        "of the slower side, by figures of each side alone, refined by whatever else has been measured."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument("file", metavar="FILE", nargs="?", help="JSON with the figures (- for standard input)")
    parser.add_argument("--gpus", type=whole(2, MOST_GPUS), metavar="N", help="to divide; default: as FILE says")
    parser.add_argument("--unit", help="of all throughputs (default: tokens/s)")
    figures = parser.add_argument_group("figures", "of the system that was named last")
    figures.add_argument("--system", action=_NewSystem, metavar="NAME", help="the figures that follow are its own")
    for side in ("train", "roll"):
        text = f"throughput of {'training' if side == 'train' else 'rollout'} alone: per GPU, or of COUNT GPUs together"
        figures.add_argument(f"--{side}", action=_Figures, nargs="+", metavar="[COUNT=]X", help=text)
    text = "throughput of the whole pipeline with this many rollout and training GPUs, such as 5/3=66.7"
    figures.add_argument("--measured", action=_Figures, nargs="+", metavar="ROLL/TRAIN=X", help=text)
    parser.add_argument("--json", metavar="OUT", help="write the result as JSON to OUT (- for stdout), print nothing")
    parser.add_argument("--plot", metavar="OUT.png", help="draw all systems too; needs matplotlib")


class _NewSystem(argparse.Action):
    """Begins a system, to which the figures after it belong."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.systems = [*namespace.systems, (values, {})]


class _Figures(argparse.Action):
    """Adds figures to the system that was begun last, or to an unnamed one."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if not namespace.systems:
            namespace.systems = [("system", {})]
        namespace.systems[-1][1].setdefault(self.dest, []).extend(values)


def _run(arguments: argparse.Namespace) -> int:
    given = _read(arguments.file) if arguments.file else {}
    systems = [_from_json(name, figures) for name, figures in given.get("systems", {}).items()]
    systems += [_from_arguments(name, figures) for name, figures in arguments.systems]
    gpus = given.get("gpus") if arguments.gpus is None else arguments.gpus
    if type(gpus) is not int:
        raise OptionError("no number of GPUs", expected='--gpus N, or "gpus": N in FILE', got=repr(gpus))
    if not systems:
        raise OptionError("no figures", expected="--train and --roll, or FILE", hint="dta split --help has an example")
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise OptionError("two systems have one name", expected="distinct names", got=", ".join(names))
    unit = arguments.unit or given.get("unit", "tokens/s")
    if not isinstance(unit, str):
        raise OptionError("a unit is a text", expected='"unit": "tokens/s"', got=repr(unit))
    sweeps = [sweep(system, gpus) for system in systems]
    if arguments.plot:
        _plot(sweeps, gpus, unit, Path(arguments.plot))
    if arguments.json:
        write(arguments.json, json.dumps(_as_json(sweeps, gpus, unit), indent=1) + "\n")
    else:
        _print(sweeps, gpus, unit)
    return 0


def _read(path: str) -> dict[str, Any]:
    try:
        given = json.loads(stdin_text() if path == "-" else read_text(path))
    except (ValueError, RecursionError) as error:
        raise OptionError("not a JSON file", where=path, got=str(error)) from error
    is_known = isinstance(given, dict) and set(given) <= {"gpus", "unit", "systems"}
    if not isinstance(given, dict) or not is_known or not isinstance(given.get("systems", {}), dict):
        expected = '{"gpus": N, "unit": "tokens/s", "systems": {NAME: {...}}}'
        raise OptionError("not a file of figures", where=path, expected=expected)
    return given


def _from_json(name: str, figures: Any) -> System:
    keys = ("train", "roll", "measured")
    if not isinstance(figures, dict) or not set(figures) <= set(keys):
        raise OptionError("bad figures", where=name, expected="an object with " + ", ".join(keys), got=repr(figures))
    given = {}
    for key, value in figures.items():
        by_count = value if isinstance(value, dict) else {"1": value}
        bad = next((one for one in by_count.values() if type(one) not in (int, float)), None)
        if bad is not None:
            raise OptionError("bad figure", where=f"{name}, {key}", expected="a number", got=repr(bad))
        given[key] = [f"{count}={throughput}" for count, throughput in by_count.items()]
    return _from_arguments(name, given)


def _from_arguments(name: str, figures: dict[str, list[str]]) -> System:
    train, roll = (_parsed(name, key, figures.get(key, []), _count) for key in ("train", "roll"))
    return System(name, train, roll, _parsed(name, "measured", figures.get("measured", []), _split))


def _parsed(name: str, key: str, figures: Sequence[str], read: Callable[[str], Any]) -> dict[Any, float]:
    found: dict[Any, float] = {}
    for figure in figures:
        count, _, throughput = figure.rpartition("=")
        try:
            gpus, value = read(count), float(throughput)
        except ValueError as error:
            expected = "ROLL/TRAIN=X, such as 5/3=66.7" if key == "measured" else "X, or COUNT=X, such as 2=49.4"
            raise OptionError("bad figure", where=f"{name}, {key}", expected=expected, got=repr(figure)) from error
        if gpus in found:
            raise OptionError("two figures for the same GPUs", where=f"{name}, {key}", got=repr(figure))
        found[gpus] = value
    return found


def _count(text: str) -> int:
    return int(text) if text else 1


def _split(text: str) -> Split:
    roll, _, train = text.partition("/")
    return int(roll), int(train)


def _as_json(sweeps: list[Sweep], gpus: int, unit: str) -> dict[str, Any]:
    def cell(cell: Cell) -> dict[str, Any]:
        return {**dataclasses.asdict(cell), "split": cell.split, "limit": cell.limit}

    systems = {
        made.system.name: {"best": cell(made.best), "sweep": [cell(each) for each in made.cells]} for made in sweeps
    }
    return {"gpus": gpus, "unit": unit, "systems": systems}


def _print(sweeps: list[Sweep], gpus: int, unit: str) -> None:
    table = Table(title=escape(visible(f"{gpus} GPUs, {unit}")), title_justify="left", box=None, pad_edge=False)
    table.add_column("rollout/training")
    for made in sweeps:
        table.add_column(escape(visible(made.system.name)), justify="right")
        table.add_column("limited by")
    for row in zip(*(made.cells for made in sweeps), strict=True):
        values = [text for made, cell in zip(sweeps, row, strict=True) for text in _texts(cell, cell is made.best)]
        table.add_row(row[0].split, *values)
    console = Console(highlight=False)
    console.print(table)
    console.print("\n* best of its column; m measured\n", style="dim")
    slowest = min(made.best.throughput for made in sweeps)
    for made in sweeps:
        ratio = f", {made.best.throughput / slowest:.2f}x" if len(sweeps) > 1 else ""
        text = f"{made.system.name}: best {made.best.split} with {made.best.throughput:,.4g} {unit}{ratio}"
        console.print(visible(text), markup=False, soft_wrap=True)


def _texts(cell: Cell, best: bool) -> tuple[str, str]:
    marks = ("m" if cell.measured else " ") + ("*" if best else " ")
    style = ("[bold]", "[/bold]") if best else ("", "")
    return f"{style[0]}{cell.throughput:,.4g} {marks}{style[1]}", cell.limit


def _plot(sweeps: list[Sweep], gpus: int, unit: str, target: Path) -> None:
    """Throughput over the split: the pipeline as a line, its sides dashed, measured splits as crosses."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DTAError("--plot needs matplotlib", hint="pip install matplotlib") from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    ticks = [cell.roll_gpus for cell in sweeps[0].cells]
    for index, made in enumerate(sweeps):
        color = f"C{index}"
        axes.plot(
            ticks, [cell.throughput for cell in made.cells], color=color, marker="o", ms=3, label=made.system.name
        )
        for side in ("roll", "train"):
            axes.plot(ticks, [getattr(cell, side) for cell in made.cells], color=color, ls="--", lw=0.7, alpha=0.6)
        measured = [cell for cell in made.cells if cell.measured]
        axes.plot([c.roll_gpus for c in measured], [c.throughput for c in measured], "x", color=color, ms=8)
        best = made.best
        axes.annotate(best.split, (best.roll_gpus, best.throughput), (0, 6), textcoords="offset points", ha="center")
    top = max(made.best.throughput for made in sweeps)
    axes.set_ylim(0, 1.4 * top)  # the sides run far above what the pipeline can reach
    axes.set_xticks(ticks, [cell.split for cell in sweeps[0].cells])
    axes.set_xlabel(f"rollout/training GPUs of {gpus}")
    axes.set_ylabel(unit)
    axes.legend()
    try:
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=110, format=target.suffix[1:] or "png")
        write_output(target, drawn.getvalue())
    except ValueError as error:  # a suffix that no format has
        raise OptionError("cannot draw to this file", where=str(target), got=str(error)) from error
