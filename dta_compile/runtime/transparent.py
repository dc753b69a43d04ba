"""The transparent mode: forward over the tree, any loss by ordinary autograd, then backward over the tree."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.passes.program import FrontierValue
from dta_compile.plan import Op, Plan
from dta_compile.runtime.call import Call
from dta_compile.runtime.executor import Executor
from dta_compile.runtime.rows.buffers import AllRows

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
    def forward(ctx: Any, call: Call, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        executor, backward_half = _or_keeping_nothing(call, lambda plan: forward_half(call, plan))
        if not backward_half:
            call.record(call.schedule_plan, executor)
        outputs = tuple(call.expand(i, buffer) for i, buffer in enumerate(executor.outputs))
        executor.outputs = []
        ctx.call, ctx.executor, ctx.backward_half = call, executor, backward_half
        ctx.save_for_backward(*parameters, *call.reread())
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(out for out, value in zip(outputs, call.program.frontier, strict=True) if not value.differentiable)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
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
        call: Call = ctx.call
        parameters = _unchanged(ctx)[: len(call.program.region_parameters)]
        begun = [(ctx.executor, ctx.backward_half)] if ctx.executor is not None else []
        ctx.executor = ctx.backward_half = None  # the kept graphs serve one backward; another one recomputes
        if not begun:
            call.schedule_plan = call.replan_keeping_nothing()

        def run(plan: Plan) -> list[torch.Tensor | None]:
            executor, backward_half = begun.pop() if begun else forward_half(call, plan)
            gradients = backpropagate(call, executor, backward_half, grads, parameters)
            call.record(plan, executor)
            return gradients

        with no_autocast():
            return (None, *_or_keeping_nothing(call, run))


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


def _or_keeping_nothing(call: Call, run: Callable[[Plan], Result]) -> Result:
    """`run` the call's plan; if memory does not suffice for what it keeps, once more with a plan that keeps nothing."""
    try:
        return run(call.schedule_plan)
    except torch.OutOfMemoryError:
        if not call.schedule_plan.keeps:
            raise
    # Outside of the handler: the error's traceback holds what the run had allocated.
    logger.warning(
        "dta: out of memory with activations kept from forward to backward: this call starts again and recomputes all "
        "of them (options={'memory_budget': BYTES} keeps fewer from the start)"
    )
    if call.device.type == "cuda":
        torch.cuda.empty_cache()
    call.schedule_plan = call.replan_keeping_nothing()
    call.context.note_plan(call.schedule_plan)
    return run(call.schedule_plan)


def forward_half(call: Call, plan: Plan) -> tuple[Executor, Sequence[Op]]:
    """Run a schedule up to its attach op; the executor, and what is left of the operations."""
    executor = call.executor(plan)
    executor.prepare_outputs(AllRows, training=plan.schedule.mode != "score")
    done = executor.run(plan.schedule.ops, on_attach=lambda sequences: False)
    return executor, plan.schedule.ops[done:]


def backpropagate(
    call: Call,
    executor: Executor,
    ops: Sequence[Op],
    grads: Sequence[torch.Tensor | None],
    parameters: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Run the backward half of a schedule; gradients of all region parameters (None for frozen ones)."""
    set_gradients(call, executor, grads)
    prepare_accumulators(executor, parameters)
    executor.run(ops, on_attach=lambda sequences: True)
    return finished_gradients(executor, parameters, {i for i, grad in enumerate(grads) if grad is not None})


def set_gradients(call: Call, executor: Executor, grads: Sequence[torch.Tensor | None]) -> None:
    """Sum dense gradients of the frontier onto head rows."""
    for i, (value, grad) in enumerate(zip(call.program.frontier, grads, strict=True)):
        if value.is_cache and grad is not None:
            raise gradient_of_cache(value)
        if i in executor.joint.differentiated and grad is not None:
            buffer = executor.row_buffer(i, AllRows, statistics_dtype(value.dtype))
            call.add_gradient(i, buffer, grad)
            executor.gradients[i] = buffer
    executor.active = rows_with_gradient(executor)


def gradient_of_cache(value: FrontierValue) -> RuntimeContractError:
    """The error for a loss that depends on returned keys or values, which are not followed back."""
    return RuntimeContractError(
        "a gradient reached the returned KV cache",
        expected="a loss that does not use past_key_values",
        got=f"a gradient for {value.node.name}",
        hint="pass use_cache=False",
    )


def rows_with_gradient(executor: Executor) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """`[H]` head rows with a gradient in any frontier value. Read once per backward: no chunk waits for the device."""
    active = torch.zeros(len(executor.head_rows), dtype=torch.bool, device=executor.path.device)
    for buffer in executor.gradients:
        if isinstance(buffer, AllRows):
            active |= (buffer.values[:-1] != 0).unsqueeze(-1).flatten(1).any(1)
    return active.cpu().numpy()


def prepare_accumulators(executor: Executor, parameters: Sequence[torch.Tensor]) -> None:
    executor.path.allocate_gradients()
    if executor.lease is not None:
        executor.accumulators = executor.lease.accumulators(parameters, executor.joint.grad_parameters)
        return
    executor.accumulators = [
        torch.zeros_like(parameters[i], dtype=statistics_dtype(parameters[i].dtype)).detach()
        for i in executor.joint.grad_parameters
    ]


def finished_gradients(
    executor: Executor, parameters: Sequence[torch.Tensor], used: set[int]
) -> list[torch.Tensor | None]:
    """Gradients of all region parameters; None, not zero, where none of the frontier values `used` depends on one."""
    gradients: list[torch.Tensor | None] = [None] * len(parameters)
    joint = executor.joint
    totals, executor.accumulators = executor.accumulators[::-1], []
    for i, sources in zip(joint.grad_parameters, joint.grad_sources, strict=True):
        total = totals.pop()  # so that a wide sum is gone before the next one is rounded to its parameter's dtype
        if sources & used:
            gradients[i] = total.to(parameters[i].dtype, copy=executor.lease is not None)  # a lease goes on using it
    return gradients
