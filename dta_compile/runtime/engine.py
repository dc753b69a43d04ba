"""The engine: a compiled call at run time, and the autograd function between the dense world and the executor."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.options import Options
from dta_compile.passes import Program
from dta_compile.passes.attention_op import statistics_dtype
from dta_compile.passes.program import Axis, FrontierValue
from dta_compile.plan import Plan, make_plan
from dta_compile.plan.prefix_tree import PrefixTree
from dta_compile.runtime import streaming
from dta_compile.runtime.dense_inputs import Sizes, gathered, key_codes
from dta_compile.runtime.executor import ChunkData, Executor
from dta_compile.runtime.memory import default_budget
from dta_compile.runtime.reference import verified
from dta_compile.runtime.row_buffer import AllRows, RowBuffer
from dta_compile.runtime.rows import BatchRows, Integers
from dta_compile.runtime.stack import PathStack


class Engine:
    """Runs the passes' result on real inputs, any number of times; holds no state of a call but the last plan."""

    def __init__(self, program: Program, options: Options) -> None:
        self.program, self.options = program, options
        self.sizes = Sizes(program)
        self.last_plan: Plan | None = None
        self.verified = False

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """The outputs of the captured call for its inputs."""
        streaming.handle(self, args)
        outputs = self._run(args)
        verify = self.options.verify
        if verify == "always" or (verify == "first" and not self.verified):
            self.verified = True
            return verified(self.program, args, outputs)
        return outputs

    def _run(self, args: Sequence[Any]) -> tuple[Any, ...]:
        with no_autocast():
            call = self.begin(args)
            call.plan("transparent" if self.program.training and torch.is_grad_enabled() else "score")
            parameters = [args[spec.index] for spec in self.program.region_parameters]
            frontier = TreeFunction.apply(call, *parameters)
            return self.epilogue(args, call.dense, frontier)

    def begin(self, args: Sequence[Any]) -> Call:
        """A call with its prologue run."""
        with torch.no_grad():
            values = self.program.prologue(*args)
        return Call(self, args, dict(zip(self.program.prologue_nodes, values, strict=True)))

    def epilogue(
        self, args: Sequence[Any], dense: dict[Any, torch.Tensor], frontier: Sequence[torch.Tensor]
    ) -> tuple[Any, ...]:
        """The outputs of the call from its dense frontier values, under ordinary autograd."""
        received = [dense[node] for node in self.program.epilogue_dense_inputs]
        return self.program.epilogue(*args, *frontier, *received)


class Call:
    """One call: its inputs, its tree and plan, and how frontier values are dense again."""

    def __init__(self, engine: Engine, args: Sequence[Any], dense: dict[Any, torch.Tensor]) -> None:
        self.engine, self.program, self.args, self.dense = engine, engine.program, args, dense
        self.batch = engine.sizes.evaluate(self.program.batch, args)
        self.tokens = engine.sizes.evaluate(self.program.tokens, args)
        self.device = self._device()
        self.rows: BatchRows
        self.schedule_plan: Plan
        self.maps: list[torch.Tensor] = []

    def plan(self, mode: str) -> Plan:
        """Build tree, rows and schedule."""
        program = self.program
        windows = [self._window(value.layout.frame) for value in program.frontier]
        self.rows = BatchRows.build(
            valid=self._valid(),
            trunk_keys=[self._codes(item) for item in program.trunk_keys if not _by_column(item)],
            head_keys=[self._codes(item) for item in program.head_keys],
            windows=[(start, start + length) for start, length in windows],
            by_column=any(_by_column(item) for item in program.trunk_keys),
            plan_tree=lambda keys: self._plan_tree(keys, mode),
        )
        maps = {w: self.rows.frontier_map(self.batch, *w) for w in dict.fromkeys(windows)}
        self.maps = [torch.from_numpy(maps[w]).to(self.device) for w in windows]
        return self.schedule_plan

    def _plan_tree(self, keys: list[Integers], mode: str) -> PrefixTree:
        keep = self._keep_tokens() if mode == "transparent" else None
        self.schedule_plan = make_plan(keys, self.engine.options, mode=mode, keep_tokens=keep)
        self.engine.last_plan = self.schedule_plan
        return self.schedule_plan.prefix_tree

    def replan_keeping_nothing(self) -> Plan:
        """The plan of a second backward: the kept graphs are gone, so every chunk is recomputed."""
        same_rows = dataclasses.replace(self.engine.options, strategy=self.schedule_plan.schedule.strategy)
        return make_plan(self.rows.tree, same_rows, mode="transparent", keep_tokens=0)

    def _keep_tokens(self) -> int:
        budget = self.engine.options.memory_budget
        budget = default_budget(self.device) if budget is None else budget
        return int(budget // max(self.program.joint.saved_bytes_per_token, 1))

    def executor(self) -> Executor:
        """An executor with fresh stack and buffers."""
        longest = int(self.rows.tree.stop.max(initial=0))
        path = PathStack(self.program.attention, longest, self.device)
        return Executor(self.program.joint, self.program.frontier, self._chunk_data(), self.rows, path)

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

    def expand(self, index: int, buffer: RowBuffer) -> torch.Tensor:
        """The rows of a frontier value as the dense tensor of its layout; zeros at padding."""
        value = self.program.frontier[index]
        dense = buffer.gather(self.maps[index])
        return self._from_entries(value, dense, self.batch)

    def expand_row(self, index: int, buffer: RowBuffer, row: int) -> torch.Tensor:
        """As `expand`, for one sequence: the batch axis has size one."""
        value = self.program.frontier[index]
        entries = buffer.gather(self._row_map(index, row))
        return self._from_entries(value, entries, batch=1)

    def add_row_gradient(self, index: int, buffer: RowBuffer, grad: torch.Tensor, row: int) -> None:
        """Add the gradient of `expand_row` to its rows."""
        value = self.program.frontier[index]
        entries = grad.permute(_entry_order(value)).reshape(-1, *value.features)
        row_map = self._row_map(index, row)
        self._refuse_gradients_at_padding(index, entries, row_map)
        buffer.add(row_map, entries)

    def _row_map(self, index: int, row: int) -> torch.Tensor:
        return self.maps[index].reshape(self.batch, -1)[row]

    def _from_entries(self, value: FrontierValue, entries: torch.Tensor, batch: int) -> torch.Tensor:
        dims, order = value.layout.dims, _entry_order(value)
        if Axis.BATCH in dims:
            entries = entries.reshape(batch, -1, *value.features)
        inverse = [order.index(i) for i in range(len(dims))]
        entries = entries.permute(inverse)
        # The same memory, but no view to autograd: callers may write to outputs in place (`logits.div_(temperature)`).
        return torch.ops.aten._unsafe_view(entries.contiguous(), entries.shape)

    def add_gradient(self, index: int, buffer: RowBuffer, grad: torch.Tensor) -> None:
        """Add the gradient of `expand` to its rows."""
        value = self.program.frontier[index]
        entries = grad.permute(_entry_order(value)).reshape(-1, *value.features)
        self._refuse_gradients_at_padding(index, entries, self.maps[index])
        buffer.add(self.maps[index], entries)

    def _refuse_gradients_at_padding(self, index: int, entries: torch.Tensor, row_map: torch.Tensor) -> None:
        padding = row_map == len(self.rows.head_positions)
        if self.rows.columns.size == self.batch * self.tokens or not bool(padding.any()):
            return
        used = (entries[padding] != 0).reshape(int(padding.sum()), -1).any(1)
        if bool(used.any()):
            raise RuntimeContractError(
                "the loss uses outputs at padding positions, which the prefix tree does not compute",
                where=f"frontier value {self.program.frontier[index].node.name}",
                expected="zero gradients wherever the attention mask is 0",
                got=f"{int(used.sum())} of {len(used)} padding positions with a gradient",
                hint="mask the loss there (labels: -100), or let the attention mask cover these positions",
            )

    def _window(self, frame: Any) -> tuple[int, int]:
        return self.engine.sizes.window(frame, self.args) if frame is not None else (0, 1)

    def _codes(self, item: Any) -> Integers:
        return key_codes(item, self.dense[item.node], self.batch, self.tokens, self._window(item.layout.frame))

    def _device(self) -> torch.device:
        for spec in self.program.region_parameters:
            return self.args[spec.index].device
        return torch.device("cpu")

    def _valid(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """`[B, S]` real tokens; checks what the masks' proofs assumed of the inputs."""
        everything = np.ones((self.batch, self.tokens), bool)
        layers = self.program.attention
        valid = everything
        if layers[0].mask.valid is not None:
            values = self.dense[layers[0].mask.valid]
            valid = (values != 0).reshape(-1, self.tokens).expand(self.batch, self.tokens).cpu().numpy()
        for layer in layers:
            for node in layer.mask.positions:
                self._require_consecutive(node)
            if layer.window is not None:
                self._require_contiguous(valid)
        return valid

    def _require_consecutive(self, node: Any) -> None:
        positions = self.dense[node].reshape(-1, self.tokens)
        if bool((positions.diff(dim=1) != 1).any()):
            raise RuntimeContractError(
                "these position ids make the model treat a row as several packed sequences",
                where=f"input {node.name}",
                expected="position ids that grow by one along every row",
                got="a row with a jump",
                hint="pass an attention_mask along with position_ids, and one sequence per row",
            )

    def _require_contiguous(self, valid: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        changes = np.diff(valid.astype(np.int8), axis=1, prepend=0, append=0)
        if ((changes == 1).sum(1) > 1).any():
            raise RuntimeContractError(
                "a row has padding between real tokens, and a sliding window counts padding",
                expected="padding at the left or right end of a row only",
                got=f"row {int(((changes == 1).sum(1) > 1).argmax())}",
                hint="move the padding to one end of the row",
            )


def _by_column(item: Any) -> bool:
    return Axis.BATCH not in item.layout.dims and Axis.ROWS not in item.layout.dims


def _entry_order(value: FrontierValue) -> list[int]:
    """Dimensions of a frontier value: batch, tokens, then features."""
    dims = value.layout.dims
    order = sorted(range(len(dims)), key=lambda i: (dims[i] is None, dims[i] is not Axis.BATCH, i))
    return order


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Casts are spelled out in the graphs: autocast around the call must not add its own."""
    with torch._C._DisableAutocast():
        yield


class TreeFunction(torch.autograd.Function):
    """Dense frontier values of a call as a function of the region's parameters."""

    @staticmethod
    def forward(ctx: Any, call: Call, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plan = call.schedule_plan
        executor = call.executor()
        ops = forward_half(executor, plan)
        outputs = tuple(call.expand(i, buffer) for i, buffer in enumerate(executor.outputs))
        executor.outputs = []
        ctx.call, ctx.executor, ctx.ops = call, executor, ops
        ctx.save_for_backward(*parameters)
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
        parameters = ctx.saved_tensors  # checks that no parameter was changed in place since the forward
        call: Call = ctx.call
        executor, ops = ctx.executor, ctx.ops
        ctx.executor = ctx.ops = None  # the kept graphs serve one backward; another one recomputes
        with no_autocast():
            if executor is None:
                plan = call.replan_keeping_nothing()
                executor = call.executor()
                ops = forward_half(executor, plan)
            accumulators = backpropagate(call, executor, ops, grads, parameters)
        return (None, *accumulators)


def forward_half(executor: Executor, plan: Plan) -> Iterator[Any]:
    """Run a schedule up to its attach op; what is left of its operations."""
    ops = iter(plan.schedule.ops)
    executor.outputs = [executor.row_buffer(i, AllRows, v.dtype) for i, v in enumerate(executor.frontier)]
    executor.run(ops, on_attach=lambda sequences: False)
    return ops


def backpropagate(
    call: Call, executor: Executor, ops: Iterator[Any], grads: Sequence[torch.Tensor | None], parameters: Sequence[Any]
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
            raise RuntimeContractError(
                "a gradient reached the returned KV cache",
                expected="a loss that does not use past_key_values",
                got=f"a gradient for {value.node.name}",
                hint="pass use_cache=False",
            )
        if i in executor.joint.differentiated and grad is not None:
            buffer = executor.row_buffer(i, AllRows, statistics_dtype(value.dtype))
            call.add_gradient(i, buffer, grad)
            executor.gradients[i] = buffer


def prepare_accumulators(executor: Executor, parameters: Sequence[torch.Tensor]) -> None:
    executor.path.allocate_gradients()
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
    for i, sources, total in zip(joint.grad_parameters, joint.grad_sources, executor.accumulators, strict=True):
        if sources & used:
            gradients[i] = total.to(parameters[i].dtype)
    return gradients
