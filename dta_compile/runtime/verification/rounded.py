"""What rounding alone changes of the captured program's outputs and gradients.

The gradient of a divergence of two equal models is nothing but rounding, of which two runs have different ones. No
tolerance relative to it tells that, but another run of the same program does, on weights that differ by rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from dta_compile.errors import VerificationError
from dta_compile.executable.as_captured import as_captured
from dta_compile.runtime.verification.probe import NOISE, gradients_of
from dta_compile.runtime.verification.values import largest_entry, real_parts

Compared = TypeVar("Compared")

LAST_PLACES = 1  # that a weight is changed by, about


def run_captured(captured: fx.GraphModule, args: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs of the captured program as it is."""
    return tuple(as_captured(captured)(*args))


def takes_gradient(arg: Any) -> bool:
    """Whether an input of a call has a gradient."""
    return isinstance(arg, torch.Tensor) and arg.requires_grad and torch.is_grad_enabled()


def but_for_rounding(compared: Callable[[float], Compared], change: Callable[[], float]) -> Compared:
    """A comparison with a difference that is allowed for; where it fails without any, with what rounding changes."""
    try:
        return compared(0.0)
    except VerificationError:
        more = NOISE * change()
        if not more:
            raise
        return compared(more)


class Rounded:
    """The captured program on weights with differences of the size of rounding. It runs once it is asked for anything.

    Args:
        args: the inputs of the run that changes are measured from.
    """

    def __init__(self, captured: fx.GraphModule, args: Sequence[Any]) -> None:
        self._captured, self._args = captured, args
        self._change_of_gradients: float | None = None

    @functools.cached_property
    def _inputs(self) -> list[Any]:
        return [_rounded(arg) if _is_weight(arg) else arg for arg in self._args]

    @functools.cached_property
    def _outputs(self) -> tuple[Any, ...]:
        return run_captured(self._captured, self._inputs)

    def change_of_output(self, index: int, plain: Any, mask: torch.Tensor | None) -> float:
        """The largest change of an output from what it was, where `mask` holds."""
        other = self._outputs[index]
        if mask is None or not isinstance(plain, torch.Tensor) or other.shape != plain.shape:
            return 0.0
        changed, before = real_parts(other.detach()), real_parts(plain.detach())
        return largest_entry(torch.where(mask, changed - before, 0)) if before.is_floating_point() else 0.0

    def change_of_gradients(
        self, inputs: Sequence[int], plain: Sequence[torch.Tensor | None], cotangents: dict[int, torch.Tensor]
    ) -> float:
        """The largest change of any gradient for some inputs from what it was."""
        if self._change_of_gradients is None:
            again = gradients_of(self._outputs, [self._inputs[i] for i in inputs], cotangents)
            changes = (a - b for a, b in zip(again, plain, strict=True) if a is not None and b is not None)
            self._change_of_gradients = max(map(largest_entry, changes), default=0.0)
        return self._change_of_gradients


def _is_weight(arg: Any) -> bool:
    trained = takes_gradient(arg) or isinstance(arg, torch.nn.Parameter)
    return trained and arg.is_floating_point()


def _rounded(value: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(value.device).manual_seed(2)
    noise = torch.randn(value.shape, generator=generator, device=value.device, dtype=torch.float32).clamp(-2, 2)
    small = (LAST_PLACES * torch.finfo(value.dtype).eps * noise).to(value.dtype)
    return (value.detach() * (1 + small)).requires_grad_(value.requires_grad)
