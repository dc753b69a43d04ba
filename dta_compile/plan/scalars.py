"""The figures of a plan by flat names, for what draws curves."""

from __future__ import annotations

import dataclasses

from dta_compile.plan.summary import Estimates, Stats

PREFIX = "dta/"


def scalars(stats: Stats, estimates: Estimates) -> dict[str, float]:
    """All numbers of `Stats`, and what is known of time and memory; see `Plan.scalars`."""
    found: dict[str, float] = {PREFIX + name: float(value) for name, value in dataclasses.asdict(stats).items()}
    found[PREFIX + "predicted_seconds"] = estimates.seconds
    if (measured := estimates.measured_seconds) is not None:
        found[PREFIX + "seconds"] = measured
        if measured > 0:
            found[PREFIX + "tokens_per_second"] = stats.tokens / measured
            found[PREFIX + "prediction_error"] = estimates.seconds / measured - 1
    if estimates.peak_bytes is not None:
        found[PREFIX + "predicted_peak_bytes"] = float(estimates.peak_bytes)
    if (counts := estimates.replays) is not None:
        for name, value in dataclasses.asdict(counts).items():
            found[f"{PREFIX}cuda_graphs_{name}"] = float(value)
    return found


def step_line(stats: Stats, estimates: Estimates, strategy: str) -> str:
    """A call in one line, for logs."""
    shared = f"{stats.tree_tokens:,} run (C {stats.compression:.2f})"
    runs = f"{strategy}, {stats.launches:,} launches, {stats.tokens_forwarded_twice:,} tokens forwarded twice"
    text = f"{stats.sequences:,} sequences, {stats.tokens:,} tokens, {shared}, {runs}"
    if (measured := estimates.measured_seconds) is None:
        return text
    rate = f", {stats.tokens / measured:,.0f} tokens/s" if measured > 0 else ""
    return f"{text}, {measured:.3g} s in chunk runs (predicted {estimates.seconds:.3g}){rate}"
