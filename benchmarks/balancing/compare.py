"""Compare our balancing with balancers that know no tree: imbalance, repeated tokens, predicted step, planning cost.

    python -m benchmarks.balancing [--rollouts FOLDER] [--pools 20000,1000000] [--output build/balancing]

Writes a table, balancing.json and plots. Needs numpy and rich, and matplotlib for the plots; no torch, no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.balancing.partitions import METHODS, Batch, IntArray, Partition, TooLarge
from benchmarks.balancing.pools import Shape, generate
from dta_compile.data import bundled, load_rollouts
from dta_compile.plan import CostModel, Work, lexicographic_order, plan

COST = CostModel()
CHUNK_SIZE = 2048
FIELDS = Path("/proc/self/status")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Figures of one method on one batch and number of groups.

    Attributes:
        token_imbalance: ratio of the largest to the mean number of tree tokens per group.
        cost_imbalance: ratio of the largest to the mean predicted seconds per group.
        extra: tree tokens of all groups beyond those of the combined tree, relative to the latter.
        step_seconds: predicted seconds of the slowest group.
        seconds: time to divide the sequences; the lexicographic order is given to methods that use it.
        peak_bytes: growth of resident memory at its peak during the division; None where the system does not tell.
    """

    method: str
    groups: int
    token_imbalance: float
    cost_imbalance: float
    extra: float
    step_seconds: float
    seconds: float
    peak_bytes: int | None


@dataclasses.dataclass
class Result:
    """Figures of all methods on one batch.

    Attributes:
        predicted_by: basis of `step_seconds`, "schedules" or "tokens and pairs".
        unavoidable: least `extra` of all divisions, by number of groups (`Batch.least_repeated`).
        order_seconds, order_peak_bytes: cost of the lexicographic order and the common prefixes of neighbours.
        resident_bytes: peak of the whole process during ordering, with the sequences.
    """

    name: str
    sequences: int
    tokens: int
    tree_tokens: int
    predicted_by: str
    order_seconds: float
    order_peak_bytes: int | None
    resident_bytes: int | None
    unavoidable: dict[int, float] = dataclasses.field(default_factory=dict)
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)


def compare(name: str, sequences: Sequence[Any], group_counts: Sequence[int], schedule_tokens: int) -> Result:
    """Run every method on one batch; methods that are too slow for it are skipped.

    Args:
        name: name of the batch.
        sequences: token ids.
        group_counts: numbers of groups; those above the number of sequences are skipped.
        schedule_tokens: most tokens of a batch whose step times are predicted by planning every group.
    """
    order, order_seconds, order_peak = _measured(lambda: lexicographic_order(sequences))
    resident = _status_bytes("VmHWM")
    batch = Batch(order)
    tokens, tree_tokens = int(order.lengths.sum()), int(order.lengths.sum() - order.common.sum())
    scheduled = tokens <= schedule_tokens
    by = "schedules" if scheduled else "tokens and pairs"
    result = Result(name, len(order.order), tokens, tree_tokens, by, order_seconds, order_peak, resident)
    predict = _by_schedule(sequences) if scheduled else _by_tree
    for groups in group_counts:
        if groups > len(order.order):
            continue
        result.unavoidable[groups] = batch.least_repeated(groups) / max(tree_tokens, 1)
        for method, divide in METHODS.items():
            with contextlib.suppress(TooLarge):
                partition, seconds, peak = _measured(lambda divide=divide, groups=groups: divide(batch, groups))
                figures = _evaluate(batch, partition, tree_tokens, predict)
                result.outcomes.append(Outcome(method, groups, *figures, seconds, peak))
    return result


Predict = Callable[[IntArray, tuple[int, int]], float]


def _evaluate(batch: Batch, groups: Partition, tree_tokens: int, predict: Predict) -> tuple[float, float, float, float]:
    sizes = [batch.tree_size(group) for group in groups]
    seconds = [predict(group, size) for group, size in zip(groups, sizes, strict=True)]
    tokens = [size[0] for size in sizes]
    extra = sum(tokens) / max(tree_tokens, 1) - 1
    return _imbalance(tokens), _imbalance(seconds), extra, max(seconds)


def _imbalance(costs: Sequence[float]) -> float:
    return max(costs) * len(costs) / sum(costs) if any(costs) else 1.0


def _by_schedule(sequences: Sequence[Any]) -> Predict:
    """Predict the seconds of a group by planning it."""

    def predict(group: IntArray, size: tuple[int, int]) -> float:
        return plan([sequences[i] for i in group.tolist()], chunk_size=CHUNK_SIZE).estimates.seconds

    return predict


def _by_tree(group: IntArray, size: tuple[int, int]) -> float:
    """Predict the seconds of a group as if all of its chunks were full: a lower bound for any schedule."""
    tokens, pairs = size
    launches = math.ceil(tokens / CHUNK_SIZE)
    work = Work(launches, launches, tokens, pairs, tokens)
    return COST.forward.seconds(work) + COST.backward.seconds(work)


def _measured(call: Callable[[], Any]) -> tuple[Any, float, int | None]:
    """Run a call; return its result, its seconds, and the growth of resident memory at its peak, in bytes."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc: memory freed earlier may hide the growth
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark to the current resident size
    before, start = _status_bytes("VmHWM"), time.perf_counter()
    result = call()
    seconds, after = time.perf_counter() - start, _status_bytes("VmHWM")
    return result, seconds, None if before is None or after is None else after - before


def _status_bytes(field: str) -> int | None:
    """Read a memory figure of this process in bytes; None where the system does not tell (Linux does)."""
    try:
        lines = FIELDS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


COLUMNS = ("K", "method", "max/mean tokens", "max/mean cost", "extra", "step", "of dta's", "seconds", "memory")


def show(result: Result, console: Console) -> None:
    """Print the figures of one batch."""
    compression = result.tokens / max(result.tree_tokens, 1)
    shape = f"{result.sequences:,} sequences, {result.tokens:,} tokens, {result.tree_tokens:,} in the tree"
    console.print(f"{result.name}: {shape}; C {compression:.2f}", style="bold", highlight=False)
    resident = f"; {_mebibytes(result.resident_bytes)} resident in all" if result.resident_bytes else ""
    order = f"order {result.order_seconds:.2f} s, {_mebibytes(result.order_peak_bytes)}{resident}"
    console.print(f"{order}; steps predicted by {result.predicted_by}", highlight=False)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for groups, unavoidable in result.unavoidable.items():
        outcomes = [outcome for outcome in result.outcomes if outcome.groups == groups]
        for number, outcome in enumerate(outcomes):
            label = "" if number else str(groups)
            table.add_row(label, *_cells(outcome, outcomes[0]), style="green" if outcome.method in _OURS else "")
        table.add_row("", "unavoidable", "", "", f"{unavoidable:.1%}", style="dim", end_section=True)
    console.print(table)


_OURS = tuple(method for method in METHODS if method.startswith("dta"))  # the others are rivals or the paper's


def _cells(outcome: Outcome, ours: Outcome) -> list[str]:
    return [
        outcome.method,
        f"{outcome.token_imbalance:.3f}",
        f"{outcome.cost_imbalance:.3f}",
        f"{outcome.extra:.1%}",
        f"{outcome.step_seconds:,.3g} s",
        f"{outcome.step_seconds / ours.step_seconds:.2f}x" if ours.step_seconds else "-",
        f"{outcome.seconds:.3f} s",
        _mebibytes(outcome.peak_bytes),
    ]


def _mebibytes(number: int | None) -> str:
    return "-" if number is None else f"{number / 2**20:,.0f} MiB"


def _batches(arguments: argparse.Namespace) -> list[tuple[str, Callable[[], Sequence[Any]], list[int]]]:
    """List name, constructor and numbers of groups of every batch."""
    files = sorted(arguments.rollouts.glob("*.npz")) if arguments.rollouts else [bundled()]
    if not files:
        raise SystemExit(f"{arguments.rollouts}: no rollout files (.npz)")
    batches: list[tuple[str, Callable[[], Sequence[Any]], list[int]]] = [
        (file.stem, lambda file=file: [rollout.tokens for rollout in load_rollouts(file)], arguments.groups)
        for file in files
    ]
    shape = Shape(vocabulary=arguments.vocabulary)
    for size in arguments.pools:
        build = lambda size=size: generate(size, arguments.mean_tokens, shape)  # noqa: E731
        batches.append((f"pool of {size:,}", build, arguments.pool_groups))
    return batches


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    console = Console()
    arguments.output.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for name, build, groups in _batches(arguments):
        results.append(compare(name, build(), groups, arguments.schedule_tokens))
        show(results[-1], console)
        target = arguments.output / "balancing.json"
        target.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1) + "\n")
    console.print(str(target))
    try:
        from benchmarks.balancing.plots import draw
    except ImportError:
        console.print("no plots without matplotlib: pip install '.[bench]'", style="yellow")
        return 0
    for path in draw(results, arguments.output):
        console.print(str(path))
    return 0


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=Path, metavar="FOLDER", help="of rollout files; default: the bundled one")
    parser.add_argument("--groups", type=_numbers, default=[2, 4, 8, 16], metavar="K,...", help="ranks (2,4,8,16)")
    parser.add_argument("--pools", type=_numbers, default=[1000, 20_000], metavar="N,...", help="rollouts of each pool")
    parser.add_argument("--pool-groups", type=_numbers, default=[8, 64, 1024], metavar="K,...", help="(8,64,1024)")
    parser.add_argument("--mean-tokens", type=int, default=2000, help="of a rollout of a pool (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=Shape().vocabulary, help="of a pool (default: %(default)s)")
    text = "most tokens of a batch whose steps are predicted by planning every group (default: %(default)s)"
    parser.add_argument("--schedule-tokens", type=int, default=5_000_000, metavar="N", help=text)
    parser.add_argument("--output", type=Path, default=Path("build/balancing"), help="default: %(default)s")
    return parser
