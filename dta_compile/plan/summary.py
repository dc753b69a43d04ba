"""The one-screen summary of a plan, with the place where neighbours diverge when they share little."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from dta_compile.plan.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from dta_compile.plan.plan import Plan

__all__ = ["divergence", "summarize"]

_WIDTH = 100
_LOW_SHARING = 2.0  # compression below which the summary explains itself
_LARGEST_GROUPS = 3


def summarize(plan: Plan) -> str:
    """Counts, strategy and reason, ops by kind and peaks in at most 24 lines of 100 columns."""
    s, schedule, tree = plan.stats, plan.schedule, plan.prefix_tree
    kinds = Counter(type(op).__name__.lower() for op in schedule.ops)
    again = s.tokens_forwarded_twice / max(s.tree_tokens, 1)
    rows = [
        ("tree", f"{s.leaves:,} leaves, longest path {s.longest_path:,} tokens"),
        ("sharing", f"C {s.compression:.2f}, leaves only {s.leaf_compression:.2f}, attention {_attention(plan)}"),
        (
            "strategy",
            f"{schedule.strategy}, order {schedule.order}, mode {schedule.mode}, chunk_size {schedule.chunk_size}",
        ),
        ("reason", plan.reason),
        ("ops", f"{s.ops:,}: " + (", ".join(f"{n:,} {kind}" for kind, n in sorted(kinds.items())) or "nothing to run")),
        ("recompute", f"{s.tokens_forwarded_twice:,} tokens forwarded again ({again:.1%} of the tree)"),
        (
            "peaks",
            f"{s.peak_stack_tokens:,} tokens on the stack, {s.peak_live_tokens:,} with live graphs, "
            f"{s.peak_stored_tokens:,} with KV alone kept",
        ),
        *_estimates(plan),
    ]
    title = f"dta plan: {s.sequences:,} sequences, {s.tokens:,} tokens, {s.tree_tokens:,} to run"
    lines = [title, *(line for label, text in rows for line in _row(label, text))]
    if s.sequences > 1 and _possible_compression(tree) < _LOW_SHARING:
        lines += ["low sharing: where neighbours in lexicographic order first differ"]
        lines += ["  " + textwrap.shorten(line, _WIDTH - 2) for line in divergence(tree)]
    return "\n".join(lines)


def divergence(tree: PrefixTree) -> list[str]:
    """Where lexicographic neighbours first differ: the largest groups of equal depth, and a histogram by decade."""
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
        lines.append(f"{count} of {neighbours} neighbours diverge at token {depth}: {left} vs {right}{others}")
    decades = sorted(Counter(len(str(depth)) if depth else 0 for depth in depths).items())
    if decades:
        lines.append("first difference at: " + ", ".join(f"{_decade(digits)}: {n}" for digits, n in decades))
    if len(differs) < neighbours:
        lines.append(f"{neighbours - len(differs)} of {neighbours} neighbours are a prefix of the next, or equal to it")
    return lines


def _row(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {label:<9} ", subsequent_indent=" " * 12, max_lines=2)


def _estimates(plan: Plan) -> list[tuple[str, str]]:
    """Time, memory, generated code and the self-check, as far as the runtime has told."""
    known, rows = plan.estimates, []
    if known.measured_seconds is not None:
        predicted = f"{known.seconds:.3g} s predicted ({known.cost_source})"
        rows.append(("time", f"{predicted}, {known.measured_seconds:.3g} s measured, in chunk runs"))
    if known.peak_bytes is not None:
        rows.append(("memory", f"{known.peak_bytes / 2**20:,.0f} MiB predicted at the peak, besides model and batch"))
    if (counts := known.replays) is not None:
        text = f"{counts.replayed:,} runs replayed, {counts.eager:,} not; {counts.recorded:,} recorded in this call"
        rows.append(("graphs", f"{text}, {counts.bytes / 2**20:,.0f} MiB held"))
    if known.codegen is not None:
        rows.append(("codegen", known.codegen))
    if known.self_check is not None:
        rows.append(("self-check", known.self_check))
    return rows


def _attention(plan: Plan) -> str:
    text = f"{plan.stats.attention_compression:.2f}"
    if plan.prefix_tree.shared:
        return text
    return f"{text} (not shared; a prefix tree would have C {_possible_compression(plan.prefix_tree):.2f})"


def _possible_compression(tree: PrefixTree) -> float:
    """Compression of the sequences if prefixes were shared, whether this tree shares them or not."""
    tokens = int(tree.lengths.sum())
    unique = tokens - int(tree.common.sum())
    return tokens / unique if unique else 1.0


def _decade(digits: int) -> str:
    return f"{10 ** (digits - 1):,}-{10**digits - 1:,}" if digits else "0"
