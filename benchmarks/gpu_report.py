"""Records, tables, plots and acceptance lines of `benchmarks.gpu`.

    python -m benchmarks.gpu_report RESULTS.json

prints and draws the results of a run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.models import PEAK_FLOPS, config_of, operations
from benchmarks.measuring.plots import bars, kilotokens, save
from benchmarks.measuring.results import Report, Result
from benchmarks.report import headline

GIB = 2**30
VERDICTS = {True: "pass", False: "FAIL", None: "unknown"}
SHARING, LOW_SHARING = "airline_think", ("airline_modprefix", "mathlike", "aimelike")
CHECKPOINT, TREE_MASKS, DENSE, OURS = ("checkpoint",), ("tree-mask", "tree-mask-ckpt"), ("dense", "checkpoint"), "auto"
# Rivals at their fastest settings, where the packages that these need are installed.
FASTEST = (*TREE_MASKS, "tree-flash", "tree-flash-ckpt", *DENSE, "cudnn", "cudnn-ckpt", "varlen", "varlen-ckpt")
OVER_CHECKPOINT, OVER_TREE_MASK, OVER_DENSE, OVER_FASTEST, OVER_FASTEST_IN_MEMORY = 10.0, 2.0, 1.0, 1.5, 1.2
MEMORY_MODEL, MEMORY_SHARE = "1.7b", 0.5  # share of dense memory without checkpointing
LARGEST_GRADIENT_DIFFERENCE = 0.25  # between two bfloat16 runs; gradients of different losses differ by more than 1

COLUMNS = (
    *("method", "s/step", "K tokens/s", "x checkpoint", "x tree mask", "peak GiB", "MFU", "MFU, tree", "diff."),
    "first s",
)


@dataclasses.dataclass
class Check:
    """Result of a check.

    Attributes:
        passed: None if undecided.
        text: one line for readers.
        figures: measured values.
        error: reason for a missing result.
    """

    passed: bool | None
    text: str
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


@dataclasses.dataclass
class GpuReport(Report):
    """Report of a run; results are named "model/workload", and their peaks include weights and gradients.

    Attributes:
        checks: checks by key.
        skipped: reasons by key, for items that did not fit into the time.
        tracebacks: tracebacks of all failures by key.
        running: key of the running item; if the process is gone, this item killed it.
    """

    checks: dict[str, Check] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    tracebacks: dict[str, str] = dataclasses.field(default_factory=dict)
    running: str = ""

    @classmethod
    def load(cls, path: Path) -> GpuReport:
        report, data = super().load(path), json.loads(path.read_text())
        assert isinstance(report, cls)
        report.checks = {key: Check(**check) for key, check in data["checks"].items()}
        report.skipped, report.tracebacks, report.running = data["skipped"], data["tracebacks"], data["running"]
        return report

    def result(self, name: str) -> Result | None:
        return next((result for result in self.results if result.name == name), None)


@dataclasses.dataclass(frozen=True)
class Line:
    """Requirement with its outcome (None: unknown) and the figures behind it."""

    name: str
    passed: bool | None
    text: str


def acceptance(report: GpuReport) -> list[Line]:
    """Evaluate all requirements, those of the checks first."""
    lines = [Line(key, check.passed, check.error or check.text) for key, check in report.checks.items()]
    models = list(dict.fromkeys(result.name.partition("/")[0] for result in report.results))
    for model in models:
        sharing = report.result(f"{model}/{SHARING}")
        lines.append(_faster(f"{model}/{SHARING}", sharing, CHECKPOINT, OVER_CHECKPOINT))
        lines.append(_faster(f"{model}/{SHARING}", sharing, TREE_MASKS, OVER_TREE_MASK))
        lines.append(_faster_than_all(f"{model}/{SHARING}", sharing, OVER_FASTEST))
        lines.append(_faster_in_memory(f"{model}/{SHARING}", sharing))
        for name in LOW_SHARING:
            result = report.result(f"{model}/{name}")
            lines.append(_faster(f"{model}/{name}", result, DENSE, OVER_DENSE))
            lines.append(_faster_than_all(f"{model}/{name}", result, OVER_DENSE))
    lines.append(_memory(report.result(f"{MEMORY_MODEL}/{SHARING}")))
    lines.append(_gradients(report.results))
    return lines


def _faster(name: str, result: Result | None, rivals: tuple[str, ...], factor: float) -> Line:
    """Check that ours is `factor` times as fast as the fastest rival that ran."""
    title = f"{name}: at least {factor:g}x of {' and '.join(rivals)}"
    if result is None or any(method not in result.outcomes for method in (OURS, *rivals)):
        return Line(title, None, "not measured")
    rates = {method: rate for method in rivals if (rate := result.throughput(method)) is not None}
    own = result.throughput(OURS)
    if own is None or not rates:
        failed = [f"{m}: {result.outcomes[m].error}" for m in (OURS, *rivals) if result.outcomes[m].error]
        return Line(title, False if own is None else None, "; ".join(failed))
    best = max(rates, key=rates.__getitem__)
    text = f"{own / rates[best]:.2f}x of {best}: {own / 1000:.1f} against {rates[best] / 1000:.1f} K tokens/s"
    ours = _rates(result, OURS)
    fastest = max(ours, key=ours.__getitem__)
    text += f" ({ours[fastest] / rates[best]:.2f}x with {fastest})" if fastest != OURS else ""
    return Line(title, own >= factor * rates[best], text)


def _rates(result: Result | None, start: str = "") -> dict[str, float]:
    """Return the throughput of the methods that ran and whose names begin so."""
    names = [name for name in (result.outcomes if result else ()) if name.startswith(start)]
    return {name: rate for name in names if result and (rate := result.throughput(name)) is not None}


def _faster_than_all(name: str, result: Result | None, factor: float) -> Line:
    """Check that ours is `factor` times as fast as the fastest of all rivals, if each has been tried."""
    title = f"{name}: at least {factor:g}x of the fastest rival at its best setting"
    rates = {method: rate for method, rate in _rates(result).items() if method in FASTEST}
    own = result.throughput(OURS) if result else None
    if result is None or own is None or not rates:
        return Line(title, None, "not measured")
    best = max(rates, key=rates.__getitem__)
    text = f"{own / rates[best]:.2f}x of {best}"
    if missing := [method for method in FASTEST if method not in rates]:
        text += f"; not measured: {', '.join(missing)}"
    failed = own < factor * rates[best]
    return Line(title, False if failed else None if missing else True, text)


def _faster_in_memory(name: str, result: Result | None) -> Line:
    """Check that for each rival, ours is faster with a setting that needs no more memory."""
    title = f"{name}: at least {OVER_FASTEST_IN_MEMORY:g}x of each rival that needs as much memory"
    rates = _rates(result)
    peaks = {method: outcome.peak_bytes or 0 for method, outcome in (result.outcomes if result else {}).items()}
    ratios = {}
    for rival in (method for method in FASTEST if method in rates and peaks[method]):
        fitting = [rate for method, rate in _rates(result, OURS).items() if 0 < peaks[method] <= peaks[rival]]
        ratios[rival] = max(fitting, default=0.0) / rates[rival]
    if not ratios:
        return Line(title, None, "not measured")
    closest = min(ratios, key=ratios.__getitem__)
    text = f"{ratios[closest]:.2f}x of" if ratios[closest] else "no setting as small as"
    text += f" {closest}, within its {peaks[closest] / GIB:.1f} GiB"
    return Line(title, ratios[closest] >= OVER_FASTEST_IN_MEMORY, text)


def _memory(result: Result | None) -> Line:
    title = f"{MEMORY_MODEL}/{SHARING}: peak at most {MEMORY_SHARE:g}x of dense"
    outcomes = result.outcomes if result else {}
    peaks = [outcomes[method].peak_bytes if method in outcomes else None for method in (OURS, "dense", "auto-0")]
    own, dense, least = peaks
    if own is None or dense is None:
        return Line(title, None, "not measured")
    text = f"{own / dense:.2f}x: {own / GIB:.1f} against {dense / GIB:.1f} GiB"
    text += f"; with budget 0 {least / GIB:.1f} GiB" if least else ""
    return Line(title, own <= MEMORY_SHARE * dense, text)


def _gradients(results: Iterable[Result]) -> Line:
    """Check that the gradients of all timed methods agree, as far as bfloat16 can tell."""
    title = f"gradients of timed steps differ by at most {LARGEST_GRADIENT_DIFFERENCE:g}"
    errors = {
        f"{result.name} {method}": outcome.gradient_difference
        for result in results
        for method, outcome in result.outcomes.items()
        if outcome.gradient_difference is not None
    }
    if not errors:
        return Line(title, None, "not measured")
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))  # NaN is worst
    return Line(title, errors[worst] <= LARGEST_GRADIENT_DIFFERENCE, f"at most {errors[worst]:.1e}: {worst}")


def rows_of(result: Result) -> Iterator[list[str]]:
    """Yield the cells of `COLUMNS` for every method."""
    config = config_of(result.name.partition("/")[0])
    amounts = [operations(config, result, tree) for tree in (False, True)]
    for method, outcome in result.outcomes.items():
        seconds = outcome.median
        rate = result.throughput(method)
        efficiencies = [amount / seconds / PEAK_FLOPS if seconds else None for amount in amounts]
        yield [
            method,
            _cell(seconds, "{:.3f}"),
            _cell(rate and rate / 1000, "{:,.1f}"),
            *(_cell(_ratio(result, method, rivals), "{:.2f}") for rivals in (CHECKPOINT, TREE_MASKS)),
            _cell(outcome.peak_bytes and outcome.peak_bytes / GIB, "{:.1f}"),
            *(_cell(efficiency, "{:.1%}") for efficiency in efficiencies),
            _cell(outcome.gradient_difference, "{:.0e}"),
            _cell(outcome.first_call_seconds, "{:.1f}"),
        ]


def _ratio(result: Result, method: str, rivals: tuple[str, ...]) -> float | None:
    own = result.throughput(method)
    rates = [rate for rival in rivals if (rate := result.throughput(rival)) is not None]
    return own / max(rates) if own and rates else None


def _cell(value: float | None, template: str) -> str:
    return "-" if value is None else template.format(value)


def show(report: GpuReport, console: Console) -> None:
    """Print all tables, then the acceptance lines."""
    for result in report.results:
        console.print(headline(result), style="bold", highlight=False)
        console.print(f"  {result.description}", style="dim", highlight=False)
        table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
        for row, outcome in zip(rows_of(result), result.outcomes.values(), strict=True):
            table.add_row(*row, style="red" if outcome.error else "")
        console.print(table)
        for method, outcome in result.outcomes.items():
            if outcome.error or outcome.note:
                style = "red" if outcome.error else "dim"
                console.print(f"  {method}: {outcome.error or outcome.note}", style=style, markup=False)
        console.print()
    for key, reason in report.skipped.items():
        console.print(f"skipped {key}: {reason}", style="yellow", markup=False, highlight=False)
    for line in acceptance(report):
        style = {True: "green", False: "red", None: "yellow"}[line.passed]
        text = f"{VERDICTS[line.passed]:8}{line.name}: {line.text}"
        console.print(text, style=style, markup=False, highlight=False)


def draw(report: GpuReport, folder: Path) -> list[Path]:
    """Draw bars of throughput and of peak memory. Needs matplotlib."""
    values = (
        ("gpu-throughput", kilotokens, "thousand tokens per second"),
        ("gpu-memory", _gibibytes, "GiB at the peak, weights and gradients included"),
    )
    paths = []
    for name, value, label in values:
        make = bars(report, report.results, value, label)
        if make is not None:
            paths.append(save(make(), folder / f"{name}.png"))
    return paths


def _gibibytes(result: Result, method: str) -> float | None:
    peak = result.outcomes[method].peak_bytes if method in result.outcomes else None
    return None if peak is None else peak / GIB


def conclude(file: Path, console: Console) -> None:
    """Show the results in a file and write the plots next to it."""
    report = GpuReport.load(file)
    show(report, console)
    try:
        for path in draw(report, file.parent):
            console.print(str(path))
    except ImportError:
        console.print("no plots without matplotlib: pip install '.[bench]'", style="yellow")
    failed = f"; {len(report.tracebacks)} failed, with their tracebacks in it" if report.tracebacks else ""
    console.print(f"{file}{failed}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="results.json of a run")
    conclude(parser.parse_args().file, Console(width=160))


if __name__ == "__main__":
    main()
