"""Batches from a stream of rollouts: gain and cost of selecting them by sharing, against first-come-first-served.

    python -m benchmarks.streaming                        # generated rollouts and the bundled ones
    python -m benchmarks.streaming --rollouts FOLDER      # all rollout files of a folder
    python -m benchmarks.streaming --rows 128 --waiting 8 --patience 0,2,4,8,16 --json OUT

Rollouts arrive one by one in a `RolloutTree`. Whenever `--waiting` batches of them wait, one batch leaves; at the end
of the stream the rest is drained. Every batch makes a new policy version, which later arrivals have. Streams shorter
than eight batches are cut into eight. A patience of 0 is first-come-first-served. Needs no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dta_compile import RolloutTree
from dta_compile.data import bundled, load_rollouts
from dta_compile.errors import TreeClosedError
from dta_compile.plan import PrefixTree

Sequences = list[npt.NDArray[np.int32]]
VOCABULARY = 150_000
NUMBERS = (
    *("rollouts", "rows", "whole C", "patience", "batches", "C", "C of groups"),
    *("waited", "most", "late", "expired", "ms"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """Figures of one stream at one patience.

    Attributes:
        arrival: "shuffled", or "jittered": in generated order, each rollout delayed by up to as many as may wait.
        rows: rollouts per batch.
        whole: compression of all rollouts as one tree, an upper bound that batches do not reach.
        compression: ratio of tokens of all batches to tokens of their trees.
        compression_in_groups: the same ratio for the trees of the K groups into which a batch is cut for K trainers.
        mean_waited, most_waited: batches that left while a rollout waited.
        most_late: batches by which a rollout left later than under first-come-first-served.
        expired: rollouts that were not trained in time.
        seconds: mean time to select and balance a batch.
    """

    stream: str
    arrival: str
    rollouts: int
    rows: int
    whole: float
    patience: int
    batches: int
    compression: float
    compression_in_groups: float
    mean_waited: float
    most_waited: int
    most_late: int
    expired: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Insertion:
    """Insertion of rollouts by some threads; every rollout is handed out again exactly once.

    Attributes:
        meanwhile: whether another thread took batches at the same time.
        tokens_per_cpu_second: tokens per CPU second of the whole process.
        tokens_per_cpu_second: by the processor time of the whole process.
    """

    stream: str
    producers: int
    meanwhile: bool
    rollouts: int
    tokens: int
    seconds: float
    tokens_per_second: float
    tokens_per_cpu_second: float


def answers(prompts: int, count: int, prompt: int, answer: int, seed: int = 0) -> Sequences:
    """Generate single-turn groups: `count` answers of 0.5 to 1.5 times `answer` tokens per prompt."""
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(prompts):
        start = random.integers(0, VOCABULARY, prompt, np.int32)
        for length in random.integers(answer // 2, answer * 3 // 2 + 1, count):
            sequences.append(np.concatenate([start, random.integers(0, VOCABULARY, length, np.int32)]))
    return sequences


def agents(tasks: int, trials: int, turns: int, system: int, turn: int, thought: int, seed: int = 0) -> Sequences:
    """Generate conversations after each of their turns; thoughts of earlier turns are dropped, as agents do."""
    random = np.random.default_rng(seed)
    common, sequences = random.integers(0, VOCABULARY, system, np.int32), []
    for _ in range(tasks):
        task = np.concatenate([common, random.integers(0, VOCABULARY, turn, np.int32)])
        for _ in range(trials):
            history = task
            for _ in range(int(random.integers(turns // 2, turns * 3 // 2 + 1))):
                sequences.append(np.concatenate([history, random.integers(0, VOCABULARY, thought, np.int32)]))
                history = np.concatenate([history, random.integers(0, VOCABULARY, turn, np.int32)])
    return sequences


def streams(folder: Path | None) -> dict[str, Callable[[], Sequences]]:
    """Return the streams by name, as functions that generate or load them."""
    files = [bundled()] if folder is None else sorted(folder.glob("*.npz"))
    by_name: dict[str, Callable[[], Sequences]] = {
        "answers (generated)": lambda: answers(prompts=256, count=8, prompt=1000, answer=1000),
        "agents (generated)": lambda: agents(tasks=32, trials=8, turns=8, system=1000, turn=200, thought=200),
    }
    for path in files:
        by_name[path.stem] = lambda path=path: [rollout.tokens for rollout in load_rollouts(path)]
    return by_name


def arrive(sequences: Sequences, arrival: str, waiting: int, seed: int) -> Sequences:
    """Return the sequences in order of arrival."""
    random = np.random.default_rng(seed)
    if arrival == "shuffled":
        order = random.permutation(len(sequences))
    else:
        order = np.argsort(np.arange(len(sequences)) + random.uniform(0, waiting, len(sequences)), kind="stable")
    return [sequences[index] for index in order]


def simulate(
    sequences: Sequences, rows: int, waiting: int, groups: int, patience: int, staleness: int | None = None
) -> tuple[dict[str, float], dict[int, int]]:
    """Return fields of `Row`, and for every rollout the batch that trained it."""
    tree = RolloutTree(patience=patience, max_staleness=staleness)
    arriving = iter(sequences)
    tokens = tree_tokens = group_tokens = 0
    left, waits, seconds = {}, [], []
    while True:
        for sequence in itertools.islice(arriving, max(rows * waiting - len(tree), 0)):
            tree.add(sequence, policy_version=len(seconds))
        if len(tree) < rows:
            tree.close()
        if not len(tree):
            break
        began = time.perf_counter()
        batch = tree.take(groups, rows=rows, policy_version=len(seconds))
        seconds.append(time.perf_counter() - began)
        tokens += batch.tokens
        tree_tokens += batch.tree_tokens
        for group in batch.groups:
            group_tokens += PrefixTree.build([rollout.tokens for rollout in group]).num_rows
            waits += [rollout.batches_waited for rollout in group]
            left |= dict.fromkeys((rollout.id for rollout in group), len(seconds))
    assert tree.stats.trained + tree.stats.expired == len(sequences)
    figures = {
        "batches": len(seconds),
        "compression": tokens / tree_tokens,
        "compression_in_groups": tokens / group_tokens,
        "mean_waited": float(np.mean(waits)),
        "most_waited": max(waits),
        "expired": tree.stats.expired,
        "seconds": float(np.mean(seconds)),
    }
    return figures, left


def measure(
    name: str, sequences: Sequences, arrival: str, arguments: argparse.Namespace, patiences: Sequence[int]
) -> list[Row]:
    """Measure every patience; the first one, 0, is the reference for the others."""
    size = max(min(arguments.rows, len(sequences) // 8), 1)
    arrived = arrive(sequences, arrival, size * arguments.waiting, arguments.seed)
    whole = PrefixTree.build(arrived)
    first_come: dict[int, int] = {}
    rows = []
    for patience in patiences:
        figures, left = simulate(arrived, size, arguments.waiting, arguments.groups, patience, arguments.staleness)
        first_come = first_come or left
        rows.append(
            Row(
                stream=name,
                arrival=arrival,
                rollouts=len(arrived),
                rows=size,
                whole=int(whole.lengths.sum()) / whole.num_rows,
                patience=patience,
                most_late=max(left[rollout] - first_come[rollout] for rollout in left.keys() & first_come.keys()),
                **figures,
            )
        )
    return rows


def insert(name: str, sequences: Sequences, producers: int, meanwhile: bool, count: int) -> Insertion:
    """Insert `count` rollouts and check that each one comes out exactly once.

    Args:
        producers: number of inserting threads.
        meanwhile: take batches in another thread at the same time; else after all insertions.
    """
    tree, rollouts, out = RolloutTree(), [sequences[i % len(sequences)] for i in range(count)], []

    def produce(first: int) -> None:
        for index in range(first, count, producers):
            tree.add(rollouts[index], payload=index)

    def consume() -> None:
        try:
            while True:
                out.extend(rollout.payload for group in tree.take(8, rows=1024).groups for rollout in group)
        except TreeClosedError:
            return

    threads = [threading.Thread(target=produce, args=(first,)) for first in range(producers)]
    consumer = threading.Thread(target=consume)
    wall, cpu = time.perf_counter(), time.process_time()
    for thread in [consumer, *threads] if meanwhile else threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tree.close()
    if not meanwhile:
        consumer.start()
    consumer.join()
    assert sorted(out) == list(range(count)), "rollouts were lost or came out twice"
    tokens = sum(map(len, rollouts))
    return Insertion(name, producers, meanwhile, count, tokens, wall, tokens / wall, tokens / cpu)


def show(rows: list[Row], insertions: list[Insertion], console: Console) -> None:
    table = Table(title="batches by patience (0: first-come-first-served)", box=box.SIMPLE)
    for heading in ("stream", "arrival"):
        table.add_column(heading, no_wrap=True)
    for heading in NUMBERS:
        table.add_column(heading, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        same = index > 0 and (rows[index - 1].stream, rows[index - 1].arrival) == (row.stream, row.arrival)
        table.add_row(
            *([""] * 5 if same else [row.stream, row.arrival, f"{row.rollouts:,}", str(row.rows), f"{row.whole:.2f}"]),
            *(str(row.patience), str(row.batches), f"{row.compression:.2f}", f"{row.compression_in_groups:.2f}"),
            *(f"{row.mean_waited:.2f}", str(row.most_waited), str(row.most_late), str(row.expired)),
            f"{row.seconds * 1e3:.1f}",
        )
    console.print(table)
    table = Table(title="insertion", box=box.SIMPLE)
    table.add_column("stream", no_wrap=True)
    for heading in ("producers", "taking", "rollouts", "tokens", "seconds", "tokens/s", "tokens/CPU s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for insertion in insertions:
        table.add_row(
            *(insertion.stream, str(insertion.producers), "yes" if insertion.meanwhile else "no"),
            *(f"{insertion.rollouts:,}", f"{insertion.tokens:,}", f"{insertion.seconds:.2f}"),
            *(f"{insertion.tokens_per_second:,.0f}", f"{insertion.tokens_per_cpu_second:,.0f}"),
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=Path, metavar="FOLDER", help="of rollout files; default: the bundled one")
    parser.add_argument("--files", metavar="NAMES", help="only these streams, separated by commas")
    parser.add_argument("--rows", type=int, default=64, help="rollouts of a batch (default: %(default)s)")
    parser.add_argument("--waiting", type=int, default=4, help="batches that wait when one leaves (%(default)s)")
    parser.add_argument("--staleness", type=int, metavar="N", help="batches after which a rollout expires; never")
    parser.add_argument("--patience", default="0,1,2,4,8", help="default: %(default)s; 0 always runs")
    parser.add_argument("--groups", type=int, default=8, help="K (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of arrival (default: %(default)s)")
    parser.add_argument("--insertions", type=int, default=20_000, help="rollouts to insert (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write settings and all figures to OUT")
    arguments = parser.parse_args()
    try:
        patiences = sorted({0, *map(int, arguments.patience.split(","))})
    except ValueError:
        parser.error(f"--patience {arguments.patience} is no list of numbers")
    if (
        min(arguments.rows, arguments.waiting, arguments.groups, arguments.insertions, 1 + patiences[0]) < 1
        or (arguments.staleness or 0) < 0
    ):
        parser.error("--rows, --waiting, --groups and --insertions must be at least 1, the others at least 0")
    known = streams(arguments.rollouts)
    names = arguments.files.split(",") if arguments.files else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown streams {', '.join(unknown)}; known: {', '.join(known)}")

    console, rows, insertions = Console(), [], []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(names) * 4)
        for name in names:
            progress.update(task, description=name)
            sequences = known[name]()
            for arrival in ("shuffled", "jittered"):
                rows += measure(name, sequences, arrival, arguments, patiences)
                progress.advance(task)
            mixed = arrive(sequences, "shuffled", 0, arguments.seed)
            for producers, meanwhile in ((1, False), (8, True)):
                insertions.append(insert(name, mixed, producers, meanwhile, arguments.insertions))
                progress.advance(task)
    show(rows, insertions, console)
    if arguments.json:
        facts = {"rows": arguments.rows, "waiting": arguments.waiting, "groups": arguments.groups}
        facts["staleness"] = arguments.staleness
        facts |= {"seed": arguments.seed, "python": platform.python_version(), "numpy": np.__version__}
        results = {"facts": facts, "batches": [*map(dataclasses.asdict, rows)]}
        results["insertion"] = [*map(dataclasses.asdict, insertions)]
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
