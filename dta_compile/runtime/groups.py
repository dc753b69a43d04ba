"""A sweep of stages over groups of subtrees, one group after another (see `plan.schedule.Schedule`).

Forward, each group goes through all parts for its outputs, and its values between parts are freed, except those of the
last group. Backward, the node of the outputs takes their gradients and runs all groups but the first, the last one
first: forward once more, if its values are not there, then backward. The node of each part then runs the first group's
backward, and returns the sums over all groups as gradients of its parameters. So a parameter's gradient arrives once,
the last part's first, as without groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from dta_compile.executable.chunk import Part, first_backward
from dta_compile.ops.products import AnySum, Sum
from dta_compile.runtime.calls.planned_call import PlannedCall
from dta_compile.runtime.calls.schedule_buffers import output_buffers
from dta_compile.runtime.rows.buffers import AllRows, RowBuffer
from dta_compile.runtime.rows.upload import upload
from dta_compile.runtime.transparent import (
    ReachedValues,
    TreeFunction,
    TreeRun,
    check_gradients,
    no_autocast,
    save,
    unchanged,
)

Gradients = Sequence[torch.Tensor | None]


def frontier_of_groups(call: PlannedCall) -> list[torch.Tensor | None]:
    """Run the forward of all groups; return the dense frontier values, with autograd history (None: not wanted)."""
    sweep, link = GroupSweep(call), torch.zeros(1)
    for number, part in enumerate(call.parts):
        link = PartFunction.apply(sweep, number, link, *call.parameters(part))
    return list(OutputsFunction.apply(sweep, link))


class GroupSweep:
    """Forward and backward of all groups of a call.

    Attributes:
        first: no earlier part goes backward.
        grads: gradients of the dense frontier values, while a backward runs.
        group: the first group, whose backward the nodes of the parts run.
        last: the last group after its forward, for the first backward.
        sums: by part, sums of parameter gradients over the groups that have gone backward.
    """

    def __init__(self, call: PlannedCall) -> None:
        self.call, self.layers = call, call.context.layers
        self.first = first_backward(call.parts)
        self.grads: Gradients = ()
        self.group: GroupRun | None = None
        self.last: GroupRun | None = None
        self.sums: dict[int, list[AnySum | None]] = {}

    def outputs(self) -> list[torch.Tensor | None]:
        """Run the forward of all groups; return the dense frontier values."""
        call = self.call
        heads, frontier = len(call.rows.head_positions), call.executable.frontier
        rows = output_buffers(AllRows, frontier, call.wanted, heads, call.device, training=True)
        for group in call.groups:
            self.last = GroupRun(group)
            self.last.forward(rows, leaves=group is call.groups[-1])
        return [None if buffer is None else call.layout.expand(i, buffer) for i, buffer in enumerate(rows)]

    def begin_backward(self, grads: Gradients) -> None:
        """Run the backward of all groups but the first, and the forward of the first."""
        self.grads, self.sums = grads, {}
        for call in reversed(self.call.groups[1:]):
            group, self.last = self.last, None
            if group is None:
                group = GroupRun(call)
                group.forward()
            with contextlib.nullcontext() if self.layers is None else self.layers.without_parameter_hooks():
                for number in reversed(range(self.first, len(call.parts))):
                    self._add(group, number)
                if self.layers is not None:
                    self.layers.end_backward(self.first)
        self.group = GroupRun(self.call.groups[0])
        self.group.forward()

    def backward(self, number: int) -> Gradients:
        """Run the backward of a part of the first group; return the gradients of its parameters, of all groups."""
        parameters = self.call.parameters(self.call.parts[number])
        if number < self.first:  # its parameters get no gradient, but their groups may wait for a reduction
            if self.layers is not None:
                self.layers.end_backward(number + 1)
                self.layers.begin_backward(number, number - 1)
            return [None] * len(parameters)
        assert self.group is not None, "the node of the outputs goes backward first"
        self.group.runs[number].sums = self.sums.pop(number, None)
        gradients = self.group.backward(number, self.grads, parameters)
        if number == self.first:
            self.call.context.note_run(self.call.plan, self.call.stopwatch, self.call.device)
            self.group, self.grads = None, ()
        return gradients

    def _add(self, group: GroupRun, number: int) -> None:
        """Run the backward of a part of a group and add its parameter gradients to the sums.

        Gradients of a layer that is gathered from other ranks are reduced with every group instead, so that no rank
        holds whole gradients of all layers.
        """
        run, parameters = group.runs[number], self.call.parameters(self.call.parts[number])
        run.sums, run.hands_over_sums = self.sums.pop(number, None), True
        group.backward(number, self.grads, parameters)
        totals, run.sums = run.sums, None
        if totals is None:
            return
        graphs, sums = run.part.graphs, self.sums.setdefault(number, [])
        for i, sources, total in zip(graphs.grad_parameters, graphs.grad_sources, totals, strict=True):
            is_reduced = self.layers is not None and self.layers.has(parameter := parameters[i])
            sums.append(None if is_reduced else total)
            if is_reduced and isinstance(total, Sum) and sources & run.reached:
                gradient = total.taken()
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class GroupRun:
    """One group on its way through the parts.

    Attributes:
        crossing: values between parts: a tensor per chunk.
        gradients: their gradients.
    """

    def __init__(self, call: PlannedCall) -> None:
        self.call, self.chunks = call, call.plan.schedule.chunks
        boundaries = ReachedValues()
        self.runs = [TreeRun(call, number, self.chunks, False, boundaries) for number in range(len(call.parts))]
        self.crossing: dict[int, list[torch.Tensor]] = {}
        self.gradients: dict[int, list[torch.Tensor | None]] = {}

    def forward(self, outputs: Sequence[RowBuffer | None] | None = None, leaves: bool = True) -> None:
        """Run the forward of all parts. Write frontier values to `outputs`, if they are given.

        Args:
            leaves: leave the values between parts, for the backward.
        """
        layers, last_read = self.call.context.layers, {v: n for n, run in enumerate(self.runs) for v in run.part.reads}
        index = upload(self.call.head_rows, self.call.device)
        for number, run in enumerate(self.runs):
            part = run.part
            if outputs is None and not part.writes:
                continue
            if layers is not None:
                layers.begin(number)
            with no_autocast():
                sent, rows = run.forward_rows(self._received(part))
            if layers is not None:
                layers.end(number)
            self.crossing |= {value: sent[i :: len(part.writes)] for i, value in enumerate(part.writes)}
            for value in part.reads:
                if last_read[value] == number and not leaves:
                    del self.crossing[value]
            if outputs is None:
                continue
            for i, buffer in zip(part.frontier, rows, strict=True):
                if (output := outputs[i]) is not None and isinstance(buffer, AllRows):
                    output.values.index_copy_(0, index, buffer.heads)

    def backward(self, number: int, grads: Gradients, parameters: Sequence[torch.Tensor]) -> Gradients:
        """Run the backward of a part, after all later ones; return the gradients of its parameters."""
        run, part = self.runs[number], self.runs[number].part
        nothing: list[torch.Tensor | None] = [None] * len(self.chunks)
        of_written = {value: self.gradients.pop(value, nothing) for value in part.writes}
        for value in part.writes:
            self.crossing.pop(value, None)
        of_sent = [of_written[value][i] for i in range(len(self.chunks)) for value in part.writes]
        results = run.backward([*of_sent, *(grads[i] for i in part.frontier)], self._received(part), parameters)
        for position, gradient in enumerate(results[: run.received]):
            chunk, place = divmod(position, len(part.reads))
            so_far = self.gradients.setdefault(part.reads[place], list(nothing))
            before = so_far[chunk]
            if gradient is not None:  # a part without a gradient leaves that of other readers
                so_far[chunk] = gradient if before is None else before + gradient
        return results[run.received :]

    def _received(self, part: Part) -> list[torch.Tensor]:
        return [self.crossing[value][i] for i in range(len(self.chunks)) for value in part.reads]


class PartFunction(torch.autograd.Function):
    """Autograd function of the parameters of one part. A dummy link makes the parts go backward in order."""

    @staticmethod
    def forward(
        ctx: Any, sweep: GroupSweep, number: int, link: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        """Note the versions of the parameters, which are not gathered yet; return the link."""
        ctx.sweep, ctx.number = sweep, number
        save(ctx, (link,), (), parameters)
        return link.clone()

    @staticmethod
    @torch.compiler.disable  # else Dynamo would trace it in a compiled function that calls backward()
    def backward(ctx: Any, link: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the link's and the parameters' gradients."""
        unchanged(ctx)
        return (None, None, torch.zeros(1, device="cpu"), *ctx.sweep.backward(ctx.number))

    jvp = TreeFunction.jvp


class OutputsFunction(torch.autograd.Function):
    """Autograd function of the dense frontier values of all groups, after all parts."""

    @staticmethod
    def forward(ctx: Any, sweep: GroupSweep, link: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Run the forward of all groups; return the frontier values (None for those not wanted)."""
        outputs, frontier = sweep.outputs(), sweep.call.executable.frontier
        ctx.sweep = sweep
        parameters = [p for part in sweep.call.parts for p in sweep.call.parameters(part)]
        save(ctx, (), sweep.call.reread(), parameters)  # the backward runs all parts forward again
        ctx.set_materialize_grads(False)
        pairs = zip(frontier, outputs, strict=True)
        ctx.mark_non_differentiable(*(out for value, out in pairs if out is not None and not value.differentiable))
        return tuple(outputs)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run what comes before the backward of the first group's last part; see `TreeFunction.backward`."""
        check_gradients(grads)
        unchanged(ctx)
        ctx.sweep.begin_backward(grads)
        return None, torch.zeros(1, device="cpu")

    jvp = TreeFunction.jvp
