"""Speed floors: dta against eager one sequence at a time, interleaved in one process.

    python benchmarks/floors.py [--models dense,mixture] [--trees short,mid,none] [--repetitions 5] [--json OUT]

A step is forward and backward of a weighted sum of token log-probs over a whole batch, in float32, on a small Qwen3 and
a small mixture of experts. Eager mode uses the fastest of transformers' expert implementations. Recurrent models are
also compared with eager mode under our recurrences, and with `--compiled`, models of attention alone are compared with
the fastest dense rows compiled by inductor: one at a time, padded, packed. Gradients are compared once per tree, so
that a fast wrong answer does not count. Exit code 1: a floor was missed or gradients differ. `python -m benchmarks.run`
compares with more methods.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.batches.model import MODELS, flops, gradient_difference, gradients
from benchmarks.batches.trees import TREES, ideal_speedup
from benchmarks.batches.workloads import Workload, catalogue
from benchmarks.measuring.measure import Runner
from benchmarks.methods.baselines import dense, dense_recurrences
from benchmarks.methods.compiled_dense import compiled_dense, compiled_packed, compiled_padded
from benchmarks.methods.ours import compiled

FLOORS = {"short": 3.0, "mid": 1.5, "none": 0.75}
EXPERTS = ("grouped_mm", "eager")  # "batched_mm" copies the weights per token: gigabytes, and minutes
COMPILED = {"one": compiled_dense, "padded": compiled_padded, "packed": compiled_packed}
TOLERANCE = 1e-3  # bound on max |difference| / max |gradient| per parameter, for two float32 runs


@dataclasses.dataclass(frozen=True)
class Row:
    """Figures of one model and tree; seconds are per step."""

    model: str
    tree: str
    sequences: int
    tokens: int
    tree_tokens: int
    compression: float
    ideal: float
    floor: float | None
    first_call_seconds: float
    eager_seconds: list[float]
    kernels_seconds: list[float]  # eager with our recurrences; empty for models without any
    compiled_seconds: dict[str, list[float]]  # dense rows compiled by inductor, by method; empty unless requested
    dta_seconds: list[float]
    gradient_difference: float
    strategy: str

    @property
    def speedup(self) -> float:
        """Ratio of median eager time to median dta time."""
        return statistics.median(self.eager_seconds) / statistics.median(self.dta_seconds)

    @property
    def over_kernels(self) -> float | None:
        """Ratio of median time of eager with our recurrences to median dta time."""
        if not self.kernels_seconds:
            return None
        return statistics.median(self.kernels_seconds) / statistics.median(self.dta_seconds)

    @property
    def over_compiled(self) -> float | None:
        """Ratio of the median time of the fastest dense rows compiled by inductor to median dta time."""
        if not self.compiled_seconds:
            return None
        return min(map(statistics.median, self.compiled_seconds.values())) / statistics.median(self.dta_seconds)

    @property
    def passed(self) -> bool:
        return self.gradient_difference < TOLERANCE and (self.floor is None or self.speedup >= self.floor)


def measure(
    model: str, tree: str, repetitions: int, options: dict, backend: str, dense_rows: bool, tick: Callable[[], None]
) -> Row:
    """Measure one tree: compare the first call of both, then time `repetitions` alternating steps."""
    workload = catalogue(None, (), 0)[tree].build()
    torch.compiler.reset()
    eager = fastest_eager(model, workload)
    dta = Runner.of(compiled(backend, backend, **(options if backend == "dta" else {})), workload, model)
    eager.seconds()
    first_call = dta.seconds()
    difference = gradient_difference(gradients(dta.model), gradients(eager.model))
    tick()
    ways = {"eager": eager, "dta": dta}
    if "linear_attention" in (getattr(dta.model.config, "layer_types", None) or ()):
        ways["kernels"] = Runner.of(dense_recurrences, workload, model)
        ways["kernels"].seconds()
    for name, build in (COMPILED if dense_rows else {}).items():
        ways[name] = Runner.of(build, workload, model)
        ways[name].seconds()
        difference = max(difference, gradient_difference(gradients(ways[name].model), gradients(eager.model)))
    seconds: dict[str, list[float]] = {way: [] for way in ("eager", "kernels", "dta", *ways)}
    for repetition in range(repetitions):
        for way in list(ways)[:: 1 if repetition % 2 else -1]:
            seconds[way].append(ways[way].seconds())
        tick()
    counts = workload.counts
    return Row(
        model=model,
        tree=tree,
        sequences=counts.sequences,
        tokens=counts.tokens,
        tree_tokens=counts.tree_tokens,
        compression=counts.tokens / counts.tree_tokens,
        ideal=ideal_speedup(counts, *flops(dta.model.config)),
        floor=FLOORS.get(tree) if backend == "dta" else None,
        first_call_seconds=first_call,
        eager_seconds=seconds["eager"],
        kernels_seconds=seconds["kernels"],
        compiled_seconds={name: seconds[name] for name in COMPILED if name in ways},
        dta_seconds=seconds["dta"],
        gradient_difference=difference,
        strategy=dta.step.note() or "-",
    )


def fastest_eager(model: str, workload: Workload) -> Runner:
    """Return eager mode with the fastest experts, chosen by the shorter of two steps each."""
    runner = Runner.of(dense, workload, model)
    if getattr(runner.model.config, "num_experts", 0):

        def seconds(implementation: str) -> float:
            runner.model.set_experts_implementation(implementation)
            return min(runner.seconds(), runner.seconds())

        runner.model.set_experts_implementation(min(EXPERTS, key=seconds))
    return runner


def show(rows: list[Row], facts: dict, console: Console) -> None:
    table = Table(title="one step (forward and backward), median seconds; diff: of gradients", box=box.SIMPLE)
    table.add_column("model", no_wrap=True)
    table.add_column("tree", no_wrap=True)
    for heading in (
        "C",
        "ideal",
        "eager",
        facts["backend"],
        "ratio",
        "kernels",
        "ratio",
        "compiled",
        "floor",
        "1st call",
        "diff.",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.model,
            row.tree,
            f"{row.compression:.2f}",
            f"{row.ideal:.2f}x",
            f"{statistics.median(row.eager_seconds):.3f}",
            f"{statistics.median(row.dta_seconds):.3f}",
            f"{row.speedup:.2f}x",
            f"{statistics.median(row.kernels_seconds):.3f}" if row.kernels_seconds else "-",
            f"{row.over_kernels:.2f}x" if row.over_kernels else "-",
            f"{row.over_compiled:.2f}x" if row.over_compiled else "-",
            "-" if row.floor is None else f"{row.floor:.2f}x",
            f"{row.first_call_seconds:.2f}",
            f"{row.gradient_difference:.0e}",
            style="" if row.passed else "red",
        )
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), style="dim")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="dense,mixture", help=f"of {', '.join(MODELS)} (default: %(default)s)")
    parser.add_argument("--trees", default=",".join(TREES), help="default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=5, help="timed steps of each way (default: %(default)s)")
    parser.add_argument("--chunk-size", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--strategy", default="auto", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--backend", default="dta", help="default: %(default)s")
    parser.add_argument("--compiled", action="store_true", help="also against dense rows that inductor compiled")
    parser.add_argument("--json", metavar="OUT", help="write facts, medians and all timings to OUT")
    arguments = parser.parse_args()
    models, trees = arguments.models.split(","), arguments.trees.split(",")
    for what, names, known in (("models", models, MODELS), ("trees", trees, TREES)):
        if unknown := set(names) - set(known):
            parser.error(f"unknown {what} {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    if arguments.repetitions < 1:
        parser.error("--repetitions must be at least 1")

    torch.set_num_threads(arguments.threads)
    console = Console()
    options = {"chunk_size": arguments.chunk_size, "strategy": arguments.strategy}
    facts = {"backend": arguments.backend, **options, "repetitions": arguments.repetitions}
    facts |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    facts |= {"transformers": transformers.__version__, "python": platform.python_version()}
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("steps", total=len(models) * len(trees) * (arguments.repetitions + 1))
        for model, tree in itertools.product(models, trees):
            progress.update(task, description=f"{model} {tree}")
            tick = functools.partial(progress.advance, task)
            rows.append(
                measure(model, tree, arguments.repetitions, options, arguments.backend, arguments.compiled, tick)
            )
    show(rows, facts, console)
    if arguments.json:
        trees = [dataclasses.asdict(row) | {"speedup": row.speedup, "passed": row.passed} for row in rows]
        Path(arguments.json).write_text(json.dumps({"facts": facts, "trees": trees}, indent=1) + "\n")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
