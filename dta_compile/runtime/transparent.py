"""The transparent mode: a `torch.autograd.Function` between the dense world and the executor.

`dense_frontier` runs the first half of the schedule in the forward of a `TreeFunction` and the second half in its
backward, one such function per part of a chunk's stages. Any loss works on the outputs by ordinary autograd.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.executable.chunk import first_backward
from dta_compile.executable.executable import FrontierValue
from dta_compile.ops.products import AnySum
from dta_compile.plan import Op
from dta_compile.plan.tree.chunk import Chunk
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
from dta_compile.torch_compat.autograd import current_backward, is_batchedtensor, is_legacy_batchedtensor
from dta_compile.torch_compat.tensors import DisableAutocast

logger = logging.getLogger("dta_compile")

Result = TypeVar("Result")


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Switch autocast off: casts are explicit in the graphs, and autocast must not add others."""
    with DisableAutocast():
        yield


def is_batched(value: torch.Tensor) -> bool:
    """Return whether a tensor is batched by `torch.func.vmap` or the legacy `vmap`."""
    return bool(is_batchedtensor(value) or is_legacy_batchedtensor(value))


class ReachedValues:
    """Boundary values that gradients reach in a backward, collected from the last part to the first.

    Each backward begins with none, whether the one before came to its end or was stopped by an error in a hook.
    """

    def __init__(self) -> None:
        self._backward = -1
        self._values: set[int] = set()

    def in_this_backward(self) -> set[int]:
        """Return those of the backward that runs, to add to."""
        if self._backward != (backward := current_backward()):
            self._backward, self._values = backward, set()
        return self._values


class TreeRun:
    """Forward and backward of one part of a call's stages over all chunks, for a `TreeFunction`.

    Attributes:
        call: the call; replaced by one with a plan that keeps nothing after running out of memory.
        number: index of the part.
        chunks: chunks of the tree, in the order of the boundary values between parts.
        is_first: no earlier part goes backward, so that the backward of this part ends that of the call.
        is_last: the forward of this part ends that of the call.
        boundaries: boundary values that gradients reach, shared by all parts.
        executor: executor of the forward half, with the graphs kept for one backward; another backward recomputes.
        sums: sums of parameter gradients to go on with, from the group of subtrees that went backward before; None:
            they begin at zero.
        hands_over_sums: its sums stay in `sums` for the next group of subtrees, instead of becoming gradients.
        reached: positions of the outputs from which gradients have come into `sums`.
        stretch: the stretch of parts that it belongs to; None: its own node saves all that it receives.
        next_part: the part that runs after its backward.
    """

    def __init__(
        self, call: PlannedCall, number: int, chunks: Sequence[Chunk], is_first: bool, boundaries: ReachedValues
    ) -> None:
        self.call, self.number, self.part, self.chunks = call, number, call.parts[number], chunks
        self.is_first, self.is_last, self.boundaries = is_first, number + 1 == len(call.parts), boundaries
        self.executor: Executor | None = None
        self.backward_half: Sequence[Op] = ()
        self.sums: Sequence[AnySum | None] | None = None
        self.hands_over_sums, self.reached = False, set[int]()
        self.stretch: Stretch | None = None
        self.next_part = number - 1

    def is_differentiable(self, position: int) -> bool:
        """Return whether a result may get a gradient. A KV cache may not; a gradient for it is an error."""
        written = len(self.part.writes)
        sent = written * len(self.chunks)
        if position < sent:
            return position % written in self.part.graphs.differentiated
        return self.call.executable.frontier[self.part.frontier[position - sent]].differentiable

    @property
    def received(self) -> int:
        """Number of tensors received from other parts."""
        return len(self.part.reads) * len(self.chunks)

    def by_chunk(self, tensors: Sequence[Any], each: int) -> dict[Chunk, Sequence[Any]]:
        """Group tensors by chunk, `each` tensors per chunk."""
        return {chunk: tensors[i * each :][:each] for i, chunk in enumerate(self.chunks)} if each else {}

    def forward(self, received: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the forward half of the schedule; return values for later parts, then dense frontier values."""
        sent, rows = self.forward_rows(received)
        frontier = [
            None if (row_buffer := rows.pop(0)) is None else self.call.layout.expand(i, row_buffer)
            for i in self.part.frontier
        ]
        return [*sent, *frontier]

    def forward_rows(self, received: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[RowBuffer | None]]:
        """Run the forward half of the schedule; return values for later parts, and rows of frontier values."""
        chunk_inputs = self.by_chunk(received, len(self.part.reads))
        self.call, (executor, buffers, left) = _or_keeping_nothing(
            self.call, lambda call: forward_half(call, self.number, chunk_inputs)
        )
        if self.is_last and not left:
            self.call.record(executor)
        if self.call.by_stages:
            executor.leave_path()
        if executor.keeps or not self.call.by_stages:
            self.executor, self.backward_half = executor, left
        # Detached, because tensors of kept graphs would hold the autograd node that holds the graphs.
        sent = [value.detach() for chunk in self.chunks for value in buffers.sent.get(chunk, ())]
        return sent, list(buffers.outputs)

    def backward(
        self, grads: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Run the backward half; return gradients of the received values, then of the part's parameters.

        Args:
            kept: the received values, or if the part belongs to a stretch, what its node has saved of them.
        """
        layers = self.call.context.layers
        if layers is not None:
            layers.end_backward(self.number + 1)
        received = kept if self.stretch is None else self.stretch.received(self, kept)
        if layers is not None:
            layers.begin_backward(self.number, self.next_part)
        begun = [(self.executor, self.backward_half)] if self.executor is not None else []
        self.executor, self.backward_half = None, ()  # kept graphs serve one backward; another one recomputes
        chunk_inputs = self.by_chunk(received, len(self.part.reads))
        recomputes = self.call.by_stages and not self.call.plan.schedule.of_part(self.number).keeps
        call = self.call if begun or recomputes else self.call.keeping_nothing()

        def run(call: PlannedCall) -> list[torch.Tensor | None]:
            executor, backward_half = begun.pop() if begun else self._again(call, chunk_inputs)
            gradients = self._backpropagate(call, executor, backward_half, grads, chunk_inputs, parameters)
            if self.is_first:
                call.record(executor)
            return gradients

        with no_autocast():
            return _or_keeping_nothing(call, run)[1]

    def _again(self, call: PlannedCall, reads: Mapping[Chunk, Sequence[torch.Tensor]]) -> tuple[Executor, Sequence[Op]]:
        """Return an executor and the ops of the backward half, for a backward without kept graphs."""
        if not call.by_stages:
            executor, _, left = forward_half(call, self.number, reads)
            return executor, left
        return call.executor(self.part), call.plan.schedule.of_part(self.number).halves[1]

    def _backpropagate(
        self,
        call: PlannedCall,
        executor: Executor,
        ops: Sequence[Op],
        grads: Sequence[torch.Tensor | None],
        received: Mapping[Chunk, Sequence[torch.Tensor]],
        parameters: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        part, joint, lease, written = self.part, self.part.graphs, executor.lease, len(self.part.writes)
        sent = written * len(self.chunks)
        used = {i for i, grad in enumerate(grads[sent:], written) if grad is not None}
        reached = self.boundaries.in_this_backward()
        used |= {i for i, value in enumerate(part.writes) if value in reached}
        if not used:
            return [None] * (self.received + len(parameters))
        reached |= {part.reads[i] for i in joint.differentiated_reads}
        if call.by_stages:
            executor.enter_path(call.path(part))
        gradients, active = row_gradients(call, executor, grads[sent:]), None
        executor.path.allocate_gradients()
        totals = accumulators(joint, parameters, lease, self.sums)
        if part.frontier:  # synchronises, so as late as possible
            active = rows_with_gradient(gradients, len(executor.head_rows), executor.path.device)
            active = call.context.ranks.with_gradient(active, [grad is not None for grad in grads[sent:]])
        buffers = ScheduleBuffers(
            (),
            gradients,
            tuple(totals),
            active,
            received=received,
            gradients_of_sent=self.by_chunk(grads[:sent], written),
        )
        executor.run(ops, buffers, on_attach=lambda sequences: True)
        of_received = buffers.gradients_of_received
        del buffers
        self.sums, self.reached, nothing = None, used, [None] * len(part.reads)
        if self.hands_over_sums:
            self.sums = totals
            return [grad for chunk in self.chunks for grad in of_received.get(chunk, nothing)]
        of_parameters = finished_gradients(joint, totals, parameters, used)
        return [*(grad for chunk in self.chunks for grad in of_received.get(chunk, nothing)), *of_parameters]


class Stretch:
    """Consecutive parts of which only the values that enter from earlier parts are kept for the backward.

    Values that they pass to each other are computed again. A backward can begin at the last part, or at an earlier one
    with frontier values, so the autograd nodes of all of these save the kept values. The node that goes backward first
    runs the parts before it forward again.

    Attributes:
        parts: numbers of its parts.
        runs: runs of its parts so far.
        kept: until the last part has run forward: the values to keep, a tensor per chunk.
        values: in a backward, all values that parts still to go backward receive.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self.parts = parts
        self.runs: list[TreeRun] = []
        self.kept: dict[int, Sequence[torch.Tensor]] = {}
        self.values: dict[int, Sequence[torch.Tensor]] = {}
        self._written: set[int] = set()
        self._saved: dict[int, int] = {}  # by part, how many of the values to keep its node saves
        self._lowest_backward = parts[-1]  # number of the earliest part that goes backward

    def begin(self, run: TreeRun, crossing: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Note what a part receives, before its forward."""
        self.kept |= {value: crossing[value] for value in run.part.reads if value not in self._written}
        self._written |= {*run.part.writes}
        self.runs.append(run)

    def to_save(self, run: TreeRun, goes_backward: bool) -> list[torch.Tensor]:
        """Return the tensors that the node of a part saves."""
        if goes_backward:
            self._lowest_backward = min(self._lowest_backward, run.number)
        kept, is_last = self.kept, run.number == self.parts[-1]
        if not (is_last or run.part.frontier):
            return []
        self._saved[run.number] = len(kept)
        if is_last:
            self.kept = dict.fromkeys(kept, ())
        return [tensor for tensors in kept.values() for tensor in tensors]

    def saved(self, run: TreeRun) -> int:
        """Return the number of these tensors."""
        return self._saved.get(run.number, 0) * len(run.chunks)

    def parameters_before(self, run: TreeRun) -> list[torch.Tensor]:
        """Return the parameters of earlier parts, which the node of a part may run forward again."""
        if run.number not in self._saved:
            return []
        return [p for before in self.runs if before is not run for p in run.call.parameters(before.part)]

    def received(self, run: TreeRun, saved: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what a part receives, for its backward, from what its node has saved."""
        chunks = len(run.chunks)
        if any(value not in self.values for value in run.part.reads):  # the first one to go backward
            kept = list(self.kept)[: self._saved[run.number]]
            self.values = {value: saved[i * chunks :][:chunks] for i, value in enumerate(kept)}
            self._run_again([before for before in self.runs if before.number < run.number])
        for value in run.part.writes:  # all that read it have gone backward
            self.values.pop(value, None)
        received = [self.values[value][i] for i in range(chunks) for value in run.part.reads]
        if run.number == self._lowest_backward:
            self.values = {}
        return received

    def _run_again(self, runs: Sequence[TreeRun]) -> None:
        layers = self.runs[0].call.context.layers
        needed = {value for run in self.runs for value in run.part.reads}
        for run in runs:
            if layers is not None:
                layers.begin(run.number)
            with no_autocast():
                received = [self.values[value][i] for i in range(len(run.chunks)) for value in run.part.reads]
                sent, _ = run.forward_rows(received)
            if layers is not None:
                (layers.end if run is not runs[-1] else layers.end_again)(run.number)
            written = len(run.part.writes)
            self.values |= {v: sent[i::written] for i, v in enumerate(run.part.writes) if v in needed}


class TreeFunction(torch.autograd.Function):
    """Autograd function of one part of a call.

    Maps the values received from earlier parts and the part's parameters to the values sent to later parts, chunk by
    chunk, and dense frontier values. The first input and output is a dummy link between the parts (None if there is
    one part): it makes every part go backward, from the last to the first, because other ranks wait for the gather and
    reduction of each.
    """

    @staticmethod
    def forward(
        ctx: Any, run: TreeRun, link: torch.Tensor | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Run the forward half.

        Args:
            tensors: received values, then parameters.

        Returns:
            The link, values for later parts, then frontier values (None for those not wanted).
        """
        received, parameters = tensors[: run.received], tensors[run.received :]
        outputs = run.forward(received)
        ctx.run = run
        kept = received if run.stretch is None else run.stretch.to_save(run, any(ctx.needs_input_grad))
        of_earlier = [] if run.stretch is None else run.stretch.parameters_before(run)
        save(ctx, kept, (*parameters, *run.call.reread()), of_earlier)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(out for i, out in enumerate(outputs) if out is not None and not run.is_differentiable(i))
        )
        return (None if link is None else link.clone(), *outputs)

    @staticmethod
    @torch.compiler.disable  # else Dynamo would trace it in a compiled function that calls backward()
    def backward(ctx: Any, link: torch.Tensor | None, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run the backward half; return a gradient or None for every input of `forward`.

        Raises:
            RuntimeContractError: under create_graph=True, or for batched gradients.
        """
        check_gradients(grads)
        run: TreeRun = ctx.run
        saved, kept = unchanged(ctx), run.received if run.stretch is None else run.stretch.saved(run)
        parameters = saved[kept : kept + len(run.call.parameters(run.part))]
        gradients = run.backward(grads, saved[:kept], parameters)
        return (None, torch.zeros(1, device="cpu") if run.call.by_stages else None, *gradients)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        """Raise RuntimeContractError: forward-mode derivatives are not supported."""
        raise RuntimeContractError(
            "a call over the prefix tree has no derivative in forward mode",
            expected="gradients by backward() or torch.autograd.grad",
            got="forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad)",
            hint="take directional derivatives in eager mode",
        )


def check_gradients(grads: Sequence[torch.Tensor | None]) -> None:
    """Raise RuntimeContractError if a backward is to be differentiated again, or gradients come in batches."""
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


def save(
    ctx: Any, computed: Sequence[torch.Tensor], given: Sequence[torch.Tensor], read: Sequence[torch.Tensor] = ()
) -> None:
    """Save computed tensors and tensors of the user's for the backward, for `unchanged`.

    Args:
        read: further tensors that the backward reads where they are. FSDP2 may have freed their memory by now, so that
            hooks on saved tensors must not get them.
    """
    ctx.save_for_backward(*computed, *given)
    ctx.memory = [(t, t.untyped_storage(), t._version) for t in (*given, *read) if not t.is_inference()]


def unchanged(ctx: Any) -> tuple[torch.Tensor, ...]:
    """Return what `save` saved; raise RuntimeContractError if one was changed in place since the forward."""
    try:
        saved = tuple(ctx.saved_tensors)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise _changed(str(error).split(" Hint:")[0]) from error
    for tensor, memory, version in ctx.memory:
        if tensor._version != version:  # under `saved_tensors_hooks` torch does not compare them
            raise _changed(f"a tensor {list(tensor.shape)} is at version {tensor._version}; expected version {version}")
        if tensor.untyped_storage()._cdata != memory._cdata:  # FSDP2 frees and fills memory, but never exchanges it
            raise _changed(f"other memory of a tensor {list(tensor.shape)}: its `.data` was set")
    return saved


def _changed(got: str) -> RuntimeContractError:
    return RuntimeContractError(
        "a parameter, buffer or input of the compiled call was changed in place before its backward",
        expected="the same values, which chunks read again (eager mode may have saved none of them)",
        got=got,
        hint="call backward first, or write to a copy",
    )


def _or_keeping_nothing(call: PlannedCall, run: Callable[[PlannedCall], Result]) -> tuple[PlannedCall, Result]:
    """Run a call; if it runs out of memory, run it again with a plan that keeps no graphs."""
    try:
        return call, run(call)
    except torch.OutOfMemoryError:
        if not call.plan.keeps or call.context.ranks.several:  # other ranks are in the middle of the same run
            raise
    # Outside of the handler, because the traceback of the error holds the allocations of the run.
    logger.warning(
        "dta: out of memory with activations kept from forward to backward: this call starts again and recomputes all "
        "of them (options={'memory_budget': BYTES} keeps fewer from the start)"
    )
    if call.device.type == "cuda":
        torch.cuda.empty_cache()
    call = call.keeping_nothing()
    call.context.note_plan(call.plan)
    return call, run(call)


def dense_frontier(call: PlannedCall) -> list[torch.Tensor | None]:
    """Run the forward of all parts; return the dense frontier values, with autograd history (None: not wanted)."""
    frontier: list[torch.Tensor | None] = [None] * len(call.executable.frontier)
    crossing: dict[int, list[torch.Tensor]] = {}  # boundary values: a tensor per chunk
    parts, chunks = call.parts, call.plan.schedule.chunks if call.by_stages else ()
    link, layers, boundaries = torch.zeros(1) if call.by_stages else None, call.context.layers, ReachedValues()
    last_read = {value: number for number, part in enumerate(parts) for value in part.reads}
    first = first_backward(parts)
    stretches = _stretches(call, len(parts))
    for number, part in enumerate(parts):
        run = TreeRun(call, number, chunks, number == first, boundaries)
        run.stretch, run.next_part = stretches[number]
        if run.stretch is not None:
            run.stretch.begin(run, crossing)
        received = [crossing[value][i] for i in range(len(chunks)) for value in part.reads]
        if layers is not None:
            layers.begin(number)
        link, *outputs = TreeFunction.apply(run, link, *received, *call.parameters(part))
        if layers is not None:
            layers.end(number)
        call = run.call
        del received
        for value in part.reads:
            if last_read[value] == number:
                del crossing[value]
        sent = len(part.writes) * len(chunks)
        crossing |= {value: outputs[i : sent : len(part.writes)] for i, value in enumerate(part.writes)}
        for i, output in zip(part.frontier, outputs[sent:], strict=True):
            frontier[i] = output
    return frontier


def _stretches(call: PlannedCall, parts: int) -> list[tuple[Stretch | None, int]]:
    """Return by part its stretch, if that has several parts, and the part that runs after its backward."""
    by_part: list[tuple[Stretch | None, int]] = []
    before = range(-1, 0)
    for numbers in call.plan.schedule.stretches(parts):
        stretch = Stretch(numbers) if len(numbers) > 1 else None
        by_part += [(stretch, number - 1 if number > numbers[0] else before[0]) for number in numbers]
        before = numbers
    return by_part


def forward_half(
    call: PlannedCall, number: int, received: Mapping[Chunk, Sequence[torch.Tensor]]
) -> tuple[Executor, ScheduleBuffers, Sequence[Op]]:
    """Run a part's schedule up to its attach op; return the executor, its buffers and the remaining ops."""
    part, schedule = call.parts[number], call.plan.schedule.of_part(number)
    executor, training = call.executor(part), schedule.mode != "score"
    heads, device = len(executor.head_rows), executor.path.device
    wanted = [call.wanted[i] for i in part.frontier]
    outputs = output_buffers(AllRows, executor.frontier, wanted, heads, device, training)
    buffers = ScheduleBuffers(outputs, received=received)
    left = executor.run(schedule.ops, buffers, on_attach=lambda sequences: False)
    if executor.path.fillers:
        call.context.ranks.check(executor.path.require_hidden)
    return executor, buffers, left


def row_gradients(
    call: PlannedCall, executor: Executor, grads: Sequence[torch.Tensor | None]
) -> list[RowBuffer | None]:
    """Sum the dense gradients of a part's frontier values onto head rows."""
    buffers: list[RowBuffer | None] = []
    part, first = executor.part, len(executor.part.writes)
    for i, (number, value, grad) in enumerate(zip(part.frontier, executor.frontier, grads, strict=True), first):
        if value.is_cache and grad is not None:
            raise gradient_of_cache(value)
        buffer = None
        if i in executor.joint.differentiated and grad is not None:
            buffer = gradient_buffer(AllRows, value, len(executor.head_rows), executor.path.device)
            call.layout.add_gradient(number, buffer, grad)
        buffers.append(buffer)
    return buffers


def gradient_of_cache(value: FrontierValue) -> RuntimeContractError:
    """Return the error for a loss that depends on returned keys or values: no gradient goes through the KV cache."""
    return RuntimeContractError(
        "a gradient reached the returned KV cache",
        expected="a loss that does not use past_key_values",
        got=f"a gradient for {value.name}",
        hint="pass use_cache=False",
    )
