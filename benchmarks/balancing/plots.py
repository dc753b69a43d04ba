"""PNG plots of `benchmarks.balancing`: predicted throughput, extra tokens and imbalance over ranks; planning cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.balancing.compare import Outcome, Result

COLORS = {
    "dta": "#1d5fa8",
    "dta, cost model": "#2a7f62",
    "Algorithm 4": "#9b59b6",
    "greedy, tree tokens": "#e08e3c",
    "greedy, tokens": "#c9a227",
    "first fit decreasing": "#8c96a3",
    "Karmarkar-Karp": "#6b7785",
    "round robin": "#b8c0ca",
}


def draw(results: list[Result], folder: Path) -> list[Path]:
    """Write all plots and return their paths."""
    figures = {
        # Like the paper's data-parallel ablation, but predicted.
        "throughput": _over_ranks(results, lambda r, o: r.tokens / o.step_seconds / 1e3, "K tokens/s, predicted"),
        "extra": _over_ranks(results, lambda r, o: 100 * o.extra, "extra tree tokens, %", "unavoidable"),
        "imbalance": _over_ranks(results, lambda r, o: o.cost_imbalance, "max/mean predicted seconds"),
        "planning": _planning(results),
    }
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"balancing-{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def _over_ranks(
    results: list[Result], value: Callable[[Result, Outcome], float], label: str, floor: str = ""
) -> Figure:
    """Draw one panel of lines per batch; `floor` labels a dashed line at the lower bound of all divisions."""
    columns = min(4, len(results))
    rows = math.ceil(len(results) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.9 * rows + 0.5), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, result in zip(panels, results, strict=False):
        for method, color in COLORS.items():
            points = [(o.groups, value(result, o)) for o in result.outcomes if o.method == method]
            if points:
                ours = method.startswith("dta")
                style = {"lw": 2 if ours else 1.1, "zorder": 3 if ours else 2, "marker": "o", "ms": 3}
                panel.plot(*zip(*points, strict=True), color=color, label=method, **style)
        if floor:
            shares = [100 * share for share in result.unavoidable.values()]
            panel.plot(list(result.unavoidable), shares, "k--", lw=1, label=floor)
        _finish(panel, f"{result.name} (C {result.tokens / max(result.tree_tokens, 1):.1f})", result.unavoidable)
    for panel in panels[len(results) :]:
        panel.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.supylabel(label, fontsize=10)
    return figure


def _finish(panel: Any, title: str, ticks: Any) -> None:
    panel.set_title(title, fontsize=9)
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(ticks), [f"{tick:,}" for tick in ticks])
    panel.set_ylim(bottom=0)
    panel.set_xlabel("ranks", fontsize=8)
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _planning(results: list[Result]) -> Figure:
    """Draw planning time over tokens per batch, for the largest number of ranks of any batch."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    ranks = max(max(result.unavoidable, default=0) for result in results)
    ordered = sorted((r for r in results if ranks in r.unavoidable), key=lambda result: result.tokens)
    for method, color in COLORS.items():
        points = []
        for result in ordered:
            last = [o for o in result.outcomes if o.method == method and o.groups == ranks]
            # Ordering dominates our planning time; only methods that use the tree need it.
            order = result.order_seconds if method.startswith("dta") or "tree" in method else 0.0
            points += [(result.tokens, o.seconds + order) for o in last]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, marker="o", ms=3, label=method)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens of the batch")
    axes.set_ylabel(f"seconds of planning for {ranks:,} ranks")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    return figure
