"""The engine: a compiled call at run time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dta_compile.options import Options
from dta_compile.passes import Program
from dta_compile.plan import Plan
from dta_compile.runtime import streaming
from dta_compile.runtime.calibration import Calibration
from dta_compile.runtime.call import Call
from dta_compile.runtime.dense_inputs import Sizes
from dta_compile.runtime.reference import verified
from dta_compile.runtime.replay import ReplayCache
from dta_compile.runtime.stopwatch import Stopwatch
from dta_compile.runtime.transparent import TreeFunction, no_autocast


class Engine:
    """Runs the passes' result on real inputs, any number of times; holds of a call only its plan and timings, and what
    replays are for: see `replay`."""

    def __init__(self, program: Program, options: Options) -> None:
        self.program, self.options = program, options
        self.sizes = Sizes(program)
        self.last_plan: Plan | None = None
        self.verified = False
        self.timed: list[tuple[Plan, Stopwatch, torch.device]] = []  # of calls whose times have not been read
        self.replays = ReplayCache() if options.cuda_graphs else None
        self._calibration: Calibration | None = None
        self.rest = None if program.rest is None else Engine(program.rest, options)  # of further batches

    def calibration(self, device: torch.device) -> Calibration:
        """What runs of this model have taken so far."""
        if self._calibration is None:
            self._calibration = Calibration.load(self.program, device, self.options)
        return self._calibration

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """The outputs of the captured call for its inputs."""
        streaming.handle(self, args)
        outputs = self._run(args)
        verify = self.options.verify
        if verify == "always" or (verify == "first" and not self.verified):
            self.verified = True
            return verified(self.program, args, outputs)
        return outputs

    def _run(self, args: Sequence[Any]) -> tuple[Any, ...]:
        with no_autocast():
            call = self.begin(args)
            self.last_plan = call.plan("transparent" if self.program.training and torch.is_grad_enabled() else "score")
            parameters = [args[spec.index] for spec in self.program.region_parameters]
            frontier = TreeFunction.apply(call, *parameters)
            return self.epilogue(args, call.dense, frontier)

    def collect_times(self, wait: bool = False) -> None:
        """Note in their plans, and for the cost model, what calls took that have ended; `wait` for the others."""
        waiting = self.timed
        self.timed = []
        if self.rest is not None:
            self.rest.collect_times(wait)
        for plan, stopwatch, device in waiting:
            if not wait and not stopwatch.has_ended():
                self.timed.append((plan, stopwatch, device))
                continue
            runs = stopwatch.times()
            plan.estimates.measured_seconds = sum(seconds for _, _, seconds in runs)
            self.calibration(device).record(runs)

    def begin(self, args: Sequence[Any]) -> Call:
        """A call with its prologue run."""
        self.collect_times()
        with torch.no_grad():
            values = self.program.prologue(*args)
        return Call(self, args, dict(zip(self.program.prologue_nodes, values, strict=True)))

    def epilogue(
        self, args: Sequence[Any], dense: dict[Any, torch.Tensor], frontier: Sequence[torch.Tensor]
    ) -> tuple[Any, ...]:
        """The outputs of the call from its dense frontier values, under ordinary autograd."""
        if self.rest is not None:
            return self.rest._run([*args, *frontier])
        received = [dense[node] for node in self.program.epilogue_dense_inputs]
        return self.program.epilogue(*args, *frontier, *received)
