"""Figures of a plan: a one-screen summary, which shows where neighbours diverge if they share little, and scalars."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dta_compile.plan.division.pieces import Dealing
from dta_compile.plan.interpret import Work
from dta_compile.plan.schedule import Forward, Op, Schedule
from dta_compile.plan.tree.prefix_tree import PrefixTree
from dta_compile.plan.tree.split_prefixes import Images

_WIDTH = 100
_LOW_SHARING = 2.0  # compression below which the summary explains itself
_LARGEST_GROUPS = 3


@dataclasses.dataclass(frozen=True)
class Stats:
    """Figures of a plan, in tokens unless stated otherwise.

    Attributes:
        sequences, leaves, ops, launches: counts.
        tokens, tree_tokens: tokens of all sequences, and of the tree that is run.
        compression: `tokens / tree_tokens` (the paper's C).
        leaf_compression: `compression` of the distinct sequences that are not a strict prefix of another.
        attention_compression: causal query-key pairs of the sequences, divided by those of the tree.
        longest_path: depth of the tree.
        tokens_forwarded_twice: tokens forwarded beyond one forward of the tree.
        peak_stack_tokens, peak_live_tokens, peak_stored_tokens: most tokens on the KV stack, with live graphs, and
            with only their KV kept.
        peak_states, peak_state_gradients: most running states alive, and most depths with a state gradient waiting.
    """

    sequences: int
    tokens: int
    tree_tokens: int
    compression: float
    leaf_compression: float
    attention_compression: float
    leaves: int
    longest_path: int
    ops: int
    launches: int
    tokens_forwarded_twice: int
    peak_stack_tokens: int
    peak_live_tokens: int
    peak_stored_tokens: int
    peak_states: int
    peak_state_gradients: int


@dataclasses.dataclass
class ReplayCounts:
    """Counts of the chunk runs that CUDA graphs were meant for, and the graphs' memory.

    Attributes:
        recorded, replayed, eager: graphs recorded in this call, runs replayed, runs without a graph.
        bytes: memory that graphs of this model hold so far.
    """

    recorded: int = 0
    replayed: int = 0
    eager: int = 0
    bytes: int = 0


class MeasuredRun(NamedTuple):
    """Measured run of a chunk's graph.

    Attributes:
        kind: "forward" or "backward".
        work: amount of work.
        seconds: duration.
        op: op of the schedule.
        start: start time, in seconds after the start of the first run.
        launched, launch_seconds: start and duration on the host, which only launches kernels if there is a GPU.
    """

    kind: str
    work: Work
    seconds: float
    op: Op
    start: float
    launched: float
    launch_seconds: float


@dataclasses.dataclass
class Estimates:
    """Predicted and measured time and memory of a run.

    Attributes:
        seconds: predicted seconds of all chunk runs, by the cost model.
        measured_seconds: measured seconds, filled in by the runtime; None before the run, or without a runtime.
        peak_bytes: predicted peak allocation of the run; None: the runtime's sizes are not known.
        gathered_bytes: part of `peak_bytes`: parameters gathered from other ranks, and whole gradients not yet reduced.
        cost_source: origin of the cost model's rates.
        replays: CUDA graph counts; None: no run was meant for a CUDA graph.
        codegen: generated code, in words; None: none.
        self_check: result of comparing the compiled program with the captured one; None: not compared.
        notes: sentences on settings that may be unintended.
        runs: measured runs of chunks; empty before the run.
        began: start of the first run (seconds since 1970).
        stream: name of the stream or device that the chunks ran on.
    """

    seconds: float
    cost_source: str
    measured_seconds: float | None = None
    peak_bytes: float | None = None
    gathered_bytes: int = 0
    replays: ReplayCounts | None = None
    codegen: str | None = None
    self_check: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    runs: tuple[MeasuredRun, ...] = ()
    began: float | None = None
    stream: str = ""


def summarize(
    stats: Stats,
    tree: PrefixTree,
    schedule: Schedule,
    reason: str,
    estimates: Estimates,
    segments: Sequence[tuple[int, int]] | None = None,
    tokens_lost: Mapping[str, int] | None = None,
    images: Images | None = None,
    dealing: Dealing | None = None,
    rank: int = 0,
) -> str:
    """Format counts, strategy and reason, ops by kind and peaks in rows of at most two lines of 100 columns."""
    kinds = Counter(type(op).__name__.lower() for op in schedule.ops)
    of, once = ("the tree", stats.tree_tokens) if dealing is None else ("the rank's", dealing.tokens[rank])
    again = stats.tokens_forwarded_twice / max(once, 1)
    rows = [
        ("tree", f"{stats.leaves:,} leaves, longest path {stats.longest_path:,} tokens"),
        (
            "sharing",
            f"C {stats.compression:.2f}, leaves only {stats.leaf_compression:.2f}, attention {_attention(stats, tree)}",
        ),
        (
            "strategy",
            f"{schedule.strategy}, order {schedule.order}, mode {schedule.mode}, chunk_size {schedule.chunk_size}",
        ),
        ("reason", reason),
        (
            "ops",
            f"{stats.ops:,}: " + (", ".join(f"{n:,} {kind}" for kind, n in sorted(kinds.items())) or "nothing to run"),
        ),
        *([("parts", _parts(schedule))] if schedule.others else []),
        *([("groups", _groups(schedule))] if schedule.groups else []),
        *([("stride", _stride(schedule))] if schedule.stride > 1 else []),
        *([("ranks", _ranks(dealing, rank))] if dealing else []),
        ("recompute", f"{stats.tokens_forwarded_twice:,} tokens forwarded again ({again:.1%} of {of})"),
        ("peaks", _peaks(stats)),
        *_estimates(estimates),
    ]
    if tokens_lost:
        rows.insert(2, ("split", _split(stats, tokens_lost)))
    if images is not None:
        rows.insert(1, ("images", str(images)))
    if segments is not None:
        rows.insert(0, ("packed", _packed(segments)))
    title = f"dta plan: {stats.sequences:,} sequences, {stats.tokens:,} tokens, {stats.tree_tokens:,} to run"
    lines = [title, *(line for label, text in rows for line in _row(label, text))]
    if stats.sequences > 1 and _possible_compression(tree) < _LOW_SHARING:
        lines += ["low sharing: where neighbours in lexicographic order first differ"]
        lines += ["  " + textwrap.shorten(line, _WIDTH - 2) for line in divergence(tree)]
    return "\n".join(lines)


def _parts(schedule: Schedule) -> str:
    """Say how many chunks have their graphs kept from forward to backward, by runs of parts."""
    runs = [(f"{run.first} to {run.stop - 1}", schedule.of_part(run.first)) for run in schedule.others]
    kept = [(name, sum(isinstance(op, Forward) for op in run.halves[0])) for name, run in [*runs, schedule.kinds[0]]]
    of_parts = [f"{name}: {number}" for name, number in kept[:-1]] + [f"the others: {kept[-1][1]}"]
    return f"graphs of {len(schedule.chunks)} chunks that are kept by parts {', '.join(of_parts)} of {schedule.parts}"


def _groups(schedule: Schedule) -> str:
    return f"{len(schedule.groups)} groups of subtrees, one after another; each but the last forward twice for it"


def _stride(schedule: Schedule) -> str:
    again = f"{schedule.share_again:.0%} of parts run forward again for those in between"
    return f"hidden states are kept before every {schedule.stride}. part; {again}"


def _ranks(dealing: Dealing, rank: int) -> str:
    """Say how many tokens ranks run and receive states of, and how even their costs are."""
    tokens, rounds = dealing.tokens, f" in {dealing.rounds} rounds" if dealing.rounds > 1 else ""
    return (
        f"{sum(tokens):,} tokens run in all = tokens of the tree; {dealing.ranks} ranks{rounds}, {min(tokens):,} "
        f"to {max(tokens):,} each, {tokens[rank]:,} on rank {rank}; slowest {dealing.imbalance - 1:.1%} "
        f"above the mean; at most {max(dealing.received):,} tokens' states received"
    )


def _peaks(stats: Stats) -> str:
    text = (
        f"{stats.peak_stack_tokens:,} tokens on the stack, {stats.peak_live_tokens:,} with live graphs, "
        f"{stats.peak_stored_tokens:,} with KV alone kept"
    )
    if not stats.peak_states:
        return text
    return f"{text}, {stats.peak_states:,} running states, {stats.peak_state_gradients:,} with a gradient"


def _split(stats: Stats, tokens_lost: Mapping[str, int]) -> str:
    """Name the keys besides token ids that split prefixes, and the compression without each."""
    parts = (
        f"{lost:,} tokens more because of {name} (C {stats.tokens / max(stats.tree_tokens - lost, 1):.2f} without)"
        for name, lost in tokens_lost.items()
    )
    return "; ".join(parts)


def divergence(tree: PrefixTree) -> list[str]:
    """Say where lexicographic neighbours first differ: the largest groups of equal depth, a histogram by decade."""
    lengths = tree.lengths[tree.order]
    shorter = np.minimum(lengths[1:], lengths[:-1])
    differs = np.flatnonzero(tree.common[1:] < shorter) + 1
    neighbours = len(lengths) - 1
    depths = tree.common[differs].tolist()
    lines = []
    for depth, count in Counter(depths).most_common(_LARGEST_GROUPS):
        pairs = Counter(map(tuple, tree.forks[differs[np.array(depths) == depth]].tolist()))
        (left, right), _ = pairs.most_common(1)[0]
        others = f" (and {len(pairs) - 1} more)" if len(pairs) > 1 else ""
        tokens = f": {left} vs {right}{others}" if left != right else f": {left} in both, which differ in another key"
        lines.append(f"{count} of {neighbours} neighbours diverge at token {depth}{tokens}")
    decades = sorted(Counter(len(str(depth)) if depth else 0 for depth in depths).items())
    if decades:
        lines.append("first difference at: " + ", ".join(f"{_decade(digits)}: {n}" for digits, n in decades))
    if len(differs) < neighbours:
        lines.append(f"{neighbours - len(differs)} of {neighbours} neighbours are a prefix of the next, or equal to it")
    return lines


def _row(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {label:<9} ", subsequent_indent=" " * 12, max_lines=2)


def _estimates(known: Estimates) -> list[tuple[str, str]]:
    """Format time, memory, generated code and the self-check, as far as the runtime has filled them in."""
    rows: list[tuple[str, str]] = []
    if known.measured_seconds is not None:
        predicted = f"{known.seconds:.3g} s predicted ({known.cost_source})"
        rows.append(("time", f"{predicted}, {known.measured_seconds:.3g} s measured, in chunk runs"))
    if known.peak_bytes is not None:
        text = f"{known.peak_bytes / 2**20:,.0f} MiB predicted at the peak, besides model and batch"
        gathered = f", {known.gathered_bytes / 2**20:,.0f} MiB of it gathered" if known.gathered_bytes else ""
        rows.append(("memory", text + gathered))
    if (counts := known.replays) is not None:
        text = f"{counts.replayed:,} runs replayed, {counts.eager:,} not; {counts.recorded:,} recorded in this call"
        rows.append(("graphs", f"{text}, {counts.bytes / 2**20:,.0f} MiB held"))
    if known.codegen is not None:
        rows.append(("codegen", known.codegen))
    if known.self_check is not None:
        rows.append(("self-check", known.self_check))
    rows += (("note", note) for note in known.notes)
    return rows


def _packed(segments: Sequence[tuple[int, int]]) -> str:
    """Map packed rows to sequences: `row 0 is s0..s3, row 1 is s4`."""
    counts = Counter(row for row, _ in segments)
    stops = dict(zip(counts, accumulate(counts.values()), strict=True))
    firsts = {row: stop - counts[row] for row, stop in stops.items()}
    return ", ".join(
        f"row {row} is s{firsts[row]}" + (f"..s{stop - 1}" if counts[row] > 1 else "") for row, stop in stops.items()
    )


def _attention(stats: Stats, tree: PrefixTree) -> str:
    text = f"{stats.attention_compression:.2f}"
    if tree.shared:
        return text
    return f"{text} (not shared; a prefix tree would have C {_possible_compression(tree):.2f})"


def _possible_compression(tree: PrefixTree) -> float:
    """Return the compression that sharing prefixes gives, whether or not this tree shares them."""
    tokens = int(tree.lengths.sum())
    unique = tokens - int(tree.common.sum())
    return tokens / unique if unique else 1.0


def _decade(digits: int) -> str:
    return f"{10 ** (digits - 1):,}-{10**digits - 1:,}" if digits else "0"


PREFIX = "dta/"


def scalars(stats: Stats, estimates: Estimates, dealing: Dealing | None = None, rank: int = 0) -> dict[str, float]:
    """Return all fields of `Stats`, figures of ranks, and time and memory as far as known (see `Plan.scalars`)."""
    values: dict[str, float] = {PREFIX + name: float(value) for name, value in dataclasses.asdict(stats).items()}
    if dealing is not None:
        values |= {f"{PREFIX}ranks": float(dealing.ranks), f"{PREFIX}rank_imbalance": dealing.imbalance}
        values |= {f"{PREFIX}rank_tokens": float(dealing.tokens[rank])}
        values |= {f"{PREFIX}rank_tokens_received": float(dealing.received[rank])}
    values[PREFIX + "predicted_seconds"] = estimates.seconds
    if (measured := estimates.measured_seconds) is not None:
        values[PREFIX + "seconds"] = measured
        if measured > 0:
            values[PREFIX + "tokens_per_second"] = stats.tokens / measured
            values[PREFIX + "prediction_error"] = estimates.seconds / measured - 1
    if estimates.peak_bytes is not None:
        values[PREFIX + "predicted_peak_bytes"] = float(estimates.peak_bytes)
    if (counts := estimates.replays) is not None:
        for name, value in dataclasses.asdict(counts).items():
            values[f"{PREFIX}cuda_graphs_{name}"] = float(value)
    return values


def step_line(stats: Stats, estimates: Estimates, strategy: str) -> str:
    """Format a call as one log line."""
    shared = f"{stats.tree_tokens:,} run (C {stats.compression:.2f})"
    runs = f"{strategy}, {stats.launches:,} launches, {stats.tokens_forwarded_twice:,} tokens forwarded twice"
    text = f"{stats.sequences:,} sequences, {stats.tokens:,} tokens, {shared}, {runs}"
    if (measured := estimates.measured_seconds) is None:
        return text
    rate = f", {stats.tokens / measured:,.0f} tokens/s" if measured > 0 else ""
    return f"{text}, {measured:.3g} s in chunk runs (predicted {estimates.seconds:.3g}){rate}"
