"""Cost of memory: steps at budgets between nothing saved and all saved, against checkpointed rivals.

    python -m benchmarks.budgets [--trees short,mid,long] [--rollouts FOLDER] [--repetitions 5] [--json OUT]

All methods run in turns in one process. `line` interpolates the step time linearly in the saved activations, between
nothing and all saved. Predicted bytes exclude the model, its gradients and the batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import dta_compile
from benchmarks.batches.model import VOCABULARY, build_model, gradient_difference, gradients
from benchmarks.batches.trees import build
from benchmarks.batches.workloads import Workload, catalogue
from benchmarks.measuring.measure import Runner
from benchmarks.measuring.memory import peak_growth
from benchmarks.methods.baselines import checkpoint, sparse_checkpoint
from benchmarks.methods.ours import compile_logprobs, replan
from benchmarks.methods.steps import Step, rectangle_of

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # fractions of the activations that are saved
ALL = 2**50
RIVALS = {"checkpoint": checkpoint, "sparse-checkpoint": sparse_checkpoint}
OURS = "packed-0"  # method whose resident memory is measured
MOST_TOKENS = 60_000  # taken from each rollout file
TABLE_WIDTH = 110
LIMIT = 900.0  # seconds allowed for two steps in a process of their own


def long_tree() -> Workload:
    """Return a workload of 60,000 tokens in one tree."""
    sequences = build(((1, 4000), (8, 3000), (2, 2000)), VOCABULARY)
    return Workload("long", "trees", "16 sequences of 9,000 tokens", VOCABULARY, sequences)


def measure(workload: Workload, repetitions: int, threads: int) -> dict[str, Any]:
    """Measure median seconds, predicted bytes, memory growth in a fresh process and the plan of every method."""
    torch.compiler.reset()
    model = build_model(workload.vocabulary)
    function, _ = compile_logprobs(model, "budgets", "dta", {"memory_budget": ALL, "verify": "off"})
    ids, labels, weights, mask = rectangle_of(workload)

    def run() -> None:
        (weights * function(ids, labels, mask)).sum().backward()

    ours = Runner(model, Step(run))

    def seconds(budget: int) -> float:
        replan(function, memory_budget=budget)
        return ours.seconds()

    run()
    peaks = {}
    for budget in (ALL, 0):
        seconds(budget)
        peaks[budget] = dta_compile.last_plan(function).estimates.peak_bytes or 0
    ways = {share: ALL if share == 1 else int(share * (peaks[ALL] - peaks[0])) for share in SHARES}
    rivals = {name: Runner.of(build_rival, workload) for name, build_rival in RIVALS.items()}
    expected = None
    for name, runner in rivals.items():
        runner.seconds()
        grads = gradients(runner.model)
        expected = expected or grads
        assert gradient_difference(grads, expected) < 1e-3, name
    plans: dict[float, Any] = {}
    for share, budget in ways.items():
        seconds(budget)
        assert gradient_difference(gradients(model), expected or []) < 1e-3, share
        plans[share] = dta_compile.last_plan(function)
    times: dict[Any, list[float]] = {way: [] for way in [*ways, *rivals]}
    for repetition in range(repetitions):
        for way in list(times)[:: 1 if repetition % 2 else -1]:
            gc.collect()
            times[way].append(rivals[way].seconds() if way in rivals else seconds(ways[way]))
    medians = {way: statistics.median(values) for way, values in times.items()}
    rows = []
    for share, plan in plans.items():
        line = medians[0.0] + share * (medians[1.0] - medians[0.0])
        rows.append(
            {
                "way": f"ours, {share:.0%} kept",
                "seconds": medians[share],
                "of all kept": medians[share] / medians[1.0],
                "line": line / medians[1.0],
                "predicted MiB": (plan.estimates.peak_bytes or 0) / 2**20,
                "plan": f"{plan.schedule.sweep}, chunks of {plan.schedule.chunk_size:,}",
            }
        )
    rows[0]["grown MiB"] = peak_growth(OURS, workload, threads, LIMIT) / 2**20
    for name in rivals:
        grown = peak_growth(name, workload, threads, LIMIT) / 2**20
        rows.append(
            {"way": name, "seconds": medians[name], "of all kept": medians[name] / medians[1.0], "grown MiB": grown}
        )
    counts = workload.counts
    return {"tree": workload.name, "tree tokens": counts.tree_tokens, "tokens": counts.tokens, "rows": rows}


def show(result: dict[str, Any], console: Console) -> None:
    title = f"{result['tree']}: {result['tree tokens']:,} tree tokens of {result['tokens']:,}, median seconds"
    table = Table(title=title, box=box.SIMPLE)
    names = ("way", "seconds", "of all kept", "line", "predicted MiB", "grown MiB", "plan")
    for name in names:
        table.add_column(name, justify="left" if name in ("way", "plan") else "right", no_wrap=True)
    for row in result["rows"]:
        cells = (row.get(name, "-") for name in names)
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", default="short,mid,long", help="default: %(default)s")
    parser.add_argument("--rollouts", type=Path, help="folder of rollout files, whose names may be given as trees")
    parser.add_argument("--repetitions", type=int, default=5, help="timed steps of each way (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--json", metavar="OUT", help="write the figures to OUT")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = arguments.trees.split(",")
    folder = arguments.rollouts
    files = [name for name in names if folder is not None and (folder / f"{name}.npz").exists()]
    known = catalogue(folder, files, MOST_TOKENS)
    builders = {name: entry.build for name, entry in known.items()} | {"long": long_tree}
    if unknown := set(names) - set(builders):
        parser.error(f"unknown trees {', '.join(sorted(unknown))}; known: {', '.join(builders)}")
    results = []
    console = Console(width=max(Console().width, TABLE_WIDTH))
    for name in names:
        results.append(measure(builders[name](), arguments.repetitions, arguments.threads))
        show(results[-1], console)
    if arguments.json:
        facts = {"threads": arguments.threads, "repetitions": arguments.repetitions, "torch": torch.__version__}
        Path(arguments.json).write_text(json.dumps({"facts": facts, "trees": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
