"""`dta plan --ranks`: one tree over ranks, beside a tree of its own on each rank."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dta_compile.cli.arguments import real, visible, whole
from dta_compile.data import Recorded
from dta_compile.errors import OptionError
from dta_compile.estimate.devices import device_named
from dta_compile.estimate.over_ranks import OverRanks, RanksStep
from dta_compile.estimate.predict import Ranks, model_shape
from dta_compile.options import Options
from dta_compile.plan import Footprint, Limits, PartBytes, Plan
from dta_compile.plan.cost import BY_STAGES, chunk_sizes
from dta_compile.plan.one_tree import NVLINK

MOST_RANKS = 2**12
BOTH = ("own trees (balance)", "one tree")


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Declare the options of one tree over ranks."""
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "--ranks", type=whole(1, MOST_RANKS), metavar="N", help="plan one tree over N ranks, and compare with own trees"
    )
    ranks.add_argument("--rank", type=whole(0, MOST_RANKS), default=0, help="whose schedule it is (default: 0)")
    ranks.add_argument(
        "--link",
        type=real(1e-3, 1e6),
        default=NVLINK / 1e9,
        metavar="GB/S",
        help="that a rank receives from others (default: %(default)g, NVLink of an H100 node)",
    )


def plan_over_ranks(sequences: Sequence[Recorded], arguments: argparse.Namespace) -> tuple[Plan, dict[str, RanksStep]]:
    """Plan one tree over ranks; return the plan of a rank, and the step of each way by name.

    Raises:
        OptionError: options that do not fit one tree over ranks.
    """
    count, mode = arguments.ranks, arguments.mode
    if arguments.rank >= count or mode == "streaming":
        raise OptionError(
            "--ranks does not fit",
            expected=f"--rank from 0 to {count - 1}, and --mode transparent or score",
            got=f"--rank {arguments.rank} --mode {mode}",
        )
    names = ("strategy", "order", "memory_budget")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    options = Options(chunk_size=arguments.chunk_size, **given, mesh=tuple(range(count)))
    link = arguments.link * 1e9
    if arguments.config:
        ranks = Ranks(count, "fsdp" if count > 1 else "none", arguments.optimizer)
        shape, device = model_shape(arguments.config), device_named(arguments.device)
        over_ranks = OverRanks(ranks, options, link, shape, device)
    else:
        over_ranks = OverRanks(Ranks(count), options, link, known=_limits(arguments))
    one, plan = over_ranks.one_tree(sequences, arguments.rank, mode)
    plan = dataclasses.replace(plan, sequences=[sequence.tokens for sequence in sequences])
    sizes = [size for size in range(2, count) if count % size == 0]
    parts = {f"a tree per {size} ranks": over_ranks.in_parts(sequences, size, mode) for size in sizes}
    return plan, {BOTH[0]: over_ranks.own_trees(sequences, mode), **parts, BOTH[1]: one}


def _limits(arguments: argparse.Namespace) -> Limits:
    per_token, budget = arguments.bytes_per_token, arguments.memory_budget
    if budget and not per_token:
        raise OptionError("memory_budget is in bytes, and a plan counts tokens", expected="--bytes-per-token above 0")
    footprint = Footprint(graph_token=per_token or 1.0, kv_token=arguments.kv_bytes_per_token)
    sizes = chunk_sizes(budget or float("inf"), footprint.graph_token, BY_STAGES)
    return Limits(budget, footprint, chunk_sizes=sizes, parts=(PartBytes(footprint),))


def print_ranks(plan: Plan, steps: dict[str, RanksStep], link: float, console: Console) -> None:
    """Print all ways side by side."""
    tree_tokens, own = plan.stats.tree_tokens, steps[BOTH[0]]
    table = Table(box=None, pad_edge=False, header_style="dim")
    titles = ["", "tokens run", "more than the tree's", "slowest / mean", "seconds", "relative", "exchange", "received"]
    titles += ["peak GB"] if own.peak_bytes else []
    for title in titles:
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for name, step in steps.items():
        table.add_row(
            name,
            f"{step.tokens:,}",
            f"{step.tokens / max(tree_tokens, 1) - 1:.1%}" if tree_tokens else "",
            f"{step.imbalance:.3f}",
            f"{step.seconds:.3g}",
            f"{step.seconds / own.seconds:.2f}" if own.seconds else "",
            f"{step.exchange:.2g} s",
            f"{step.received:,}",
            *([f"{step.peak_bytes / 1e9:.1f}"] if own.peak_bytes else []),
        )
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    console.print(table)
    source = visible(plan.limits.cost.source)
    text = f"by {source}; {link:,.0f} GB/s between ranks, of which nothing is hidden behind computation"
    console.print(text, style="dim", markup=False, soft_wrap=True)
