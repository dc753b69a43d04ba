"""Measure the peak growth of resident memory during a step, in a fresh process. Linux only.

The baseline includes libraries, model, gradients of every parameter, inputs, and everything that two steps on a tiny
batch load, compile and keep. Freed memory is first returned to the system, so that a step cannot hide in it. Then the
kernel's high-water mark is reset, two steps run, and the mark is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.batches.model import build_model
from benchmarks.batches.workloads import Workload, tiny
from benchmarks.methods.table import METHODS

EXIT_SECONDS = 10  # most seconds for the exit of a process that has sent its figure


class MeasurementError(RuntimeError):
    """The process that ran the step failed, was killed, or took too long."""


def peak_memory_is_available() -> bool:
    """Return whether the kernel has a high-water mark that can be reset."""
    return sys.platform == "linux" and os.access("/proc/self/clear_refs", os.W_OK)


def peak_growth(method: str, workload: Workload, threads: int, limit: float) -> int:
    """Return the bytes that two steps of a method add to resident memory at their peak.

    Raises:
        MeasurementError: there is no figure, with the reason; `limit` is in seconds, for the whole process.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, method, workload, threads))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            raise MeasurementError(f"too slow: no two steps within {limit:.0f} s in a fresh process")
        outcome = receiver.recv()
        process.join(EXIT_SECONDS)
    except EOFError:
        process.join(EXIT_SECONDS)
        raise MeasurementError(f"out of memory, or crashed: exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(outcome, str):
        raise MeasurementError(outcome)
    return outcome


def _report(sender: Connection, method: str, workload: Workload, threads: int) -> None:
    with contextlib.suppress(OSError):  # make the OOM killer choose this process
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        sender.send(_growth(method, workload, threads))
    except Exception as error:
        sender.send(describe(error))


def describe(error: Exception) -> str:
    """Return type and first words of an error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def _growth(method: str, workload: Workload, threads: int) -> int:
    torch.set_num_threads(threads)
    model = build_model(workload.vocabulary)
    prepare = METHODS[method].build(model)
    warm_up, step = prepare(tiny(workload.vocabulary)), prepare(workload)
    for _ in range(2):
        warm_up.run()
    return growth(model, step.run)


def growth(model: torch.nn.Module, step: Callable[[], object], steps: int = 2) -> int:
    """Return the bytes that steps add to resident memory at their peak; gradients are counted as there before."""
    model.zero_grad(set_to_none=False)
    _give_back_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is now VmRSS
    before = _status_bytes("VmRSS")
    for _ in range(steps):
        model.zero_grad(set_to_none=False)
        step()
    return _status_bytes("VmHWM") - before


def _give_back_freed_memory() -> None:
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
