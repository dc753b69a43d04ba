"""`torch.compile(..., backend="dta")` of the log-probs of a whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

import dta_compile
from benchmarks.batches.model import LogProbs, token_logprobs
from benchmarks.batches.workloads import Workload
from benchmarks.methods.steps import Build, Prepare, Step, rectangle_of
from dta_compile import records


def compiled(name: str, backend: str = "dta", **options: Any) -> Build:
    """Compile the log-probs of the whole batch with `backend`; `name` distinguishes several compiled functions."""

    def build(model: PreTrainedModel) -> Prepare:
        function, note = compile_logprobs(model, name, backend, options)

        def prepare(workload: Workload) -> Step:
            ids, labels, weights, mask = (tensor.to(model.device) for tensor in rectangle_of(workload))

            def run() -> None:
                (weights * function(ids, labels, mask)).sum().backward()
                finish_generating(function)

            return Step(run, note)

        return prepare

    return build


def streaming(model: PreTrainedModel) -> Prepare:
    """Run the paper's own loop: every sequence's loss goes backward as soon as its last token is computed."""
    function, note = compile_logprobs(model, "streaming", "dta", {"strategy": "dfs", "memory_budget": 0})

    def prepare(workload: Workload) -> Step:
        ids, labels, weights, mask = rectangle_of(workload)

        def loss(row: int, logprobs: torch.Tensor) -> torch.Tensor:
            return (weights[row] * logprobs).sum()

        def run() -> None:
            dta_compile.streaming_step(function, loss, ids, labels, mask)
            finish_generating(function)

        return Step(run, note)

    return prepare


def compile_logprobs(
    model: PreTrainedModel, name: str, backend: str, options: dict[str, Any]
) -> tuple[LogProbs, Callable[[], str]]:
    """Compile the log-probs of a model; return the function, and a note on its latest call."""
    logprobs: Any = token_logprobs(model)
    # Dynamo caches graphs, and limits their number, per code object, so every method needs its own.
    logprobs.__code__ = logprobs.__code__.replace(co_name="logprobs_" + name.replace("-", "_"))
    if backend != "dta":
        return torch.compile(logprobs, backend=backend), str
    if model.device.type == "cuda":  # where "auto" generates the same code, but in the background of timed steps
        options = {"codegen": "inductor", **options}
    function = torch.compile(logprobs, backend="dta", options=options)
    return function, lambda: _plan_note(function)


def finish_generating(function: LogProbs) -> None:
    """Wait for background code generation, so that only the first step pays for it and no later one is disturbed.

    Does nothing for functions of other backends.
    """
    for engine in records.of(function).engines:
        if engine.executable.joint.generated is not None:
            engine.executable.joint.generated.prepare((), wait=True)


def replan(function: LogProbs, **options: Any) -> None:
    """Change options that affect only plans, not compilation, of a function that has been called before."""
    engines = records.of(function).engines
    if not engines:
        raise RuntimeError("nothing is compiled yet that could be planned anew")
    for engine in engines:
        engine.options = dataclasses.replace(engine.options, **options)


def forget_replays(function: LogProbs) -> None:
    """Free the memory of CUDA graphs; they are recorded again when needed."""
    for engine in records.of(function).engines:
        if engine.replays is not None:
            engine.replays.arenas.clear()


def _plan_note(function: LogProbs) -> str:
    plan = dta_compile.last_plan(function)
    again = plan.stats.tokens_forwarded_twice / max(plan.stats.tree_tokens, 1)
    note = plan.schedule.strategy + (f", {again:.0%} forwarded twice" if again >= 0.005 else "")
    replays = plan.estimates.replays
    return note + (f", {replays.replayed} of {plan.stats.launches} runs replayed" if replays else "")
