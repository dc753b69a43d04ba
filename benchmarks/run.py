"""Compare our methods with all others: time, peak memory and efficiency, interleaved in one process.

    python -m benchmarks.run                                      # a quick look
    python -m benchmarks.run --suite full --rollouts FOLDER       # everything
    python -m benchmarks.run --workloads c-sweep --methods varlen,packed
    python -m benchmarks.run --workloads tiny                     # smoke test of all methods
    python -m benchmarks.run --resume build/benchmarks/results.json [the same arguments]

Prints a table per workload, and writes results.json (after every workload) and plots. `python -m benchmarks.report`
turns them into the results page. Workloads can be named by group: trees, c-sweep, suffix-sweep, rollouts, check.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.batches.workloads import ROLLOUT_FILES, Entry, catalogue
from benchmarks.measuring.measure import Settings, measure
from benchmarks.measuring.memory import peak_memory_is_available
from benchmarks.measuring.plots import SWEEP_COLORS, draw
from benchmarks.measuring.results import Report, machine_facts
from benchmarks.methods.table import METHODS
from benchmarks.report import show

QUICK_WORKLOADS = ("short", "mid", "none", "fan", "airline_tiny")
QUICK_METHODS = ("dense", "padded", "varlen", "leaves", "sparse", "dfs", "packed", "auto")
# A sweep has many points, and no sequence in it is a prefix of another: only the methods that are drawn run.
SWEEPS = ("c-sweep", "suffix-sweep")


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    memory = arguments.memory and peak_memory_is_available()
    settings = Settings(arguments.threads, arguments.repetitions, arguments.limit, memory)
    try:
        if arguments.repetitions < 1 or arguments.threads < 1:
            raise ValueError("--repetitions and --threads must be at least 1")
        entries = _choose_workloads(arguments)
        methods = _choose_methods(arguments)
        report = _new_report(settings, methods, arguments.max_tokens)
        if arguments.resume:
            report = _resumed(arguments.resume, report)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    torch.set_num_threads(settings.threads)
    folder = arguments.resume.parent if arguments.resume else arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    if arguments.memory and not memory:
        console.print("peak memory is not measured: that needs Linux", style="yellow")
    _run(report, entries, methods, settings, folder / "results.json", console)
    _draw(report, folder, console)
    return 0


def _run(
    report: Report,
    entries: list[Entry],
    methods: dict[str, list[str]],
    settings: Settings,
    file: Path,
    console: Console,
) -> None:
    """Measure the workloads that the report lacks; the report is written after each."""
    entries = [entry for entry in entries if entry.name not in {result.name for result in report.results}]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        count = sum(len({"dense", *_methods_of(entry, methods)}) for entry in entries)
        task = progress.add_task("", total=count * settings.ticks)
        for entry in entries:
            result = measure(
                entry.build(),
                _methods_of(entry, methods),
                settings,
                lambda text, steps: progress.update(task, description=text, advance=steps),
            )
            report.results.append(result)
            report.save(file)
            show(result, console)
    console.print(f"{file}: {len(report.results)} workloads")


def _methods_of(entry: Entry, methods: dict[str, list[str]]) -> list[str]:
    return methods.get(entry.group, methods[""])


def _draw(report: Report, folder: Path, console: Console) -> None:
    try:
        for _, path in draw(report, folder):
            console.print(str(path))
    except ImportError:
        console.print("no plots without matplotlib: pip install '.[bench]'", style="yellow")


def _new_report(settings: Settings, chosen: dict[str, list[str]], max_tokens: int) -> Report:
    methods = {name: {"family": method.family, "description": method.description} for name, method in METHODS.items()}
    asked = dataclasses.asdict(settings) | {"max_tokens": max_tokens, "methods": chosen}
    return Report(machine_facts(), asked, methods)


def _resumed(file: Path, new: Report) -> Report:
    """Load the report to resume; raise ValueError if its settings or versions differ."""
    old = Report.load(file)
    if old.settings != new.settings:
        differing = {name: value for name, value in old.settings.items() if new.settings.get(name) != value}
        raise ValueError(f"{file} was measured with other settings: {differing}")
    versions = [name for name in new.facts if name != "date" and old.facts.get(name) != new.facts[name]]
    if versions:
        raise ValueError(f"{file} was measured with another {', '.join(versions)}")
    return old


def _choose_workloads(arguments: argparse.Namespace) -> list[Entry]:
    entries = catalogue(arguments.rollouts, arguments.files.split(","), arguments.max_tokens)
    groups: dict[str, list[str]] = {}
    for entry in entries.values():
        groups.setdefault(entry.group, []).append(entry.name)
    if arguments.workloads:
        names = [name for word in arguments.workloads.split(",") for name in groups.get(word, [word])]
    elif arguments.suite == "quick":
        names = [name for name in QUICK_WORKLOADS if name in entries]
    else:
        names = [name for group in groups if group != "check" for name in groups[group]]
    return [entries[name] for name in _known(names, entries)]


def _choose_methods(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return method names by group of workloads; "" stands for all other groups."""
    if arguments.methods:
        return {"": _known(arguments.methods.split(","), METHODS)}
    if arguments.suite == "quick":
        return {"": list(QUICK_METHODS)}
    return {"": list(METHODS), **{group: ["dense", *SWEEP_COLORS] for group in SWEEPS}}


def _known(names: list[str], known: dict[str, object]) -> list[str]:
    """Return the names without duplicates.

    Raises:
        ValueError: a name is unknown.
    """
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=("quick", "full"), default="quick", help="default: %(default)s")
    parser.add_argument("--workloads", metavar="NAMES", help="names or groups, instead of those of the suite")
    parser.add_argument("--methods", metavar="NAMES", help="instead of those of the suite; dense always runs")
    parser.add_argument("--repetitions", type=int, default=5, help="timed steps of each method (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--limit", type=float, default=120.0, help="most seconds of a first step (%(default)s)")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure peak memory")
    parser.add_argument("--rollouts", type=Path, metavar="FOLDER", help="of rollout files; default: the bundled one")
    parser.add_argument("--files", metavar="NAMES", default=",".join(ROLLOUT_FILES), help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=50_000, help="of each rollout file (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="default: %(default)s")
    parser.add_argument("--resume", type=Path, metavar="JSON", help="go on with a run that was cut short")
    return parser


if __name__ == "__main__":
    sys.exit(main())
