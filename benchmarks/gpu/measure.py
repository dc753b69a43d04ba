"""Measurements of `benchmarks.gpu`: a method on a batch, CUDA graphs, and memory over the width of a tree."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.batches.trees import build
from benchmarks.batches.workloads import Workload
from benchmarks.gpu.methods import GpuMethod, GpuStep, clean, ours, release_memory
from benchmarks.gpu.models import Limits, Subject, batch_of
from benchmarks.gpu_report import GIB, Check
from benchmarks.measuring.results import Outcome

TIMED = 3  # timed steps
LONG = 12.0  # seconds: a step this long is timed once, one half as long twice
UNLIMITED = Limits(tokens=1 << 40, tree_seconds=math.inf, dense_seconds=math.inf)

REPLAY_CHUNK, REPLAY_TOKENS, REPLAY_PAYS = 64, 35_000, 1.5
PREFIX, BRANCH, FEW, MANY = 4096, 512, 8, 32  # tokens, tokens, branches, branches
LARGEST_GROWTH = 1.15  # ratio of step memory, many branches to few


def measure(subject: Subject, workload: Workload, method: GpuMethod, limits: Limits, deadline: float) -> Outcome:
    """Measure time and peak memory of a method, after an untimed first step.

    Args:
        deadline: by `time.monotonic`; no step begins that would end later.
    """
    outcome = Outcome()
    step = method.build(subject, workload, limits)
    try:
        outcome.first_call_seconds = seconds_of(subject, step.warm_up or step.run)
        before_peak(subject.device)
        while not outcome.seconds or _another(outcome.seconds, deadline):
            outcome.seconds.append(seconds_of(subject, step.run) / step.share)
        if subject.device.type == "cuda":
            outcome.peak_bytes = torch.cuda.max_memory_allocated()
        outcome.gradient_difference = _difference(subject, workload, step)
        outcome.note = "; ".join(filter(None, [step.note(), _reserved(subject.device)]))
    finally:
        clean(subject)
    return outcome


def seconds_of(subject: Subject, run: Callable[[], None]) -> float:
    """Time a step that begins without gradients and leaves them in `.grad`."""
    subject.model.zero_grad(set_to_none=True)
    _synchronize(subject.device)
    started = time.perf_counter()
    run()
    _synchronize(subject.device)
    return time.perf_counter() - started


def before_peak(device: torch.device) -> None:
    """Reset the peak-memory statistics."""
    release_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def replay_pays(subject: Subject) -> Check:
    """Check that CUDA graphs speed up schedules of short chunks as much as required."""
    tokens = REPLAY_TOKENS if subject.device.type == "cuda" else 2000
    batch = batch_of("airline_tiny", None, subject.config, dataclasses.replace(UNLIMITED, tokens=tokens))
    medians, notes = [], []
    for compiled_with in ({}, {"cuda_graphs": False}):  # on by default
        # A fixed strategy, so that both run the same schedule.
        step = ours(subject, batch, UNLIMITED, compiled_with, chunk_size=REPLAY_CHUNK, strategy="packed")
        times = [seconds_of(subject, step.run) for _ in range(2 + TIMED)]
        medians.append(statistics.median(times[2:]))  # the first two steps allocate and record
        notes.append(step.note())
        clean(subject)
    ratio = medians[1] / medians[0]
    text = f"{ratio:.2f}x: {medians[0]:.3f} s with CUDA graphs, {medians[1]:.3f} s without, chunks of {REPLAY_CHUNK}"
    figures = {"seconds": medians, "notes": notes, "tree_tokens": batch.counts.tree_tokens}
    return Check(ratio >= REPLAY_PAYS if subject.device.type == "cuda" else None, text, figures)


def memory_follows_depth(subject: Subject) -> Check:
    """Check that a step that saves nothing needs no more memory for a wider tree of equal depth."""
    if subject.device.type != "cuda":
        return Check(None, "needs a GPU")
    peaks = []
    for branches in (FEW, MANY):
        sequences = build(((1, PREFIX), (branches, BRANCH)), subject.config.vocab_size)
        batch = Workload("fan", "", "", subject.config.vocab_size, sequences)
        step = ours(subject, batch, UNLIMITED, memory_budget=0)
        seconds_of(subject, step.warm_up or step.run)
        subject.model.zero_grad(set_to_none=True)
        before_peak(subject.device)
        before = torch.cuda.memory_allocated()
        seconds_of(subject, step.run)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        clean(subject)
    ratio = peaks[1] / peaks[0]
    text = f"{ratio:.2f}x of memory for {MANY} branches as for {FEW}: {peaks[1] / GIB:.1f} and {peaks[0] / GIB:.1f} GiB"
    return Check(ratio <= LARGEST_GROWTH, f"{text}, of a step with budget 0", {"peaks": peaks})


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _reserved(device: torch.device) -> str:
    """Report reserved memory: CUDA graphs' reused memory counts as allocated only during capture."""
    return f"{torch.cuda.max_memory_reserved() / GIB:.1f} GiB reserved" if device.type == "cuda" else ""


def _another(seconds: list[float], deadline: float) -> bool:
    """Return whether to time one more step."""
    return len(seconds) < TIMED and sum(seconds) < LONG and time.monotonic() + seconds[-1] < deadline


def _difference(subject: Subject, workload: Workload, step: GpuStep) -> float | None:
    """Return the largest relative L2 distance of sampled gradients to the first method that ran the whole batch."""
    if step.share < 1:
        return None
    sampled = [parameter.grad.float().cpu() for parameter in subject.sampled]
    expected = subject.expected.setdefault(workload.name, sampled)
    return max(((got - want).norm() / want.norm()).item() for got, want in zip(sampled, expected, strict=True))
