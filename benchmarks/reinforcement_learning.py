"""Benchmark reinforcement learning end to end, dense against dta: replayed batches, then free-running trainers.

    make rl
    python -m benchmarks.reinforcement_learning [--seconds 45] [--seeds 3] [--updates 20] [--folder FOLDER] [--out JSON]

Every run is a run of `examples/async_grpo` from one supervised start. The first dta run is replayed: three trainers in
one process (eager, compiled over packed rows, dta) train its batches in turns, and their losses and weights are
compared. Then runs of the faster dense trainer and of dta alternate, each training for the same time next to its
workers. Snapshots are evaluated after each run. `--page` redraws the page from the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import torch
import transformers
from rich.console import Console

from benchmarks import rl_page
from benchmarks.batches.model import flops
from benchmarks.batches.trees import count_sequences, ideal_speedup
from benchmarks.streaming import simulate
from dta_compile.cli.split import System, best, sweep
from dta_compile.plan import PrefixTree
from examples.async_grpo import warmup
from examples.async_grpo.engine import ProcessEngine
from examples.async_grpo.evaluator import evaluate, summary
from examples.async_grpo.game import require_environment
from examples.async_grpo.record import Record
from examples.async_grpo.run import Run, prepare
from examples.async_grpo.samples import Sample
from examples.async_grpo.settings import WAYS, Settings
from examples.async_grpo.update import Learner
from examples.async_grpo.weights import read, snapshots

DENSE = ("eager", "compiled")
EVALUATIONS = 4  # per run, evenly spaced in time
OF_THE_LAST = 2  # most additional evaluations, within the last tenth of the updates
GPUS = 8  # for `dta split`, by the figures of one worker and one trainer
KEPT = ("version", "seconds", "samples", "tokens", "tree_tokens", "reward/train", "train/kl", "train/entropy")
KEPT += ("time/update", "time/wait", "stream/staleness", "stream/expired", "stream/batches_waited")  # of an update
PATIENCES = (0, 1, 2, 4, 8)


def replay(settings: Settings, start: Path, batches: Sequence[Sequence[Sample]], tell: Callable) -> dict[str, Any]:
    """Train equal batches with every trainer in turns; record losses, wall and CPU seconds, weight differences."""
    torch.set_num_threads(settings.trainer_threads)
    learners, first_calls = {}, {}
    for way in WAYS:
        began = time.perf_counter()
        reference, tokenizer = warmup.start(settings, start)
        model, _ = warmup.start(settings, start)
        learners[way] = Learner(dataclasses.replace(settings, way=way), model, reference)
        learners[way].rehearse(tokenizer.get_vocab_size())
        first_calls[way] = time.perf_counter() - began
        tell(f"replay: {way} compiled in {first_calls[way]:.0f} s")
    initial = {name: value.detach().clone() for name, value in reference.named_parameters()}
    steps = []
    for number, batch in enumerate(batches):
        counts = count_sequences([sample.tokens for sample in batch])
        step: dict[str, Any] = {"samples": len(batch), "tokens": counts.tokens, "tree_tokens": counts.tree_tokens}
        tree = PrefixTree.build([sample.tokens for sample in batch])
        step["leaf_tokens"] = int(tree.stop[tree.leaves].sum())
        step["ideal"] = ideal_speedup(counts, *flops(model.config))
        for way in WAYS if number % 2 else WAYS[::-1]:
            wall, processor = time.perf_counter(), time.process_time()
            facts = learners[way].update(batch)
            step[way] = {"seconds": time.perf_counter() - wall, "processor": time.process_time() - processor}
            step[way] |= {"loss": facts["loss"], "norm": facts["norm"]}
        weights = {way: dict(learners[way].model.named_parameters()) for way in WAYS}
        step["difference"] = {way: difference(weights[way], weights["eager"]) for way in ("compiled", "dta")}
        step["moved"] = difference(weights["eager"], initial)
        steps.append(step)
        tell(f"replay: update {number + 1} of {len(batches)}")
    return {"first_call_seconds": first_calls, "steps": steps}


def difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest max |difference| / max |weight| over all parameters."""
    return max(
        float((actual[name] - value).detach().abs().max() / value.detach().abs().max())
        for name, value in expected.items()
    )


def rewards_of(settings: Settings, start: Path, snapshot: Path | None) -> list[float]:
    """Evaluate a policy on all held-out tasks, in a separate process; None: the supervised start."""
    torch.set_num_threads(1)
    model, tokenizer = warmup.start(settings, start)
    if snapshot is not None:
        model.load_state_dict(read(snapshot)["weights"])
    return evaluate(settings, model.eval(), tokenizer)


def free_run(
    settings: Settings, start: Path, folder: Path, at_start: Sequence[float], pool: Executor, tell: Callable
) -> dict[str, Any]:
    """Run once in real time, then evaluate. `at_start`: rewards of the supervised start, common to all runs."""
    folder.mkdir(parents=True)
    for name in ("start.pt", "tokenizer.json"):
        shutil.copy(start / name, folder)
    prepare(folder, settings)
    name = f"{settings.way}, seed {settings.seed}"

    def tick(run: Run) -> None:
        facts = run.latest()
        if facts:
            tell(f"{name}: {facts['seconds']:.0f} of {settings.seconds:.0f} s, update {facts['version']}")

    Run(folder, settings, ProcessEngine(), evaluate=False).go(tick)
    tell(f"{name}: evaluating")
    record = Record(folder)
    updates, counts = record.updates(), record.counts()
    evaluations, files = [], snapshots(folder)
    pending = {
        version: pool.submit(rewards_of, settings, start, files[version])
        for version in chosen_versions(updates)
        if version
    }
    rewards = {0: at_start} | {version: future.result() for version, future in pending.items()}
    for version, scores in rewards.items():
        seconds = updates[version - 1]["seconds"] if version else 0.0
        reward, error, won = summary(list(scores))
        evaluations.append({"version": version, "seconds": seconds, "reward": reward, "error": error, "won": won})
    waves = record.rows("waves")
    record.close()
    return {
        "way": settings.way,
        "seed": settings.seed,
        "updates": [{key: update[key] for key in KEPT} for update in updates],
        "evaluations": evaluations,
        "rise": rise(at_start, [rewards[version] for version in last_tenth(updates)]),
        "counts": dataclasses.asdict(counts),
        "rollout": {"seconds": sum(wave[1] for wave in waves), "tokens": sum(wave[2] for wave in waves)},
    }


def chosen_versions(updates: Sequence[dict[str, Any]]) -> list[int]:
    """Choose the policies to evaluate: evenly spaced in time, and some of the last tenth of the updates."""
    if not updates:
        return [0]
    total = updates[-1]["seconds"]
    wanted = {0, updates[-1]["version"]}
    for part in range(1, EVALUATIONS):
        wanted.add(min(updates, key=lambda update: abs(update["seconds"] - total * part / EVALUATIONS))["version"])
    return sorted(wanted | set(last_tenth(updates)))


def last_tenth(updates: Sequence[dict[str, Any]]) -> list[int]:
    """Return at most `OF_THE_LAST` versions, evenly spaced in the last tenth."""
    versions = [update["version"] for update in updates][-max(1, len(updates) // 10) :]
    step = max(1, len(versions) // OF_THE_LAST)
    return versions[::-step][:OF_THE_LAST]


def rise(start: Sequence[float], ends: Sequence[Sequence[float]]) -> dict[str, float]:
    """Compare final with initial rewards; `errors` is the difference by task in standard errors."""
    differences = [fmean(at_end) - before for before, *at_end in zip(start, *ends, strict=True)] if ends else [0.0]
    error = pstdev(differences) / math.sqrt(len(differences))
    mean = fmean(differences)
    return {"start": fmean(start), "end": fmean(start) + mean, "error": error, "errors": mean / max(error, 1e-9)}


def balances(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return token rates of a trainer and a worker, the best split by `dta split`, and measured rates, by trainer."""
    figures = {}
    for way in dict.fromkeys(run["way"] for run in runs):
        mine = [run for run in runs if run["way"] == way]
        updates = [update for run in mine for update in run["updates"]]
        train = sum(update["tokens"] for update in updates) / sum(update["time/update"] for update in updates)
        roll = sum(run["rollout"]["tokens"] for run in mine) / sum(run["rollout"]["seconds"] for run in mine)
        measured = sum(update["tokens"] for update in updates) / sum(run["updates"][-1]["seconds"] for run in mine)
        system = System({1: train}, {1: roll})
        here, top = sweep(system, 2)[0], best(sweep(system, GPUS))
        figures[way] = {"train": train, "roll": roll, "predicted": here.throughput, "limit": here.limit}
        figures[way] |= {"measured": measured, "best_split": top.split, "best_throughput": top.throughput}
    return figures


def patience(runs: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, float]]:
    """Simulate the rollouts of a run in order of arrival, to see the gain of choosing batches by sharing."""
    record = Record(folder)
    arrived = [sample.tokens for update in runs[0]["updates"] for sample in record.trained_by(update["version"])]
    record.close()
    rows = max(1, round(fmean(update["samples"] for update in runs[0]["updates"])))
    return [
        {"patience": patience, **simulate(arrived, rows=rows, waiting=4, groups=1, patience=patience, staleness=4)[0]}
        for patience in PATIENCES
    ]


def measure(arguments: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Run everything and return the contents of the results file."""
    began = time.perf_counter()
    processes = ProcessPoolExecutor(os.cpu_count() or 1, multiprocessing.get_context("spawn"))
    with processes as pool, console.status("supervised warm-up") as status:

        def tell(line: str) -> None:
            status.update(f"{time.perf_counter() - began:.0f} s: {line}")

        settings = Settings(seconds=arguments.seconds, snapshot_every=1, checkpoint_every=10**6)
        start = arguments.start or folder / "start"
        start.mkdir(parents=True, exist_ok=True)
        is_new = not (start / "start.pt").exists()
        warmup.start(settings, start, tell)
        warm_seconds = time.perf_counter() - began if is_new else 0.0

        torch.set_num_threads(settings.trainer_threads)
        tell("supervised start: evaluating")
        at_start = pool.submit(rewards_of, settings, start, None).result()

        def one(way: str, seed: int) -> dict[str, Any]:
            chosen = dataclasses.replace(settings, way=way, seed=seed)
            result = free_run(chosen, start, folder / f"{way}-{seed}", at_start, pool, tell)
            console.print(f"{way}, seed {seed}: {len(result['updates'])} updates, {result['rise']}", highlight=False)
            return result

        runs = [one("dta", 0)]
        record = Record(folder / "dta-0")
        batches = [
            record.trained_by(version) for version in range(1, min(arguments.updates, len(runs[0]["updates"])) + 1)
        ]
        record.close()
        replayed = replay(settings, start, batches, tell)
        dense = min(DENSE, key=lambda way: median(step[way]["processor"] for step in replayed["steps"]))
        runs.append(one(dense, 0))
        for seed in range(1, arguments.seeds):
            runs += [one(way, seed) for way in ((dense, "dta") if seed % 2 else ("dta", dense))]
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    facts |= {"cores": os.cpu_count(), "load": os.getloadavg()[0], "seconds": time.perf_counter() - began}
    return {
        "facts": facts | {"warm_seconds": warm_seconds, "dense": dense},
        "settings": dataclasses.asdict(settings),
        "replay": replayed,
        "runs": runs,
        "rise": {f"{run['way']} {run['seed']}": run["rise"] for run in runs},
        "balance": balances(runs),
        "patience": patience(runs, folder / "dta-0"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=45.0, help="of training in each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--updates", type=int, default=20, help="that are replayed (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="new folder in which the runs are kept; default: none are")
    parser.add_argument("--start", type=Path, help="folder in which the supervised start is kept, to be used again")
    parser.add_argument("--out", type=Path, default=rl_page.RESULTS, help="results file (default: %(default)s)")
    parser.add_argument("--page", action="store_true", help="only draw the page from the results file")
    arguments = parser.parse_args()
    if min(arguments.seconds, arguments.seeds, arguments.updates) <= 0:
        parser.error("--seconds, --seeds and --updates must be positive")
    if arguments.folder is not None and arguments.folder.exists():
        parser.error(f"{arguments.folder} exists; --folder has to be new")
    console = Console()
    if not arguments.page:
        try:
            require_environment()
        except ValueError as error:
            parser.error(str(error))
        with tempfile.TemporaryDirectory() as temporary:
            results = measure(arguments, arguments.folder or Path(temporary) / "runs", console)
        arguments.out.write_text(json.dumps(rounded(results), separators=(",", ":")) + "\n")
    rl_page.draw(json.loads(arguments.out.read_text()), rl_page.PAGE)
    console.print(f"{arguments.out}, {rl_page.PAGE}")
    return 0


def rounded(value: Any) -> Any:
    """Round floats to seven digits, to keep the file small."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
