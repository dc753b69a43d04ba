"""Figures of a plan as flat scalars, for TensorBoard, wandb and log lines."""

from __future__ import annotations

import dataclasses

from dta_compile.plan.summary import Estimates, Stats

PREFIX = "dta/"


def scalars(stats: Stats, estimates: Estimates) -> dict[str, float]:
    """Return all fields of `Stats`, and time and memory as far as known (see `Plan.scalars`)."""
    values: dict[str, float] = {PREFIX + name: float(value) for name, value in dataclasses.asdict(stats).items()}
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
