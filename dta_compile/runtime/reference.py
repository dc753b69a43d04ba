"""The reference: the captured program run as it is, on the dense batch, by ordinary autograd.

`options={"verify": ...}` says which calls are compared with it, in every output and every gradient, before any of them
is handed out: by default the first, on a few of its rows (`self_check`); "first" and "always" as a whole (`verified`).

What the comparison allows is a share of the largest entry, and in addition what rounding may do: a loss that is the
difference of equal sums is nothing but rounding. So the epilogue is run once more on rounded frontier values; and if
there is padding, twice on others there, which shows what outputs depend on it: such entries of tokens are not compared,
and an output of whole sequences, a metric say, is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.capture.as_captured import as_captured
from dta_compile.errors import DTAError, VerificationError
from dta_compile.ops.draw_capture import is_random
from dta_compile.passes.axes.layouts import is_tensor
from dta_compile.passes.cuts.other_batches import programs_of
from dta_compile.passes.program import Program, ancestors, where
from dta_compile.passes.symbols import free_symbols, sizes
from dta_compile.runtime.measure.budget import default_budget
from dta_compile.runtime.planned_call import PlannedCall, Run
from dta_compile.runtime.sample import NotSampled, indices_from_values, sample

RunSmall = Callable[[int, Sequence[Any]], Run]  # of a number of columns and the inputs of a small call

# Largest accepted difference relative to the largest entry; rounding differs because sums run in another order.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
# A gradient that is zero but for rounding (of a key's bias) may differ by so many units in the last place of the
# largest gradient, and by no more than the tolerance.
ROUNDING = 100
NOISE = 3.0  # times what rounding of frontier values does that outputs and gradients may differ by
SHARE = 0.1  # of the first call's time that the self-check may take
PASSES = {True: 8.0, False: 3.0}  # what it takes with and without gradients, in forward passes of the captured program


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The largest accepted differences, relative to the largest entry; None: nothing could be compared."""

    outputs: float | None
    gradients: float | None
    trains: bool

    def __str__(self) -> str:
        parts = [("outputs", self.outputs), *([("gradients", self.gradients)] if self.trains else [])]
        return ", ".join(f"{name} not comparable" if x is None else f"{name} within {x:.1g}" for name, x in parts)


def verified(program: Program, run: Callable[[Sequence[Any]], Run], args: Sequence[Any]) -> tuple[tuple[Any, ...], str]:
    """The outputs of a call that `run` runs, compared with the reference as their gradients are; and the verdict.

    Raises:
        VerificationError: naming the output or parameter that differs, by how much, and the tolerance.
    """
    # Gradients are taken for views: hooks that are registered on the parameters are for the user's own backward.
    viewed = [arg.view_as(arg) if _takes_gradient(arg) else arg for arg in args]
    ran = run(viewed)
    if reason := _not_comparable(program):
        verdict = f"skipped: {reason}"
    else:
        with _undisturbed(ran.call.device):
            detached = _detached(args)
            expected = _captured(program, detached)
            verdict = f"the whole call: {compare(program, ran, viewed, expected, detached)}"
    return ran.outputs, verdict


def self_check(call: PlannedCall, run_small: RunSmall, compile_seconds: float) -> str:
    """Compare a few rows of a planned call, as a small call of its own; returns the verdict, or why there is none.

    Whatever else fails is left to the call itself.

    Raises:
        VerificationError: naming the output or parameter that differs, by how much, and the tolerance.
    """
    try:
        with _undisturbed(call.device):
            return _self_check(call, run_small, compile_seconds)
    except VerificationError:
        raise
    except (NotSampled, DTAError) as reason:
        return f"skipped: {str(reason).splitlines()[0]}"
    except Exception as error:
        return f"skipped: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"


def _self_check(call: PlannedCall, run_small: RunSmall, compile_seconds: float) -> str:
    program = call.program
    if program.joint.generated is not None:  # the call itself needs it, too
        program.joint.generated.prepare(["forward", "backward"] if _trains(program) else ["forward_only"])
    started = time.perf_counter()
    if reason := _not_comparable(program):
        raise NotSampled(reason)
    small = sample(call)
    if small.bytes > default_budget(call.device):
        raise NotSampled(f"{small.bytes / 2**20:,.0f} MiB for {small.rows} rows of {small.columns} tokens are not free")
    theirs, mine = _detached(small.args), _detached(small.args)
    scale = call.rows.tree.num_rows / (small.rows * small.columns)
    expected = _captured_in_time(call, theirs, compile_seconds, scale)
    run = run_small(small.columns, mine)
    verdict = compare(program, run, mine, expected, theirs)
    seconds = time.perf_counter() - started
    return f"{small.rows} rows of {small.columns} tokens at the first call: {verdict}; {seconds:.2g} s"


def _captured_in_time(call: PlannedCall, args: Sequence[Any], compile_seconds: float, scale: float) -> tuple[Any, ...]:
    """The captured program's outputs; raises `NotSampled` if the rest would take longer than it may.

    `scale`: how many times as many tokens the whole call has.
    """
    trains = _trains(call.program)
    for _attempt in range(2):  # the first run may have loaded kernels
        begun = time.perf_counter()
        outputs = _captured(call.program, args)
        if call.device.type == "cuda":
            torch.cuda.synchronize(call.device)
        seconds = time.perf_counter() - begun
        whole = compile_seconds + (3 if trains else 1) * scale * seconds
        if PASSES[trains] * seconds <= SHARE * whole:
            return outputs
    raise NotSampled(f"it would take {PASSES[trains] * seconds:.1f} s of a call of about {whole:.1f} s")


def _trains(program: Program) -> bool:
    return program.training and torch.is_grad_enabled()


def _takes_gradient(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.requires_grad and torch.is_grad_enabled()


def _detached(args: Sequence[Any]) -> list[Any]:
    """The same inputs as leaves of their own, without hooks."""
    return [arg.detach().requires_grad_() if _takes_gradient(arg) else arg for arg in args]


def _captured(program: Program, args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(as_captured(program.captured)(*args))


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Autocast as around the call, but with no casts left in its cache; and no hooks that are for the call's values."""
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", device.type}:
            if torch.amp.is_autocast_available(kind):
                dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        yield


def _not_comparable(program: Program) -> str:
    """Why two runs of the program may differ; "": they may not."""
    for node in program.graph.nodes:
        if is_random(node.target):
            return f"{node.target} draws random numbers"
        if "c10d" in str(getattr(node.target, "namespace", "")):
            return f"{node.target} waits for other ranks"
    further = programs_of(program)[1:]
    if any(layer.mask is not None for one in further for layer in one.attention):
        return "it runs the model on batches of several sizes, with masks of their own"
    return "it indexes by rounded values" if indices_from_values(program) else ""


def compare(
    program: Program, run: Run, inputs: Sequence[Any], expected: Sequence[Any], their_inputs: Sequence[Any]
) -> Verdict:
    """Compare the outputs of a run, and their gradients for `inputs`, with those of the captured program.

    Raises:
        VerificationError: naming what differs.
    """
    probe = _Probe(program, run)
    for i in range(len(expected)):
        probe.require_no_padding(i)
    compared = [probe.compare_output(i, theirs) for i, theirs in enumerate(expected)]
    outputs = max((x for x in compared if x is not None), default=None)
    kept = [i for i, out in enumerate(run.outputs) if compared[i] is not None and probe.is_differentiable(i, out)]
    if not kept or not _trains(program):
        return Verdict(outputs, None, _trains(program))
    generator = torch.Generator(run.call.device).manual_seed(0)
    cotangents = {i: probe.cotangent(i, expected[i], generator) for i in kept}
    gradients = _compare_gradients(program, probe, run.outputs, inputs, expected, their_inputs, cotangents)
    return Verdict(outputs, gradients, trains=True)


class _Probe:
    """Which entries of a run's outputs are defined, and how much of them is rounding."""

    def __init__(self, program: Program, run: Run) -> None:
        self.program, self.run, self.dtype = program, run, precision(program, run.call.device)
        self.tolerance = TOLERANCES.get(self.dtype, 5e-2)
        self.rounding = min(ROUNDING * torch.finfo(self.dtype).eps, self.tolerance)
        self.generator = torch.Generator(run.call.device).manual_seed(1)
        self.padding = [run.call.layout.padding(i) for i in range(len(run.frontier))]
        self.rounded = self._outputs([self._rounded(value) for value in run.frontier])
        self.has_padding = any(mask is not None for mask in self.padding)
        self.padded: tuple[Any, ...] = ()
        self.plausible: tuple[Any, ...] = ()
        if self.has_padding:
            self.padded = self._outputs([*map(self._padded, run.frontier, self.padding)])
            self.plausible = self._outputs([*map(self._plausible, run.frontier, self.padding)])
        self.masks: dict[int, torch.Tensor] = {}
        self.choices = set() if self.dtype in (torch.float64, torch.float32) else _choices(program)

    def _outputs(self, frontier: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        with torch.no_grad():
            return self.run.outputs_of(frontier)

    def _random(self, value: torch.Tensor) -> torch.Tensor:
        return torch.randn(value.shape, generator=self.generator, device=value.device, dtype=torch.float32)

    def _rounded(self, value: torch.Tensor) -> torch.Tensor:
        """The value with differences of the size of rounding."""
        value = value.detach()
        if value.is_complex():
            return torch.view_as_complex(self._rounded(torch.view_as_real(value)))
        if not value.is_floating_point() or not value.numel():
            return value.clone()
        noise = self._random(value).clamp(-1, 1) * (self.rounding * _largest(value))
        return value + noise.to(value.dtype)

    def _padded(self, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The value with large numbers of either sign at padding; whole ones, which may be indices, occur elsewhere."""
        value = value.detach()
        if mask is None:
            return value
        if value.is_complex():
            return torch.view_as_complex(self._padded(torch.view_as_real(value), _of_parts(mask)))
        if not value.is_floating_point():  # zero at padding
            other = value.ne(0).any() if value.dtype is torch.bool else value.amax()
            return torch.where(mask, torch.where(other == 0, torch.ones_like(value), other), value)
        other = self._random(value) * 10 * max(_largest(value), 1.0)
        return torch.where(mask, other.to(value.dtype), value)

    def _plausible(self, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The value with numbers at padding as they are elsewhere."""
        value = value.detach()
        if mask is not None and value.is_complex():
            return torch.view_as_complex(self._plausible(torch.view_as_real(value), _of_parts(mask)))
        if mask is None or not value.is_floating_point() or bool(mask.all()):
            return value
        low, high = value[~mask].aminmax()
        share = torch.rand(value.shape, generator=self.generator, device=value.device, dtype=torch.float32)
        return torch.where(mask, low + (high - low) * share.to(value.dtype), value)

    def require_no_padding(self, index: int) -> None:
        """Refuse an output without a token axis that padding changes: no gradient need ever tell of a metric's use."""
        node, mine = self.program.outputs[index], self.run.outputs[index]
        if not (self.has_padding and isinstance(mine, torch.Tensor) and isinstance(node, fx.Node)):
            return
        if self._is_over_tokens(node):
            return
        mine, other = _real(mine.detach()), _real(self.plausible[index])
        changed = (other - mine).abs() > self.tolerance * _largest(mine) if mine.is_floating_point() else other != mine
        if bool((changed & mine.isfinite() & other.isfinite()).any()):
            raise VerificationError(
                f"output {index} ({node}) depends on padding, which the prefix tree does not compute",
                where=where(node),
                expected="values of real tokens, masked before they are counted",
                got="another value with other numbers at padding",
                hint="multiply by the mask before the mean, or masked_fill before the maximum; "
                "options={'verify': 'off'} accepts it as it is",
            )

    def _is_over_tokens(self, node: fx.Node) -> bool:
        """Whether an output has a dimension whose size depends on the number of tokens."""
        assert self.program.tokens is not None
        return not self.program.tokens.free_symbols.isdisjoint(free_symbols(sizes(node)))

    def compare_output(self, index: int, theirs: Any) -> float | None:
        """The largest relative difference of an output; None if it cannot be compared."""
        mine, node = self.run.outputs[index], self.program.outputs[index]
        what = f"output {index} ({node})"
        if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
            _require(isinstance(mine, torch.Tensor) == isinstance(theirs, torch.Tensor), what, type(theirs), type(mine))
            _require(mine == theirs, what, theirs, mine)
            return None
        _require(mine.shape == theirs.shape, what, list(theirs.shape), list(mine.shape))
        _require(mine.dtype == theirs.dtype, what, theirs.dtype, mine.dtype)
        if isinstance(node, fx.Node) and self.choices and self.choices & ancestors([node]):
            return None
        mine, theirs, rounded = _real(mine.detach()), _real(theirs.detach()), _real(self.rounded[index])
        mask = self.masks[index] = self._defined(index, mine, theirs)
        if not mine.is_floating_point():
            return _compare_exactly(what, mine, theirs, mask & (rounded == mine), self.dtype)
        if not bool(mask.any()):
            return None
        noise = NOISE * _largest(torch.where(mask, rounded - mine, 0))
        beyond = max(noise - self.tolerance * _largest(torch.where(mask, theirs, 0)), 0.0)
        return compare_values(what, mine, theirs, mask, self.tolerance, beyond)

    def _defined(self, index: int, mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """Entries that do not depend on padding, bool."""
        everywhere = torch.ones_like(mine, dtype=torch.bool)
        if not self.has_padding:
            return everywhere
        other = _real(self.padded[index])
        if not mine.is_floating_point():
            return other == mine
        small = self.tolerance * _largest(theirs)
        return ((other == mine) | ((other - mine).abs() <= small)) & theirs.isfinite()

    def is_differentiable(self, index: int, out: Any) -> bool:
        """Whether gradients may be taken of an output."""
        caches = {value.node for value in self.program.frontier if value.is_cache}
        return (out.is_floating_point() or out.is_complex()) and self.program.outputs[index] not in caches

    def cotangent(self, index: int, theirs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Random numbers where the output is defined and finite."""
        parts = _real(theirs.detach())
        drawn = torch.randn(parts.shape, generator=generator, device=theirs.device, dtype=torch.float32)
        drawn = drawn.masked_fill(~(self.masks[index] & parts.isfinite()), 0).to(parts.dtype)
        return torch.view_as_complex(drawn) if theirs.is_complex() else drawn

    def conditioning(self, cotangents: dict[int, torch.Tensor]) -> float:
        """How much rounding of frontier values changes the gradients that go to them, relative to these."""
        plain = self._frontier_gradients([value.detach() for value in self.run.frontier], cotangents)
        again = self._frontier_gradients([self._rounded(value) for value in self.run.frontier], cotangents)
        change = max((_largest(a - b) for a, b in zip(again, plain, strict=True)), default=0.0)
        size = max(map(_largest, plain), default=0.0)
        return change / size if size else 0.0

    def _frontier_gradients(
        self, frontier: Sequence[torch.Tensor], cotangents: dict[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        leaves = [
            value.requires_grad_(one.requires_grad) for value, one in zip(frontier, self.run.frontier, strict=True)
        ]
        outputs = self.run.outputs_of(leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return [grad for grad in _gradients(outputs, wanted, cotangents) if grad is not None]


def _gradients(
    outputs: Sequence[Any], inputs: Sequence[torch.Tensor], cotangents: dict[int, torch.Tensor], keep: bool = False
) -> Sequence[torch.Tensor | None]:
    kept = [i for i in cotangents if outputs[i].requires_grad]
    if not kept or not inputs:
        return [None] * len(inputs)
    seeds = [cotangents[i] for i in kept]
    return torch.autograd.grad([outputs[i] for i in kept], inputs, seeds, retain_graph=keep, allow_unused=True)


def _compare_gradients(
    program: Program,
    probe: _Probe,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    expected: Sequence[Any],
    their_inputs: Sequence[Any],
    cotangents: dict[int, torch.Tensor],
) -> float | None:
    """The largest relative difference; None if the captured program's own are not finite, or are only rounding."""
    trained = [i for i, arg in enumerate(their_inputs) if _takes_gradient(arg)]
    theirs = _gradients(expected, [their_inputs[i] for i in trained], cotangents)
    conditioning = probe.conditioning(cotangents)
    if not all(bool(grad.isfinite().all()) for grad in theirs if grad is not None) or conditioning > 0.5:
        return None
    mine = _gradients(outputs, [inputs[i] for i in trained], cotangents, keep=True)
    largest = max((_largest(grad) for grad in theirs if grad is not None), default=0.0)
    share = probe.rounding + NOISE * conditioning
    found = [0.0]
    for i, one, other in zip(trained, mine, theirs, strict=True):
        known = one if one is not None else other
        if known is not None:
            one, other = (_real(torch.zeros_like(known) if grad is None else grad) for grad in (one, other))
            what = f"the gradient of {program.inputs[i].name}"
            everywhere = torch.ones_like(one, dtype=torch.bool)
            found.append(compare_values(what, one, other, everywhere, probe.tolerance, share * largest))
    return max(found)


def precision(program: Program, device: torch.device) -> torch.dtype:
    """The least precise dtype that values which depend on parameters are computed in."""
    values = [node.meta["val"] for node in program.parameter_dependent if is_tensor(node)]
    numbers = (value.dtype for value in values if value.is_floating_point() or value.is_complex())
    dtypes = {dtype.to_real() for dtype in numbers} or {torch.float64}
    least = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    if least is torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return torch.float16  # as many bits as TF32 has
    return least


def _choices(program: Program) -> set[fx.Node]:
    """Where the program chooses (an expert, a token) by values that are rounded: another choice is no error."""
    found = set()
    for node in program.parameter_dependent:
        values = node.meta.get("val")
        results = values if isinstance(values, (tuple, list)) else [values]
        if any(isinstance(value, torch.Tensor) and not value.is_floating_point() for value in results):
            found.add(node)
    return found


def _real(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _of_parts(mask: torch.Tensor) -> torch.Tensor:
    """A mask of complex numbers as one of their real and imaginary parts."""
    return mask[..., None].expand(*mask.shape, 2)


def _largest(value: torch.Tensor) -> float:
    """The largest magnitude of the finite entries."""
    if not value.numel():
        return 0.0
    return float(torch.nan_to_num(value.detach(), nan=0.0, posinf=0.0, neginf=0.0).abs().max())


def _compare_exactly(
    what: str, mine: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype
) -> float | None:
    """Whole numbers: equal; in less precision than float64 there may be a tie, or one in a hundred."""
    count = int(mask.sum())
    wrong = int(((mine != theirs) & mask).sum())
    if wrong > (0 if dtype is torch.float64 else 1 + count // 100):
        raise _difference(what, f"equal numbers at {count} places", f"{wrong} others")
    return 0.0 if count else None


def compare_values(
    what: str, mine: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor, tolerance: float, rounding: float = 0.0
) -> float:
    """The largest difference, relative to the largest entry, where `mask` holds.

    Raises:
        VerificationError: it is beyond the tolerance, and beyond `rounding` in absolute terms.
    """
    wide = torch.float64 if mine.dtype is torch.float64 else torch.float32
    mine, theirs = mine.to(wide), theirs.to(wide)
    same = (mine == theirs) | (mine.isnan() & theirs.isnan()) | ~mask
    gap = (mine - theirs).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0)
    largest, scale = float(gap.max()) if gap.numel() else 0.0, _largest(torch.where(mask, theirs, 0))
    if not largest <= tolerance * scale + rounding:
        relative = largest / scale if scale else largest
        raise _difference(what, f"a relative difference of at most {tolerance:g}", f"{relative:.3g}")
    return largest / max(scale, rounding) if largest else 0.0


def _require(holds: bool, what: str, expected: Any, got: Any) -> None:
    if not holds:
        raise _difference(what, str(expected), str(got))


def _difference(what: str, expected: str, got: str) -> VerificationError:
    return VerificationError(
        f"{what} differs from the captured program",
        expected=expected,
        got=got,
        hint="please report the model; options={'fallback': 'dense'} does not help here, eager execution does",
    )
