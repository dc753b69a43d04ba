"""PNG plots of a run: throughput and memory by workload; speed-up, efficiency and memory over a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measuring.results import Report, Result

FAMILY_COLORS = {"dense": "#8c96a3", "tree mask": "#e08e3c", "dta": "#2a7f62"}
# Methods drawn over sweeps besides `dense`; all methods at once would hide each other.
SWEEP_COLORS = {
    "compiled": "#b8c0ca",
    "compiled-padded": "#6b7785",
    "compiled-packed": "#3d4550",
    "sparse": "#e08e3c",
    "dfs": "#4fb286",
    "packed": "#1d5fa8",
    "auto": "#14432f",
}

Value = Callable[[Result, str], "float | None"]


def draw(report: Report, folder: Path) -> list[tuple[str, Path]]:
    """Write all plots for which the run has figures; return titles and paths. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    single = [result for result in report.results if result.parameter is None]
    plots: list[tuple[str, str, Callable[[], Any] | None]] = [
        ("Throughput", "throughput", bars(report, single, kilotokens, "thousand tokens per second")),
        ("Peak memory", "memory", bars(report, single, _mebibytes, "MiB above what was there before")),
        ("Over the compression ratio", "efficiency", _sweep(report, "c-sweep", "compression ratio C")),
        ("Over the length of suffixes", "suffix", _sweep(report, "suffix-sweep", "tokens of each of 16 suffixes")),
    ]
    drawn = []
    for title, name, make in plots:
        if make is not None:
            drawn.append((title, save(make(), folder / f"{name}.png")))
    return drawn


def save(figure: Any, path: Path) -> Path:
    """Write a figure and return its path."""
    figure.savefig(path, dpi=110, bbox_inches="tight")
    return path


def kilotokens(result: Result, method: str) -> float | None:
    """Return the throughput in thousands of tokens of all sequences per second."""
    throughput = result.throughput(method)
    return None if throughput is None else throughput / 1000


def _mebibytes(result: Result, method: str) -> float | None:
    peak = result.outcomes[method].peak_bytes if method in result.outcomes else None
    return None if peak is None else peak / 2**20


def bars(report: Report, results: list[Result], value: Value, label: str) -> Callable[[], Any] | None:
    """Return a function that draws one panel of horizontal bars per workload; None without figures."""
    results = [result for result in results if any(value(result, method) is not None for method in result.outcomes)]
    if not results:
        return None

    def make() -> Any:
        from matplotlib.figure import Figure

        columns = min(3, len(results))
        rows = math.ceil(len(results) / columns)
        height = 0.7 + 0.22 * max(len(result.outcomes) for result in results)
        figure = Figure(figsize=(5 * columns, height * rows), layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for panel, result in zip(panels, results, strict=False):
            _bar_panel(panel, report, result, value)
        for panel in panels[len(results) :]:
            panel.set_visible(False)
        figure.supxlabel(f"{label} (grey: nothing shared, orange: tree mask, green: dta)", fontsize=10)
        return figure

    return make


def _bar_panel(panel: Any, report: Report, result: Result, value: Value) -> None:
    methods = list(result.outcomes)[::-1]
    values = [value(result, method) for method in methods]
    colors = [FAMILY_COLORS.get(report.methods[method]["family"], "black") for method in methods]
    bars = panel.barh(methods, [number or 0 for number in values], color=colors)
    labels = [_bar_label(result, method, number) for method, number in zip(methods, values, strict=True)]
    panel.bar_label(bars, labels, padding=2, fontsize=7)
    panel.set_title(f"{result.name} (C {result.compression:.2f})", fontsize=10)
    panel.tick_params(labelsize=7)
    panel.margins(x=0.15)
    panel.spines[["top", "right"]].set_visible(False)


def _bar_label(result: Result, method: str, number: float | None) -> str:
    if number is None:  # as in the paper, a missing bar says why
        return result.outcomes[method].error.partition(":")[0] or "not measured"
    return f"{number:,.3g}" if number < 1000 else f"{number:,.0f}"


def _sweep(report: Report, group: str, label: str) -> Callable[[], Any] | None:
    """Return a function that draws speed-up, efficiency and memory over a sweep; None with fewer than two points."""
    results = [result for result in report.results if result.group == group and result.seconds("dense")]
    results.sort(key=_parameter)
    if len(results) < 2:
        return None

    def make() -> Any:
        from matplotlib.figure import Figure

        panels: list[tuple[str, Value]] = [
            ("speed-up over one sequence at a time", Result.speedup),
            ("efficiency: speed-up / ideal", Result.efficiency),
        ]
        if any(outcome.peak_bytes for result in results for outcome in result.outcomes.values()):
            panels.append(("peak memory, MiB", _mebibytes))
        figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
        for panel, (title, value) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
            _sweep_panel(panel, results, value)
            panel.set_title(title, fontsize=10)
            panel.set_xlabel(label)
        speedups, efficiencies = figure.axes[:2]
        speedups.plot([*map(_parameter, results)], [r.ideal for r in results], "k--", lw=1, label="ideal")
        speedups.set_yscale("log")
        speedups.yaxis.set_major_formatter("{x:g}x")
        speedups.legend(fontsize=7)
        efficiencies.axhline(1, color="k", ls="--", lw=1)
        efficiencies.set_ylim(bottom=0)
        if len(figure.axes) > 2:
            figure.axes[2].set_yscale("log")
            figure.axes[2].yaxis.set_major_formatter("{x:,.0f}")
        return figure

    return make


def _sweep_panel(panel: Any, results: list[Result], value: Value) -> None:
    for method, color in {"dense": FAMILY_COLORS["dense"], **SWEEP_COLORS}.items():
        points = [(_parameter(result), number) for result in results if (number := value(result, method)) is not None]
        if points:
            panel.plot(*zip(*points, strict=True), marker="o", ms=3, lw=1.2, color=color, label=method)
    panel.set_xscale("log")
    panel.set_xticks([_parameter(result) for result in results], [f"{_parameter(result):g}" for result in results])
    panel.minorticks_off()
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _parameter(result: Result) -> float:
    return result.parameter or 0.0
