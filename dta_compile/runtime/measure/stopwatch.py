"""Time graph runs: for the cost model, for measured against predicted times of plans, and for traces."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from dta_compile.plan import MeasuredRun, Op, Work


class _Pending(NamedTuple):
    """Run that a GPU may not have finished: launch times on the host, and events around it."""

    kind: str
    work: Work
    op: Op
    launched: float
    launch_seconds: float
    first: torch.cuda.Event
    last: torch.cuda.Event


class Stopwatch:
    """Timer of graph runs; on a GPU by events, which `times` reads.

    Attributes:
        on_generated_code: whether the timed graphs run generated code.
        began: start of the first run, in seconds since 1970; None: nothing has run.
        stream: name of device and stream.
    """

    def __init__(self, device: torch.device, on_generated_code: bool = False) -> None:
        self.on_cuda = device.type == "cuda"
        self.device, self.on_generated_code = device, on_generated_code
        self.runs: list[MeasuredRun] = []
        self.pending: list[_Pending] = []
        self.began: float | None = None
        self.stream = str(device)
        self._zero = 0.0  # start of the first run on the host's clock
        self._first: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def measure(self, kind: str, work: Work, op: Op) -> Iterator[None]:
        """Time the block as one run."""
        if self.began is None:
            self._begin()
        started = time.perf_counter()
        if not self.on_cuda:
            yield
            seconds = time.perf_counter() - started
            self.runs.append(MeasuredRun(kind, work, seconds, op, started - self._zero, started - self._zero, seconds))
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._first = self._first or first
        launch_seconds = time.perf_counter() - started
        self.pending.append(_Pending(kind, work, op, started - self._zero, launch_seconds, first, last))

    def _begin(self) -> None:
        self.began, self._zero = time.time(), time.perf_counter()
        if self.on_cuda:
            self.stream = f"{self.device} stream {torch.cuda.current_stream(self.device).stream_id}"

    def has_ended(self) -> bool:
        """Return whether all runs so far have ended on the device."""
        return not self.pending or self.pending[-1].last.query()

    def times(self) -> list[MeasuredRun]:
        """Return and forget all runs so far; waits for those that have not ended.

        On a GPU, starts are relative to the first run's start, whose delay behind the host is unknown.
        """
        if self.pending:
            self.pending[-1].last.synchronize()
        ended = [self._ended(run) for run in self.pending]
        runs, self.runs, self.pending = [*self.runs, *ended], [], []
        return runs

    def _ended(self, run: _Pending) -> MeasuredRun:
        assert self._first is not None
        start, seconds = self._first.elapsed_time(run.first) / 1000, run.first.elapsed_time(run.last) / 1000
        return MeasuredRun(run.kind, run.work, seconds, run.op, start, run.launched, run.launch_seconds)
