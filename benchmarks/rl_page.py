"""Write tables and plots of docs/use/asynchronous_rl.md from the results of `benchmarks.reinforcement_learning`.

Text between two comments `<!-- NAME -->` and `<!-- end -->` of the page is replaced, the rest is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "reinforcement_learning.json"
PAGE = ROOT / "docs" / "use" / "asynchronous_rl.md"
PLOTS = "../images"  # relative to the page
COLORS = {"eager": "#8c96a3", "compiled": "#e08e3c", "dta": "#1d5fa8"}
NAMES = {"eager": "dense, eager", "compiled": "dense, compiled", "dta": "dta"}
Results = dict[str, Any]


def draw(results: Results, page: Path) -> None:
    """Write the plots and the generated parts of the page."""
    folder = page.parent / PLOTS
    folder.mkdir(exist_ok=True)
    for name, figure in {"rl-reward": reward_figure, "rl-replay": replay_figure, "rl-run": run_figure}.items():
        figure(results).savefig(folder / f"{name}.png", dpi=110)
    text = page.read_text()
    for name, part in PARTS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{page} has no part {name!r}: a line <!-- {name} --> and later a line <!-- end -->")
        text = pattern.sub(lambda match, part=part: match[1] + part(results) + match[2], text)
    page.write_text(text)


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a Markdown table; all columns but the first are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def machine(results: Results) -> str:
    facts, settings = results["facts"], results["settings"]
    versions = f"torch {facts['torch']}, transformers {facts['transformers']}, Python {facts['python']}"
    threads = f"{settings['trainer_threads']} thread in the trainer and {settings['worker_threads']} in its worker"
    supervised = (
        f"{facts['warm_seconds']:.0f} s of them supervised" if facts["warm_seconds"] else "from a start made before"
    )
    minutes = f"{facts['seconds'] / 60:.1f} minutes in all, {supervised}"
    cores = f"{facts['cores']} cores (load {facts['load']:.1f} when it ended)"
    return f"{versions}; {cores}, {threads}; `--seconds {settings['seconds']:.0f}`: {minutes}.\n"


def outcome(results: Results) -> str:
    rows = []
    for run in results["runs"]:
        rise = results["rise"][f"{run['way']} {run['seed']}"]
        tokens = sum(update["tokens"] for update in run["updates"])
        tree = sum(update["tree_tokens"] for update in run["updates"])
        rows.append(
            (
                f"{NAMES[run['way']]}, seed {run['seed']}",
                len(run["updates"]),
                f"{rise['start']:.3f}",
                f"{rise['end']:.3f}",
                f"{rise['errors']:.1f}",
                f"{tokens / tree:.2f}",
                f"{fmean(update['stream/staleness'] for update in run['updates']):.1f}",
                f"{run['counts']['made']:,} = {run['counts']['trained']:,} + {run['counts']['expired']:,}"
                f" + {run['counts']['waiting']:,}",
            )
        )
    heads = ("run", "updates", "start", "end", "rise / error", "C", "staleness", "made = trained + expired + waiting")
    return table(heads, rows)


def update_times(results: Results) -> str:
    steps = results["replay"]["steps"]
    dense = results["facts"]["dense"]
    rows = []
    for way in ("eager", "compiled", "dta"):
        ratios = [step[way]["processor"] / step["dta"]["processor"] for step in steps]
        shares = [ratio / step["ideal"] for ratio, step in zip(ratios, steps, strict=True)]
        rows.append(
            (
                NAMES[way] + (" (the best dense one)" if way == dense else ""),
                f"{results['replay']['first_call_seconds'][way]:.0f} s",
                f"{median(step[way]['seconds'] for step in steps):.3f} s",
                f"{median(step[way]['processor'] for step in steps):.3f} s",
                "" if way == "dta" else f"{median(ratios):.2f}",
                "" if way == "dta" else f"{median(shares):.2f}",
            )
        )
    heads = ("update by", "compiling", "seconds", "processor", "times dta's", "over the ratio of operations")
    typical = {key: median(step[key] for step in steps) for key in ("ideal", "samples", "tokens")}
    compression = median(step["tokens"] / step["tree_tokens"] for step in steps)
    leaves = median(step["leaf_tokens"] / step["tree_tokens"] for step in steps)
    return table(heads, rows) + (
        f"\nMedians of {len(steps)} updates in turns in one process; a batch has {typical['samples']:.0f} samples with"
        f" {typical['tokens']:,.0f} tokens (C {compression:.2f}, of leaves alone {leaves:.2f}; {typical['ideal']:.2f}"
        " times the operations of its tree).\n"
    )


def equality(results: Results) -> str:
    steps = results["replay"]["steps"]
    rows = []
    for way in ("compiled", "dta"):
        losses = max(abs(step[way]["loss"] - step["eager"]["loss"]) for step in steps)
        rows.append(
            (
                f"{NAMES[way]} against eager",
                f"{losses:.1e}",
                f"{steps[0]['difference'][way]:.1e}",
                f"{steps[-1]['difference'][way]:.1e}",
                f"{steps[-1]['moved']:.1e}",
            )
        )
    heads = ("", "most of a loss", "of a weight, first update", f"after {len(steps)}", "weights moved by")
    return table(heads, rows)


def balance(results: Results) -> str:
    rows = [
        (
            NAMES[way],
            *(f"{figures[key] / 1e3:.1f}" for key in ("roll", "train", "predicted", "measured")),
            figures["limit"],
            f"{figures['best_split']}, {figures['best_throughput'] / 1e3:.0f}",
        )
        for way, figures in results["balance"].items()
    ]
    heads = ("K tokens/s", "a worker", "a trainer", "1/1 predicted", "1/1 measured", "limit", "best of 8, predicted")
    return table(heads, rows)


def batch_choice(results: Results) -> str:
    rows = [
        (
            figures["patience"],
            f"{figures['compression']:.2f}",
            f"{figures['mean_waited']:.2f}",
            figures["most_waited"],
            figures["expired"],
        )
        for figures in results["patience"]
    ]
    return table(("patience", "C of the batches", "batches waited", "most", "expired"), rows)


PARTS: dict[str, Callable[[Results], str]] = {
    "machine": machine,
    "outcome": outcome,
    "update times": update_times,
    "equality": equality,
    "balance": balance,
    "batch choice": batch_choice,
}


def reward_figure(results: Results) -> Figure:
    """Draw held-out reward over updates and over time, one line per run."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, key, label in zip(panels, ("version", "seconds"), ("update", "seconds"), strict=True):
        for run in results["runs"]:
            points = run["evaluations"]
            along, rewards = [point[key] for point in points], [point["reward"] for point in points]
            name = NAMES[run["way"]] if run["seed"] == 0 else None
            panel.plot(along, rewards, color=COLORS[run["way"]], lw=1, alpha=0.4)
            panel.plot(along, rewards, ".", color=COLORS[run["way"]], ms=5, label=name)
        if key == "seconds":
            for way in dict.fromkeys(run["way"] for run in results["runs"]):
                panel.plot(*mean_over_time(results["runs"], way), color=COLORS[way], lw=2.4)
        panel.set_xlabel(label)
        panel.set_ylabel("held-out reward")
        panel.grid(alpha=0.3)
    panels[0].legend(loc="lower right", frameon=False)  # free of curves: rewards are low only at the first updates
    return figure


def mean_over_time(runs: Sequence[Results], way: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over seeds at every second until the shortest run ends, interpolating linearly."""
    curves = [run["evaluations"] for run in runs if run["way"] == way]
    seconds = np.linspace(0, min(curve[-1]["seconds"] for curve in curves), 61)
    return seconds, np.mean(
        [np.interp(seconds, [one["seconds"] for one in curve], [one["reward"] for one in curve]) for curve in curves],
        axis=0,
    )


def replay_figure(results: Results) -> Figure:
    """Draw the losses of the replayed updates on top of each other, and CPU seconds per update."""
    steps, figure = results["replay"]["steps"], Figure(figsize=(9, 3.2), layout="constrained")
    losses, seconds = figure.subplots(1, 2)
    along = range(1, len(steps) + 1)
    for way, style in zip(COLORS, ("-", "--", ":"), strict=True):
        width = {"eager": 5, "compiled": 3, "dta": 2}[way]
        losses.plot(along, [s[way]["loss"] for s in steps], style, color=COLORS[way], lw=width, label=NAMES[way])
        seconds.plot(along, [s[way]["processor"] for s in steps], ".-", color=COLORS[way], label=NAMES[way])
    best = results["facts"]["dense"]
    allowed = [s[best]["processor"] / s["ideal"] for s in steps]
    seconds.plot(along, allowed, "k--", lw=1, label="best dense / ratio of operations")
    losses.set_ylabel("loss")
    seconds.set_ylabel("processor seconds of an update")
    seconds.set_ylim(bottom=0)
    for panel in (losses, seconds):
        panel.set_xlabel("update")
        panel.grid(alpha=0.3)
        panel.xaxis.get_major_locator().set_params(integer=True)
    losses.legend(frameon=False, fontsize=8)
    seconds.set_ylim(top=1.35 * max(s[way]["processor"] for s in steps for way in COLORS))
    seconds.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    return figure


def run_figure(results: Results) -> Figure:
    """Draw sharing, staleness and the trainer's time by run."""
    figure = Figure(figsize=(9, 3.0), layout="constrained")
    sharing, stale, times = figure.subplots(1, 3)
    for run in results["runs"]:
        along = [update["seconds"] for update in run["updates"]]
        color = COLORS[run["way"]]
        sharing.plot(along, [u["tokens"] / u["tree_tokens"] for u in run["updates"]], color=color, lw=0.8, alpha=0.7)
        stale.plot(along, [u["stream/staleness"] for u in run["updates"]], color=color, lw=0.8, alpha=0.7)
    ways = list(dict.fromkeys(run["way"] for run in results["runs"]))
    for index, way in enumerate(ways):
        updates = [update for run in results["runs"] if run["way"] == way for update in run["updates"]]
        spent, waited = (fmean(update[key] for update in updates) for key in ("time/update", "time/wait"))
        times.bar(index, spent, color=COLORS[way])
        times.bar(index, waited, bottom=spent, color=COLORS[way], alpha=0.35, hatch="//")
    times.set_xticks(range(len(ways)), [NAMES[way] for way in ways])
    times.set_ylabel("seconds (hatched: waiting)")
    for panel, label in ((sharing, "C of a batch"), (stale, "versions behind, mean of a batch")):
        panel.set_xlabel("seconds")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    return figure
