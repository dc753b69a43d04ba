"""Worker process of `benchmarks.gpu`, which owns the GPU: runs a list of items while time is left.

A failing item is recorded with its traceback, and the others continue. After an error that makes the device unusable
(such as an illegal address) the process exits with `BROKEN`, and `benchmarks.gpu` starts another one for the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import fnmatch
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.batches.workloads import Workload
from benchmarks.gpu.attention import KERNELS
from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.measure import measure, memory_follows_depth, replay_pays
from benchmarks.gpu.methods import ABLATIONS, METHODS, ON_LOW_SHARING, GpuMethod, release_memory
from benchmarks.gpu.models import Limits, Subject, batch_of, config_of, expected_seconds, operations
from benchmarks.gpu_report import GIB, LOW_SHARING, MEMORY_MODEL, VERDICTS, Check, GpuReport
from benchmarks.measuring.measure import empty_result
from benchmarks.measuring.memory import describe
from benchmarks.measuring.results import Outcome, machine_facts

BROKEN = 75  # exit status: the device must be reopened
ITEM_SECONDS = 300  # an item that runs longer is considered hung
CHECK_SECONDS, COMPILE_SECONDS, BUILD_SECONDS = 25.0, 60.0, 10.0  # estimates
SAFETY = 1.5  # factor on estimates of steps


@dataclasses.dataclass(frozen=True)
class Item:
    """Unit of work.

    Attributes:
        key: unique name, "part/...".
        seconds: estimates its duration.
        run: runs it and records its result, or raises.
        fail: records an error instead of a result.
    """

    key: str
    seconds: Callable[[], float]
    run: Callable[[], str]
    fail: Callable[[str], None]


class Worker:
    """Runner of items, which holds one model at a time.

    Attributes:
        deadline: by `time.monotonic`.
        batches: batches by model and name of the rollout file.
    """

    def __init__(self, arguments: argparse.Namespace, report: GpuReport, console: Console) -> None:
        self.arguments, self.report, self.console = arguments, report, console
        self.deadline = time.monotonic() + arguments.seconds
        self.device = torch.device("cpu" if arguments.smoke else "cuda")
        self.limits = Limits(arguments.max_tokens, arguments.tree_seconds, arguments.dense_seconds)
        self.subject: Subject | None = None
        self.batches: dict[tuple[str, str], Workload] = {}

    def run(self, file: Path) -> int:
        """Run all items that the report lacks; return the exit status."""
        for item in self._items():
            if item.key in self.report.skipped:
                del self.report.skipped[item.key]
            self.report.running = item.key
            self.report.save(file)
            healthy = self._run(item)
            self.report.running = ""
            self.report.save(file)
            if not healthy:
                return BROKEN
        return 0

    def _run(self, item: Item) -> bool:
        """Run an item if there is time; return whether the device still works."""
        started = time.monotonic()
        try:
            needed, left = item.seconds(), self.deadline - time.monotonic()
            if needed > left:
                self.report.skipped[item.key] = f"needs about {needed:.0f} s, {max(left, 0):.0f} s are left"
                return True
            with _watched():
                text, style = item.run(), None
            self.report.tracebacks.pop(item.key, None)
        except Exception as error:
            text, style = describe(error), "red"
            self.report.tracebacks[item.key] = traceback.format_exc()
            with contextlib.suppress(Exception):  # the traceback is recorded in any case
                item.fail(text)
        spent = time.monotonic() - started
        self.console.print(f"{item.key}: {text} [{spent:.0f} s]", style=style, markup=False, highlight=False)
        return self._device_works()

    def _device_works(self) -> bool:
        try:
            release_memory()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # all further uses of the device fail, too
            self.console.print(f"the device is broken: {describe(error)}", style="red", markup=False)
            return False
        return True

    def _items(self) -> Iterator[Item]:
        """Yield the requested items without results, most important first, model by model."""
        parts = self.arguments.part.split(",")
        items = [self._check("checks", name, check) for name, check in CHECKS.items()] if "checks" in parts else []
        if "attention" in parts:
            items += [self._check("attention", name, check) for name, check in KERNELS.items()]
        for model in self.arguments.models.split(","):
            items += self._of_model(model, parts)
        for item in items:
            if fnmatch.fnmatchcase(item.key, self.arguments.only) and not self._is_done(item.key):
                yield item

    def _of_model(self, model: str, parts: list[str]) -> list[Item]:
        scaling = model == (MEMORY_MODEL if self.device.type == "cuda" else model)
        workloads = self.arguments.workloads.split(",")
        items: list[Item] = []
        for index, workload in enumerate(workloads):
            if "speed" in parts:
                chosen = ON_LOW_SHARING if workload in LOW_SHARING else METHODS
                items += [self._speed(model, workload, METHODS[name]) for name in chosen]
            if index == 0 and scaling and "memory" in parts:
                wanted = ("dense", "auto", "auto-0") if "speed" not in parts else ()
                items += [self._speed(model, workload, METHODS[name]) for name in wanted]
                items.append(self._scaling(f"memory/{model}/depth", model, memory_follows_depth))
            if index == 0 and scaling and "graphs" in parts:
                items.append(self._scaling(f"graphs/{model}/chunks of 64", model, replay_pays))
        if "ablations" in parts:
            items += [self._speed(model, workloads[0], method) for method in ABLATIONS.values()]
        return items

    def _is_done(self, key: str) -> bool:
        """Return whether there is a result; failures count only if they are to be kept."""
        keep = self.arguments.keep_failures
        if key in self.report.checks:
            return keep or self.report.checks[key].passed is True
        part, _, rest = key.partition("/")
        result = self.report.result(rest.rpartition("/")[0]) if part == "speed" else None
        outcome = result.outcomes.get(rest.rpartition("/")[2]) if result else None
        return outcome is not None and (keep or not outcome.error)

    def _check(self, part: str, name: str, check: Callable[[torch.device], Check]) -> Item:
        def run() -> Check:
            torch.compiler.reset()
            return check(self.device)

        return self._checking(f"{part}/{name}", CHECK_SECONDS, run)

    def _scaling(self, key: str, model: str, check: Callable[[Subject], Check]) -> Item:
        return self._checking(key, 2 * COMPILE_SECONDS, lambda: check(self._subject(model)))

    def _checking(self, key: str, seconds: float, check: Callable[[], Check]) -> Item:
        def run() -> str:
            started = time.monotonic()
            outcome = check()
            outcome.seconds = time.monotonic() - started
            self.report.checks[key] = outcome
            return f"{VERDICTS[outcome.passed]}: {outcome.text}"

        def fail(error: str) -> None:
            self.report.checks[key] = Check(None, "", error=error)

        return Item(key, lambda: seconds if self.device.type == "cuda" else 0.0, run, fail)

    def _speed(self, model: str, workload: str, method: GpuMethod) -> Item:
        def run() -> str:
            outcomes, batch = self._outcomes(model, workload), self._batch(model, workload)
            outcome = measure(self._subject(model), batch, method, self.limits, self.deadline)
            outcomes[method.name] = outcome
            rate = batch.counts.tokens / (outcome.median or 1) / 1000
            return f"{rate:.1f} K tokens/s, peak {(outcome.peak_bytes or 0) / GIB:.1f} GiB {outcome.note}"

        def fail(error: str) -> None:
            self._outcomes(model, workload)[method.name] = Outcome(error=error)

        def seconds() -> float:
            return self._estimate(model, workload, method)

        return Item(f"speed/{model}/{workload}/{method.name}", seconds, run, fail)

    def _outcomes(self, model: str, workload: str) -> dict[str, Outcome]:
        name, batch = f"{model}/{workload}", self._batch(model, workload)
        result = self.report.result(name)
        if result is None:
            result = empty_result(dataclasses.replace(batch, name=name), config_of(model))
            self.report.results.append(result)
        if (result.tokens, result.tree_tokens) != (batch.counts.tokens, batch.counts.tree_tokens):
            raise ValueError(f"{name} was measured on another batch: resume with the same limits")
        return result.outcomes

    def _estimate(self, model: str, workload: str, method: GpuMethod) -> float:
        if self.device.type != "cuda":
            return 0.0
        counts = self._batch(model, workload).counts
        step = expected_seconds(operations(config_of(model), counts, tree=method.family != "dense"))
        if method.family == "dense":
            step = min(step, self.limits.dense_seconds)
        compiling = COMPILE_SECONDS * (method.family == "dta" and (self.subject is None or not self.subject.compiled))
        building = BUILD_SECONDS * (self.subject is None or self.subject.name != model)
        steps = 2.5 if method.family == "dense" else 4.0
        return building + compiling + steps * SAFETY * method.cost * step

    def _batch(self, model: str, workload: str) -> Workload:
        key = (model, workload)
        if key not in self.batches:
            self.batches[key] = batch_of(workload, self.arguments.rollouts, config_of(model), self.limits)
        return self.batches[key]

    def _subject(self, model: str) -> Subject:
        if self.subject is None or self.subject.name != model:
            self.subject = None
            torch.compiler.reset()  # compiled code keeps the previous model alive
            release_memory()
            self.subject = Subject(model, self.device)
        return self.subject


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Print the stack and end the process if the block hangs."""
    faulthandler.dump_traceback_later(ITEM_SECONDS, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def run(arguments: argparse.Namespace) -> int:
    """Run the requested items on top of the results of `--resume`; write `results.json` to the output folder."""
    console = Console(width=160)
    if arguments.smoke:
        torch.set_num_threads(1)  # for tiny tensors, synchronising threads costs more than the work
    elif not torch.cuda.is_available():
        console.print("no GPU: --smoke runs everything with a toy model on the CPU", style="red")
        return 2
    report = _report(arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    return Worker(arguments, report, console).run(arguments.output / "results.json")


def _report(arguments: argparse.Namespace) -> GpuReport:
    known = {**METHODS, **ABLATIONS}
    methods = {name: {"family": method.family, "description": method.description} for name, method in known.items()}
    asked = {name: getattr(arguments, name) for name in ("max_tokens", "tree_seconds", "dense_seconds")}
    new = GpuReport(machine_facts() | _device_facts(), asked, methods)
    if not arguments.resume:
        return new
    old = GpuReport.load(arguments.resume)
    old.methods.update(methods)
    compared = ("gpu", "torch", "transformers")
    if any(old.facts.get(fact) != new.facts.get(fact) for fact in compared):
        raise ValueError(f"{arguments.resume} was measured on another GPU or with other versions")
    if new.facts["dta_compile"] not in (old.facts["dta_compile"], *old.facts.get("resumed", ())):
        old.facts.setdefault("resumed", []).append(new.facts["dta_compile"])
    if old.running:
        _record_death(old)
    return old


def _record_death(report: GpuReport) -> None:
    """Record the item that was running when the previous process ended as failed."""
    part, _, rest = report.running.partition("/")
    result, text = report.result(rest.rpartition("/")[0]), "the process died of it, or it took too long"
    if part == "speed" and result is not None:
        result.outcomes[rest.rpartition("/")[2]] = Outcome(error=text)
    else:
        report.checks[report.running] = Check(None, "", error=text)
    report.tracebacks[report.running], report.running = text, ""


def _device_facts() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"gpu": platform.processor() or platform.machine()}
    facts = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    facts["gpu_memory"] = f"{torch.cuda.get_device_properties(0).total_memory / GIB:.0f} GiB"
    with contextlib.suppress(ImportError):
        import triton

        facts["triton"] = triton.__version__
    return facts
