"""The command `dta split`: divide GPUs between rollout generation and training, from measured throughputs.

The pipeline is as fast as its slower side (paper, appendix "Rollout/Training GPU Allocation Sweep"):
`min(T_train * N_train / N, T_roll * N_roll / N)`, where T is the throughput of a side on all N GPUs. Sides rarely
scale linearly, so each further measurement, of one side or of the whole pipeline, refines the curves. Beyond the
measured points the model assumes linear scaling. So measure the split that it recommends, add the figure and repeat
until the recommended split has been measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dta_compile.cli.arguments import visible, whole, write
from dta_compile.errors import OptionError

MOST_GPUS = 16_384  # limits the printed table, which has one row per split
LEAST, MOST = 1e-30, 1e30  # range of throughputs in any unit
Split = tuple[int, int]  # (rollout GPUs, training GPUs), written 5/3


@dataclasses.dataclass(frozen=True)
class System:
    """Measured throughputs of one system, all in one unit, such as tokens per second.

    Attributes:
        name: label in the output.
        train, roll: throughput of training and of rollout alone, by number of GPUs; `{1: 40.3}` is the figure per GPU.
        measured: throughput of the whole pipeline, by split.

    Raises:
        OptionError: a number of GPUs is below 1, or a throughput is not positive and finite.
    """

    name: str
    train: Mapping[int, float] = dataclasses.field(default_factory=dict)
    roll: Mapping[int, float] = dataclasses.field(default_factory=dict)
    measured: Mapping[Split, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        sides = (("training", self.train), ("rollout", self.roll))
        figures = [(f"{side} on {gpus} GPUs", gpus, value) for side, points in sides for gpus, value in points.items()]
        figures += [(f"split {split[0]}/{split[1]}", min(split), value) for split, value in self.measured.items()]
        for what, gpus, throughput in figures:
            where = f"{self.name}, {what}"
            if not 1 <= gpus <= MOST_GPUS:
                expected = f"1 or more of each side, at most {MOST_GPUS}"
                raise OptionError("bad number of GPUs", where=where, expected=expected)
            if not LEAST <= throughput <= MOST:
                expected = "a positive, finite number"
                raise OptionError("bad throughput", where=where, expected=expected, got=str(throughput))


class Cell(NamedTuple):
    """One row of a sweep: a split of the GPUs and its throughputs.

    Attributes:
        roll_gpus, train_gpus: GPUs of each side.
        roll, train: throughput that each side can reach.
        throughput: throughput of the pipeline: the measured one, or that of the slower side.
        measured: whether `throughput` was measured.
        split: the split as rollout GPUs / training GPUs.
        limit: the slower side, "rollout" or "training".
    """

    roll_gpus: int
    train_gpus: int
    roll: float
    train: float
    throughput: float
    measured: bool
    split: str
    limit: str


def sweep(system: System, gpus: int) -> list[Cell]:
    """Compute the throughput of every split of `gpus` GPUs with at least one GPU per side, from 1 rollout GPU on.

    Raises:
        OptionError: a side without any figure, or a measured split of another number of GPUs.
    """
    for split in system.measured:
        if sum(split) != gpus:
            where = f"{system.name}, split {split[0]}/{split[1]}"
            raise OptionError("a measured split is of another size", where=where, expected=f"{gpus} GPUs in all")
    sides = _sides(system)
    cells = []
    for split in ((number, gpus - number) for number in range(1, gpus)):
        roll, train = (capacity(points, number) for points, number in zip(sides, split, strict=True))
        throughput, limit = system.measured.get(split, min(roll, train)), "rollout" if roll < train else "training"
        name = f"{split[0]}/{split[1]}"
        cells.append(Cell(*split, roll, train, throughput, split in system.measured, name, limit))
    return cells


def best(cells: Sequence[Cell]) -> Cell:
    """Return the fastest split; among equals, the one with the fewest rollout GPUs."""
    return max(cells, key=lambda cell: cell.throughput)


def capacity(points: Mapping[int, float], gpus: int) -> float:
    """Interpolate the throughput of one side on `gpus` GPUs.

    The curve is exact at the measured points, linear between them, and proportional to the number of GPUs beyond them,
    at the rate of the nearest point. It rises with the number of GPUs if the points do.
    """
    counts = sorted(points)
    nearest = min(max(gpus, counts[0]), counts[-1])
    return float(np.interp(nearest, counts, [points[count] for count in counts])) * gpus / nearest


def _sides(system: System) -> tuple[dict[int, float], dict[int, float]]:
    """Return the points of the rollout and of the training side, extended by what the measured splits imply."""
    roll, train, measured = dict(system.roll), dict(system.train), system.measured
    peak = max(measured, key=measured.__getitem__, default=(0, 0))
    # One more GPU for rollout makes rollout faster and training slower. So a split with fewer rollout GPUs than the
    # fastest one is limited by rollout, and a split with fewer training GPUs by training.
    for (roll_gpus, train_gpus), throughput in measured.items():
        if roll_gpus < peak[0]:
            roll.setdefault(roll_gpus, throughput)
        elif roll_gpus > peak[0]:
            train.setdefault(train_gpus, throughput)
    for side, points in (("rollout", roll), ("training", train)):
        if not points:
            hint = f"give the throughput of {side} on one GPU, or of splits that are limited by it"
            raise OptionError(f"no throughput of {side} is known", where=system.name, hint=hint)
    if measured:  # the fastest split is limited by the side that is slower by all other figures
        if capacity(roll, peak[0]) < capacity(train, peak[1]):
            roll.setdefault(peak[0], measured[peak])
        else:
            train.setdefault(peak[1], measured[peak])
    for split, throughput in measured.items():  # each side reaches at least what the pipeline reached
        for points, gpus in zip((roll, train), split, strict=True):
            if capacity(points, gpus) < throughput:
                points[gpus] = throughput
    return roll, train


def add_split(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dta split`."""
    parser.set_defaults(run=_run, systems=[])
    parser.description = (
        "The split of GPUs between rollout and training that makes an asynchronous pipeline fastest: the throughput "
        "of the slower side, by figures of each side alone, refined by whatever else has been measured."
    )
    parser.epilog = (
        "Example: dta split --gpus 8 --system tree --train 40.3 --roll 41.1 2=56.8 --measured 5/3=66.7 "
        "--system dense --train 13.5 --roll 40.8"
    )
    parser.add_argument("--gpus", type=whole(2, MOST_GPUS), metavar="N", required=True, help="to divide")
    parser.add_argument("--unit", default="tokens/s", help="of all throughputs (default: tokens/s)")
    figures = parser.add_argument_group("figures", "of the system that was named last")
    figures.add_argument("--system", action=_Figures, metavar="NAME", help="the figures that follow are its own")
    for side in ("train", "roll"):
        text = f"throughput of {'training' if side == 'train' else 'rollout'} alone: per GPU, or of COUNT GPUs together"
        figures.add_argument(f"--{side}", action=_Figures, nargs="+", metavar="[COUNT=]X", help=text)
    text = "throughput of the whole pipeline with this many rollout and training GPUs, such as 5/3=66.7"
    figures.add_argument("--measured", action=_Figures, nargs="+", metavar="ROLL/TRAIN=X", help=text)
    parser.add_argument("--json", metavar="OUT", help="write the result as JSON to OUT (- for stdout), print nothing")


class _Figures(argparse.Action):
    """Action that begins a system, or adds figures to the latest one (an unnamed one if there is none)."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if self.dest == "system" or not namespace.systems:
            namespace.systems = [*namespace.systems, (values if self.dest == "system" else "system", {})]
        if self.dest != "system":
            namespace.systems[-1][1].setdefault(self.dest, []).extend(values)


def _run(arguments: argparse.Namespace) -> int:
    systems = [_system(name, figures) for name, figures in arguments.systems]
    if not systems:
        raise OptionError("no figures", expected="--train and --roll", hint="dta split --help has an example")
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise OptionError("two systems have one name", expected="distinct names", got=", ".join(names))
    sweeps = {system.name: sweep(system, arguments.gpus) for system in systems}
    if arguments.json:
        result = {
            name: {"best": best(cells)._asdict(), "sweep": [cell._asdict() for cell in cells]}
            for name, cells in sweeps.items()
        }
        fields = {"gpus": arguments.gpus, "unit": arguments.unit, "systems": result}
        write(arguments.json, json.dumps(fields, indent=1) + "\n")
    else:
        _print(sweeps, arguments.gpus, arguments.unit)
    return 0


def _system(name: str, figures: dict[str, list[str]]) -> System:
    def of(key: str) -> dict[Any, float]:
        throughputs: dict[Any, float] = {}
        for figure in figures.get(key, []):
            count, _, throughput = figure.rpartition("=")
            try:
                gpus: Any = tuple(map(int, count.split("/"))) if key == "measured" else int(count or 1)
                value = float(throughput)
                if key == "measured":
                    _, _ = gpus
            except ValueError as error:
                expected = "ROLL/TRAIN=X, such as 5/3=66.7" if key == "measured" else "X, or COUNT=X, such as 2=49.4"
                raise OptionError("bad figure", where=f"{name}, {key}", expected=expected, got=repr(figure)) from error
            if gpus in throughputs:
                raise OptionError("two figures for the same GPUs", where=f"{name}, {key}", got=repr(figure))
            throughputs[gpus] = value
        return throughputs

    return System(name, of("train"), of("roll"), of("measured"))


def _print(sweeps: dict[str, list[Cell]], gpus: int, unit: str) -> None:
    table = Table(title=escape(visible(f"{gpus} GPUs, {unit}")), title_justify="left", box=None, pad_edge=False)
    table.add_column("rollout/training")
    for name in sweeps:
        table.add_column(escape(visible(name)), justify="right")
        table.add_column("limited by")
    fastest = {name: best(cells) for name, cells in sweeps.items()}
    for row in zip(*sweeps.values(), strict=True):
        texts: list[str] = []
        for cell, top in zip(row, fastest.values(), strict=True):
            text = f"{cell.throughput:,.4g} {'m' if cell.measured else ' '}"
            texts += [f"[bold]{text}*[/bold]" if cell is top else f"{text} ", cell.limit]
        table.add_row(row[0].split, *texts)
    console = Console(highlight=False)
    console.print(table)
    console.print("\n* best of its column; m measured\n", style="dim")
    slowest = min(top.throughput for top in fastest.values())
    for name, top in fastest.items():
        ratio = f", {top.throughput / slowest:.2f}x" if len(sweeps) > 1 else ""
        text = f"{name}: best {top.split} with {top.throughput:,.4g} {unit}{ratio}"
        console.print(visible(text), markup=False, soft_wrap=True)
