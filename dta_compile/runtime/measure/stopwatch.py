"""Times of graph runs, for the cost model and for predicted against measured time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from dta_compile.plan import Work


class Stopwatch:
    """Collects `(kind, work, seconds)` of every run; on a GPU by events, which `times` reads."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.runs: list[tuple[str, Work, float]] = []
        self.pending: list[tuple[str, Work, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def measure(self, kind: str, work: Work) -> Iterator[None]:
        """Time what runs inside."""
        if not self.on_cuda:
            started = time.perf_counter()
            yield
            self.runs.append((kind, work, time.perf_counter() - started))
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self.pending.append((kind, work, first, last))

    def has_ended(self) -> bool:
        """Whether all runs so far have ended: a GPU may still be at them."""
        return not self.pending or self.pending[-1][3].query()

    def times(self) -> list[tuple[str, Work, float]]:
        """All runs so far; waits for those that have not ended, and forgets them."""
        if self.pending:
            self.pending[-1][3].synchronize()
        ended = [(kind, work, first.elapsed_time(last) / 1000) for kind, work, first, last in self.pending]
        runs, self.runs, self.pending = [*self.runs, *ended], [], []
        return runs
