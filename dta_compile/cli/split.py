"""How many GPUs should generate rollouts and how many should train, from measured throughputs.

The pipeline is as fast as its slower side (paper, appendix "Rollout/Training GPU Allocation Sweep"):
`min(T_train * N_train / N, T_roll * N_roll / N)`, T being what a side would reach with all N GPUs. Sides rarely scale
in proportion to their GPUs, so every further measurement, of one side or of the whole pipeline, refines the curves.
Beyond what is measured the model hopes for ideal scaling. So measure the split that it finds best, add the figure, and
ask again, until the best split is one that has been measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from dta_compile.errors import OptionError
from dta_compile.options import as_integer

__all__ = ["Cell", "Split", "Sweep", "System", "capacity", "sweep"]

MOST_GPUS = 16_384  # a line is printed for each
LEAST, MOST = 1e-30, 1e30  # of throughputs in any unit
Split = tuple[int, int]  # (rollout GPUs, training GPUs), written 5/3


@dataclasses.dataclass(frozen=True)
class System:
    """Measured throughputs of one system, all of them in one unit, such as tokens per second.

    Attributes:
        name: what to call it.
        train, roll: of training and of rollout on their own, by number of GPUs; `{1: 40.3}` is the figure per GPU.
        measured: of the whole pipeline, by split.

    Raises:
        OptionError: a number of GPUs below 1, or a throughput that is not positive and finite.
    """

    name: str
    train: Mapping[int, float] = dataclasses.field(default_factory=dict)
    roll: Mapping[int, float] = dataclasses.field(default_factory=dict)
    measured: Mapping[Split, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for side, figures in (("training", self.train), ("rollout", self.roll)):
            for gpus, throughput in figures.items():
                self._check(f"{side} on {gpus} GPUs", gpus, throughput)
        for (roll, train), throughput in self.measured.items():
            self._check(f"split {roll}/{train}", min(roll, train), throughput)

    def _check(self, what: str, gpus: int, throughput: float) -> None:
        count = as_integer(gpus)
        if count is None or not 1 <= count <= MOST_GPUS:
            expected = f"1 or more of each side, at most {MOST_GPUS}"
            raise OptionError("bad number of GPUs", where=f"{self.name}, {what}", expected=expected)
        if not LEAST <= throughput <= MOST:
            expected = "a positive, finite number"
            raise OptionError("bad throughput", where=f"{self.name}, {what}", expected=expected, got=str(throughput))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One split of the GPUs.

    Attributes:
        roll_gpus, train_gpus: the split.
        roll, train: throughput that each side could reach.
        throughput: of the pipeline; as measured if it was, else that of the slower side.
        measured: whether it was.
    """

    roll_gpus: int
    train_gpus: int
    roll: float
    train: float
    throughput: float
    measured: bool

    @property
    def split(self) -> str:
        """As it is printed: rollout GPUs / training GPUs."""
        return f"{self.roll_gpus}/{self.train_gpus}"

    @property
    def limit(self) -> str:
        """The slower side, "rollout" or "training"."""
        return "rollout" if self.roll < self.train else "training"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All splits of a number of GPUs for one system, from 1 rollout GPU to 1 training GPU."""

    system: System
    cells: tuple[Cell, ...]

    @property
    def best(self) -> Cell:
        """The fastest split; of equal ones, that with the fewest rollout GPUs."""
        return max(self.cells, key=lambda cell: cell.throughput)


def sweep(system: System, gpus: int) -> Sweep:
    """Throughput of every split of `gpus` GPUs, each side having at least one.

    Raises:
        OptionError: fewer than 2 GPUs, a side without any figure, or a measured split of another number of GPUs.
    """
    count = as_integer(gpus)
    if count is None or count < 2:
        raise OptionError("too few GPUs to split", expected="an integer >= 2", got=repr(gpus))
    if count > MOST_GPUS:
        raise OptionError("too many GPUs to list all splits", expected=f"at most {MOST_GPUS}", got=repr(gpus)[:80])
    gpus = count
    for split in system.measured:
        if sum(split) != gpus:
            where = f"{system.name}, split {split[0]}/{split[1]}"
            raise OptionError("a measured split is of another size", where=where, expected=f"{gpus} GPUs in all")
    roll, train = _sides(system)
    cells = []
    for roll_gpus in range(1, gpus):
        split = roll_gpus, gpus - roll_gpus
        sides = capacity(roll, split[0]), capacity(train, split[1])
        measured = system.measured.get(split)
        cells.append(Cell(*split, *sides, min(sides) if measured is None else measured, measured is not None))
    return Sweep(system, tuple(cells))


def capacity(points: Mapping[int, float], gpus: int) -> float:
    """Throughput of one side on `gpus` GPUs, from what it is on others.

    Exact at the points, linear between them, and beyond them proportional to the GPUs at the rate of the nearest one,
    which is the ideal model from there on. If the points rise with the GPUs, so does all of it.
    """
    counts = sorted(points)
    nearest = min(max(gpus, counts[0]), counts[-1])
    return float(np.interp(nearest, counts, [points[count] for count in counts])) * gpus / nearest


def _sides(system: System) -> tuple[dict[int, float], dict[int, float]]:
    """Points of the rollout and of the training side, with what the measured splits tell about them."""
    roll, train, measured = dict(system.roll), dict(system.train), system.measured
    peak = max(measured, key=measured.__getitem__, default=(0, 0))
    # A GPU more for rollout makes rollout faster and training slower. So a split that gives rollout less than the
    # fastest one does, and yet is slower, is limited by rollout; one that gives training less, by training.
    for (roll_gpus, train_gpus), throughput in measured.items():
        if roll_gpus < peak[0]:
            roll.setdefault(roll_gpus, throughput)
        elif roll_gpus > peak[0]:
            train.setdefault(train_gpus, throughput)
    for side, points in (("rollout", roll), ("training", train)):
        if not points:
            hint = f"give the throughput of {side} on one GPU, or of splits that are limited by it"
            raise OptionError(f"no throughput of {side} is known", where=system.name, hint=hint)
    if measured:  # the fastest split is limited by the side that is slower by all the other figures
        if capacity(roll, peak[0]) < capacity(train, peak[1]):
            roll.setdefault(peak[0], measured[peak])
        else:
            train.setdefault(peak[1], measured[peak])
    for split, throughput in measured.items():  # what the pipeline did, both of its sides can do
        for points, gpus in zip((roll, train), split, strict=True):
            if capacity(points, gpus) < throughput:
                points[gpus] = throughput
    return roll, train
