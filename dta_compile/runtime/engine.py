"""Run an `Executable` on the inputs of real calls.

Dynamo's compiled code calls an `Engine` in place of the captured graph. The engine runs the prologue, plans the call
(`calls/`), checks the program at its first call (`verification/`), and runs the schedule and the epilogue.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from dta_compile.distributed.group import Group
from dta_compile.errors import RefusalError, RuntimeContractError, VerificationError
from dta_compile.executable.as_captured import as_captured, has_checkpoints
from dta_compile.executable.executable import Executable
from dta_compile.integrations.fully_shard_by_layer import (
    LayerGroups,
    all_run_layer_by_layer,
    gather_all,
    gather_to_check_again,
    gather_to_encode,
    is_gathered_to_check,
    layer_groups,
)
from dta_compile.options import Options
from dta_compile.plan import MeasuredRun, Plan
from dta_compile.runtime import interception
from dta_compile.runtime.calls.call import Call, CallContext, Sizes
from dta_compile.runtime.calls.planned_call import PlannedCall, Run, plan_call
from dta_compile.runtime.calls.ranks import Ranks
from dta_compile.runtime.cuda_graphs.arenas import ReplayCache
from dta_compile.runtime.groups import frontier_of_groups
from dta_compile.runtime.measure import steps
from dta_compile.runtime.measure.budget import free_bytes
from dta_compile.runtime.measure.calibration import Calibration, of_whole_chunks, times_as_fast
from dta_compile.runtime.measure.profiler import trace_artifact
from dta_compile.runtime.measure.stopwatch import Stopwatch
from dta_compile.runtime.one_tree.call import GroupRanks, PieceCall, over_ranks
from dta_compile.runtime.owned_frontier import owned_frontier
from dta_compile.runtime.returned_cache import ReturnedCache, can_wait
from dta_compile.runtime.transparent import dense_frontier, no_autocast
from dta_compile.runtime.upstream_values import noticing_gradients
from dta_compile.runtime.verification.self_check import (
    check_padding,
    may_check_padding,
    may_depend_on_padding,
    self_check,
    verified,
)
from dta_compile.runtime.written_inputs import write
from dta_compile.torch_compat.tensors import FakeTensor

logger = logging.getLogger("dta_compile")


Result = TypeVar("Result")
TRACED_PLANS = 8  # per program; a training run has thousands of plans


class Engine:
    """Callable that runs an executable on real inputs, any number of times.

    Between calls it holds the last plan, timings that are still to be read, and the arenas of `replay/`.
    """

    def __init__(
        self,
        executable: Executable,
        captured: fx.GraphModule,
        options: Options,
        compile_seconds: float = 0.0,
        ranks: Ranks | None = None,
    ) -> None:
        """`captured`: Dynamo's graph that the executable was compiled from, for the self-check and dense runs."""
        self.executable, self.captured = executable, captured
        self.options, self.compile_seconds = options, compile_seconds
        self.ranks = ranks or Ranks()
        self.group = Group(options.mesh) if options.is_over_ranks else None
        self.sizes = Sizes(executable.symbols)
        self.has_checkpoints = has_checkpoints(captured)
        self.last_plan: Plan | None = None
        self.checked = False
        self.checks_padding, self.padding_is_checked = options.verify != "off", False
        self.is_reported = True  # whether plans go to logs and traces
        self.traced = 0  # number of plans in structured traces
        self.verdict: str | None = None  # of the self-check
        self.timed: list[tuple[Plan, Stopwatch, torch.device]] = []  # calls whose times have not been read
        self.replays = ReplayCache() if options.cuda_graphs and not self.ranks.several else None
        self._calibrations: dict[bool, Calibration] = {}  # by whether generated code runs
        self._checked_swaps = 0  # swaps of ATen for generated code that the self-check has covered
        # Runs the model on further batches, in place of the epilogue. The self-check here covers the whole call.
        self.rest: Engine | None = None
        if executable.rest is not None:
            self.rest = Engine(executable.rest, captured, dataclasses.replace(options, verify="off"), ranks=ranks)
            self.rest.checks_padding = self.checks_padding

    def calibration(self, device: torch.device, generated: bool = False) -> Calibration:
        """Return the calibration of this model on a device, for runs with generated code or without it."""
        if generated not in self._calibrations:
            provider = "" if self.options.attention == "auto" else self.options.attention
            prior = self.calibration(device).cost_model() if generated else None
            calibration = Calibration.load(self.executable, device, self.options, provider, generated, prior)
            self._calibrations[generated] = calibration
        return self._calibrations[generated]

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Return the outputs of the captured graph for its inputs."""
        if any(map(is_without_values, args)):
            logger.info("dta: a call on tensors without values runs as captured: these have no prefixes")
            return tuple(as_captured(self.captured)(*args))
        if interception.is_active():  # the handler may read any parameter
            gather_all()
        intercepted = interception.handle(self, args)
        if intercepted is not None:
            return intercepted
        try:
            return self._written(args, self._checked_run(self.executable.copies_of_written(args)))
        except RefusalError as refusal:  # a mask is not supported with the numbers and tables of this call
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
            run, verdict = verified(self.captured, self.run, args)
            self.checked = True  # a call that differs leaves the check to the next one
            assert self.last_plan is not None
            self.last_plan.estimates.self_check = verdict
            return run
        return self.run(args, cache_now=False, layers=layers)

    def _layer_groups(self, args: Sequence[Any]) -> LayerGroups | None:
        """Return the groups that gather sharded parameters layer by layer, or gather all parameters and return None.

        All ranks must decide alike: nothing here may depend on measurements of one rank, and options that differ are
        settled by asking all.
        """
        gather_to_encode(False)
        executable, groups = self.executable, None
        may = may_run_layer_by_layer(self.options)
        if may and self.rest is None and not self.ranks.several and len(executable.parts) > 1:
            specs = executable.region_parameters
            by_part = [[args[specs[i].index] for i in part.inputs if i < len(specs)] for part in executable.parts]
            in_epilogue = [args[i] for i in executable.epilogue_reads if isinstance(args[i], torch.Tensor)]
            groups = layer_groups(by_part, in_epilogue)
        if not all_run_layer_by_layer(groups is not None):
            groups = None
        if groups is None:
            gather_all()
        return groups

    def run(self, args: Sequence[Any], cache_now: bool = True, layers: LayerGroups | None = None) -> Run:
        """Run a call under ordinary autograd.

        Args:
            cache_now: compute a KV cache among the outputs now; else when it is read.
        """
        mode = "transparent" if self.executable.training and torch.is_grad_enabled() else "score"
        call = self.planned(args, mode, cache_now or not can_wait(self.executable, args), layers)
        try:
            with no_autocast():
                values = _dense_values(call)
        finally:
            call.predict_peak()
        frontier = [value for value in values if value is not None]
        if len(frontier) < len(values):
            cache = ReturnedCache(call.alone)
            for node in {value.grad_fn for value in frontier if value.grad_fn is not None}:
                node.register_prehook(lambda _: cache.expire())
            frontier = [cache.tensor(i) if value is None else value for i, value in enumerate(values)]
        outputs = noticing_gradients(self.outputs_of(call, frontier), self.executable.outputs)
        run = Run(call, frontier, outputs, functools.partial(self.outputs_of, call))
        if self.checks_padding:  # the rows of the self-check may have none
            self.padding_is_checked |= check_padding(run, self.padding_is_checked)
        return run

    def check_padding_of(self, call: PlannedCall) -> None:
        """Check a call that is streamed by scoring it: padding must change no output, nor a loss by one."""
        is_due = any(may_depend_on_padding(output, self.padding_is_checked) for output in self.executable.outputs)
        if self.checks_padding and is_due and may_check_padding(call):
            with torch.no_grad():
                self.run(call.args)
            self.last_plan = call.plan

    def planned(
        self, args: Sequence[Any], mode: str, with_cache: bool = True, layers: LayerGroups | None = None
    ) -> PlannedCall:
        """Run the prologue of a call and plan it; run the self-check where it is due.

        Args:
            layers: gather the call's parameters layer by layer; None: all parameters are gathered.
        """
        wanted = [with_cache or not value.is_cache for value in self.executable.frontier]
        with no_autocast():
            call = self._together(lambda: plan_call(self.begin(args, layers), mode, wanted))
            if layers is not None and mode == "transparent":
                own = len(call.groups), call.plan.schedule.stride
                groups, stride, is_short = layers.most(*own, not _pays_layer_by_layer(call))
                if is_short and self.options.sweep == "auto":
                    gather_all()
                    layers, call = None, plan_call(self.begin(args, sweep="chunks"), mode, wanted)
                elif groups > own[0] or (not groups and stride > own[1]):
                    # Another rank needs more, and all have to gather alike.
                    call = plan_call(call, mode, wanted, max(groups, 1), stride)
            self.last_plan = call.plan
        self._together(lambda: self._check_program(call, mode, layers))
        if self.group is not None:
            _require_no_streaming(mode)
            call = over_ranks(call, mode, self.group, self.options.strategy == "one_tree")
            self.last_plan = call.plan
        self._trace(call)
        call.plan.estimates.self_check = self.verdict
        return call

    def _together(self, make: Callable[[], Result]) -> Result:
        """Return the result of `make()`; if it raises one of our errors on any rank of the mesh, raise on all."""
        if self.group is None:
            return make()
        made: list[Result] = []
        GroupRanks(self.group, self.ranks).check(lambda: made.append(make()))
        return made[0]

    def _check_program(self, call: PlannedCall, mode: str, layers: LayerGroups | None) -> None:
        """Run the self-check where it is due."""
        if layers is not None:
            if self.options.verify == "auto" and not self.checked:
                self.verdict = "skipped: layers are gathered from other ranks one at a time"
        elif call.rows.tree.num_rows and self._is_check_due(mode):
            self.verdict = self._self_check(call, self.compile_seconds)
            self.checked = True
        elif call.rows.tree.num_rows and (swaps := self._unchecked_swaps(call, mode)):
            verdict = self._self_check(call, 0.0, "at the first call with generated code")
            self._checked_swaps = swaps
            skipped = verdict.startswith("skipped")
            self.verdict = f"{self.verdict}; with generated code {verdict}" if skipped else verdict

    def _self_check(self, call: PlannedCall, compile_seconds: float, *when: str) -> str:
        """Run the self-check; after a failure the next call can run it again."""
        try:
            run_small = functools.partial(self.run_small, sweep=call.plan.schedule.sweep)
            return self_check(call, self.captured, run_small, compile_seconds, *when)
        except VerificationError:
            gather_to_check_again()
            raise

    def _trace(self, call: PlannedCall) -> None:
        """Write the plans of the first calls to structured traces."""
        if self.is_reported and self.traced < TRACED_PLANS:
            self.traced += 1

            def text() -> str:
                call.predict_peak()
                return f"{call.plan}\n\n{call.plan.schedule}\n"

            trace_artifact(f"dta_plan_{self.traced}", text)

    def _is_check_due(self, mode: str) -> bool:
        verify = self.options.verify
        if mode == "streaming":  # it has no outputs of the whole batch to compare
            return verify == "always" or (verify != "off" and not self.checked)
        return verify == "auto" and not self.checked

    def _unchecked_swaps(self, call: PlannedCall, mode: str) -> int:
        """Return the number of swaps so far if the self-check has not covered all code that a call runs; else 0."""
        generated = self.executable.joint.generated
        if generated is None or self.options.verify != "auto" or mode == "streaming":
            return 0
        _ = call.generated_code  # takes the code that is ready now
        return generated.swaps if generated.swaps > self._checked_swaps else 0

    def run_small(self, columns: int, args: Sequence[Any], sweep: str) -> Run:
        """Run the small call of a self-check: with shared prefixes, in several chunks, without recording times or CUDA
        graphs."""
        options = dataclasses.replace(
            self.options,
            verify="off",
            strategy="packed" if self.options.strategy in ("auto", "one_tree") else self.options.strategy,
            mesh=None,
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
        """Record the times of ended calls in their plans and the calibration; `wait` for calls that still run."""
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
        """Record the runs of a plan for the cost model, and note in the plan the speedup by generated code."""
        learned = self.calibration(device, generated)
        whole = runs if plan.schedule.sweep == "chunks" else of_whole_chunks(runs)
        learned.record((run.kind, run.work, run.seconds) for run in whole)
        learned.cost_model()  # fits now, as a GPU is busy with this call: the next one begins with it idle
        if generated and (times := times_as_fast(self.calibration(device), learned)) is not None:
            plan.estimates.codegen = f"{plan.estimates.codegen}; chunks run {times:.2f}x as fast as on ATen"

    def begin(self, args: Sequence[Any], layers: LayerGroups | None = None, sweep: str | None = None) -> Call:
        """Run the prologue of a call. `sweep` overrides the option; gathering by `layers` needs the sweep "stages"."""
        sweep = "stages" if layers is not None else sweep or self.options.sweep
        with torch.no_grad():
            dense = self.executable.prologue.function(*args)
        context = CallContext(
            self.executable,
            _of_own_tree(self.options, sweep),
            self.sizes,
            self.replays,
            self.calibration,
            self._note_run,
            self._note_plan,
            self.ranks,
            self.has_checkpoints,
            layers,
        )
        return Call.begin(context, args, dense)

    def _note_run(self, plan: Plan, stopwatch: Stopwatch, device: torch.device) -> None:
        self.timed.append((plan, stopwatch, device))
        self.collect_times()

    def note(self, sentence: str, kept_bytes: float, groups: int) -> None:
        """Add a note on an encoder to the plan of the last call, and what it keeps to the plan's predicted peak.

        Several groups are encoded again in the backward, when the tree is gone.
        """
        if self.last_plan is not None:
            estimates = self.last_plan.estimates
            estimates.notes.append(sentence)
            if estimates.peak_bytes is not None:
                peak = estimates.peak_bytes
                estimates.peak_bytes = peak + kept_bytes if groups == 1 else max(peak, kept_bytes)

    def _note_plan(self, plan: Plan) -> None:
        self.last_plan = plan

    def outputs_of(self, call: PlannedCall, frontier: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Run the epilogue of a call on dense frontier values, without autocast."""
        with no_autocast():
            return self.epilogue(call.args, call.dense, frontier)

    def epilogue(
        self, args: Sequence[Any], dense: Sequence[torch.Tensor], frontier: Sequence[torch.Tensor]
    ) -> tuple[Any, ...]:
        """Compute the outputs of a call from its dense frontier values, under ordinary autograd."""
        if self.rest is not None:
            return self.rest.run([*args, *frontier]).outputs
        assert self.executable.epilogue is not None
        received = [dense[slot] for slot in self.executable.epilogue_slots]
        outputs: tuple[Any, ...] = self.executable.epilogue.function(*args, *frontier, *received)
        return outputs


def is_without_values(arg: Any) -> bool:
    """Return whether an argument is a tensor that has a shape alone: on the meta device, or of `FakeTensorMode`."""
    return isinstance(arg, torch.Tensor) and (arg.is_meta or isinstance(arg, FakeTensor))


def _require_no_streaming(mode: str) -> None:
    """Raise `RuntimeContractError` for a streaming step over the ranks of a mesh."""
    if mode == "streaming":
        raise RuntimeContractError(
            "a streaming step walks the tree of one process, depth first",
            expected="loss.backward() on the outputs of a call, with one tree over the ranks of options={'mesh': ...}",
            got="dta_compile.streaming_step of a model compiled with a mesh",
            hint="compile without the mesh for streaming steps",
        )


def _of_own_tree(options: Options, sweep: str) -> Options:
    """Return the options for planning a rank's own tree, which `over_ranks` may replace."""
    strategy = "auto" if options.strategy == "one_tree" else options.strategy
    return dataclasses.replace(options, sweep=sweep, strategy=strategy, mesh=None)


def _dense_values(call: PlannedCall) -> list[torch.Tensor | None]:
    """Run the forward of a call; return its dense frontier values."""
    if isinstance(call, PieceCall):
        return owned_frontier(call)
    return frontier_of_groups(call) if call.groups else dense_frontier(call)


def may_run_layer_by_layer(options: Options) -> bool:
    """Return whether a call may gather layers one by one; alike on all ranks, whichever programs these run."""
    is_allowed = options.sweep != "chunks" and options.verify in ("auto", "off") and options.fallback == "raise"
    return is_allowed and not (options.verify == "auto" and is_gathered_to_check())


def _pays_layer_by_layer(call: PlannedCall) -> bool:
    """Return whether a plan fits into memory, or its boundary values take less memory than whole parameters would."""
    limits, rows = call.plan.limits, call.plan.prefix_tree.num_rows
    boundary_bytes = rows * sum(part.sent for part in limits.parts)
    call.predict_peak()
    fits = (call.plan.estimates.peak_bytes or 0) <= free_bytes(call.device)
    return fits or boundary_bytes <= limits.sums + sum(p.nbytes for p in call.parameters(call.executable.whole))
