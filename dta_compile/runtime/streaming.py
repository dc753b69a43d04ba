"""The streaming mode: evaluate each row's loss and backpropagate its suffix during one walk over the tree.

This is the loop of the paper, called by `dta_compile.streaming_step`. The compiled callable runs first, with stand-ins
for the outputs of its graph, so that Dynamo's code builds the return value. Then the schedule runs: each `attach` op
gives the rows of the returned tensors to the loss of the sequences that it names.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dta_compile.errors import RefusalError, RuntimeContractError
from dta_compile.executable.executable import NoRowEpilogue, NumberSpec, Output, RowEpilogue, TensorSpec
from dta_compile.integrations.fully_shard import held
from dta_compile.runtime.calls.executor import Executor
from dta_compile.runtime.calls.planned_call import PlannedCall
from dta_compile.runtime.calls.schedule_buffers import (
    ScheduleBuffers,
    accumulators,
    finished_gradients,
    gradient_buffer,
    output_buffers,
)
from dta_compile.runtime.interception import Intercepted, intercept
from dta_compile.runtime.rows.buffers import PathRows
from dta_compile.runtime.rows.gradients import RowGradients
from dta_compile.runtime.stand_in import StandIns, tensors_of
from dta_compile.runtime.transparent import gradient_of_cache, no_autocast
from dta_compile.runtime.upstream_values import noticing_gradients

aten = torch.ops.aten


def step(
    compiled: Callable[..., Any],
    loss_fn: Callable[..., torch.Tensor],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    log: Callable[[str], None],
) -> list[torch.Tensor]:
    """Run one streaming step of a compiled callable; see `dta_compile.streaming_step`."""
    stream = Stream()
    with held() as reduce:
        with intercept(stream.begin):
            returned = compiled(*args, **kwargs)
        if stream.call is None:
            log(f"the outputs of a streaming step exist for the whole batch: {stream.why_whole}")
            return _whole(tensors_of(returned), loss_fn)
        sources = stream.sources(tensors_of(returned))
        stream.in_return_value = stream.stand_ins.alive(expected=[i for i in sources if isinstance(i, int)])
        del returned
        stream.refuse_other_places(sources)
        losses = stream.run(sources, loss_fn)
        reduce()
    return losses


def _whole(outputs: Sequence[torch.Tensor], loss_fn: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Run the step on outputs of the whole batch, for a call that was not streamed."""
    if not outputs:
        raise RefusalError(
            "the compiled function returns no tensors, so its rows cannot be told", expected="outputs [rows, ...]"
        )
    rows = outputs[0].shape[0] if outputs[0].dim() else 0
    for output in outputs:
        _require_rows(output, rows)
    losses = [_checked(loss_fn(row, *(output[row] for output in outputs)), row) for row in range(rows)]
    with_gradient = [loss for loss in losses if loss.requires_grad]
    if losses and not with_gradient:
        raise RefusalError(
            "no loss of this step has a gradient",
            expected="a call with gradients for the model, or a loss_fn with parameters of its own",
            got="parameters that are all frozen, or outputs that are detached",
            hint="print(dta_compile.explain(...)) says how the call runs",
        )
    if with_gradient:
        torch.autograd.backward(with_gradient)
    return [loss.detach() for loss in losses]


def _require_rows(output: torch.Tensor, rows: int) -> None:
    if not output.dim() or output.shape[0] != rows:
        raise RefusalError(
            "an output of the compiled function has no batch axis in front",
            expected=f"outputs [{rows}, ...], a row for every sequence",
            got=f"{tuple(output.shape)}",
            hint="compute what belongs to no sequence in loss_fn, or outside of the compiled function",
        )


def _checked(loss: Any, row: int) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"{tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise RuntimeContractError(
            "loss_fn did not return a scalar tensor", where=f"row {row}", expected="the loss of one row", got=got
        )
    return loss


class Stream:
    """Streamed call: begun when its engine is called, run when the compiled function has returned."""

    def __init__(self) -> None:
        self.call: PlannedCall | None = None
        self.stand_ins = StandIns()
        self.in_return_value: set[int] = set()
        self.why_whole = "it ran no training graph over a tree"

    def begin(self, engine: Intercepted, args: Sequence[Any]) -> tuple[Any, ...] | None:
        """Plan the call; return the graph's outputs, as stand-ins where they do not exist for the whole batch.

        Returns None, so that the engine runs as usual, where the call cannot be streamed.
        """
        executable = engine.executable
        if not executable.training:
            return None  # its outputs exist for the whole batch
        if isinstance(executable.row_epilogue, NoRowEpilogue):
            raise _mixes_sequences(executable.row_epilogue)
        call = engine.planned(args, "streaming")
        call.predict_peak()
        if call.plan.segments is not None:
            self.why_whole = "rows are packed, and the loss of a row needs all of its sequences at one time"
            return None
        if call.context.ranks.several:
            self.why_whole = "ranks of a tensor-parallel group run the model together, in an order set beforehand"
            return None
        engine.check_padding_of(call)
        self.call = call
        return tuple(self._output(i, output) for i, output in enumerate(executable.outputs))

    def _output(self, position: int, output: Output) -> Any:
        call = self.call
        assert call is not None
        if output.input is not None:
            return call.args[output.input]
        if output.slot is not None:
            return call.dense[output.slot]
        match output.value:
            case NumberSpec() as number:
                return call.context.sizes.number(number, call.args)
            case TensorSpec() as tensor:
                shape = call.context.sizes.shape(tensor.shape, call.args)
                return self.stand_ins.make(position, tensor, shape, output.where)
        return output.value

    def sources(self, returned: Sequence[torch.Tensor]) -> list[int | torch.Tensor]:
        """Return for each returned tensor the position of its output, or the tensor itself if it has values."""
        assert self.call is not None
        sources: list[int | torch.Tensor] = []
        for tensor in returned:
            position = self.stand_ins.position(tensor)
            if position is None:
                _require_rows(tensor, self.call.batch)
            sources.append(tensor if position is None else position)
        return sources

    def refuse_other_places(self, sources: Sequence[int | torch.Tensor]) -> None:
        """Raise RefusalError if a stand-in does not go to loss_fn; a returned KV cache need not."""
        assert self.call is not None
        stored = self.stand_ins.alive()
        if stored:
            raise RefusalError(
                "the compiled function stores a value outside of what it returns: in a streaming step the value never"
                " exists for the whole batch",
                where=self.stand_ins.where(min(stored)),
                expected="outputs that are returned",
                got=f"{len(stored)} stored in an attribute, a list or a global variable",
                hint="return the value, and store what you need of it in loss_fn",
            )
        outputs = self.call.executable.outputs
        if lost := [i for i in self.in_return_value - set(sources) if not outputs[i].is_cache]:
            raise RefusalError(
                "the compiled function returns tensors in an object that loss_fn cannot be given the rows of",
                where=outputs[lost[0]].where,
                expected="tensors in tuples, lists, mappings or dataclasses",
                got=f"{len(lost)} in objects of other classes",
                hint="return the tensors themselves",
            )

    def run(self, sources: Sequence[int | torch.Tensor], loss_fn: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """Run the schedule, add the gradients to the parameters, and return the loss of each row."""
        call = self.call
        assert call is not None
        executable = call.executable
        loss_fn = _under_current_autocast(loss_fn)
        with no_autocast():
            executor = call.executor()
            parameters = call.parameters(executable.whole)
            executor.path.allocate_gradients()
            totals = accumulators(executor.joint, parameters, executor.lease)
            buffers = _buffers(call, executor)
            rows = _Rows(call, buffers, sources, loss_fn)
            with_sums = dataclasses.replace(buffers, accumulators=tuple(totals))
            executor.run(call.plan.schedule.ops, with_sums, on_attach=rows.attach)
            del with_sums
            if executor.path.fillers:
                executor.path.require_hidden()
            call.record(executor)
            gradients = finished_gradients(executor.joint, totals, parameters, rows.used)
            rows.refuse_padding(gradients)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    rows.gradients.add(parameter, gradient)
            rows.gradients.send()
        return [rows.losses[row] for row in range(call.batch)]


def _mixes_sequences(why: NoRowEpilogue) -> RefusalError:
    return RefusalError(
        "the compiled function mixes sequences, so its outputs do not exist one sequence at a time",
        where=why.where,
        expected="outputs with the batch axis in front, each row computed from its own sequence",
        got=why.reason,
        hint="compile the part up to per-token values, and put the loss of one sequence in loss_fn",
    )


def _under_current_autocast(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the user's loss under the autocast of the caller: unlike the graphs, it has no explicit casts."""
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    dtypes = [torch.get_autocast_dtype(device) for device in devices]

    def run(*args: Any) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            for device, dtype in zip(devices, dtypes, strict=True):
                stack.enter_context(torch.autocast(device, dtype))
            return function(*args)

    return run


def _buffers(call: PlannedCall, executor: Executor) -> ScheduleBuffers:
    frontier, heads, device = call.executable.frontier, len(executor.head_rows), executor.path.device
    differentiated = executor.joint.differentiated
    gradients = [
        gradient_buffer(PathRows, value, heads, device) if i in differentiated else None
        for i, value in enumerate(frontier)
    ]
    outputs = output_buffers(PathRows, frontier, call.wanted, heads, device, training=True)
    return ScheduleBuffers(outputs, gradients)


class _Rows:
    """Losses row by row: dense outputs of the row, its loss, and the gradients summed onto head rows."""

    def __init__(
        self,
        call: PlannedCall,
        buffers: ScheduleBuffers,
        sources: Sequence[int | torch.Tensor],
        loss_fn: Callable[..., torch.Tensor],
    ) -> None:
        self.call, self.buffers, self.sources, self.loss_fn = call, buffers, sources, loss_fn
        self.streamed = {source for source in sources if isinstance(source, int)}
        self.losses: dict[int, torch.Tensor] = {}
        self.used: set[int] = set()  # frontier values that a loss sends gradients to
        self.gradients = RowGradients()  # of the epilogue and the loss for other leaves, such as parameters
        self.at_padding: dict[int, list[torch.Tensor]] = {}  # by frontier value: entries at padding with a gradient
        epilogue = call.executable.row_epilogue
        assert isinstance(epilogue, RowEpilogue)
        slots = [call.dense[slot] for slot in call.executable.epilogue_slots]
        self.epilogue = epilogue.code.function
        self.inputs = list(zip(call.args, epilogue.input_dims, strict=True))
        self.dense = list(zip(slots, epilogue.dense_dims, strict=True))

    def attach(self, sequences: tuple[int, ...]) -> bool:
        for row in sequences:
            self._row(row)
        return True

    def refuse_padding(self, of_parameters: Sequence[torch.Tensor | None]) -> None:
        """Raise if a loss has a gradient at padding. Run once after all rows: it synchronises the device."""
        for i, masks in self.at_padding.items():
            if masks:
                self.call.layout.refuse_padding(i, torch.cat(masks), of_parameters)

    def _row(self, row: int) -> None:
        leaves = [self._leaf(i, row) for i in range(len(self.buffers.outputs))]
        self.gradients.begin_row()
        with torch.enable_grad():
            outputs = self._outputs(row, leaves)
            rows = [outputs[source] if isinstance(source, int) else source[row] for source in self.sources]
            loss = _checked(self.loss_fn(row, *rows), row)
        if any(leaf.grad is not None for leaf in leaves):
            raise RuntimeContractError(
                "loss_fn went backward itself, and its gradients end at the row",
                where=f"row {row}",
                expected="a loss that is returned: streaming_step goes backward from it",
                got="backward() inside of loss_fn",
                hint="return the sum of all losses of the row; torch.autograd.grad may take gradients of the outputs",
            )
        self.losses[row] = loss.detach()
        if not loss.requires_grad:
            return
        for i, grad in enumerate(self.gradients.of_row(loss, leaves)):
            if grad is not None:
                self._add(i, grad, row)

    def _leaf(self, index: int, row: int) -> torch.Tensor:
        value, buffer = self.call.executable.frontier[index], self.buffers.outputs[index]
        assert buffer is not None, "a streaming step computes all frontier values"
        dense = self.call.layout.expand(index, buffer, row)
        return dense.requires_grad_(self.buffers.gradients[index] is not None or value.is_cache)

    def _add(self, index: int, grad: torch.Tensor, row: int) -> None:
        value, buffer = self.call.executable.frontier[index], self.buffers.gradients[index]
        if buffer is None:
            raise gradient_of_cache(value)
        at_padding = self.call.layout.add_row_gradient(index, buffer, grad, row)
        self.at_padding.setdefault(index, []).extend([] if at_padding is None else [at_padding])
        self.used.add(index)

    def _outputs(self, row: int, leaves: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Run the row epilogue: the graph's outputs for one row, without batch axis; None where loss_fn gets none."""
        batch = self.call.batch
        inputs, dense = ([_cut(value, dim, row, batch) for value, dim in pairs] for pairs in (self.inputs, self.dense))
        # Same memory, but not autograd leaves: loss_fn may write to its outputs in place.
        frontier = [aten._unsafe_view(leaf, leaf.shape) for leaf in leaves]
        outputs = self.epilogue(batch, *inputs, *frontier, *dense)
        of_row = [output[0] if i in self.streamed else None for i, output in enumerate(outputs)]
        return noticing_gradients(of_row, self.call.executable.outputs)


def _cut(value: Any, dim: int | None, row: int, batch: int) -> Any:
    """Cut a dense value to one row of the batch, if it has a batch axis."""
    if dim is None:
        return value
    length = value.shape[dim] // batch
    return value.narrow(dim, row * length, length)
