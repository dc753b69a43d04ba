"""Determine which entries of a run's outputs are comparable and how much of them is rounding, for the self-check."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from dta_compile.errors import VerificationError
from dta_compile.executable.executable import Executable
from dta_compile.runtime.calls.planned_call import Run
from dta_compile.runtime.rows.batch_rows import Booleans

# Largest accepted difference relative to the largest entry; rounding differs because sums run in another order.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
# A gradient that is zero up to rounding (as of a key's bias) may differ by so many units in the last place of the
# largest gradient, but not by more than the tolerance.
ROUNDING = 100
NOISE = 3.0  # outputs and gradients may differ by so many times the effect of rounding frontier values


class Probe:
    """Perturbed epilogues of a run, which show the entries of outputs that are defined and their rounding.

    Args:
        all_finite: the captured program's outputs are all finite.
        read: numbers of the frontier values to perturb at padding; None: all.
    """

    def __init__(self, run: Run, all_finite: bool = True, read: Collection[int] | None = None) -> None:
        self.all_finite = all_finite
        self.outputs, self.run = run.call.executable.outputs, run
        self.dtype = precision(run.call.executable, run.call.device)
        self.tolerance = TOLERANCES.get(self.dtype, 5e-2)
        self.rounding = min(ROUNDING * torch.finfo(self.dtype).eps, self.tolerance)
        layout, numbers = run.call.alone.layout, range(len(run.frontier))
        self.padding = [layout.padding(i) if read is None or i in read else None for i in numbers]
        self.has_padding = any(mask is not None for mask in self.padding)
        self.masks: dict[int, torch.Tensor] = {}

    @functools.cached_property
    def generator(self) -> torch.Generator:
        """Generator of the perturbations."""
        return torch.Generator(self.run.call.device).manual_seed(1)

    @functools.cached_property
    def rounded(self) -> tuple[Any, ...]:
        """Outputs for frontier values perturbed by rounding."""
        return self._outputs(lambda value, _: self._rounded(value))

    @functools.cached_property
    def padded(self) -> tuple[Any, ...]:
        """Outputs for frontier values with large numbers at padding."""
        return self._outputs(self._padded)

    @functools.cached_property
    def plausible(self) -> tuple[Any, ...]:
        """Outputs for frontier values with numbers at padding that are in the range of the others."""
        return self._outputs(self._plausible)

    @functools.cached_property
    def mixed(self) -> dict[int, torch.Tensor]:
        """Masks, bool, of the entries of each output without a token axis that several tokens change.

        The numbers of any two tokens differ in a bit, by which they are in different halves.
        """
        outputs = [(i, out) for i, out in enumerate(self.run.outputs) if isinstance(out, torch.Tensor)]
        mine = {i: real_parts(out.detach()) for i, out in outputs if not self.outputs[i].is_over_tokens}
        mixed = {i: torch.zeros_like(out, dtype=torch.bool) for i, out in mine.items()}
        layout = self.run.call.alone.layout
        numbers = np.arange(layout.valid.size).reshape(layout.valid.shape)
        for bit in range((numbers.size - 1).bit_length()):
            half = (numbers >> bit) % 2 == 0
            one, other = (self._with_others_at(tokens) for tokens in (half, ~half))
            for i, out in mine.items():
                mixed[i] |= _differs(one[i], out) & _differs(other[i], out)
        return mixed

    def _with_others_at(self, tokens: Booleans) -> tuple[Any, ...]:
        """Return the outputs for frontier values with large numbers at tokens `[B, S]`."""
        layout, wanted = self.run.call.alone.layout, self.run.call.wanted
        masks = [layout.mask_of(i, tokens) if is_wanted else None for i, is_wanted in enumerate(wanted)]
        return self._outputs(self._padded, masks)

    def _outputs(
        self,
        perturbed: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
        masks: Sequence[torch.Tensor | None] | None = None,
    ) -> tuple[Any, ...]:
        """Return the outputs for perturbed frontier values, each given its mask, by default of padding."""
        wanted = self.run.call.wanted  # others are computed later
        triples = zip(self.run.frontier, masks or self.padding, wanted, strict=True)
        with torch.no_grad():
            return self.run.outputs_of([perturbed(v, mask) if wanted else v for v, mask, wanted in triples])

    def _random(self, value: torch.Tensor) -> torch.Tensor:
        return torch.randn(value.shape, generator=self.generator, device=value.device, dtype=torch.float32)

    def _rounded(self, value: torch.Tensor) -> torch.Tensor:
        """Perturb a value by the size of rounding."""
        value = value.detach()
        if value.is_complex():
            return torch.view_as_complex(self._rounded(torch.view_as_real(value)))
        if not value.is_floating_point() or not value.numel():
            return value.clone()
        noise = self._random(value).clamp(-1, 1) * (self.rounding * largest_entry(value))
        return value + noise.to(value.dtype)

    def _padded(self, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Fill padding with large numbers of either sign; integers, which may be indices, with one of the others."""
        value = value.detach()
        if mask is None:
            return value
        if value.is_complex():
            return torch.view_as_complex(self._padded(torch.view_as_real(value), of_parts(mask)))
        if not value.is_floating_point():  # it is zero at padding
            other = value.ne(0).any() if value.dtype is torch.bool else value.amax()
            return torch.where(mask, torch.where(other == 0, torch.ones_like(value), other), value)
        other = self._random(value) * 10 * max(largest_entry(value), 1.0)
        return torch.where(mask, other.to(value.dtype), value)

    def _plausible(self, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Fill padding with numbers in the range of the other entries."""
        value = value.detach()
        if mask is not None and value.is_complex():
            return torch.view_as_complex(self._plausible(torch.view_as_real(value), of_parts(mask)))
        if mask is None or bool(mask.all()):
            return value
        if not value.is_floating_point():
            return self._padded(value, mask)
        low, high = value[~mask].aminmax()
        share = torch.rand(value.shape, generator=self.generator, device=value.device, dtype=torch.float32)
        return torch.where(mask, low + (high - low) * share.to(value.dtype), value)

    def require_no_padding(self, index: int) -> None:
        """Raise VerificationError if padding changes an output that is no token's, such as a metric.

        Entries that one token alone changes are that token's, also in outputs without a token axis: the last columns.
        """
        output, mine = self.outputs[index], self.run.outputs[index]
        if not self.has_padding or not isinstance(mine, torch.Tensor) or output.is_over_tokens:
            return
        mine, others = real_parts(mine.detach()), [real_parts(other[index]) for other in (self.plausible, self.padded)]
        if any(self._is_changed(index, mine, other) for other in others):
            raise VerificationError(
                f"output {index} ({output.name}) depends on padding, which the prefix tree does not compute",
                where=output.where,
                expected="values of real tokens, masked before they are counted",
                got="another value with other numbers at padding",
                hint="multiply by the mask before the mean, or masked_fill before the maximum; padding on the left "
                "predicts each row's first token, whose label has to be -100; "
                "options={'verify': 'off'} accepts it as it is",
            )

    def _is_changed(self, index: int, mine: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether an entry that is finite in both, and not of one token, changes by more than rounding."""
        if other.shape != mine.shape:
            return True
        is_float = mine.is_floating_point()
        changed = (other - mine).abs() > self.tolerance * largest_entry(mine) if is_float else other != mine
        changed = changed & mine.isfinite() & other.isfinite()
        return bool(changed.any()) and bool((changed & self.mixed[index]).any())

    def compare_output(self, index: int, theirs: Any, rounding: float = 0.0) -> float | None:
        """Return the largest relative difference of an output; None if it cannot be compared.

        `rounding`: absolute tolerance, in addition to the effect of rounding frontier values.
        """
        mine, output = self.run.outputs[index], self.outputs[index]
        what = f"output {index} ({output.name})"
        if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
            require(isinstance(mine, torch.Tensor) == isinstance(theirs, torch.Tensor), what, type(theirs), type(mine))
            require(mine == theirs, what, theirs, mine)
            return None
        require(mine.shape == theirs.shape, what, list(theirs.shape), list(mine.shape))
        require(mine.dtype == theirs.dtype, what, theirs.dtype, mine.dtype)
        if output.follows_choice and self.dtype not in (torch.float64, torch.float32):
            return None
        mine, theirs, rounded = real_parts(mine.detach()), real_parts(theirs.detach()), real_parts(self.rounded[index])
        mask = self.masks[index] = self._defined(index, mine, theirs)
        if not mine.is_floating_point():
            if not self.all_finite:  # an argmax is not comparable if the maximum may be NaN
                return None
            return compare_exactly(what, mine, theirs, mask & (rounded == mine), self.dtype)
        if not bool(mask.any()):
            return None
        noise = NOISE * largest_entry(torch.where(mask, rounded - mine, 0))
        beyond = max(noise - self.tolerance * largest_entry(torch.where(mask, theirs, 0)), 0.0)
        return compare_values(what, mine, theirs, mask, self.tolerance, max(beyond, rounding))

    def _defined(self, index: int, mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """Return the mask, bool, of entries that are comparable and do not depend on padding."""
        compared = comparable(mine, theirs, self.all_finite)
        if not self.has_padding:
            return compared
        others = [real_parts(outputs[index]) for outputs in (self.padded, self.plausible)]
        same = (others[0] == mine) & (others[1] == mine)
        if not mine.is_floating_point():
            return same
        # Exact for entries of one token: those of real ones never change, and among many at padding some would come
        # close by chance. Sums over tokens may change by rounding.
        if not self.outputs[index].is_over_tokens and not bool(same.all()):
            same |= ((others[0] - mine).abs() <= self.tolerance * largest_entry(theirs)) & self.mixed[index]
        return same & theirs.isfinite() & compared

    def is_differentiable(self, index: int, out: Any) -> bool:
        """Return whether an output is compared by its gradients, too."""
        is_rounded = bool(out.is_floating_point() or out.is_complex())
        return is_rounded and not self.outputs[index].is_cache

    def cotangent(self, index: int, theirs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw a random cotangent, zero where the output is undefined or not finite."""
        parts = real_parts(theirs.detach())
        drawn = torch.randn(parts.shape, generator=generator, device=theirs.device, dtype=torch.float32)
        drawn = drawn.masked_fill(~(self.masks[index] & parts.isfinite()), 0).to(parts.dtype)
        return torch.view_as_complex(drawn) if theirs.is_complex() else drawn

    def conditioning(self, cotangents: dict[int, torch.Tensor]) -> float:
        """Return the relative change of the gradients of frontier values when these are perturbed by rounding."""
        plain = self._frontier_gradients([value.detach() for value in self.run.frontier], cotangents)
        again = self._frontier_gradients([self._rounded(value) for value in self.run.frontier], cotangents)
        change = max((largest_entry(a - b) for a, b in zip(again, plain, strict=True)), default=0.0)
        size = max(map(largest_entry, plain), default=0.0)
        return change / size if size else 0.0

    def _frontier_gradients(
        self, frontier: Sequence[torch.Tensor], cotangents: dict[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        leaves = [
            value.requires_grad_(old.requires_grad) for value, old in zip(frontier, self.run.frontier, strict=True)
        ]
        outputs = self.run.outputs_of(leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return [grad for grad in gradients_of(outputs, wanted, cotangents) if grad is not None]


def gradients_of(
    outputs: Sequence[Any], inputs: Sequence[torch.Tensor], cotangents: dict[int, torch.Tensor], keep: bool = False
) -> Sequence[torch.Tensor | None]:
    """Return gradients of outputs for `inputs`, with cotangents by output position; `keep`: retain the graph."""
    positions = [i for i in cotangents if outputs[i].requires_grad]
    if not positions or not inputs:
        return [None] * len(inputs)
    seeds = [cotangents[i] for i in positions]
    return torch.autograd.grad([outputs[i] for i in positions], inputs, seeds, retain_graph=keep, allow_unused=True)


def precision(executable: Executable, device: torch.device) -> torch.dtype:
    """Return the least precise dtype of values that depend on parameters."""
    least = executable.comparison.precision
    if least is torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return torch.float16  # the same mantissa as TF32
    return least


def _differs(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return where a value differs from another; everywhere if it has another shape."""
    value = real_parts(value)
    return value != other if value.shape == other.shape else torch.ones_like(other, dtype=torch.bool)


def real_parts(value: torch.Tensor) -> torch.Tensor:
    """View complex values as pairs of reals along a new last dimension; return others unchanged."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def of_parts(mask: torch.Tensor) -> torch.Tensor:
    """Expand a mask of complex entries to their real and imaginary parts."""
    return mask[..., None].expand(*mask.shape, 2)


def largest_entry(value: torch.Tensor) -> float:
    """Return the largest magnitude of the finite entries; 0 if there are none."""
    if not value.numel():
        return 0.0
    return float(torch.nan_to_num(value.detach(), nan=0.0, posinf=0.0, neginf=0.0).abs().max())


def are_finite(values: Iterable[Any]) -> bool:
    """Return whether all entries of all tensors are finite."""
    return all(bool(value.isfinite().all()) for value in values if isinstance(value, torch.Tensor))


def comparable(mine: torch.Tensor, theirs: torch.Tensor, all_finite: bool) -> torch.Tensor:
    """Return the mask, bool, of compared entries: all, or those finite in both if the program is not `all_finite`."""
    return torch.ones_like(mine, dtype=torch.bool) if all_finite else mine.isfinite() & theirs.isfinite()


def compare_exactly(
    what: str, mine: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype
) -> float | None:
    """Compare integers for equality; below float64 allow one mismatch plus one per hundred, because ties may break."""
    count = int(mask.sum())
    wrong = int(((mine != theirs) & mask).sum())
    if wrong > (0 if dtype is torch.float64 else 1 + count // 100):
        raise difference(what, f"equal numbers at {count} places", f"{wrong} others")
    return 0.0 if count else None


def compare_values(
    what: str, mine: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor, tolerance: float, rounding: float = 0.0
) -> float:
    """Return the largest difference, relative to the largest entry, where `mask` holds.

    Raises:
        VerificationError: it is beyond the tolerance, and beyond `rounding` in absolute terms.
    """
    wide = torch.float64 if mine.dtype is torch.float64 else torch.float32
    mine, theirs = mine.to(wide), theirs.to(wide)
    same = (mine == theirs) | (mine.isnan() & theirs.isnan()) | ~mask
    gap = (mine - theirs).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0)
    largest, scale = float(gap.max()) if gap.numel() else 0.0, largest_entry(torch.where(mask, theirs, 0))
    if not largest <= tolerance * scale + rounding:
        relative = largest / scale if scale else largest
        raise difference(what, f"a relative difference of at most {tolerance:g}", f"{relative:.3g}")
    return largest / max(scale, rounding) if largest else 0.0


def require(holds: bool, what: str, expected: Any, got: Any) -> None:
    """Raise `VerificationError` unless `holds`."""
    if not holds:
        raise difference(what, str(expected), str(got))


def difference(what: str, expected: str, got: str) -> VerificationError:
    """Return the error for a difference from the captured program."""
    return VerificationError(
        f"{what} differs from the captured program",
        expected=expected,
        got=got,
        hint="please report the model; options={'fallback': 'dense'} does not help here, eager execution does",
    )
