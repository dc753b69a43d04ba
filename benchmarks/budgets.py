"""Cost of memory: steps at budgets between nothing saved and all saved, against checkpointed rivals.

    python -m benchmarks.budgets [--trees short,mid,long] [--rollouts FOLDER] [--shares 0.25,0.5,0.75]
                                 [--no-rivals] [--repetitions 5] [--json OUT]

All methods run in turns in one process. `line` interpolates the step time linearly in the saved activations, between
nothing and all saved. `at equal memory` saves nothing, in the largest chunks with which a step takes no more memory
than the checkpointed rival that takes least. Bytes are what torch allocates at the peak of a step, without the model,
its gradients and the batch.
"""

from __future__ import annotations

import argparse
import gc
import itertools
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
from benchmarks.measuring.allocations import allocated_at_the_peak, counting
from benchmarks.measuring.measure import Runner
from benchmarks.methods.baselines import checkpoint, sparse_checkpoint
from benchmarks.methods.ours import compile_logprobs, finish_generating, replan
from benchmarks.methods.steps import Step, rectangle_of
from dta_compile.plan import Plan

ALL = 2**50
RIVALS = {"checkpoint": checkpoint, "sparse-checkpoint": sparse_checkpoint}
EQUAL = "at equal memory"
SIZES = (2048, 1024, 512, 256, 128)  # of chunks, at equal memory
MOST_TOKENS = 60_000  # taken from each rollout file
TABLE_WIDTH = 120


def long_tree() -> Workload:
    """Return a workload of 60,000 tokens in one tree."""
    sequences = build(((1, 4000), (8, 3000), (2, 2000)), VOCABULARY)
    return Workload("long", "trees", "16 sequences of 9,000 tokens", VOCABULARY, sequences)


def measure(workload: Workload, repetitions: int, shares: list[float], rivals_too: bool) -> dict[str, Any]:
    """Measure median seconds, bytes that are allocated and predicted, and the plan of every method.

    Args:
        shares: fractions of the activations that are saved, besides 0 and 1.
    """
    torch.compiler.reset()
    model = build_model(workload.vocabulary)
    function, _ = compile_logprobs(model, "budgets", "dta", {"memory_budget": ALL, "verify": "off"})
    ids, labels, weights, mask = rectangle_of(workload)

    def run() -> None:
        (weights * function(ids, labels, mask)).sum().backward()

    ours = Runner(model, Step(run))
    builders = RIVALS if rivals_too else {}
    rivals = {name: Runner.of(build_rival, workload) for name, build_rival in builders.items()}
    grads: list[torch.Tensor] = []
    allocated: dict[Any, int] = {}
    plans: dict[Any, Plan] = {}
    options: dict[Any, dict[str, Any]] = {}

    def runner(way: Any) -> Runner:
        if way in rivals:
            return rivals[way]
        replan(function, **{"chunk_size": None, "sweep": "auto", **options[way]})
        return ours

    def try_out(way: Any) -> None:
        """Run a way until its code is generated, for its gradients, its plan and its memory."""
        chosen = runner(way)
        chosen.seconds()
        if way not in rivals:
            finish_generating(function)
            chosen.seconds()
        grads[:] = grads or gradients(chosen.model)
        assert gradient_difference(gradients(chosen.model), grads) < 1e-3, way
        chosen.model.zero_grad(set_to_none=False)
        allocated[way] = allocated_at_the_peak(chosen.step.run)
        if way not in rivals:
            plans[way] = dta_compile.last_plan(function)

    run()
    for name in rivals:
        try_out(name)
    options |= {0.0: {"memory_budget": 0}, 1.0: {"memory_budget": ALL}}
    for share in options:
        try_out(share)
    least, most = (plans[share].estimates.peak_bytes or 0 for share in (0.0, 1.0))
    for share in shares:
        options[share] = {"memory_budget": int(share * (most - least))}
        try_out(share)
    for size, sweep in itertools.product(SIZES, ("stages", "chunks")) if rivals else ():
        options[EQUAL] = {"memory_budget": 0, "chunk_size": size, "sweep": sweep}
        try_out(EQUAL)
        if allocated[EQUAL] <= min(allocated[name] for name in rivals):
            break
    times: dict[Any, list[float]] = {way: [] for way in sorted(allocated, key=str)}
    for repetition in range(repetitions):
        for way in list(times)[:: 1 if repetition % 2 else -1]:
            gc.collect()
            times[way].append(runner(way).seconds())
    medians = {way: statistics.median(values) for way, values in times.items()}
    rows = []
    for way, median in medians.items():
        row = {"way": f"ours, {way:.0%} kept" if isinstance(way, float) else way}
        row |= {"seconds": median, "of all kept": median / medians[1.0], "allocated MiB": allocated[way] / 2**20}
        if isinstance(way, float):
            row["line"] = (medians[0.0] + way * (medians[1.0] - medians[0.0])) / medians[1.0]
        if way in plans:
            row["predicted MiB"] = (plans[way].estimates.peak_bytes or 0) / 2**20
            row["plan"] = f"{plans[way].schedule.sweep}, chunks of {plans[way].schedule.chunk_size:,}"
        rows.append(row)
    counts = workload.counts
    return {"tree": workload.name, "tree tokens": counts.tree_tokens, "tokens": counts.tokens, "rows": rows}


def show(result: dict[str, Any], console: Console) -> None:
    title = f"{result['tree']}: {result['tree tokens']:,} tree tokens of {result['tokens']:,}, median seconds"
    table = Table(title=title, box=box.SIMPLE)
    names = ("way", "seconds", "of all kept", "line", "allocated MiB", "predicted MiB", "plan")
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
    parser.add_argument("--shares", default="0.25,0.5,0.75", help="of activations to save; default: %(default)s")
    parser.add_argument("--no-rivals", action="store_true", help="measure ours alone")
    parser.add_argument("--repetitions", type=int, default=5, help="timed steps of each way (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--json", metavar="OUT", help="write the figures to OUT")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    counting()
    names = arguments.trees.split(",")
    shares = [float(share) for share in arguments.shares.split(",") if share]
    folder = arguments.rollouts
    files = [name for name in names if folder is not None and (folder / f"{name}.npz").exists()]
    known = catalogue(folder, files, MOST_TOKENS)
    builders = {name: entry.build for name, entry in known.items()} | {"long": long_tree}
    if unknown := set(names) - set(builders):
        parser.error(f"unknown trees {', '.join(sorted(unknown))}; known: {', '.join(builders)}")
    results = []
    console = Console(width=max(Console().width, TABLE_WIDTH))
    for name in names:
        results.append(measure(builders[name](), arguments.repetitions, shares, not arguments.no_rivals))
        show(results[-1], console)
    if arguments.json:
        facts = {"threads": arguments.threads, "repetitions": arguments.repetitions, "torch": torch.__version__}
        Path(arguments.json).write_text(json.dumps({"facts": facts, "trees": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
