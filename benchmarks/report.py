"""Print the tables of a run, and write the results page from its JSON file.

    python -m benchmarks.report RESULTS.json [--output benchmarks]

Writes RESULTS.md and its plots into the folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring.plots import draw
from benchmarks.measuring.results import Report, Result

COLUMNS = ("method", "seconds", "tokens/s", "speed-up", "efficiency", "memory", "diff.", "how")

PREAMBLE = """\
# Results

One step is forward and backward of a weighted sum of token log-probs over a whole batch, in float32, by a Qwen3 of
4 layers and hidden size 256 (vocabulary {vocabulary}). All methods run in one process in turns; seconds are
medians of {repetitions} steps after a first one that is not timed. Every method's gradients are compared with those of
one sequence at a time, and figures of a method that differs by more than 1e-4 (largest difference over largest
gradient, worst parameter) are not reported. Leaves, packed trees, masks and plans are made inside of the timed step;
padding and tensors are not.

* **Speed-up** is over `dense`, one sequence at a time.
* **Ideal** is the ratio of floating-point operations, all sequences over every tree token once; **efficiency** is
  speed-up over ideal.
* **C** is the paper's compression ratio, tokens of all sequences over tokens of their prefix tree.
* **Memory** is what two steps add to resident memory at their peak, in a fresh process in which model, gradients,
  inputs and compiled code exist already.
* **Tokens per second** count all tokens of all sequences, shared or not.

On a CPU there is no block-sparse kernel for tree masks that has a backward pass, so `sparse` runs dense attention under
a mask, and no variable-length kernel, so `varlen` runs attention for each sequence. On GPUs both have kernels of
their own.
"""


SUMMARY = """\
## Summary

Speed-up over `dense`: of the defaults (and their speed over the best dense method, a compiled one perhaps), and of the
best method of each family.

"""


def rows_of(result: Result) -> list[list[str]]:
    """Return the cells of `COLUMNS` for every method."""
    return [[method, *_cells(result, method)] for method in result.outcomes]


def show(result: Result, console: Console) -> None:
    """Print the figures of one workload; failures are red."""
    console.print(headline(result), style="bold", highlight=False)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in COLUMNS[:-1]:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row, outcome in zip(rows_of(result), result.outcomes.values(), strict=True):
        table.add_row(*row[:-1], style="red" if outcome.error else "")
    console.print(table)
    for method, outcome in result.outcomes.items():
        if outcome.error or outcome.note:
            style = "red" if outcome.error else "dim"
            console.print(f"  {method}: {outcome.error or outcome.note}", style=style, markup=False, highlight=False)
    console.print()


def headline(result: Result) -> str:
    """Describe a workload's name and shape in one line."""
    return (
        f"{result.name}: {result.sequences} sequences, {result.tokens:,} tokens, {result.tree_tokens:,} in the tree; "
        f"C {result.compression:.2f}, attention {result.attention_compression:.2f}, ideal {result.ideal:.2f}x"
    )


def markdown(report: Report, plots: Sequence[tuple[str, str]]) -> str:
    """Return the text of the results page; `plots` are titles and paths relative to it."""
    groups = {result.group for result in report.results}
    vocabulary = "2,048; 7,936 on rollouts" if "rollouts" in groups else "2,048"
    parts = [PREAMBLE.format(vocabulary=vocabulary, repetitions=report.settings["repetitions"])]
    parts.append(_measured_on(report))
    parts.append(SUMMARY + _summary(report))
    parts += [f"## {title}\n\n![{title}]({path})\n" for title, path in plots]
    rows = [[f"`{name}`", facts["family"], facts["description"]] for name, facts in report.methods.items()]
    parts.append("## Methods\n\n" + table(["method", "family", "what it does"], rows))
    parts.append("## Every figure\n")
    parts += [_details(result) for result in report.results]
    return "\n".join(parts)


def write_page(report: Report, folder: Path) -> Path:
    """Write the plots and RESULTS.md to `folder`."""
    plots = draw(report, folder / "plots")
    page = folder / "RESULTS.md"
    page.write_text(markdown(report, [(title, f"plots/{path.name}") for title, path in plots]))
    return page


def _cells(result: Result, method: str) -> list[str]:
    outcome = result.outcomes[method]
    return [
        _format(outcome.median, "{:.3f}"),
        _format(result.throughput(method), "{:,.0f}"),
        _format(result.speedup(method), "{:.2f}x"),
        _format(result.efficiency(method), "{:.0%}"),
        _format(outcome.peak_bytes, "{:,.0f} MiB", 2**20),
        _format(outcome.gradient_difference, "{:.0e}"),
        outcome.error or outcome.note,
    ]


def _format(value: float | None, template: str, unit: int = 1) -> str:
    return "-" if value is None else template.format(value / unit)


def _measured_on(report: Report) -> str:
    facts, threads = report.facts, report.settings["threads"]
    machine = f"{facts['processor']} with {facts['cores']} cores and {facts['memory']}, {facts['system']}"
    versions = (f"{name} {facts[name]}" for name in ("python", "torch", "transformers", "numpy", "dta_compile"))
    return f"Measured on {facts['date']} with {threads} threads: {machine}; {', '.join(versions)}.\n"


def _summary(report: Report) -> str:
    families = list(dict.fromkeys(facts["family"] for facts in report.methods.values()))
    rows = []
    for result in report.results:
        shape = [result.name, f"{result.compression:.2f}", f"{result.ideal:.2f}x"]
        seconds = _format(result.seconds("dense"), "{:.2f} s")
        defaults = _format(result.speedup("auto"), "{:.2f}x")
        over = _format(_over_best_dense(report, result), "{:.2f}x")
        rows.append([*shape, seconds, defaults, over, *(_best(report, result, family) for family in families)])
    best = [f"best {family}" for family in families]
    return table(["workload", "C", "ideal", "`dense`", "`auto`", "`auto` over best dense", *best], rows)


def _over_best_dense(report: Report, result: Result) -> float | None:
    """Return the speed of the defaults relative to the fastest dense method, compiled ones included."""
    dense = [name for name in result.outcomes if report.methods[name]["family"] == "dense"]
    seconds, ours = [result.seconds(name) for name in dense], result.seconds("auto")
    measured = [number for number in seconds if number is not None]
    return min(measured) / ours if measured and ours else None


def _best(report: Report, result: Result, family: str) -> str:
    names = [name for name in result.outcomes if report.methods[name]["family"] == family and name != "dense"]
    speedups = {name: speedup for name in names if (speedup := result.speedup(name)) is not None}
    if not speedups:
        return "-"
    best = max(speedups, key=speedups.__getitem__)
    return f"{speedups[best]:.2f}x `{best}`"


def _details(result: Result) -> str:
    rows = table(COLUMNS, [[f"`{row[0]}`", *row[1:]] for row in rows_of(result)])
    return f"<details><summary>{headline(result)}</summary>\n\n{result.description}\n\n{rows}\n</details>\n"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="results.json of a run")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="default: beside this file")
    arguments = parser.parse_args()
    print(write_page(Report.load(arguments.file), arguments.output))


if __name__ == "__main__":
    main()
