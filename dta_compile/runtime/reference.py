"""The reference: the captured program run as it is, on the dense batch, by ordinary autograd.

`options={"verify": ...}` runs it beside the tree and compares every output and every parameter gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dta_compile.errors import VerificationError
from dta_compile.passes.as_captured import as_captured
from dta_compile.passes.program import Axis, InputKind, Layout, Program

# Largest accepted difference relative to the largest entry; rounding differs because sums run in another order.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
# A gradient that is zero but for rounding (of a key's bias) may differ by so many units in the last place of the
# largest gradient, and by no more than the tolerance.
ROUNDING = 100


def verified(program: Program, args: Sequence[Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The outputs, after comparing them with the reference; their gradients are compared when backward runs.

    Raises:
        VerificationError: naming the output or parameter that differs, by how much, and the tolerance.
    """
    expected = as_captured(program.captured)(*args)
    for index, (node, mine, theirs) in enumerate(zip(program.outputs, outputs, expected, strict=True)):
        if isinstance(mine, torch.Tensor):
            mask = _real(program, args, node, mine)
            _compare(f"output {index} ({node})", mine.detach(), theirs.detach(), mask)
    if not any(isinstance(out, torch.Tensor) and out.requires_grad for out in outputs):
        return outputs
    trained = [i for i, spec in enumerate(program.inputs) if spec.requires_grad and spec.kind is InputKind.PARAMETER]
    names = [program.inputs[i].name for i in trained]
    parameters = [args[i] for i in trained]
    kept = [i for i, out in enumerate(outputs) if isinstance(out, torch.Tensor) and out.requires_grad]
    checked = _CompareGradients.apply(
        names, parameters, [outputs[i] for i in kept], [expected[i] for i in kept], *(outputs[i] for i in kept)
    )
    result = list(outputs)
    for i, out in zip(kept, checked, strict=True):
        result[i] = out
    return tuple(result)


class _CompareGradients(torch.autograd.Function):
    """Identity on the outputs; its backward takes the gradients of both programs for the same cotangents."""

    @staticmethod
    def forward(
        ctx: Any,
        names: list[str],
        parameters: list[torch.Tensor],
        mine: list[torch.Tensor],
        theirs: list[torch.Tensor],
        *outputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.names, ctx.parameters, ctx.mine, ctx.theirs = names, parameters, mine, theirs
        return tuple(out.view_as(out) for out in outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        both = [
            torch.autograd.grad(outputs, ctx.parameters, cotangents, retain_graph=True, allow_unused=True)
            for outputs in (ctx.mine, ctx.theirs)
        ]
        largest = max((float(grad.abs().max()) for grad in both[1] if grad is not None and grad.numel()), default=0.0)
        for name, mine, theirs in zip(ctx.names, *both, strict=True):
            if mine is None and theirs is None:
                continue
            known = mine if mine is not None else theirs
            zero = torch.zeros_like(known)
            mine, theirs = zero if mine is None else mine, zero if theirs is None else theirs
            share = min(ROUNDING * torch.finfo(known.dtype).eps, TOLERANCES.get(known.dtype, 1e-3))
            _compare(f"the gradient of {name}", mine, theirs, None, share * largest)
        return (None, None, None, None, *cotangents)


def _real(program: Program, args: Sequence[Any], node: Any, value: torch.Tensor) -> torch.Tensor | None:
    """Where an output of the token region lies at real tokens (padding is not computed); None: everywhere."""
    mask = program.attention[0].mask.valid
    layout = program.values.get(node)
    if mask is None or not isinstance(layout, Layout) or layout.token_dim is None or layout.frame is None:
        return None
    if layout.dims[layout.token_dim] is Axis.ROWS or layout.frame.start != 0 or layout.frame.length != program.tokens:
        return None
    dense = dict(zip(program.prologue_nodes, program.prologue(*args), strict=True))
    valid = dense[mask] != 0
    shape = [value.shape[i] if axis is not None else 1 for i, axis in enumerate(layout.dims)]
    return valid.reshape(shape).expand_as(value)


def _compare(
    what: str, mine: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor | None, rounding: float = 0.0
) -> None:
    if not mine.is_floating_point():
        same = mine == theirs if mask is None else (mine == theirs) | ~mask
        difference, tolerance = float((~same).any()), 0.0
    else:
        scale = theirs.abs().max().clamp(min=torch.finfo(theirs.dtype).tiny)
        gap = ((mine - theirs).abs() - rounding).clamp(min=0)
        difference = float((gap if mask is None else gap.masked_fill(~mask, 0)).max() / scale) if gap.numel() else 0.0
        tolerance = TOLERANCES.get(mine.dtype, 1e-3)
    if not difference <= tolerance:
        raise VerificationError(
            f"{what} differs from the captured program",
            expected=f"a relative difference of at most {tolerance:g}",
            got=f"{difference:.3g}",
            hint="please report the model; options={'fallback': 'dense'} does not help here, eager execution does",
        )
