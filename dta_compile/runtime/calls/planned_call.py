"""Plan a call: read its masks, build the prefix tree and its rows, and choose a schedule.

`plan_call` is the entry; the `PlannedCall` that it returns makes executors for the modes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.executable.chunk import Part, first_backward
from dta_compile.executable.executable import ChunkInput, Executable
from dta_compile.executable.layers import MixerLayer, RecurrentLayer
from dta_compile.executable.pieces import NO_CODES, Codes
from dta_compile.integrations.checkpoint_flags import is_hidden
from dta_compile.integrations.fully_shard import bytes_of_running
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.options import CHUNK_TOKENS
from dta_compile.plan import Footprint, Limits, PartBytes, Plan, bytes_of_halves, make_plan
from dta_compile.plan.cost import BY_STAGES, chunk_sizes
from dta_compile.plan.schedule import Anchor, Backward, Forward
from dta_compile.plan.simulate import by_group, simulate
from dta_compile.plan.tree.chunk import Chunk
from dta_compile.plan.tree.prefix_tree import PrefixTree
from dta_compile.plan.tree.split_prefixes import SplitPrefixes, ids_at_forks
from dta_compile.proofs.mask_class import CERTAIN
from dta_compile.runtime.calls.call import Call
from dta_compile.runtime.calls.executor import BatchChunk, ChunkData, Executor
from dta_compile.runtime.calls.masks import ReadMasks
from dta_compile.runtime.calls.mixers import runtimes_of
from dta_compile.runtime.measure.budget import default_budget
from dta_compile.runtime.measure.stopwatch import Stopwatch
from dta_compile.runtime.path.mixer_runtime import AnyRuntime
from dta_compile.runtime.path.stack import PathStack
from dta_compile.runtime.rows.batch_rows import BatchRows, BatchTokens, Booleans, Integers, looks_padded
from dta_compile.runtime.rows.buffers import Gathered
from dta_compile.runtime.rows.dense_to_tree import gathered, require_in_bounds, to_numpy
from dta_compile.runtime.rows.tree_to_dense import BatchLayout

logger = logging.getLogger("dta_compile")


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedCall(Call):
    """Call with its masks, rows and plan, ready to run.

    Attributes:
        masks: facts read from its attention masks.
        rows: maps between `[B, S]` tokens and rows of the tree.
        layout: maps between dense values and head rows.
        plan: prefix tree, schedule and estimates.
        wanted: by frontier value, whether it is computed.
        sharded_bytes: bytes of parameters gathered from other ranks, and of whole gradients that are not yet reduced.
        groups: the call over each group of subtrees of the schedule, if it has any.
        head_rows: of a group, the head row of the whole call of each of its head rows.
    """

    masks: ReadMasks
    rows: BatchRows
    layout: BatchLayout
    plan: Plan
    wanted: Sequence[bool]
    sharded_bytes: tuple[int, int]
    groups: Sequence[PlannedCall] = ()
    head_rows: Integers = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def alone(self) -> PlannedCall:
        """The call over the rows of this process alone."""
        return self

    @property
    def by_stages(self) -> bool:
        """Whether the schedule runs stage by stage: all chunks of a part before the next part."""
        return self.plan.schedule.sweep == "stages"

    @property
    def parts(self) -> Sequence[Part]:
        """Parts that the schedule runs one after the other: layers, or all stages of a chunk as one part."""
        return self.executable.parts if self.by_stages else (self.executable.whole,)

    @property
    def restarts(self) -> bool:
        """Whether recurrent states are reset between packed sequences, unlike in the captured program."""
        return self.masks.starts is not None and any(layer.mask is None for layer in self.executable.recurrent)

    def keeping_nothing(self) -> PlannedCall:
        """Return the call with a plan that recomputes every chunk, for another backward or after out-of-memory."""
        schedule = self.plan.schedule
        same_rows = dataclasses.replace(
            self.context.options, strategy=schedule.strategy, chunk_size=schedule.chunk_size, sweep=schedule.sweep
        )
        plan = make_plan(
            self.rows.tree,
            same_rows,
            mode="transparent",
            limits=Limits(budget=0, footprint=self.plan.limits.footprint),
            segments=self.plan.segments,
        )
        plan.estimates.self_check = self.plan.estimates.self_check
        return dataclasses.replace(self, plan=plan)

    def predict_peak(self) -> None:
        """Fill in the plan's predicted peak, when chunks run already: a GPU waits for a plan. Does not synchronise."""
        if self.plan.estimates.peak_bytes is None:
            gathered, in_flight = self.sharded_bytes
            self.plan.estimates.peak_bytes = gathered + _prologue_bytes(self) + max(_peak_bytes(self), in_flight)

    def record(self, executor: Executor) -> None:
        """Pass the timings of a finished schedule to the engine, for the plan's estimates and the cost model."""
        self.plan.estimates.replays = executor.lease.counts if executor.lease else None
        self.context.note_run(self.plan, self.stopwatch, self.device)

    @functools.cached_property
    def generated_code(self) -> Codes:
        """Generated code that the call runs, fixed at first use; several ranks wait for compilation."""
        generated = self.executable.joint.generated
        if generated is None:
            return NO_CODES
        # Ranks that run a call together must run the same code, or their results would round differently.
        graphs = {op.graph for _, schedule in self.plan.schedule.kinds for op in schedule.ops if op.graph}
        return generated.prepare(sorted(graphs), wait=self.context.ranks.several)

    def executor(self, part: Part | None = None) -> Executor:
        """Return an executor for a part (default: all stages of a chunk), with a fresh or leased stack."""
        part = part or self.executable.whole
        codes = self.generated_code
        if self.executable.joint.generated is not None:
            self.plan.estimates.codegen = str(self.executable.joint.generated)
        data, frontier, lease = self._chunk_data(part), [self.executable.frontier[i] for i in part.frontier], None
        cache, watch = self.context.replays, self.stopwatch
        runs = [op.chunk.tokens for op in self.plan.schedule.ops if isinstance(op, (Anchor, Forward, Backward))]
        if cache is not None and part is self.executable.whole and cache.pays(self.device, runs):
            layers, capacity, attention = self._layers(part), self.stack_tokens, self.context.options.attention
            parameters = data.whole[: len(self.executable.region_parameters)]
            lease = cache.lease(*layers, capacity, self.device, attention, parameters, codes)
        path = lease.path if lease else self.path(part)
        path.watch(self._fillers(part))
        shared = None if lease else self._chunks  # chunks that are replayed are padded
        executor = self._executor(part, frontier, data, self.rows, path, watch, lease, codes, shared)
        if lease:
            weakref.finalize(executor, lease.arena.release)  # however the call ends
        return executor

    def _executor(self, *arguments: Any) -> Executor:
        return Executor(*arguments)

    def path(self, part: Part) -> PathStack:
        """Allocate a path stack for the layers of a part."""
        return PathStack(*self._layers(part), self.stack_tokens, self.device)

    def _layers(self, part: Part) -> tuple[list[MixerLayer], list[AnyRuntime]]:
        return [self.executable.mixers[i] for i in part.layers], [self._runtimes[i] for i in part.layers]

    def _fillers(self, part: Part) -> dict[int, float]:
        """Return the numbers by which masks hide keys, by layer of a part, where their effect depends on the scores."""
        fillers = dict(zip((layer.index for layer in self.executable.attention), self.masks.fillers, strict=True))
        known = {number: fillers.get(i, -math.inf) for number, i in enumerate(part.layers)}
        return {number: filler for number, filler in known.items() if filler > CERTAIN}

    @property
    def stack_tokens(self) -> int:
        """Most tokens whose states are on the path."""
        return self.plan.simulation.peak_stack_tokens

    @property
    def computed_heads(self) -> int:
        """Number of head rows that this process computes."""
        return len(self.rows.head_positions)

    @functools.cached_property
    def _runtimes(self) -> list[AnyRuntime]:
        return runtimes_of(self.executable, self.masks, self.device, self.context.options.attention)

    @functools.cached_property
    def stopwatch(self) -> Stopwatch:
        """Timer of the graphs that the call's executors run."""
        return Stopwatch(self.device, bool(self.generated_code))

    def _chunk_data(self, part: Part) -> ChunkData:
        """Split the inputs of a part into constants, inputs by tree row and inputs by head row."""
        executable = self.executable
        first = len(executable.region_parameters)
        after = first + len(executable.constant_inputs), len(executable.trunk_inputs)
        readers = sum(after)
        constants = [executable.constant_inputs[i - first] for i in part.inputs if first <= i < after[0]]
        trunk = [executable.trunk_inputs[i - after[0]] for i in part.inputs if after[0] <= i < readers]
        head = [executable.head_inputs[i - readers - 1] for i in part.inputs if i > readers]
        whole = [*(p.detach() for p in self.parameters(part)), *(self.dense[slot] for slot in constants)]
        return ChunkData(
            whole,
            [self._gathered(item, of_head=False) for item in trunk],
            readers in part.inputs,
            [self._gathered(item, of_head=True) for item in head],
        )

    def _gathered(self, item: ChunkInput, of_head: bool) -> Gathered:
        """Return an input by tree row, or by head row; its rows are uploaded once for all parts."""
        key = item, of_head
        if key not in self._inputs:
            coordinates = self.rows.head_coordinates if of_head else self.rows.row_coordinates
            value, window = self.dense[item.slot], self.window(item.layout.frame)
            self._inputs[key] = gathered(item, value, self.rows, coordinates, window)
        return self._inputs[key]

    @functools.cached_property
    def _inputs(self) -> dict[tuple[ChunkInput, bool], Gathered]:
        return {}

    @functools.cached_property
    def _chunks(self) -> dict[tuple[Chunk, bool], BatchChunk]:
        return {}


@dataclasses.dataclass(frozen=True)
class _Read:
    """Facts read from a call before planning: masks, tokens, tree and rows, and the tokens that use frontier values."""

    masks: ReadMasks
    tokens: BatchTokens
    rows: BatchRows
    used: Sequence[Booleans]
    head_keys: Sequence[Integers]
    split: SplitPrefixes | None


def plan_call(call: Call, mode: str, wanted: Sequence[bool], groups: int = 1, stride: int = 1) -> PlannedCall:
    """Read the masks of a call, build its tree and rows, and choose a schedule for the frontier values `wanted`.

    Args:
        groups, stride: number of groups of subtrees, and stride, that ranks agreed on (see `Limits`).
    """
    executable, ranks = call.executable, call.context.ranks

    def read_with_limits() -> tuple[_Read, Limits]:
        read = _read(call, wanted)
        return read, dataclasses.replace(_limits(call, read.rows, mode), groups=groups, stride=stride)

    read, limits = ranks.agreed(read_with_limits)
    masks, tokens, rows, tree = read.masks, read.tokens, read.rows, read.rows.tree
    plan = make_plan(tree, call.context.options, mode=mode, limits=limits, segments=tokens.segments, split=read.split)
    if plan.prefix_tree is not tree:  # the plan does not share prefixes
        rows = BatchRows.of(tokens, plan.prefix_tree, read.head_keys, np.logical_or.reduce(read.used))
    ranks.require_same("the tokens of a batch", *tokens.keys, rows.head_positions, rows.position_rows, plan.schedule)
    plan.estimates.notes += _notes(call, tokens, plan)
    gathered, in_flight = bytes_of_running()
    by_part = max((max(part.gathered) for part in limits.parts_of(plan.schedule.sweep)), default=0)
    plan.estimates.gathered_bytes = gathered + int(by_part)
    needed = [mask if is_wanted else None for mask, is_wanted in zip(read.used, wanted, strict=True)]
    windows = [call.window(value.layout.frame) for value in executable.frontier]
    layout = BatchLayout(executable.frontier, rows, masks.valid, needed, windows, call.device, mode == "streaming")
    fields = call.context, call.args, call.dense, call.batch, call.tokens, call.device
    planned = PlannedCall(
        *fields, masks=masks, rows=rows, layout=layout, plan=plan, wanted=wanted, sharded_bytes=(gathered, in_flight)
    )
    if plan.schedule.groups:
        planned = dataclasses.replace(planned, groups=_groups_of(planned, read.head_keys))
        for group in planned.groups:  # one of each for the whole call
            group.__dict__.update(
                {name: getattr(planned, name) for name in ("stopwatch", "generated_code", "_runtimes")}
            )
    if planned.restarts:
        _require_restarts(executable)
        _note_restarts()
    return planned


def _groups_of(call: PlannedCall, head_keys: Sequence[Integers]) -> list[PlannedCall]:
    """Return the call over each group of subtrees of its schedule, with rows and maps of its own."""
    plan, rows, groups = call.plan, call.rows, []
    used = [mask for mask in call.layout.used if mask is not None]
    wanted = np.logical_or.reduce(used or [np.zeros_like(rows.tokens.valid)])
    schedules = by_group(plan.prefix_tree, plan.schedule, plan.limits.head_starts)
    for group, (tree, schedule, starts) in zip(plan.schedule.groups, schedules, strict=True):
        tokens = rows.tokens.of(group.sequences)
        own = BatchRows.of(tokens, tree, head_keys, wanted)
        limits = dataclasses.replace(plan.limits, head_starts=starts)
        simulation = simulate(tree, schedule, own.head_starts)
        of_group = dataclasses.replace(plan, prefix_tree=tree, schedule=schedule, simulation=simulation, limits=limits)
        groups.append(
            dataclasses.replace(
                call,
                rows=own,
                layout=dataclasses.replace(call.layout, rows=own),
                plan=of_group,
                head_rows=rows.head_rows.reshape(-1)[tokens.places[own.head_positions]],
            )
        )
    return groups


def _require_restarts(executable: Executable) -> None:
    """Raise for packed rows if a recurrence without a mask cannot be reset between sequences."""
    for layer in executable.recurrent:
        if layer.mask is None and not layer.mixer.may_restart:
            raise RuntimeContractError(
                "the first token of a sequence reads the one before in its row, which is of another sequence",
                where=layer.where,
                expected="one sequence per row",
                got="packed rows",
                hint="pass one sequence per row, padded on the right: tokens that rows share are computed once; "
                "or say where sequences begin, as in dta_compile.short_convolution(..., segments=), numbered from 1 on",
            )


def _read(call: Call, wanted: Sequence[bool]) -> _Read:
    executable, masks = call.executable, call.read_masks()
    used = [mask if is_wanted else np.zeros_like(mask) for mask, is_wanted in zip(call.used(), wanted, strict=True)]
    reads = np.logical_or.reduce(used)
    for items, tokens_read in ((executable.trunk_inputs, masks.valid), (executable.head_inputs, reads)):
        for item in items:
            require_in_bounds(item, call.dense[item.slot], tokens_read, call.window(item.layout.frame))
    # Tables with an entry per column of the batch are equal for all rows that begin at their first token. Otherwise
    # tables of numbers become keys by value, and wide tables require that sequences agree on the columns of their
    # tokens. Sequences of a packed row have no column in common, so there all tables are read.
    is_even = masks.from_first
    tables = [item for item in executable.trunk_keys if not item.layout.is_over_sequences]
    wide = [item for item in tables if masks.starts is None and not _is_one_number(call.dense[item.slot])]
    left_out = tables if is_even else wide
    keys = [item for item in executable.trunk_keys if item not in left_out]
    trunk_keys = [call.codes(item) for item in keys]
    head_keys = [call.codes(item) for item in executable.head_keys]
    by_column = bool(wide) and not is_even
    tokens = BatchTokens.read(masks.valid, masks.starts, trunk_keys, by_column, masks.joined)
    tree = PrefixTree.build(tokens.keys, units=tokens.units)
    if (ids := next((code for item, code in zip(keys, trunk_keys, strict=True) if _are_ids(item)), None)) is not None:
        tree.forks = ids_at_forks(ids.reshape(-1)[tokens.places], tree, tokens.begins)
    rows = BatchRows.of(tokens, tree, head_keys, reads)
    return _Read(masks, tokens, rows, used, head_keys, _split(keys, trunk_keys, by_column, tokens, tree))


def _are_ids(item: ChunkInput) -> bool:
    return item.is_input and item.indexes is not None


def _notes(call: Call, tokens: BatchTokens, plan: Plan) -> list[str]:
    """Return hints for the plan about settings and inputs that may be mistakes."""
    notes = []
    if is_hidden() or call.context.has_checkpoints:
        notes.append("gradient checkpointing has no effect here: memory_budget decides what is computed again")
    ids = next(filter(_are_ids, call.executable.trunk_inputs), None)
    everything_is_real = tokens.segments is None and len(tokens.places) == call.batch * call.tokens
    if ids is not None and everything_is_real and ids.layout.is_over_sequences:
        numbers = call.dense[ids.slot].reshape(call.batch, -1)
        if (padding := looks_padded(to_numpy(numbers), plan.stats.tree_tokens, plan.prefix_tree.shared)) is not None:
            notes.append(f"{padding}: pass attention_mask, and padding is not run")
    return notes


@functools.cache
def _note_restarts() -> None:
    logger.warning(
        "dta: rows hold several sequences, and the model's recurrences are not told where these begin (seq_idx,"
        " cu_seqlens): their states start anew with each sequence, whereas in eager mode they run on into the next one"
    )


COUNTS_COLUMNS = ", with an entry per column: positions have to count from each row's first token"


def _split(
    keys: Sequence[ChunkInput], codes: Sequence[Integers], by_column: bool, tokens: BatchTokens, tree: PrefixTree
) -> SplitPrefixes | None:
    """Find keys with several numbers per token (unlike ids and positions) that split prefixes.

    None if there are no such keys, or if sequences must also agree on columns or blocks, where the cause is unknown.
    """
    names = [f"{item.source}{'' if item.layout.is_over_sequences else COUNTS_COLUMNS}" for item in keys]
    suspects = [name for name, item in zip(names, keys, strict=True) if None in item.layout.dims]
    if not suspects or by_column or tokens.units is not None:
        return None
    flat = {name: code.reshape(-1)[tokens.places] for name, code in zip(names, codes, strict=True)}
    return SplitPrefixes.of(tree, flat, tokens.begins, suspects)


def _limits(call: Call, rows: BatchRows, mode: str) -> Limits:
    """Return what the planner knows of model, machine and batch: memory budget, footprints, rates, chunk sizes."""
    executable, asked_for = call.executable, call.context.options.memory_budget
    joint, whole, layers = executable.joint, _bytes_of_part(call, executable.whole), call.context.layers
    kinds = {part.graphs: part for part in executable.parts}
    known = {graphs: _bytes_of_part(call, part) for graphs, part in kinds.items()}
    first = first_backward(executable.parts)
    budget = default_budget(call.device, int(whole.sums)) if asked_for is None else asked_for
    by_stages = _by_stages(call, list(known.values()), rows) if mode == "transparent" and len(known) > 1 else None
    return Limits(
        budget if mode == "transparent" else None,
        whole.footprint,
        call.context.calibration(call.device, _runs_generated(call)).cost_model(),
        rows.head_starts,
        chunk_sizes(budget, joint.token_bytes + joint.head_bytes),
        whole.sums,
        tuple(
            known[part.graphs]._replace(
                sent=part.written_bytes,
                readers=part.written,
                reduced=layers.bytes_of_sums(call.parameters(part)) if layers else 0,
                gathered=layers.bytes_of(number) if layers else (0, 0, 0),
                goes_backward=number >= first,
            )
            for number, part in enumerate(executable.parts)
        ),
        asked_for is not None,
        by_stages[:2] if by_stages else None,
        default_budget(call.device, int(max(part.sums for part in known.values()))),
        at_zero=by_stages[2] if by_stages else (),
    )


def _by_stages(call: Call, parts: Sequence[PartBytes], rows: BatchRows) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return budget and chunk sizes of a sweep by stages (sums and activations of one part), and its sizes at zero."""
    budget = call.context.options.memory_budget
    boundary_bytes = rows.tree.num_rows * sum(part.written_bytes for part in call.executable.parts)
    if budget is None:
        budget = default_budget(call.device, int(max(part.sums for part in parts) + boundary_bytes))
    widest = max(part.footprint.graph_token + part.footprint.graph_head for part in parts)

    def sizes(budget: int) -> tuple[int, ...]:
        allowed = chunk_sizes(budget, widest, BY_STAGES, boundary_bytes, rows.tree.num_rows)
        # A host that computes by itself loses little by a few small chunks.
        return allowed[:1] if call.device.type == "cpu" and allowed[0] < CHUNK_TOKENS else allowed

    return budget, sizes(budget), sizes(0)


def _runs_generated(call: Call) -> bool:
    generated = call.executable.joint.generated
    return generated is not None and generated.is_used


def _bytes_of_part(call: Call, part: Part) -> PartBytes:
    graphs, mixers = part.graphs, [call.executable.mixers[i] for i in part.layers]
    recurrent = [layer for layer in mixers if isinstance(layer, RecurrentLayer)]
    # At least 1, so that the planner sees recurrences whose states are empty.
    state = max(sum(layer.running.bytes for layer in recurrent), 1) if recurrent else 0
    sizes = graphs.token_bytes, graphs.head_bytes, graphs.kv_bytes, graphs.result_bytes
    states = [(math.prod(spec.shape), spec.dtype) for layer in mixers for spec in layer.states]
    narrow = sum(size * dtype.itemsize for size, dtype in states)
    wide = sum(size * statistics_dtype(dtype).itemsize for size, dtype in states)
    footprint = Footprint(*sizes, graphs.working, state, wide / narrow if narrow else 1.0)
    sums = 0
    if call.executable.training:
        parameters = call.parameters(part)
        trained = (parameters[i] for i in graphs.grad_parameters)
        sums = sum(parameter.numel() * statistics_dtype(parameter.dtype).itemsize for parameter in trained)
    return PartBytes(footprint, sums, part.written_bytes)


def _peak_bytes(call: PlannedCall) -> float:
    """Predict the peak bytes of a call and its backward, without parameters gathered from other ranks."""
    rows, plan, wanted = call.rows, call.plan, call.wanted
    heads, by_stages = call.computed_heads, plan.schedule.sweep == "stages"
    features = [value.dtype.itemsize * math.prod(value.features) for value in call.executable.frontier]
    stored = [heads * size if is_wanted else 0 for size, is_wanted in zip(features, wanted, strict=True)]
    dense = [
        call.batch * call.window(value.layout.frame)[1] * size if is_wanted else 0
        for value, size, is_wanted in zip(call.executable.frontier, features, wanted, strict=True)
    ]
    parts = [
        known._replace(returned=sum(dense[i] for i in part.frontier), on_rows=sum(stored[i] for i in part.frontier))
        for known, part in zip(
            plan.limits.parts_of(plan.schedule.sweep),
            call.executable.parts if by_stages else (call.executable.whole,),
            strict=True,
        )
    ]
    stack_tokens = call.stack_tokens
    first, second = bytes_of_halves(rows.tree, plan.schedule, parts, stack_tokens, rows.head_starts)
    forward = sum(stored) + first
    if not call.executable.training or plan.schedule.mode == "score":
        copied = [0 if call.layout.is_in_order(i) else size for i, size in enumerate(stored)]
        return max(forward, sum(copied) + sum(dense))
    return max(forward, sum(dense) + second)  # dense values live as long as the user holds them


def _prologue_bytes(call: Call) -> int:
    """Return the bytes of what the prologue made, such as tables of positions; inputs of the call are not among it."""
    tensors = ([value for value in values if isinstance(value, torch.Tensor)] for values in (call.args, call.dense))
    of_inputs, made = ({value.untyped_storage().data_ptr(): value for value in values} for values in tensors)
    return sum(value.untyped_storage().nbytes() for where, value in made.items() if where not in of_inputs)


@dataclasses.dataclass(frozen=True)
class Run:
    """Finished call: its dense frontier values and its outputs.

    Attributes:
        outputs_of: computes the outputs for other frontier values.
    """

    call: PlannedCall
    frontier: Sequence[torch.Tensor]
    outputs: tuple[Any, ...]
    outputs_of: Callable[[Sequence[torch.Tensor]], tuple[Any, ...]]


def _is_one_number(table: torch.Tensor) -> bool:
    """Return whether a table by column has one number per column, so that comparing values is as cheap as columns."""
    return table.numel() == max(table.shape, default=1)
