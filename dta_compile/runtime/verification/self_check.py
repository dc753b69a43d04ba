"""Compare calls with the captured program, run densely by ordinary autograd.

`options={"verify": ...}` says which calls are compared, in every output and every gradient, before any of them is
returned: by default a few rows of the first call (`self_check`); "first" and "always" whole calls (`verified`).

The tolerance is relative to the largest entry, plus an estimate of rounding, because a loss that is the difference of
equal sums is nothing but rounding. For the estimate the epilogue runs once more on perturbed frontier values. With
padding it also runs twice with other values there, which shows the outputs that depend on padding: such entries of
tokens are not compared, and an output of whole sequences, such as a metric, is refused. If a difference remains, the
captured program runs on perturbed weights, and changes by that are allowed, too (the divergence of two equal models is
all rounding). If the program has non-finite values, only entries that are finite in both are compared, because kernels
differ in how far a NaN spreads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from dta_compile.errors import DTAError, VerificationError
from dta_compile.executable.as_captured import as_captured
from dta_compile.executable.executable import OF_SEVERAL_BATCHES, Executable, Output
from dta_compile.ops.feature_tables import part_of_batch
from dta_compile.runtime.calls.planned_call import PlannedCall, Run
from dta_compile.runtime.measure.budget import default_budget
from dta_compile.runtime.verification.probe import (
    NOISE,
    Probe,
    are_finite,
    comparable,
    compare_values,
    gradients_of,
    largest_entry,
    real_parts,
)
from dta_compile.runtime.verification.sample import NotSampled, sample

RunSmall = Callable[[int, Sequence[Any]], Run]  # from the number of columns and the inputs of a small call

SHARE = 0.1  # largest share of the first call's time for the self-check
UNNOTICED = 0.25  # seconds that it may take in any case; the first call with generated code compiles nothing
COPIES = 3  # of frontier values, about what it takes to compute an epilogue on other ones
PASSES = {True: 8.0, False: 3.0}  # its cost with and without gradients, in forward passes of the captured program


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Largest accepted differences, relative to the largest entry; None: nothing could be compared."""

    outputs: float | None
    gradients: float | None
    trains: bool

    def __str__(self) -> str:
        parts = [("outputs", self.outputs), *([("gradients", self.gradients)] if self.trains else [])]
        return ", ".join(f"{name} not comparable" if x is None else f"{name} within {x:.1g}" for name, x in parts)


def verified(captured: fx.GraphModule, run: Callable[[Sequence[Any]], Run], args: Sequence[Any]) -> tuple[Run, str]:
    """Run a call, compare its outputs and gradients with the captured program, and return the run and the verdict.

    Raises:
        VerificationError: naming the output or parameter that differs, by how much, and the tolerance.
    """
    # Gradients are taken for views, so that hooks on parameters run in the user's own backward only.
    viewed = [arg.view_as(arg) if takes_gradient(arg) else arg for arg in args]
    ran = run(viewed)
    if reason := _not_comparable(ran.call):
        verdict = f"skipped: {reason}"
    else:
        with _undisturbed(ran.call.device):
            detached = _detached(args)
            expected = run_captured(captured, detached, ran.call.executable)
            verdict = f"the whole call: {compare(captured, ran, viewed, expected, detached)}"
    return ran, verdict


def self_check(
    call: PlannedCall,
    captured: fx.GraphModule,
    run_small: RunSmall,
    compile_seconds: float,
    when: str = "at the first call",
) -> str:
    """Compare a few rows of a planned call, run as a small call; return the verdict, or the reason for skipping.

    Other errors skip the check, too: the call itself will raise them. `when` becomes part of the verdict.

    Raises:
        VerificationError: naming the output or parameter that differs, by how much, and the tolerance.
    """
    try:
        with _undisturbed(call.device), part_of_batch():
            return _self_check(call, captured, run_small, compile_seconds, when)
    except VerificationError:
        raise
    except (NotSampled, DTAError) as reason:
        return f"skipped: {str(reason).splitlines()[0]}"
    except Exception as error:
        return f"skipped: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"


def check_padding(run: Run, again: bool) -> bool:
    """Check that padding changes no output of a whole call; return False if it has none, or cannot be checked.

    Args:
        again: a call before has passed, so this one is checked as far as masks made of other data may change the
            result, and no gradient at padding would tell of it.

    Raises:
        VerificationError: naming the output.
    """
    call, executable = run.call, run.call.executable
    if again and executable.rest is not None:
        return True  # its epilogue is a run of the model
    pairs = enumerate(zip(executable.outputs, run.outputs, strict=True))
    numbers = [i for i, (output, value) in pairs if may_depend_on_padding(output, again and takes_gradient(value))]
    read = {i for number in numbers for i in executable.outputs[number].reads if call.wanted[i]}
    size = sum(run.frontier[i].nbytes for i in read)
    if _runs_once(call) or COPIES * size > default_budget(call.device):
        return False
    probe = Probe(run, read=read)
    for i in numbers:
        probe.require_no_padding(i)
    return probe.has_padding


def may_depend_on_padding(output: Output, has_gradient: bool) -> bool:
    """Return whether an output may be computed from padding, without a gradient that would tell of it."""
    return bool(output.reads) and not output.is_over_tokens and not (has_gradient and output.is_differentiated)


def may_check_padding(call: PlannedCall) -> bool:
    """Return whether a call has padding, may run twice, and its frontier values fit into memory for `check_padding`."""
    valid = call.alone.layout.valid
    of_token = sum(math.prod(value.features) * value.dtype.itemsize for value in call.executable.frontier)
    fits = COPIES * valid.size * of_token <= default_budget(call.device)
    return not valid.all() and fits and not _runs_once(call)


def _self_check(
    call: PlannedCall, captured: fx.GraphModule, run_small: RunSmall, compile_seconds: float, when: str
) -> str:
    generated = call.executable.joint.generated
    if generated is not None:  # the call itself needs the code, too
        graphs = ["forward", "backward"] if _trains(call.executable) else ["forward_only"]
        generated.prepare(graphs, wait=call.context.ranks.several)
    started = time.perf_counter()
    if reason := _not_comparable(call):
        raise NotSampled(reason)
    small = sample(call)
    if small.bytes > default_budget(call.device):
        raise NotSampled(f"{small.bytes / 2**20:,.0f} MiB for {small.rows} rows of {small.columns} tokens are not free")
    theirs, mine = _detached(small.args), _detached(small.args)
    scale = call.rows.tree.num_rows / (small.rows * small.columns)
    expected = _captured_in_time(call, captured, theirs, compile_seconds, scale)
    run = run_small(small.columns, mine)
    verdict = compare(captured, run, mine, expected, theirs)
    seconds = time.perf_counter() - started
    return f"{small.rows} rows of {small.columns} tokens {when}: {verdict}; {seconds:.2g} s"


def _captured_in_time(
    call: PlannedCall, captured: fx.GraphModule, args: Sequence[Any], compile_seconds: float, scale: float
) -> tuple[Any, ...]:
    """Return the captured program's outputs; raise `NotSampled` if the rest of the check would take too long.

    `scale`: tokens of the whole call per token of the small one.
    """
    trains = _trains(call.executable)
    for _attempt in range(2):  # the first attempt may include loading kernels
        begun = time.perf_counter()
        outputs = run_captured(captured, args, call.executable)
        if call.device.type == "cuda":
            torch.cuda.synchronize(call.device)
        seconds = time.perf_counter() - begun
        whole = compile_seconds + (3 if trains else 1) * scale * seconds
        if PASSES[trains] * seconds <= max(SHARE * whole, UNNOTICED):
            return outputs
    raise NotSampled(f"it would take {PASSES[trains] * seconds:.1f} s of a call of about {whole:.1f} s")


def _trains(executable: Executable) -> bool:
    return executable.training and torch.is_grad_enabled()


def _detached(args: Sequence[Any]) -> list[Any]:
    """Return the inputs as new autograd leaves, without hooks."""
    return [arg.detach().requires_grad_() if takes_gradient(arg) else arg for arg in args]


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Isolate the check: autocast without its cache, random state restored, no saved-tensor hooks of the caller."""
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", device.type}:
            if torch.amp.is_autocast_available(kind):
                dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        yield


def _not_comparable(call: PlannedCall) -> str:
    """Return the reason why a call may differ from the captured program; "" if it may not."""
    if call.restarts:
        return "the program's recurrences run on from one sequence of a packed row into the next"
    return call.executable.comparison.incomparable


def _runs_once(call: PlannedCall) -> bool:
    """Return whether a call must not run again: it draws random numbers, say, or waits for other ranks."""
    return _not_comparable(call) not in ("", OF_SEVERAL_BATCHES)


def compare(
    captured: fx.GraphModule, run: Run, inputs: Sequence[Any], expected: Sequence[Any], their_inputs: Sequence[Any]
) -> Verdict:
    """Compare the outputs of a run, and their gradients for `inputs`, with those of the captured program.

    Raises:
        VerificationError: naming the output or gradient that differs.
    """
    executable, probe = run.call.executable, Probe(run, are_finite(expected))
    rounded = Rounded(captured, their_inputs, executable)
    for i in range(len(expected)):
        probe.require_no_padding(i)
    compared = [_compare_output(probe, rounded, i, theirs) for i, theirs in enumerate(expected)]
    outputs = max((x for x in compared if x is not None), default=None)
    indices = [i for i, out in enumerate(run.outputs) if compared[i] is not None and probe.is_differentiable(i, out)]
    if not indices or not _trains(executable):
        return Verdict(outputs, None, _trains(executable))
    generator = torch.Generator(run.call.device).manual_seed(0)
    cotangents = {i: probe.cotangent(i, expected[i], generator) for i in indices}
    gradients = _compare_gradients(probe, rounded, run.outputs, inputs, expected, their_inputs, cotangents)
    return Verdict(outputs, gradients, trains=True)


def _compare_output(probe: Probe, rounded: Rounded, index: int, theirs: Any) -> float | None:
    def change() -> float:
        return rounded.change_of_output(index, theirs, probe.masks.get(index))

    return but_for_rounding(functools.partial(probe.compare_output, index, theirs), change)


def _compare_gradients(
    probe: Probe,
    rounded: Rounded,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    expected: Sequence[Any],
    their_inputs: Sequence[Any],
    cotangents: dict[int, torch.Tensor],
) -> float | None:
    """Return the largest relative difference; None if nothing is finite in both, or gradients are mere rounding."""
    trained = [i for i, arg in enumerate(their_inputs) if takes_gradient(arg)]
    theirs = gradients_of(expected, [their_inputs[i] for i in trained], cotangents)
    conditioning = probe.conditioning(cotangents)
    if conditioning > 0.5:
        return None
    mine = gradients_of(outputs, [inputs[i] for i in trained], cotangents, keep=True)
    inputs_of = probe.run.call.executable.inputs
    largest = max((largest_entry(grad) for grad in theirs if grad is not None), default=0.0)
    share = probe.rounding + NOISE * conditioning

    def compare_gradient(what: str, got: torch.Tensor, want: torch.Tensor, mask: torch.Tensor, more: float) -> float:
        return compare_values(what, got, want, mask, probe.tolerance, max(share * largest, more))

    change = functools.partial(rounded.change_of_gradients, trained, theirs, cotangents)
    all_finite = are_finite(theirs)
    gaps = [0.0] if all_finite else []
    for i, got, want in zip(trained, mine, theirs, strict=True):
        example = got if got is not None else want
        if example is not None:
            got, want = (real_parts(torch.zeros_like(example) if grad is None else grad) for grad in (got, want))
            mask = comparable(got, want, all_finite)
            what = f"the gradient of {inputs_of[i].name}"
            if bool(mask.any()) or all_finite:
                gaps.append(but_for_rounding(functools.partial(compare_gradient, what, got, want, mask), change))
    return max(gaps, default=None)


Compared = TypeVar("Compared")

LAST_PLACES = 1  # perturbation of weights, about so many units in the last place


def run_captured(captured: fx.GraphModule, args: Sequence[Any], executable: Executable) -> tuple[Any, ...]:
    """Run the captured program densely, on copies of the inputs that it writes to.

    Returns its outputs, then the final values of these inputs.
    """
    copies = executable.copies_of_written(args)
    outputs = tuple(as_captured(captured)(*copies))
    return *outputs, *(copies[written.input] for written in executable.written)


def takes_gradient(arg: Any) -> bool:
    """Return whether an input of a call gets a gradient."""
    return isinstance(arg, torch.Tensor) and arg.requires_grad and torch.is_grad_enabled()


def but_for_rounding(compared: Callable[[float], Compared], change: Callable[[], float]) -> Compared:
    """Run a comparison with no extra tolerance; if it fails, again with the `change` caused by rounding."""
    try:
        return compared(0.0)
    except VerificationError:
        more = NOISE * change()
        if not more:
            raise
        return compared(more)


class Rounded:
    """Captured program on weights perturbed by the size of its rounding; runs lazily.

    Args:
        args: inputs of the unperturbed run.
    """

    def __init__(self, captured: fx.GraphModule, args: Sequence[Any], executable: Executable) -> None:
        self._captured, self._args, self._executable = captured, args, executable
        self._eps = _coarsest(captured)
        self._change_of_gradients: float | None = None

    @functools.cached_property
    def _inputs(self) -> list[Any]:
        return [_rounded(arg, self._eps) if _is_weight(arg) else arg for arg in self._args]

    @functools.cached_property
    def _outputs(self) -> tuple[Any, ...]:
        return run_captured(self._captured, self._inputs, self._executable)

    def change_of_output(self, index: int, plain: Any, mask: torch.Tensor | None) -> float:
        """Return the largest change of an output from its unperturbed value, where `mask` holds."""
        perturbed = self._outputs[index]
        if mask is None or not isinstance(plain, torch.Tensor) or perturbed.shape != plain.shape:
            return 0.0
        changed, before = real_parts(perturbed.detach()), real_parts(plain.detach())
        return largest_entry(torch.where(mask, changed - before, 0)) if before.is_floating_point() else 0.0

    def change_of_gradients(
        self, inputs: Sequence[int], plain: Sequence[torch.Tensor | None], cotangents: dict[int, torch.Tensor]
    ) -> float:
        """Return the largest change of any gradient for the given inputs."""
        if self._change_of_gradients is None:
            perturbed = gradients_of(self._outputs, [self._inputs[i] for i in inputs], cotangents)
            changes = (a - b for a, b in zip(perturbed, plain, strict=True) if a is not None and b is not None)
            self._change_of_gradients = max(map(largest_entry, changes), default=0.0)
        return self._change_of_gradients


def _is_weight(arg: Any) -> bool:
    trained = takes_gradient(arg) or isinstance(arg, torch.nn.Parameter)
    return trained and arg.is_floating_point()


def _coarsest(captured: fx.GraphModule) -> float:
    """Return the largest machine epsilon among a program's values, such as that of a softmax in float32."""
    parts = [part for part in captured.modules() if isinstance(part, fx.GraphModule)]
    values = [node.meta.get("example_value") for part in parts for node in part.graph.nodes]
    floats = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in floats), default=0.0)


def _rounded(value: torch.Tensor, eps: float) -> torch.Tensor:
    generator = torch.Generator(value.device).manual_seed(2)
    noise = torch.randn(value.shape, generator=generator, device=value.device, dtype=torch.float32).clamp(-2, 2)
    small = (LAST_PLACES * max(eps, torch.finfo(value.dtype).eps) * noise).to(value.dtype)
    return (value.detach() * (1 + small)).requires_grad_(value.requires_grad)
