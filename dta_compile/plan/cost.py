"""What schedules cost by a linear model, and the choice of the strategy `auto` by it."""

from __future__ import annotations

import dataclasses

from dta_compile.options import Options
from dta_compile.plan.planner import build_schedule
from dta_compile.plan.prefix_tree import PrefixTree
from dta_compile.plan.schedule import Schedule
from dta_compile.plan.verify import Simulation, simulate

__all__ = ["CostModel", "choose"]


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds as a linear function of a schedule's counts.

    The defaults are ratios for a model of about 2B parameters on a current datacentre GPU, worked out from its
    arithmetic, not measured: 4 GFLOP a token, 0.2 MFLOP a query-key pair, a few hundred kernels a launch.

    Attributes:
        launch: per chunk run, whatever its size.
        token: per token forward.
        pair: per query-key pair forward.
        restore: per token whose KV is copied back.
        backward: cost of a token or pair backward, relative to forward.
    """

    launch: float = 2e-3
    token: float = 1e-5
    pair: float = 8e-10
    restore: float = 1e-7
    backward: float = 2.0

    def estimate(self, simulation: Simulation) -> float:
        """Seconds that a schedule with these counts takes."""
        s = simulation
        tokens = s.forward_tokens + self.backward * s.backward_tokens
        pairs = s.attention_pairs_forward + self.backward * s.attention_pairs_backward
        return self.launch * s.launches + self.token * tokens + self.pair * pairs + self.restore * s.restored_tokens


def choose(
    tree: PrefixTree, options: Options, mode: str, keep_tokens: int | None = None, model: CostModel | None = None
) -> tuple[PrefixTree, Schedule, str]:
    """Tree to run on, schedule, and why: the strategy asked for, or for "auto" the cheapest one by `model`.

    A strategy that must hold more graphs than `keep_tokens` (and one chunk) is no candidate. Dense is planned only
    if a lower bound of its cost does not rule it out, since its schedule is as long as the batch without sharing.
    """
    if options.strategy != "auto":
        tree = tree.unshared() if options.strategy == "dense" else tree
        return tree, build_schedule(tree, options, mode, keep_tokens), "asked for"
    model = model or CostModel()
    limit = None if keep_tokens is None else max(keep_tokens, options.chunk_size)
    found: list[tuple[float, PrefixTree, Schedule]] = []
    costs: dict[str, float] = {}
    refused = ""
    for strategy in ("dfs", "vanilla", "dense"):  # the first of equal cost is taken
        if strategy == "dense":
            bound = model.estimate(_dense_at_least(tree, options, mode))
            if bound > min(cost for cost, _, _ in found):
                costs["dense >="] = bound
                continue
        candidate = tree.unshared() if strategy == "dense" else tree
        schedule = build_schedule(candidate, dataclasses.replace(options, strategy=strategy), mode, keep_tokens)
        simulation = simulate(candidate, schedule)
        if limit is not None and simulation.peak_live_tokens > limit:
            refused += f"; {strategy} holds graphs of {simulation.peak_live_tokens:,} > {limit:,} tokens"
            continue
        costs[strategy] = model.estimate(simulation)
        found.append((costs[strategy], candidate, schedule))
    least, best_tree, best = min(found, key=lambda entry: entry[0])
    relative = ", ".join(f"{name} {cost / least if least else 1:.2f}" for name, cost in costs.items())
    return best_tree, best, f"auto, by estimated cost: {relative}{refused}"


def _dense_at_least(tree: PrefixTree, options: Options, mode: str) -> Simulation:
    """Counts that no dense schedule of these sequences can be below."""
    lengths = tree.lengths
    passes = 1 if mode == "score" else 2
    tokens, pairs = int(lengths.sum()), int((lengths * (lengths + 1)).sum()) // 2
    launches = passes * int((-(-lengths // options.chunk_size)).sum())
    return Simulation(
        ops=launches,
        launches=launches,
        forward_tokens=tokens,
        recomputed_tokens=0,
        backward_tokens=tokens * (passes - 1),
        restored_tokens=0,
        peak_stack_tokens=int(lengths.max(initial=0)),
        peak_live_tokens=0,
        attention_pairs_forward=pairs,
        attention_pairs_backward=pairs * (passes - 1),
    )
