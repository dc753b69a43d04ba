"""Measure all methods on one workload: first memory, then gradients, then interleaved timing."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel, Qwen3Config

from benchmarks.batches.model import build_model, flops, gradient_difference, gradients
from benchmarks.batches.trees import ideal_speedup
from benchmarks.batches.workloads import Workload
from benchmarks.measuring import memory
from benchmarks.measuring.results import Outcome, Result
from benchmarks.methods.steps import Build, Step
from benchmarks.methods.table import METHODS

TOLERANCE = 1e-4  # on the gradient difference of two float32 runs
REFERENCE = "dense"

Tick = Callable[[str, int], None]  # description of what begins, and its steps on the progress bar


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a measurement; `limit` is the most seconds of a method's first step."""

    threads: int
    repetitions: int
    limit: float
    memory: bool

    @property
    def ticks(self) -> int:
        """Progress-bar steps per method and workload."""
        return self.memory + 1 + self.repetitions


@dataclasses.dataclass(frozen=True)
class Runner:
    """Method prepared for one workload."""

    model: PreTrainedModel
    step: Step

    @classmethod
    def of(cls, build: Build, workload: Workload, name: str = "dense") -> Runner:
        model = build_model(workload.vocabulary, name)
        return cls(model, build(model)(workload))

    def seconds(self) -> float:
        """Time one step; gradients are left in `.grad`."""
        self.model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        self.step.run()
        return time.perf_counter() - started


def measure(workload: Workload, methods: list[str], settings: Settings, tick: Tick) -> Result:
    """Measure all methods; one that fails, is wrong or takes too long is recorded with its error.

    Memory is measured first, in separate processes; a method that runs out of memory there is not run in this process.
    """
    torch.compiler.reset()
    result = empty_result(workload, build_model(workload.vocabulary).config)
    result.outcomes = {method: Outcome() for method in [REFERENCE, *(name for name in methods if name != REFERENCE)]}
    if settings.memory:
        for method, outcome in result.outcomes.items():
            tick(f"{workload.name}: memory of {method}", 1)
            _measure_memory(method, outcome, workload, settings)
    runners = _first_calls(workload, result.outcomes, settings.limit, tick)
    for repetition in range(settings.repetitions):
        for method in list(runners)[:: 1 if repetition % 2 else -1]:
            tick(f"{workload.name}: {method}, repetition {repetition + 1}", 1)
            result.outcomes[method].seconds.append(runners[method].seconds())
        tick(workload.name, len(result.outcomes) - len(runners))
    return result


def _measure_memory(method: str, outcome: Outcome, workload: Workload, settings: Settings) -> None:
    try:
        # Two steps, after imports and possibly compilation.
        outcome.peak_bytes = memory.peak_growth(method, workload, settings.threads, 120 + 2 * settings.limit)
    except memory.MeasurementError as error:
        outcome.error = str(error)


def _first_calls(workload: Workload, outcomes: dict[str, Outcome], limit: float, tick: Tick) -> dict[str, Runner]:
    """Return the methods to time: those whose first step succeeds in time with the right gradients."""
    runners: dict[str, Runner] = {}
    expected: list[torch.Tensor] = []  # gradients of the reference, which runs first
    for method, outcome in outcomes.items():
        tick(f"{workload.name}: first call of {method}", 1)
        if not expected and method != REFERENCE:
            outcome.error = outcome.error or f"not run: {REFERENCE} failed, so there is nothing to compare with"
        if outcome.error:
            continue
        try:
            runner = Runner.of(METHODS[method].build, workload)
            outcome.first_call_seconds = runner.seconds()
            actual = gradients(runner.model)
            expected = actual if method == REFERENCE else expected
            outcome.gradient_difference = gradient_difference(actual, expected)
            outcome.note = runner.step.note()
        except Exception as error:
            outcome.error = memory.describe(error)
            continue
        outcome.error = _objection(outcome, limit)
        if not outcome.error:
            runners[method] = runner
    gc.collect()
    return runners


def _objection(outcome: Outcome, limit: float) -> str:
    assert outcome.gradient_difference is not None and outcome.first_call_seconds is not None
    if not outcome.gradient_difference <= TOLERANCE:  # NaN is wrong, too
        return f"wrong: gradients differ by {outcome.gradient_difference:.0e}"
    if outcome.first_call_seconds > limit:
        return f"too slow: first call {outcome.first_call_seconds:.0f} s"
    return ""


def empty_result(workload: Workload, config: Qwen3Config) -> Result:
    """Describe a workload and its ideal speed-up for a model, without any method."""
    counts = workload.counts
    return Result(
        name=workload.name,
        group=workload.group,
        description=workload.description,
        parameter=workload.parameter,
        sequences=counts.sequences,
        tokens=counts.tokens,
        pairs=counts.pairs,
        tree_tokens=counts.tree_tokens,
        tree_pairs=counts.tree_pairs,
        ideal=ideal_speedup(counts, *flops(config)),
    )
