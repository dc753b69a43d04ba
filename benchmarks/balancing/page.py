"""Write the page BALANCING.md from the figures of a run.

    python -m benchmarks.balancing.page build/balancing/balancing.json [--output benchmarks]

Writes BALANCING.md and its plots into the folder.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.balancing.compare import Outcome, Result
from benchmarks.balancing.plots import draw
from benchmarks.report import table

OURS, TOKENS, PAPER = "dta, cost model", "dta", "Algorithm 4"
GROUPS = 8  # number of ranks in the main table
DRAWN = ("extra", "throughput", "planning")

PREAMBLE = """\
# Balancing over ranks

`balance` by the cost model of attention, tokens and whole chunks, and by tree tokens, against Algorithm 4 of the paper
(contiguous groups of the lexicographic order, by tree tokens) and against balancers that know no tree. Made on {date}
from what

```
python -m benchmarks.balancing --rollouts FOLDER --pools 1000,10000,100000,1000000
```

wrote, on a machine whose cores others used too: times are upper bounds, everything else is the same at every run.

* **Imbalance** is the largest over the mean number of tree tokens of the ranks, **extra** are tree tokens of all ranks
  beyond those of the one combined tree; both are of dta by the cost model, which gives longer sequences fewer tokens.
  Any division repeats at least what the fewest cuts of the tree repeat ("unavoidable": the K - 1 smallest common
  prefixes of neighbours).
* **Step** is predicted for the slowest rank, relative to that of dta by the cost model: by the schedules that would be
  run, and by tokens and pairs for more than 5 million tokens. Rivals are first fit decreasing and Karmarkar-Karp by
  tokens, greedy by tokens and by tree tokens, and round robin; the nearest is the one with the shortest step.

Of {cases} cases, batches and numbers of ranks, a rival's step is shorter in {behind}: the nearest has {least:.3f} times
dta's at the least. Algorithm 4 has {paper:.3f} to {worst:.3f} times dta's. By tree tokens alone, the default of
`balance`, steps are up to {tokens:.0%} longer, as attention is not counted.
"""

AT_SCALE = """\
## Planning at scale

Generated pools with lengths and sharing like the real rollouts: prompts shared by tasks, turns that share their past,
trials that branch. Order is the time to sort all sequences and find what neighbours share; memory is what that adds to
the tokens themselves.
"""

COLUMNS = ("imbalance", "extra", "unavoidable", "step, tree tokens", "step, Algorithm 4", "nearest rival")
RIVAL = ("its imbalance", "its extra", "its step")


def load(file: Path) -> list[Result]:
    """Read the results that `benchmarks.balancing` wrote."""
    results = []
    for data in json.loads(file.read_text()):
        data["outcomes"] = [Outcome(**outcome) for outcome in data["outcomes"]]
        data["unavoidable"] = {int(groups): share for groups, share in data["unavoidable"].items()}
        results.append(Result(**data))
    return results


def markdown(results: Sequence[Result]) -> str:
    """Return the text of the page."""
    chosen = [_Case(result, groups) for result in results for groups in result.unavoidable]
    nearest, paper = [case.rival.step_seconds / case.step for case in chosen], [case.over(PAPER) for case in chosen]
    facts = {"cases": len(chosen), "least": min(nearest), "paper": min(paper), "worst": max(paper)}
    facts["behind"] = sum(ratio < 1 for ratio in nearest)
    facts["tokens"] = max(case.over(TOKENS) for case in chosen) - 1
    parts = [PREAMBLE.format(date=datetime.date.today().isoformat(), **facts), f"## {GROUPS} ranks\n"]
    at = [case for case in chosen if case.groups == GROUPS]
    rows = [[case.result.name, f"{case.result.sequences:,}", case.compression, *case.cells] for case in at]
    parts.append(table(["batch", "sequences", "C", *COLUMNS, *RIVAL], rows))
    parts.append(AT_SCALE)
    pools = [case for case in chosen if case.result.name.startswith("pool")]
    rows = [[*case.planning, *case.cells] for case in pools]
    planning = ["sequences", "tokens", "ranks", "order", "order, memory", "division"]
    parts.append(table([*planning, *COLUMNS, *RIVAL], rows))
    parts += [f"![{name.capitalize()}](plots/balancing-{name}.png)\n" for name in DRAWN]
    return "\n".join(parts)


class _Case:
    """Row of a table: a batch and a number of ranks."""

    def __init__(self, result: Result, groups: int) -> None:
        self.result, self.groups = result, groups
        self.outcomes = {outcome.method: outcome for outcome in result.outcomes if outcome.groups == groups}
        rivals = [outcome for method, outcome in self.outcomes.items() if method not in (OURS, TOKENS, PAPER)]
        self.rival = min(rivals, key=lambda outcome: outcome.step_seconds)
        self.ours = self.outcomes[OURS]
        self.step = self.ours.step_seconds
        self.compression = f"{result.tokens / max(result.tree_tokens, 1):.2f}"

    def over(self, method: str) -> float:
        """Return the ratio of a method's step time to ours."""
        return self.outcomes[method].step_seconds / self.step

    @property
    def cells(self) -> list[str]:
        """Cells of `COLUMNS` and `RIVAL`."""
        ours, rival = self.ours, self.rival
        shares = [f"{ours.token_imbalance:.3f}", f"{ours.extra:.1%}", f"{self.result.unavoidable[self.groups]:.1%}"]
        steps = [f"{self.over(TOKENS):.2f}x", f"{self.over(PAPER):.2f}x"]
        theirs = [f"{rival.token_imbalance:.3f}", f"{rival.extra:.1%}", f"{rival.step_seconds / self.step:.3f}x"]
        return [*shares, *steps, rival.method, *theirs]

    @property
    def planning(self) -> list[str]:
        """Size of the batch and cost of planning it."""
        result = self.result
        memory = "-" if result.order_peak_bytes is None else f"{result.order_peak_bytes / 2**20:,.0f} MiB"
        order = [f"{result.order_seconds:.1f} s", memory, f"{self.ours.seconds:.2f} s"]
        return [f"{result.sequences:,}", f"{result.tokens:,}", f"{self.groups:,}", *order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="balancing.json of a run")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="default: beside this file")
    arguments = parser.parse_args()
    results = load(arguments.file)
    plots = arguments.output / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    for path in draw(results, plots):
        if path.stem.removeprefix("balancing-") not in DRAWN:
            path.unlink()
    page = arguments.output / "BALANCING.md"
    page.write_text(markdown(results))
    print(page)


if __name__ == "__main__":
    main()
