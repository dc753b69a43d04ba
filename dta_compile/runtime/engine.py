"""The engine: a compiled call at run time."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.executable.as_captured import as_captured
from dta_compile.executable.executable import Executable
from dta_compile.integrations.layer_groups import LayerGroups, gather_all, is_gathered_to_check, layer_groups
from dta_compile.options import Options
from dta_compile.plan import MeasuredRun, Plan
from dta_compile.runtime import interception
from dta_compile.runtime.calls.call import Call, CallContext
from dta_compile.runtime.calls.planned_call import PlannedCall, Run, plan_call
from dta_compile.runtime.calls.ranks import Ranks
from dta_compile.runtime.calls.sizes import Sizes
from dta_compile.runtime.measure import steps
from dta_compile.runtime.measure.budget import free_bytes
from dta_compile.runtime.measure.calibration import Calibration, of_whole_chunks, times_as_fast
from dta_compile.runtime.measure.profiler import trace_artifact
from dta_compile.runtime.measure.stopwatch import Stopwatch
from dta_compile.runtime.replay.lease import ReplayCache
from dta_compile.runtime.returned_cache import ReturnedCache
from dta_compile.runtime.transparent import dense_frontier, no_autocast
from dta_compile.runtime.verification.self_check import self_check, verified
from dta_compile.runtime.written import write

logger = logging.getLogger("dta_compile")


TRACED_PLANS = 8  # of each program; a run has thousands


class Engine:
    """Runs the passes' result on real inputs, any number of times; holds of a call only its plan and timings, and what
    replays are for: see `replay`."""

    def __init__(
        self,
        executable: Executable,
        captured: fx.GraphModule,
        options: Options,
        compile_seconds: float = 0.0,
        ranks: Ranks | None = None,
    ) -> None:
        """`captured`: the graph that the executable was made of, to compare calls with and to run densely."""
        self.executable, self.captured = executable, captured
        self.options, self.compile_seconds = options, compile_seconds
        self.ranks = ranks or Ranks()
        self.sizes = Sizes(executable.symbols)
        self.last_plan: Plan | None = None
        self.checked = False
        self.is_reported = True  # in logs and traces
        self.traced = 0  # plans that are in structured traces
        self.verdict: str | None = None  # of the self-check
        self.timed: list[tuple[Plan, Stopwatch, torch.device]] = []  # of calls whose times have not been read
        self.replays = ReplayCache() if options.cuda_graphs and not self.ranks.several else None
        self._calibrations: dict[bool, Calibration] = {}  # with generated code, and without
        self._checked_swaps = 0  # of ATen for generated code, that the self-check has seen
        # Of further batches; what is checked is the whole call.
        self.rest: Engine | None = None
        if executable.rest is not None:
            self.rest = Engine(executable.rest, captured, dataclasses.replace(options, verify="off"), ranks=ranks)

    def calibration(self, device: torch.device, generated: bool = False) -> Calibration:
        """What runs of this model have taken so far, with generated code or without."""
        if generated not in self._calibrations:
            chosen = "" if self.options.attention == "auto" else self.options.attention
            prior = self.calibration(device).cost_model() if generated else None
            loaded = Calibration.load(self.executable, device, self.options, chosen, generated, prior)
            self._calibrations[generated] = loaded
        return self._calibrations[generated]

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """The outputs of the captured call for its inputs."""
        if interception.is_active():  # which may read any parameter
            gather_all()
        replaced = interception.handle(self, args)
        if replaced is not None:
            return replaced
        try:
            return self._written(args, self._checked_run(self.executable.copies_of_written(args)))
        except RefusalError as refusal:  # of a mask with the numbers and tables of this call
            if self.options.fallback != "dense":
                raise
            logger.warning("dta: running densely, as fallback='dense' says: %s", refusal)
            gather_all()
            return tuple(as_captured(self.captured)(*args))

    def _written(self, args: Sequence[Any], run: Run) -> tuple[Any, ...]:
        """Write what a call writes to its inputs, once; its other outputs."""
        outputs = len(run.outputs) - len(self.executable.written)
        if self.executable.written:
            write(args, run, run.outputs[outputs:])
        return run.outputs[:outputs]

    def _checked_run(self, args: Sequence[Any]) -> Run:
        verify = self.options.verify
        layers = self._layer_groups(args)
        if verify == "always" or (verify == "first" and not self.checked):
            self.checked = True
            run, verdict = verified(self.captured, self.run, args)
            assert self.last_plan is not None
            self.last_plan.estimates.self_check = verdict
            return run
        return self.run(args, cache_now=False, layers=layers)

    def _layer_groups(self, args: Sequence[Any]) -> LayerGroups | None:
        """What gathers sharded parameters layer by layer; where a call cannot do with that, all are gathered now.

        All ranks have to come to the same, so nothing here may depend on the batch, or on what a rank has measured.
        """
        executable, options, found = self.executable, self.options, None
        can = self.rest is None and not self.ranks.several and len(executable.parts) > 1
        may = options.sweep != "chunks" and options.verify in ("auto", "off") and options.fallback == "raise"
        if can and may and not (options.verify == "auto" and is_gathered_to_check()):
            specs = executable.region_parameters
            of_parts = [[args[specs[i].index] for i in part.inputs if i < len(specs)] for part in executable.parts]
            others = [args[i] for i in executable.epilogue_reads if isinstance(args[i], torch.Tensor)]
            found = layer_groups(of_parts, others)
        if found is None:
            gather_all()
        return found

    def run(self, args: Sequence[Any], cache_now: bool = True, layers: LayerGroups | None = None) -> Run:
        """A call under ordinary autograd; a KV cache among its outputs is computed now, or when it is read."""
        mode = "transparent" if self.executable.training and torch.is_grad_enabled() else "score"
        call = self.planned(args, mode, cache_now, layers)
        with no_autocast():
            found = dense_frontier(call)
        frontier = [one for one in found if one is not None]
        if len(frontier) < len(found):
            cache = ReturnedCache(call)
            for node in {one.grad_fn for one in frontier if one.grad_fn is not None}:
                node.register_prehook(lambda _: cache.expire())
            frontier = [cache.tensor(i) if value is None else value for i, value in enumerate(found)]
        return Run(call, frontier, self.outputs_of(call, frontier), functools.partial(self.outputs_of, call))

    def planned(
        self, args: Sequence[Any], mode: str, with_cache: bool = True, layers: LayerGroups | None = None
    ) -> PlannedCall:
        """A call with its prologue run and its plan; before the first one goes on, the program is checked.

        Args:
            layers: what gathers its parameters layer by layer; None: all are there.
        """
        wanted = [with_cache or not value.is_cache for value in self.executable.frontier]
        with no_autocast():
            call = plan_call(self.begin(args, layers), mode, wanted)
            may_leave = layers is not None and self.options.sweep == "auto" and mode == "transparent"
            if layers is not None and may_leave and layers.any_rank(not _pays_layer_by_layer(call)):
                gather_all()
                layers, call = None, plan_call(self.begin(args, sweep="chunks"), mode, wanted)
            self.last_plan = call.plan
        self._trace(call.plan)
        run_small = functools.partial(self.run_small, sweep=call.plan.schedule.sweep)
        if layers is not None:
            if self.options.verify == "auto" and not self.checked:
                self.verdict = "skipped: layers are gathered from other ranks one at a time"
        elif call.rows.tree.num_rows and self._is_check_due(mode):
            self.checked = True
            self.verdict = self_check(call, self.captured, run_small, self.compile_seconds)
        elif call.rows.tree.num_rows and self._is_swap_unchecked(call, mode):
            again = self_check(call, self.captured, run_small, 0.0, "at the first call with generated code")
            skipped = again.startswith("skipped")
            self.verdict = f"{self.verdict}; with generated code {again}" if skipped else again
        call.plan.estimates.self_check = self.verdict
        return call

    def _trace(self, plan: Plan) -> None:
        """Leave the plans of the first calls in structured traces."""
        if self.is_reported and self.traced < TRACED_PLANS:
            self.traced += 1
            trace_artifact(f"dta_plan_{self.traced}", lambda: f"{plan}\n\n{plan.schedule}\n")

    def _is_check_due(self, mode: str) -> bool:
        verify = self.options.verify
        if mode == "streaming":  # has no outputs that could be compared as a whole
            return verify == "always" or (verify != "off" and not self.checked)
        return verify == "auto" and not self.checked

    def _is_swap_unchecked(self, call: PlannedCall, mode: str) -> bool:
        """Whether a call is the first one that runs code which was generated since the self-check."""
        generated = self.executable.joint.generated
        if generated is None or self.options.verify != "auto" or mode == "streaming":
            return False
        _ = call.generated_code  # those that are ready are taken now
        seen, self._checked_swaps = self._checked_swaps, generated.swaps
        return self._checked_swaps > seen

    def run_small(self, columns: int, args: Sequence[Any], sweep: str) -> Run:
        """Run a small call so that it shares prefixes, needs several chunks and leaves nothing behind: no times, no
        graphs."""
        options = dataclasses.replace(
            self.options,
            verify="off",
            strategy="packed" if self.options.strategy == "auto" else self.options.strategy,
            sweep=sweep,
            chunk_size=min(self.options.chunk_tokens, max(1, columns // 2)),
            memory_budget=None,
            cuda_graphs=False,
            cache_dir="off",
        )
        engine = Engine(self.executable, self.captured, options)
        engine.is_reported = False
        return engine.run(args)

    def collect_times(self, wait: bool = False) -> None:
        """Note in their plans, and for the cost model, what calls took that have ended; `wait` for the others."""
        pending = self.timed
        self.timed = []
        if self.rest is not None:
            self.rest.collect_times(wait)
        for plan, stopwatch, device in pending:
            if not wait and not stopwatch.has_ended():
                self.timed.append((plan, stopwatch, device))
                continue
            runs = stopwatch.times()
            plan.estimates.runs, plan.estimates.began = tuple(runs), stopwatch.began
            plan.estimates.stream = stopwatch.stream
            plan.estimates.measured_seconds = sum(run.seconds for run in runs)
            self._calibrate(plan, runs, device, stopwatch.on_generated_code)
            if self.is_reported:
                steps.log(plan)

    def _calibrate(self, plan: Plan, runs: Sequence[MeasuredRun], device: torch.device, generated: bool) -> None:
        """Learn from the runs of a plan, and say in it whether generated code has paid."""
        learned = self.calibration(device, generated)
        whole = runs if plan.schedule.sweep == "chunks" else of_whole_chunks(runs)
        learned.record((run.kind, run.work, run.seconds) for run in whole)
        if generated and (times := times_as_fast(self.calibration(device), learned)) is not None:
            plan.estimates.codegen = f"{plan.estimates.codegen}; chunks run {times:.2f}x as fast as on ATen"

    def begin(self, args: Sequence[Any], layers: LayerGroups | None = None, sweep: str | None = None) -> Call:
        """A call with its prologue run; `sweep`: in place of that of the options. Layers are gathered by stages."""
        self.collect_times()
        sweep = "stages" if layers is not None else sweep or self.options.sweep
        with torch.no_grad():
            dense = self.executable.prologue.function(*args)
        context = CallContext(
            self.executable,
            dataclasses.replace(self.options, sweep=sweep),
            self.sizes,
            self.replays,
            self.calibration,
            self._note_run,
            self._note_plan,
            self.ranks,
            layers,
        )
        return Call.begin(context, args, dense)

    def _note_run(self, plan: Plan, stopwatch: Stopwatch, device: torch.device) -> None:
        self.timed.append((plan, stopwatch, device))
        self.collect_times()

    def _note_plan(self, plan: Plan) -> None:
        self.last_plan = plan

    def outputs_of(self, call: PlannedCall, frontier: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The outputs of a call for some dense frontier values."""
        with no_autocast():
            return self.epilogue(call.args, call.dense, frontier)

    def epilogue(
        self, args: Sequence[Any], dense: Sequence[torch.Tensor], frontier: Sequence[torch.Tensor]
    ) -> tuple[Any, ...]:
        """The outputs of the call from its dense frontier values, under ordinary autograd."""
        if self.rest is not None:
            return self.rest.run([*args, *frontier]).outputs
        assert self.executable.epilogue is not None
        received = [dense[slot] for slot in self.executable.epilogue_slots]
        outputs: tuple[Any, ...] = self.executable.epilogue.function(*args, *frontier, *received)
        return outputs


def _pays_layer_by_layer(call: PlannedCall) -> bool:
    """Whether a plan fits into memory or, if not, hands less from layer to layer than whole parameters would take."""
    limits, rows = call.plan.limits, call.plan.prefix_tree.num_rows
    handed = rows * sum(part.sent for part in limits.parts)
    fits = (call.plan.estimates.peak_bytes or 0) <= free_bytes(call.device)
    return fits or handed <= limits.sums + sum(one.nbytes for one in call.parameters(call.executable.whole))
