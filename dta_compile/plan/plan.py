"""A plan: the prefix tree of a batch, the schedule over it, and the numbers that tell whether it pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from os import PathLike
from typing import Any

from dta_compile.errors import OptionError
from dta_compile.files import write_output
from dta_compile.options import MOST_BYTES, Options
from dta_compile.plan.cost import Limits, choose
from dta_compile.plan.peak_memory import Footprint
from dta_compile.plan.picture import Known, picture
from dta_compile.plan.scalars import scalars
from dta_compile.plan.schedule import Schedule
from dta_compile.plan.simulate import Simulation
from dta_compile.plan.summary import Estimates, Stats, summarize
from dta_compile.plan.timeline import processes, tree_as_speedscope
from dta_compile.plan.tree.lexicographic import each
from dta_compile.plan.tree.prefix_tree import IntArray, PrefixTree
from dta_compile.plan.tree.split_prefixes import SplitPrefixes, with_routes
from dta_compile.plan.verify import verify
from dta_compile.views.traces.chrome import Process, as_chrome_trace

__all__ = ["Plan", "make_plan", "plan"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A verified plan; `print(plan)` shows a summary, `print(plan.schedule)` the operations.

    Attributes:
        prefix_tree: the tree that is run; without sharing if the strategy is dense.
        schedule: the operations, verified against the tree.
        simulation: what the operations cost.
        options: as asked for; the strategy that "auto" chose is `schedule.strategy`.
        reason: why this strategy.
        estimates: time and memory.
        segments: `(row, segment)` of every sequence, where rows of the batch are packed; None: sequence i is row i.
        split: what splits prefixes of equal tokens; None: nothing does.
        limits: what the planner knew of the model and the machine.
        sequences: token ids of every sequence, if they are known (of a compiled call they are not kept).
    """

    prefix_tree: PrefixTree
    schedule: Schedule
    simulation: Simulation
    options: Options
    reason: str
    estimates: Estimates
    segments: Sequence[tuple[int, int]] | None = None
    split: SplitPrefixes | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    sequences: Sequence[Any] | None = None

    @cached_property
    def tokens_lost(self) -> dict[str, int]:
        """By what else than token ids decides whether prefixes are the same, the tokens that are run because of it.

        Routes of experts that were recorded and are replayed, for one: a token with two routes is run twice.
        """
        return self.split.tokens() if self.split else {}

    @cached_property
    def tree(self) -> Any:
        """The prefix tree as a `networkx.DiGraph` (see `PrefixTree.graph`)."""
        return self.prefix_tree.graph()

    @cached_property
    def stats(self) -> Stats:
        """What the tree and the schedule come to, in numbers."""
        tree, simulation = self.prefix_tree, self.simulation
        tokens = int(tree.lengths.sum())
        tree_pairs = _causal_pairs(tree.stop) - _causal_pairs(tree.start)
        return Stats(
            sequences=len(tree.lengths),
            tokens=tokens,
            tree_tokens=tree.num_rows,
            compression=_ratio(tokens, tree.num_rows),
            leaf_compression=_ratio(int(tree.stop[tree.leaves].sum()), tree.num_rows),
            attention_compression=_ratio(_causal_pairs(tree.lengths), tree_pairs),
            leaves=len(tree.leaves),
            longest_path=int(tree.stop.max(initial=0)),
            ops=simulation.ops,
            launches=simulation.launches,
            tokens_forwarded_twice=simulation.recomputed_tokens,
            peak_stack_tokens=simulation.peak_stack_tokens,
            peak_live_tokens=simulation.peak_live_tokens,
            peak_stored_tokens=simulation.peak_stored_tokens,
            peak_states=simulation.peak_states,
            peak_state_gradients=simulation.peak_state_gradients,
        )

    @property
    def keeps(self) -> bool:
        """Whether activations of more than the chunk at work are kept."""
        return self.schedule.keeps

    def to_html(
        self,
        path: str | PathLike[str],
        *,
        sequences: Iterable[Any] | None = None,
        tokenizer: Any = None,
        rewards: Iterable[float] | None = None,
        loss_masks: Iterable[Any] | None = None,
        names: Iterable[str] | None = None,
        title: str = "dta plan",
    ) -> None:
        """Write the plan as one HTML file that opens from disk and needs no network.

        It shows the tree, the schedule, and tokens and bytes held, linked with each other. Of huge plans it has the
        first and last tokens of each segment only, and says so.

        Args:
            path: the file to write.
            sequences: token ids of every sequence, as planned; by default `self.sequences`.
            tokenizer: shows tokens as text: anything with `decode(list[int]) -> str`, such as a tokenizer of
                transformers or a `tokenizers.Tokenizer`.
            rewards: a number for every sequence, to colour by.
            loss_masks: for every sequence the tokens that are trained on, to colour by: a mask `[n]` of booleans, or
                half-open ranges `(start, stop)` such as `Rollout.spans`.
            names: what each sequence is called; s0, s1, ... if left out.
            title: of the page.

        Raises:
            PlanError: these are not of the plan's sequences, or the tokenizer cannot decode.
            OSError: the file cannot be written.
        """
        given = self.sequences if sequences is None else sequences
        known = Known(given, tokenizer, rewards, loss_masks, names)
        facts = {"summary": str(self), "stats": dataclasses.asdict(self.stats), "shared": self.prefix_tree.shared}
        text = picture(self.prefix_tree, self.schedule, self.limits, facts, known, title)
        write_output(path, text)

    def scalars(self) -> dict[str, float]:
        """Figures by flat names such as `dta/compression`, for TensorBoard, wandb and the like; numbers only.

        Of a compiled call, seconds and throughput are there once it was measured (`last_plan` waits for that).
        """
        return scalars(self.stats, self.estimates)

    def trace_processes(self, rank: int = 0, epoch: float | None = None) -> list[Process]:
        """What `to_chrome_trace` writes of one rank; times count from `epoch` (seconds since 1970) or its own begin."""
        return processes(self.prefix_tree, self.schedule, self.limits, self.estimates, rank, epoch)

    def to_chrome_trace(self, path: str | PathLike[str], rank: int = 0) -> None:
        """Write the schedule in time as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

        Predicted by the cost model and, after a run, measured: a track per stream, and curves of the tokens on the
        stack, under live graphs and with KV alone kept, and of bytes where the plan knows them.
        `dta_compile.distributed.to_chrome_trace` writes those of all ranks into one file.

        Args:
            path: the file to write.
            rank: what the tracks are called after.

        Raises:
            OSError: the file cannot be written.
        """
        write_output(path, as_chrome_trace(self.trace_processes(rank), self.scalars()))

    def to_speedscope(self, path: str | PathLike[str]) -> None:
        """Write the prefix tree as a flame graph for https://www.speedscope.app: its tokens, and all sequences'.

        Raises:
            OSError: the file cannot be written.
        """
        write_output(path, tree_as_speedscope(self.prefix_tree, "dta prefix tree"))

    def __str__(self) -> str:
        facts = self.stats, self.prefix_tree, self.schedule, self.reason, self.estimates
        return summarize(*facts, self.segments, self.tokens_lost)

    def __repr__(self) -> str:
        sequences, ops = len(self.prefix_tree.lengths), len(self.schedule.ops)
        return f"<Plan {self.schedule.strategy}: {sequences} sequences, {ops} ops>"


def make_plan(
    sequences: Iterable[Any] | PrefixTree,
    options: Options,
    *,
    mode: str = "transparent",
    limits: Limits | None = None,
    segments: Sequence[tuple[int, int]] | None = None,
    split: SplitPrefixes | None = None,
) -> Plan:
    """Plan for a batch: builds its tree, chooses the strategy, schedules and verifies.

    Args:
        sequences: 1-D integer sequences (see `PrefixTree.build`), or their tree.
        mode: see `build_schedule`.
        limits: what is known of the model and the machine.
        segments, split: see `Plan`.

    Raises:
        PlanError: a sequence that is not a run of integers, or an unknown mode.
    """
    shared = sequences if isinstance(sequences, PrefixTree) else PrefixTree.build(sequences)
    limits = limits or Limits()
    tree, schedule, reason = choose(shared, options, mode, limits)
    head_starts = limits.head_starts if tree is shared else None
    simulation = verify(tree, schedule, head_starts, limits.footprint.has_states)
    estimates = Estimates(limits.cost.estimate(simulation), limits.cost.source)
    limits = dataclasses.replace(limits, head_starts=head_starts)
    return Plan(tree, schedule, simulation, options, reason, estimates, segments, split, limits)


def plan(
    sequences: Iterable[Any] | PrefixTree,
    *,
    mode: str = "transparent",
    bytes_per_token: float | None = None,
    kv_bytes_per_token: float = 0.0,
    state_bytes: float = 0.0,
    routes: Iterable[Any] | None = None,
    **options: Any,
) -> Plan:
    """Plan for a batch, without a model and without torch.

    Args:
        sequences: token ids of every sequence: 1-D arrays, lists or tensors of integers.
        mode: "score", "transparent" or "streaming" (see `build_schedule`).
        bytes_per_token: activations that one token's graph keeps; what a `memory_budget` is spent on.
        kv_bytes_per_token: keys and values of one token, all layers; 0: KV is not kept on its own.
        state_bytes: running states of the recurrent layers at one depth; 0: the model has none.
        routes: for every sequence `[n, ...]` what was recorded of its tokens and is replayed, such as the experts of
            every layer: tokens are shared where it is the same.
        options: as in `torch.compile(..., options={...})` (see `Options`). Without a `memory_budget` all graphs are
            kept from forward to backward.

    Raises:
        OptionError: an unknown option or a bad value.
        PlanError: a sequence that is not a run of integers, routes that do not fit, or an unknown mode.
    """
    parsed = Options.parse(options)
    if parsed.memory_budget and (bytes_per_token is None or bytes_per_token <= 0):
        raise OptionError(
            "memory_budget is in bytes, and a plan counts tokens",
            expected="bytes_per_token > 0, or a memory_budget of None (keep all) or 0 (keep nothing)",
            got=f"memory_budget={parsed.memory_budget}, bytes_per_token={bytes_per_token}",
        )
    for name, value in (("bytes_per_token", bytes_per_token or 0), ("kv_bytes_per_token", kv_bytes_per_token)):
        if not 0 <= value <= MOST_BYTES:
            raise OptionError(f"bad value for {name}", expected=f"a number from 0 to {MOST_BYTES}", got=str(value)[:80])
    footprint = Footprint(graph_token=bytes_per_token or 1.0, kv_token=kv_bytes_per_token, state=state_bytes)
    limits, split = Limits(parsed.memory_budget, footprint), None
    given = None if isinstance(sequences, PrefixTree) else each(sequences)
    tree: Iterable[Any] | PrefixTree = sequences if given is None else given
    if routes is not None:
        tree, split = with_routes(tree, routes)
    made = make_plan(tree, parsed, mode=mode, limits=limits, split=split)
    return dataclasses.replace(made, sequences=given)


def _causal_pairs(lengths: IntArray) -> int:
    return int((lengths * (lengths + 1)).sum()) // 2


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else 1.0
