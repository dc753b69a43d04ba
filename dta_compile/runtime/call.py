"""One call of a compiled program: its inputs, its rows and plan, and how values of rows are dense again."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import sympy
import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.options import Options
from dta_compile.passes.program import Axis, FrontierValue, Program
from dta_compile.plan import Footprint, Limits, Plan, make_plan, peak_bytes
from dta_compile.plan.prefix_tree import PrefixTree
from dta_compile.plan.schedule import Anchor, Backward, Forward
from dta_compile.runtime import replay
from dta_compile.runtime.executor import ChunkData, Executor
from dta_compile.runtime.masks import ReadMasks, read_masks
from dta_compile.runtime.measure.budget import default_budget, keep_freed_pages
from dta_compile.runtime.measure.calibration import Calibration
from dta_compile.runtime.measure.stopwatch import Stopwatch
from dta_compile.runtime.mixers import runtimes_of
from dta_compile.runtime.path.stack import PathStack
from dta_compile.runtime.rows.batch_rows import BatchRows, BatchTokens, Booleans, Integers
from dta_compile.runtime.rows.buffers import RowBuffer
from dta_compile.runtime.rows.dense import Sizes, gathered, key_codes, used_tokens
from dta_compile.runtime.rows.upload import upload


@dataclasses.dataclass(frozen=True)
class CallContext:
    """What an engine gives each of its calls.

    Attributes:
        program, options: what was compiled, and how it is to run.
        sizes: numbers for the program's size symbols.
        replays: CUDA graphs of its chunks, if there are to be any.
        calibration: what runs on a device have taken so far.
        note_run: takes the plan, the stopwatch and the device of a schedule that has been run.
        note_plan: takes a plan that the call goes on with in place of its first one.
    """

    program: Program
    options: Options
    sizes: Sizes
    replays: replay.ReplayCache | None
    calibration: Callable[[torch.device], Calibration]
    note_run: Callable[[Plan, Stopwatch, torch.device], None]
    note_plan: Callable[[Plan], None]


class Call:
    """One call: its inputs, its tree and plan, and how frontier values are dense again."""

    def __init__(self, context: CallContext, args: Sequence[Any], dense: dict[Any, torch.Tensor]) -> None:
        self.context, self.program, self.args, self.dense = context, context.program, args, dense
        self.batch = context.sizes.evaluate(self.program.batch, args)
        self.tokens = context.sizes.evaluate(self.program.tokens, args)
        self.device = self._device()
        if self.device.type == "cpu":
            keep_freed_pages()
        self.masks: ReadMasks
        self.rows: BatchRows
        self.schedule_plan: Plan
        # Per frontier value the head row of every entry; in streaming mode those of every sequence.
        self.maps: list[torch.Tensor] = []
        self.uncovered: list[Booleans | None] = []  # `[entries]` at padding that the outputs depend on, if any

    def plan(self, mode: str) -> Plan:
        """Build tree, rows and schedule."""
        program, self.masks = self.program, self._read_masks()
        valid = self.masks.valid
        trunk_keys = [self._codes(item) for item in program.trunk_keys if not _by_column(item)]
        head_keys = [self._codes(item) for item in program.head_keys]
        used = [used_tokens(value, self.dense, self.batch, self.tokens, self._window) for value in program.frontier]
        used_by_any = np.logical_or.reduce(used)
        tokens = BatchTokens.read(valid, trunk_keys, by_column=any(_by_column(item) for item in program.trunk_keys))
        tree = PrefixTree.build(tokens.keys)
        self.rows = BatchRows.of(tokens, tree, head_keys, used_by_any)
        self.schedule_plan = make_plan(tree, self.context.options, mode=mode, limits=self._limits(mode))
        if self.schedule_plan.prefix_tree is not tree:  # the plan does not share prefixes
            self.rows = BatchRows.of(tokens, self.schedule_plan.prefix_tree, head_keys, used_by_any)
        self.schedule_plan.estimates.peak_bytes = self._peak_bytes(self.schedule_plan)
        by_sequence = mode == "streaming"
        for value, one in zip(program.frontier, used, strict=True):
            # Rows that are read sequence by sequence are looked up on the host.
            device = torch.device("cpu") if by_sequence else self.device
            self.maps.append(upload(self._entries(self.rows.head_rows, value), device))
            padding = self._entries(one & ~valid, value)
            self.uncovered.append(padding if padding.any() else None)
        return self.schedule_plan

    def _entries(self, values: np.ndarray[Any, Any], frontier: FrontierValue) -> np.ndarray[Any, Any]:
        """`[B, S]` (or `[1, S]`) numbers as `[entries]` of a frontier value."""
        start, length = self._window(frontier.layout.frame)
        return np.ascontiguousarray(values[:, start : start + length]).reshape(-1)

    def replan_keeping_nothing(self) -> Plan:
        """The plan of a second backward: the kept graphs are gone, so every chunk is recomputed."""
        same_rows = dataclasses.replace(self.context.options, strategy=self.schedule_plan.schedule.strategy)
        made = make_plan(self.rows.tree, same_rows, mode="transparent", limits=Limits(budget=0))
        made.estimates.self_check = self.schedule_plan.estimates.self_check
        return made

    def _limits(self, mode: str) -> Limits:
        """What the planner needs to know of this model, machine and batch."""
        budget = self.context.options.memory_budget
        cost = self.context.calibration(self.device).cost_model()
        if mode != "transparent":
            return Limits(cost=cost, head_starts=self.rows.head_starts)
        budget = default_budget(self.device) if budget is None else budget
        return Limits(budget, self._footprint(), cost, self.rows.head_starts)

    def _footprint(self) -> Footprint:
        joint = self.program.joint
        return Footprint(joint.token_bytes, joint.head_bytes, joint.kv_bytes, joint.working)

    def _peak_bytes(self, plan: Plan) -> float:
        """Most bytes that a call and its backward allocate at one time."""
        joint, frontier = self.program.joint, self.program.frontier
        first, second = peak_bytes(self.rows.tree, plan.schedule, self._footprint(), self.rows.head_starts)
        stack = joint.kv_bytes * plan.simulation.peak_stack_tokens
        heads = len(self.rows.head_positions)
        rows = sum(heads * math.prod(value.features) * value.dtype.itemsize for value in frontier)
        dense = sum(
            self.batch * self._window(value.layout.frame)[1] * math.prod(value.features) * value.dtype.itemsize
            for value in frontier
        )
        forward = stack + rows + first
        if not self.program.training or plan.schedule.mode == "score":
            return max(forward, rows + dense)
        parameters = [self.args[spec.index] for spec in self.program.region_parameters]
        wide = [parameters[i].numel() * statistics_dtype(parameters[i].dtype).itemsize for i in joint.grad_parameters]
        # The values, the gradients that come for them, and these summed onto rows; KV has gradients too.
        return max(forward, 2 * stack + 2 * dense + rows + sum(wide) + second)

    def record(self, plan: Plan, executor: Executor) -> None:
        """Note what the chunk runs of a schedule took, in the plan and for the cost model, as soon as they ended."""
        plan.estimates.replays = executor.lease.counts if executor.lease else None
        self.context.note_run(plan, executor.stopwatch, self.device)

    def executor(self, plan: Plan) -> Executor:
        """An executor with fresh stack and buffers; the code that its graphs call is compiled now, not as they run."""
        generated = self.program.joint.generated
        if generated is not None:
            generated.prepare(sorted(_graphs(plan)))
            plan.estimates.codegen = str(generated)
        layers, capacity = self.program.mixers, plan.simulation.peak_stack_tokens
        attention, cache = self.context.options.attention, self.context.replays
        runtimes = runtimes_of(self.program, self.masks, self.device, attention)
        data, lease = self._chunk_data(), None
        if cache is not None and replay.is_possible(self.device) and replay.pays(_runs(plan)):
            lease = cache.lease(layers, runtimes, capacity, self.device, attention, data.parameters)
        path = lease.path if lease else PathStack(layers, runtimes, capacity, self.device)
        executor = Executor(self.program.joint, self.program.frontier, data, self.rows, path, lease)
        if lease:
            weakref.finalize(executor, lease.place.release)  # whatever way the call ends
        return executor

    def _chunk_data(self) -> ChunkData:
        program, rows = self.program, self.rows
        trunk = [
            gathered(item, self.dense[item.node], rows, rows.row_positions, self._window(item.layout.frame))
            for item in program.trunk_inputs
        ]
        head = [
            gathered(item, self.dense[item.node], rows, rows.head_positions, self._window(item.layout.frame))
            for item in program.head_inputs
        ]
        parameters = [self.args[spec.index].detach() for spec in program.region_parameters]
        return ChunkData(parameters, [self.dense[node] for node in program.constant_inputs], trunk, head)

    def reread(self) -> list[torch.Tensor]:
        """Dense values, inputs of the call among them, that chunks may read again in the backward."""
        program = self.program
        nodes = [item.node for item in (*program.trunk_inputs, *program.head_inputs)]
        values = [self.dense[node] for node in dict.fromkeys([*nodes, *program.constant_inputs])]
        return [value for value in values if not value.is_inference()]  # those have no version

    def expand(self, index: int, buffer: RowBuffer) -> torch.Tensor:
        """The rows of a frontier value in its dense layout; next to zero at padding and where it is not used."""
        value = self.program.frontier[index]
        dense = buffer.gather(self.maps[index])
        return self._from_entries(value, dense, self.batch)

    def padding(self, index: int) -> torch.Tensor | None:
        """Where the dense frontier value lies at padding that the outputs depend on, bool; None: nowhere."""
        value, uncovered = self.program.frontier[index], self.uncovered[index]
        if uncovered is None:
            return None
        entries = upload(uncovered, self.device).reshape(-1, *[1] * len(value.features))
        return self._from_entries(value, entries.expand(-1, *value.features), self.batch)

    def expand_row(self, index: int, buffer: RowBuffer, row: int) -> torch.Tensor:
        """As `expand`, for one sequence: the batch axis has size one."""
        value = self.program.frontier[index]
        entries = buffer.gather(self._row_of(self.maps[index], row))
        return self._from_entries(value, entries, batch=1)

    def add_row_gradient(self, index: int, buffer: RowBuffer, grad: torch.Tensor, row: int) -> torch.Tensor | None:
        """Add the gradient of `expand_row` to its rows; returns what `refuse_padding` asks for."""
        value, uncovered = self.program.frontier[index], self.uncovered[index]
        entries = _to_entries(value, grad, batch=1)
        buffer.add(self._row_of(self.maps[index], row), entries)
        return None if uncovered is None else _which_are_used(entries, self._row_of(uncovered, row))

    def _row_of(self, entries: Any, row: int) -> Any:
        return entries.reshape(self.batch, -1)[row]

    def _from_entries(self, value: FrontierValue, entries: torch.Tensor, batch: int) -> torch.Tensor:
        dims, order = value.layout.dims, _entry_order(value)
        if Axis.BATCH in dims:
            entries = entries.reshape(batch, -1, *value.features)
        elif Axis.TOKEN_ROWS in dims:
            entries = entries.reshape(batch, -1, *value.features).transpose(0, 1).reshape(-1, *value.features)
        ordered = entries.permute([order.index(i) for i in value.memory_order]).contiguous()
        # No view to autograd: callers may write to outputs in place (`logits.div_(temperature)`).
        if value.memory_order == tuple(range(len(dims))):
            return torch.ops.aten._unsafe_view(ordered, ordered.shape)
        ordered = ordered.permute([value.memory_order.index(i) for i in range(len(dims))])
        return torch.empty_strided(ordered.shape, ordered.stride(), dtype=ordered.dtype, device=ordered.device).copy_(
            ordered
        )

    def add_gradient(self, index: int, buffer: RowBuffer, grad: torch.Tensor) -> None:
        """Add the gradient of `expand` to its rows."""
        value, uncovered = self.program.frontier[index], self.uncovered[index]
        entries = _to_entries(value, grad, self.batch)
        if uncovered is not None and (used := _which_are_used(entries, uncovered)) is not None:
            self.refuse_padding(index, used)
        buffer.add(self.maps[index], entries)

    def refuse_padding(self, index: int, used: torch.Tensor) -> None:
        """Raise if a gradient came for any entry at padding; `used` says which, bool `[n]`. Waits for the device."""
        if bool(used.any()):
            raise RuntimeContractError(
                "the loss uses outputs at padding positions, which the prefix tree does not compute",
                where=f"frontier value {self.program.frontier[index].node.name}",
                expected="zero gradients wherever the attention mask is 0",
                got=f"{int(used.sum())} of {len(used)} padding positions with a gradient",
                hint="mask the loss there (labels: -100), or let the attention mask cover these positions",
            )

    def _window(self, frame: Any) -> tuple[int, int]:
        return self.context.sizes.window(frame, self.args) if frame is not None else (0, 1)

    def _codes(self, item: Any) -> Integers:
        return key_codes(item, self.dense[item.node], self.batch, self.tokens, self._window(item.layout.frame))

    def _device(self) -> torch.device:
        for spec in self.program.region_parameters:
            return self.args[spec.index].device
        return torch.device("cpu")

    def _read_masks(self) -> ReadMasks:
        return read_masks(self.program, self.dense, self._number, (self.batch, self.tokens))

    def _number(self, expr: sympy.Expr) -> int | float:
        return self.context.sizes.value(expr, self.args)


@dataclasses.dataclass(frozen=True)
class Run:
    """A call that was run: its dense frontier values and its outputs.

    Attributes:
        outputs_of: the outputs for other frontier values.
    """

    call: Call
    frontier: Sequence[torch.Tensor]
    outputs: tuple[Any, ...]
    outputs_of: Callable[[Sequence[torch.Tensor]], tuple[Any, ...]]


def _runs(plan: Plan) -> list[int]:
    """Tokens of every chunk run of a schedule."""
    return [op.chunk.tokens for op in plan.schedule.ops if isinstance(op, (Anchor, Forward, Backward))]


def _graphs(plan: Plan) -> set[str]:
    """Names of the executable graphs that a schedule runs."""
    found: set[str] = set()
    for op in plan.schedule.ops:
        match op:
            case Anchor(_, out):
                found.add("forward_only" if out else "cache_only")
            case Forward():
                found.add("forward")
            case Backward():
                found.add("backward")
    return found


def _which_are_used(gradients: torch.Tensor, entries: Booleans) -> torch.Tensor | None:
    """Which of some entries have a gradient, bool `[n]` on the gradients' device; None if there are no such entries."""
    positions = upload(np.flatnonzero(entries), gradients.device)
    if not len(positions):
        return None
    return (gradients.index_select(0, positions) != 0).reshape(len(positions), -1).any(1)


def _by_column(item: Any) -> bool:
    return not item.layout.is_over_sequences


def _to_entries(value: FrontierValue, dense: torch.Tensor, batch: int) -> torch.Tensor:
    """`[entries, *features]` of a dense frontier value, sequence by sequence."""
    if Axis.TOKEN_ROWS in value.layout.dims:
        dim = value.layout.dims.index(Axis.TOKEN_ROWS)
        dense = dense.unflatten(dim, (-1, batch)).transpose(dim, dim + 1).flatten(dim, dim + 1)
    return dense.permute(_entry_order(value)).reshape(-1, *value.features)


def _entry_order(value: FrontierValue) -> list[int]:
    """Dimensions of a frontier value: batch, tokens, then features."""
    dims = value.layout.dims
    order = sorted(range(len(dims)), key=lambda i: (dims[i] is None, dims[i] is not Axis.BATCH, i))
    return order
