"""The paper's own loop: losses attached and suffixes backpropagated while the tree is walked, in one pass."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dta_compile.errors import RefusalError
from dta_compile.passes.attention_op import statistics_dtype
from dta_compile.passes.program import Axis, Layout
from dta_compile.runtime.row_buffer import PathRows

if TYPE_CHECKING:
    from dta_compile.runtime.call import Call
    from dta_compile.runtime.engine import Engine
    from dta_compile.runtime.executor import Executor


class Intercepted(BaseException):
    """Leaves a compiled call whose engine did something else than return its outputs."""


@dataclasses.dataclass
class Interception:
    """What the next engine call of this thread does in place of its work, and what came of it."""

    handler: Callable[[Engine, Sequence[Any]], Any]
    result: Any = None


_active = threading.local()


@contextlib.contextmanager
def intercept(handler: Callable[[Engine, Sequence[Any]], Any]) -> Iterator[Interception]:
    """Within the block, the first engine call runs `handler(engine, inputs)` and then raises `Intercepted`."""
    interception = Interception(handler)
    _active.interception = interception
    try:
        yield interception
    finally:
        _active.interception = None


def handle(engine: Engine, args: Sequence[Any]) -> None:
    """Called by every engine at its start."""
    interception = getattr(_active, "interception", None)
    if interception is not None:
        _active.interception = None
        interception.result = interception.handler(engine, args)
        raise Intercepted


def step(
    compiled: Callable[..., Any], loss_fn: Callable[..., torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """One streaming step of a compiled callable; see `dta_compile.streaming_step`."""
    with intercept(lambda engine, inputs: stream(engine, loss_fn, inputs)) as interception:
        try:
            compiled(*args, **kwargs)
        except Intercepted:
            return interception.result
    raise _not_streamed()


def _not_streamed() -> RefusalError:
    return RefusalError(
        "the call ran no training graph over a tree, so it cannot be streamed",
        expected="a call with gradients for the model, more than one token, and scaled_dot_product_attention",
        got="a call that ran as captured, or forward only",
        hint="print(dta_compile.explain(...)) says why",
    )


def stream(engine: Engine, loss_fn: Callable[..., torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
    """Run a call's schedule in streaming mode and add the gradients to the parameters."""
    from dta_compile.runtime.transparent import finished_gradients, no_autocast, prepare_accumulators

    program = engine.program
    if not program.training:
        raise _not_streamed()
    if program.mixes_sequences is not None:
        raise RefusalError(
            "the compiled function mixes sequences, so its outputs do not exist one sequence at a time",
            expected="outputs with the batch axis in front, each row computed from its own sequence",
            got=program.mixes_sequences,
            hint="compile the part up to per-token values, and put the loss of one sequence in loss_fn",
        )
    loss_fn = _under_current_autocast(loss_fn)
    call = engine.planned(args, "streaming")
    plan = call.schedule_plan
    with no_autocast():
        executor = call.executor(plan)
        parameters = [args[spec.index] for spec in program.region_parameters]
        prepare_accumulators(executor, parameters)
        executor.outputs = [executor.row_buffer(i, PathRows, v.dtype) for i, v in enumerate(program.frontier)]
        for i in executor.joint.differentiated:
            executor.gradients[i] = executor.row_buffer(i, PathRows, statistics_dtype(program.frontier[i].dtype))
        rows = _Rows(call, executor, loss_fn)
        executor.run(plan.schedule.ops, on_attach=rows.attach)
        rows.refuse_padding()
        call.record(plan, executor)
        pending = dict(rows.gradients)
        for parameter, gradient in zip(parameters, finished_gradients(executor, parameters, rows.used), strict=True):
            if gradient is not None:
                pending[parameter] = pending[parameter] + gradient if parameter in pending else gradient
        if pending:
            torch.autograd.backward(list(pending), list(pending.values()))
    return [rows.losses[row] for row in range(call.batch)]


def _under_current_autocast(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The user's loss runs as outside the compiled call: its casts are left to autocast, unlike the graphs'."""
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    dtypes = [torch.get_autocast_dtype(device) for device in devices]

    def run(*args: Any) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            for device, dtype in zip(devices, dtypes, strict=True):
                stack.enter_context(torch.autocast(device, dtype))
            return function(*args)

    return run


class _Rows:
    """Losses of single rows: dense outputs of one row, its loss, and the gradient back on the tree's rows."""

    def __init__(self, call: Call, executor: Executor, loss_fn: Callable[..., torch.Tensor]) -> None:
        self.call, self.executor, self.loss_fn = call, executor, loss_fn
        self.losses: dict[int, torch.Tensor] = {}
        self.used: set[int] = set()  # frontier values that a loss sends gradients to
        # Gradients that the epilogue and the loss send to parameters directly.
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.at_padding: dict[int, list[torch.Tensor]] = {}  # by frontier value: which entries there have gradients

    def attach(self, sequences: tuple[int, ...]) -> bool:
        for row in sequences:
            self._row(row)
        return True

    def refuse_padding(self) -> None:
        """Raise if a loss sent gradients to padding. Asking waits for the device: once, when all rows are through."""
        for i, found in self.at_padding.items():
            if found:
                self.call.refuse_padding(i, torch.cat(found))

    def _row(self, row: int) -> None:
        call, program = self.call, self.call.program
        leaves = []
        for i in range(len(program.frontier)):
            dense = call.expand_row(i, self.executor.outputs[i], row)
            leaves.append(dense.requires_grad_(self.executor.gradients[i] is not None))
        with torch.enable_grad():
            outputs = call.engine.epilogue(self._row_args(row), self._row_dense(row), leaves)
            loss = self.loss_fn(row, *(out[0] for out in self._shown(outputs)))
        self.losses[row] = loss.detach()
        if not loss.requires_grad:
            return
        frontier = [leaf for leaf in leaves if leaf.requires_grad]
        others = _leaves_of(loss, frontier)  # parameters that the epilogue or the loss itself uses
        grads = iter(torch.autograd.grad(loss, [*frontier, *others], allow_unused=True))
        for i in range(len(leaves)):
            buffer = self.executor.gradients[i]
            if buffer is not None and (grad := next(grads)) is not None:
                at_padding = call.add_row_gradient(i, buffer, grad, row)
                self.at_padding.setdefault(i, []).extend([] if at_padding is None else [at_padding])
                self.used.add(i)
        for parameter, grad in zip(others, grads, strict=True):
            if grad is not None:
                known = self.gradients.get(parameter)
                self.gradients[parameter] = grad if known is None else known + grad

    def _shown(self, outputs: Sequence[Any]) -> list[torch.Tensor]:
        """The tensor outputs, without a returned KV cache."""
        caches = {value.node for value in self.call.program.frontier if value.is_cache}
        nodes = self.call.program.outputs
        return [
            out
            for out, node in zip(outputs, nodes, strict=True)
            if isinstance(out, torch.Tensor) and node not in caches
        ]

    def _row_args(self, row: int) -> list[Any]:
        program = self.call.program
        args = []
        for arg, node in zip(self.call.args, program.placeholders, strict=True):
            value = node.meta["val"]
            if isinstance(value, torch.SymInt) and value.node.expr == program.batch:
                args.append(1)
            else:
                args.append(self._cut(arg, program.values.get(node), row))
        return args

    def _row_dense(self, row: int) -> dict[Any, torch.Tensor]:
        values = self.call.program.values
        return {node: self._cut(value, values[node], row) for node, value in self.call.dense.items()}

    def _cut(self, value: Any, layout: Any, row: int) -> Any:
        """A dense value cut to one row of the batch, if it has a batch axis."""
        axes = layout.dims if isinstance(layout, Layout) else ()
        for axis in (Axis.BATCH, Axis.ROWS):
            if axis in axes:
                dim = axes.index(axis)
                length = value.shape[dim] // self.call.batch
                return value.narrow(dim, row * length, length)
        return value


def _leaves_of(loss: torch.Tensor, known: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaf tensors that a loss sends gradients to, besides those that are known."""
    seen, pending = set(), [loss.grad_fn]
    found: dict[torch.Tensor, None] = {}
    while pending:
        function = pending.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        variable = getattr(function, "variable", None)
        if isinstance(variable, torch.Tensor):
            found[variable] = None
        pending.extend(following for following, _ in function.next_functions)
    if loss.grad_fn is None:
        found[loss] = None
    excluded = {id(tensor) for tensor in known}
    return [tensor for tensor in found if id(tensor) not in excluded]
