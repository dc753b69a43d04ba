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
from rich.table import Table

from dta_compile.cli.arguments import whole, write
from dta_compile.errors import OptionError

MOST_GPUS = 16_384  # limits the printed table, which has one row per split
LEAST, MOST = 1e-30, 1e30  # range of throughputs in any unit
Split = tuple[int, int]  # (rollout GPUs, training GPUs), written 5/3


@dataclasses.dataclass(frozen=True)
class System:
    """Measured throughputs, all in one unit, such as tokens per second.

    Attributes:
        train, roll: throughput of training and of rollout alone, by number of GPUs; `{1: 40.3}` is the figure per GPU.
        measured: throughput of the whole pipeline, by split.

    Raises:
        OptionError: a number of GPUs is below 1, or a throughput is not positive and finite.
    """

    train: Mapping[int, float] = dataclasses.field(default_factory=dict)
    roll: Mapping[int, float] = dataclasses.field(default_factory=dict)
    measured: Mapping[Split, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        sides = (("training", self.train), ("rollout", self.roll))
        figures = [(f"{side} on {gpus} GPUs", gpus, value) for side, points in sides for gpus, value in points.items()]
        figures += [(f"split {split[0]}/{split[1]}", min(split), value) for split, value in self.measured.items()]
        for where, gpus, throughput in figures:
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
            where = f"split {split[0]}/{split[1]}"
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
            raise OptionError(f"no throughput of {side} is known", hint=hint)
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
    parser.set_defaults(run=_run)
    parser.description = (
        "The split of GPUs between rollout and training that makes an asynchronous pipeline fastest: the throughput "
        "of the slower side, by figures of each side alone, refined by whatever else has been measured."
    )
    parser.epilog = "Example: dta split --gpus 8 --train 40.3 --roll 41.1 2=56.8 --measured 5/3=66.7"
    parser.add_argument("--gpus", type=whole(2, MOST_GPUS), metavar="N", required=True, help="to divide")
    many: dict[str, Any] = {"nargs": "+", "default": []}
    for side in ("train", "roll"):
        text = f"throughput of {'training' if side == 'train' else 'rollout'} alone: per GPU, or of COUNT GPUs together"
        parser.add_argument(f"--{side}", type=figure, metavar="[COUNT=]X", help=text, **many)
    text = "throughput of the whole pipeline with this many rollout and training GPUs, such as 5/3=66.7"
    parser.add_argument("--measured", type=split_figure, metavar="ROLL/TRAIN=X", help=text, **many)
    parser.add_argument("--json", metavar="OUT", help="write the result as JSON to OUT (- for stdout), print nothing")


def figure(text: str) -> tuple[int, float]:
    count, _, throughput = text.rpartition("=")
    return int(count or 1), float(throughput)


def split_figure(text: str) -> tuple[Split, float]:
    split, _, throughput = text.rpartition("=")
    roll_gpus, train_gpus = map(int, split.split("/"))
    return (roll_gpus, train_gpus), float(throughput)


def _run(arguments: argparse.Namespace) -> int:
    cells = sweep(System(*(_by_gpus(arguments, name) for name in ("train", "roll", "measured"))), arguments.gpus)
    top = best(cells)
    if arguments.json:
        fields = {"gpus": arguments.gpus, "best": top._asdict(), "sweep": [cell._asdict() for cell in cells]}
        write(arguments.json, json.dumps(fields, indent=1) + "\n")
        return 0
    table = Table("rollout/training", title=f"{arguments.gpus} GPUs", title_justify="left", box=None, pad_edge=False)
    table.add_column("throughput", justify="right")
    table.add_column("limited by")
    for cell in cells:
        text = f"{cell.throughput:,.4g} {'m' if cell.measured else ' '}"
        table.add_row(cell.split, f"[bold]{text}*[/bold]" if cell is top else f"{text} ", cell.limit)
    console = Console(highlight=False)
    console.print(table)
    console.print("\n* the best; m measured", style="dim")
    return 0


def _by_gpus(arguments: argparse.Namespace, name: str) -> dict[Any, float]:
    figures: list[tuple[Any, float]] = getattr(arguments, name)
    if len(dict(figures)) < len(figures):
        raise OptionError("two figures for the same GPUs", where=f"--{name}", got=str(figures))
    return dict(figures)
