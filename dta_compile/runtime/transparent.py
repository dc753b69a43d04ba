"""The transparent mode: forward over the tree, any loss by ordinary autograd, then backward over the tree."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.executable.executable import FrontierValue
from dta_compile.plan import Op
from dta_compile.runtime.calls.executor import Executor
from dta_compile.runtime.calls.planned_call import PlannedCall
from dta_compile.runtime.calls.schedule_buffers import (
    ScheduleBuffers,
    accumulators,
    finished_gradients,
    gradient_buffer,
    output_buffers,
    rows_with_gradient,
)
from dta_compile.runtime.rows.buffers import AllRows, RowBuffer

logger = logging.getLogger("dta_compile")

Result = TypeVar("Result")


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Casts are spelled out in the graphs: autocast around the call must not add its own."""
    with torch._C._DisableAutocast():
        yield


def is_batched(value: torch.Tensor) -> bool:
    """Whether a value stands for many, in a `vmap` of either kind."""
    return bool(torch._C._functorch.is_batchedtensor(value) or torch._C._functorch.is_legacy_batchedtensor(value))


class TreeFunction(torch.autograd.Function):
    """Dense frontier values of a call as a function of the region's parameters."""

    @staticmethod
    def forward(ctx: Any, call: PlannedCall, *parameters: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Run the forward half of the schedule; returns the dense frontier values, None for those not wanted."""
        call, (executor, rows, backward_half) = _or_keeping_nothing(call, forward_half)
        if not backward_half:
            call.record(executor)
        outputs = tuple(None if (one := rows.pop(0)) is None else call.layout.expand(i, one) for i in range(len(rows)))
        ctx.call, ctx.executor, ctx.backward_half = call, executor, backward_half
        ctx.save_for_backward(*parameters, *call.reread())
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(
                out
                for out, value in zip(outputs, call.executable.frontier, strict=True)
                if out is not None and not value.differentiable
            )
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run the backward half; returns a gradient, or None, for every parameter."""
        if torch.is_grad_enabled():
            raise RuntimeContractError(
                "a backward over the prefix tree cannot be differentiated again",
                expected="gradients without create_graph=True",
                got="create_graph=True",
                hint="take second derivatives (gradient penalties, Hessians) in eager mode",
            )
        if any(grad is not None and is_batched(grad) for grad in grads):
            raise RuntimeContractError(
                "a backward over the prefix tree takes one gradient at a time",
                expected="gradients of the outputs' shapes",
                got="a batch of gradients (is_grads_batched=True, torch.func.vmap, or vectorize=True)",
                hint="call torch.autograd.grad in a loop, with retain_graph=True",
            )
        call: PlannedCall = ctx.call
        parameters = _unchanged(ctx)[: len(call.executable.region_parameters)]
        begun = [(ctx.executor, ctx.backward_half)] if ctx.executor is not None else []
        ctx.executor = ctx.backward_half = None  # the kept graphs serve one backward; another one recomputes
        if not begun:
            call = call.keeping_nothing()

        def run(call: PlannedCall) -> list[torch.Tensor | None]:
            executor, backward_half = begun.pop() if begun else forward_half(call)[::2]  # outputs are there
            gradients = backpropagate(call, executor, backward_half, grads, parameters)
            call.record(executor)
            return gradients

        with no_autocast():
            _, gradients = _or_keeping_nothing(call, run)
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        """Refuse derivatives in the direction of the forward."""
        raise RuntimeContractError(
            "a call over the prefix tree has no derivative in forward mode",
            expected="gradients by backward() or torch.autograd.grad",
            got="forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad)",
            hint="take directional derivatives in eager mode",
        )


def _unchanged(ctx: Any) -> tuple[torch.Tensor, ...]:
    """What was saved; torch checks that no parameter and no input was changed in place since the forward."""
    try:
        return tuple(ctx.saved_tensors)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeContractError(
            "a parameter, buffer or input of the compiled call was changed in place before its backward",
            expected="the same values, which chunks read again (eager mode may have saved none of them)",
            got=str(error).split(" Hint:")[0],
            hint="call backward first, or write to a copy",
        ) from error


def _or_keeping_nothing(call: PlannedCall, run: Callable[[PlannedCall], Result]) -> tuple[PlannedCall, Result]:
    """`run` a call; if memory does not suffice for what its plan keeps, once more with a plan that keeps nothing."""
    try:
        return call, run(call)
    except torch.OutOfMemoryError:
        if not call.plan.keeps or call.context.ranks.several:  # the other ranks are in the middle of it
            raise
    # Outside of the handler: the error's traceback holds what the run had allocated.
    logger.warning(
        "dta: out of memory with activations kept from forward to backward: this call starts again and recomputes all "
        "of them (options={'memory_budget': BYTES} keeps fewer from the start)"
    )
    if call.device.type == "cuda":
        torch.cuda.empty_cache()
    call = call.keeping_nothing()
    call.context.note_plan(call.plan)
    return call, run(call)


def forward_half(call: PlannedCall) -> tuple[Executor, list[RowBuffer | None], Sequence[Op]]:
    """Run a schedule up to its attach op; the executor, rows of frontier values, and what is left of the ops."""
    executor, training = call.executor(), call.plan.schedule.mode != "score"
    heads, device = len(executor.head_rows), executor.path.device
    outputs = output_buffers(AllRows, call.executable.frontier, call.wanted, heads, device, training)
    left = executor.run(call.plan.schedule.ops, ScheduleBuffers(outputs), on_attach=lambda sequences: False)
    return executor, outputs, left


def backpropagate(
    call: PlannedCall,
    executor: Executor,
    ops: Sequence[Op],
    grads: Sequence[torch.Tensor | None],
    parameters: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Run the backward half of a schedule; gradients of all region parameters (None for frozen ones)."""
    joint, lease = executor.joint, executor.lease
    gradients = row_gradients(call, executor, grads)
    active = rows_with_gradient(gradients, len(executor.head_rows), executor.path.device)
    active = call.context.ranks.with_gradient(active, [grad is not None for grad in grads])
    executor.path.allocate_gradients()
    totals = accumulators(joint, parameters, lease)
    executor.run(ops, ScheduleBuffers((), gradients, tuple(totals), active), on_attach=lambda sequences: True)
    used = {i for i, grad in enumerate(grads) if grad is not None}
    return finished_gradients(joint, totals, parameters, used, copy=lease is not None)


def row_gradients(
    call: PlannedCall, executor: Executor, grads: Sequence[torch.Tensor | None]
) -> list[RowBuffer | None]:
    """Dense gradients of the frontier, summed onto head rows."""
    found: list[RowBuffer | None] = []
    for i, (value, grad) in enumerate(zip(call.executable.frontier, grads, strict=True)):
        if value.is_cache and grad is not None:
            raise gradient_of_cache(value)
        buffer = None
        if i in executor.joint.differentiated and grad is not None:
            buffer = gradient_buffer(AllRows, value, len(executor.head_rows), executor.path.device)
            call.layout.add_gradient(i, buffer, grad)
        found.append(buffer)
    return found


def gradient_of_cache(value: FrontierValue) -> RuntimeContractError:
    """The error for a loss that depends on returned keys or values, which are not followed back."""
    return RuntimeContractError(
        "a gradient reached the returned KV cache",
        expected="a loss that does not use past_key_values",
        got=f"a gradient for {value.name}",
        hint="pass use_cache=False",
    )
