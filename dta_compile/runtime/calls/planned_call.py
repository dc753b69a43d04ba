"""A call with its rows and plan: all that running it needs, made at once by `plan_call`."""

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
from dta_compile.executable.chunk import Part
from dta_compile.executable.executable import ChunkInput, Executable
from dta_compile.executable.layers import MixerLayer, RecurrentLayer
from dta_compile.executable.pieces import NO_CODES, Codes
from dta_compile.integrations.checkpoint_flags import is_hidden
from dta_compile.integrations.fully_shard import bytes_of_running
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.plan import Footprint, Limits, PartBytes, Plan, bytes_of_halves, make_plan
from dta_compile.plan.cost import BY_STAGES, chunk_sizes
from dta_compile.plan.schedule import Anchor, Backward, Forward
from dta_compile.plan.tree.prefix_tree import PrefixTree
from dta_compile.plan.tree.split_prefixes import SplitPrefixes
from dta_compile.runtime.calls.call import Call
from dta_compile.runtime.calls.executor import ChunkData, Executor
from dta_compile.runtime.calls.masks import ReadMasks
from dta_compile.runtime.calls.mixers import runtimes_of
from dta_compile.runtime.measure.budget import default_budget
from dta_compile.runtime.measure.stopwatch import Stopwatch
from dta_compile.runtime.path.interface import AnyRuntime
from dta_compile.runtime.path.stack import PathStack
from dta_compile.runtime.rows.batch_rows import BatchRows, BatchTokens, Booleans, Integers, looks_padded
from dta_compile.runtime.rows.buffers import Gathered
from dta_compile.runtime.rows.dense_to_tree import gathered, require_in_bounds, to_numpy
from dta_compile.runtime.rows.tree_to_dense import BatchLayout

logger = logging.getLogger("dta_compile")


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedCall(Call):
    """A call that can be run.

    Attributes:
        masks: what its masks are.
        layout: where its values lie.
        plan: its tree and schedule.
        wanted: by frontier value, whether it is computed.
    """

    masks: ReadMasks
    layout: BatchLayout
    plan: Plan
    wanted: Sequence[bool]

    @property
    def rows(self) -> BatchRows:
        """How `[B, S]` and the rows of the tree correspond."""
        return self.layout.rows

    @property
    def by_stages(self) -> bool:
        """Whether the ops of its schedule run layer by layer."""
        return self.plan.schedule.sweep == "stages"

    @property
    def parts(self) -> Sequence[Part]:
        """What the ops of its schedule run, one part after the other: layers, or all of a chunk at once."""
        return self.executable.parts if self.by_stages else (self.executable.whole,)

    @property
    def restarts(self) -> bool:
        """Whether states start anew with sequences of packed rows that the captured program itself runs through."""
        return self.masks.starts is not None and any(layer.mask is None for layer in self.executable.recurrent)

    def keeping_nothing(self) -> PlannedCall:
        """The call with a plan for another backward: the kept graphs are gone, so every chunk is recomputed."""
        schedule = self.plan.schedule
        same_rows = dataclasses.replace(
            self.context.options, strategy=schedule.strategy, chunk_size=schedule.chunk_size, sweep=schedule.sweep
        )
        made = make_plan(
            self.rows.tree,
            same_rows,
            mode="transparent",
            limits=Limits(budget=0, footprint=self.plan.limits.footprint),
            segments=self.plan.segments,
        )
        made.estimates.self_check = self.plan.estimates.self_check
        return dataclasses.replace(self, plan=made)

    def record(self, executor: Executor) -> None:
        """Note what the chunk runs of the schedule took, in the plan and for the cost model, as soon as they ended."""
        self.plan.estimates.replays = executor.lease.counts if executor.lease else None
        self.context.note_run(self.plan, self.stopwatch, self.device)

    @functools.cached_property
    def generated_code(self) -> Codes:
        """The generated code that it runs: what there is when it is first asked for, compiled now if none may wait."""
        generated = self.executable.joint.generated
        if generated is None:
            return NO_CODES
        # Ranks that run a call together would round apart if they ran different code.
        return generated.prepare(sorted(_graphs(self.plan)), wait=self.context.ranks.several)

    def executor(self, part: Part | None = None) -> Executor:
        """An executor with a fresh stack, of a part or all of a chunk's stages."""
        part = part or self.executable.whole
        codes = self.generated_code
        if self.executable.joint.generated is not None:
            self.plan.estimates.codegen = str(self.executable.joint.generated)
        data, frontier, lease = self._chunk_data(part), [self.executable.frontier[i] for i in part.frontier], None
        cache, watch = self.context.replays, self.stopwatch
        if cache is not None and part is self.executable.whole and cache.pays(self.device, _runs(self.plan)):
            layers, capacity, attention = self._layers(part), self._capacity, self.context.options.attention
            parameters = data.whole[: len(self.executable.region_parameters)]
            lease = cache.lease(*layers, capacity, self.device, attention, parameters, codes)
        path = lease.path if lease else self.path(part)
        executor = Executor(part, frontier, data, self.rows, path, watch, lease, codes)
        if lease:
            weakref.finalize(executor, lease.arena.release)  # whatever way the call ends
        return executor

    def path(self, part: Part) -> PathStack:
        """A fresh stack for the layers of a part."""
        return PathStack(*self._layers(part), self._capacity, self.device)

    def _layers(self, part: Part) -> tuple[list[MixerLayer], list[AnyRuntime]]:
        return [self.executable.mixers[i] for i in part.layers], [self._runtimes[i] for i in part.layers]

    @property
    def _capacity(self) -> int:
        return self.plan.simulation.peak_stack_tokens

    @functools.cached_property
    def _runtimes(self) -> list[AnyRuntime]:
        return runtimes_of(self.executable, self.masks, self.device, self.context.options.attention)

    @functools.cached_property
    def stopwatch(self) -> Stopwatch:
        """Times what its executors run."""
        return Stopwatch(self.device, bool(self.generated_code))

    def _chunk_data(self, part: Part) -> ChunkData:
        """The inputs of a part by what they run over."""
        executable, rows = self.executable, self.rows
        first = len(executable.region_parameters)
        after = first + len(executable.constant_inputs), len(executable.trunk_inputs)
        readers = sum(after)
        constants = [executable.constant_inputs[i - first] for i in part.inputs if first <= i < after[0]]
        trunk = [executable.trunk_inputs[i - after[0]] for i in part.inputs if after[0] <= i < readers]
        head = [executable.head_inputs[i - readers - 1] for i in part.inputs if i > readers]
        whole = [*(one.detach() for one in self.parameters(part)), *(self.dense[slot] for slot in constants)]
        return ChunkData(
            whole,
            [self._gathered(item, rows.row_positions) for item in trunk],
            readers in part.inputs,
            [self._gathered(item, rows.head_positions) for item in head],
        )

    def _gathered(self, item: ChunkInput, positions: Integers) -> Gathered:
        return gathered(item, self.dense[item.slot], self.rows, positions, self.window(item.layout.frame))


@dataclasses.dataclass(frozen=True)
class _Read:
    """What a call says before it is planned: its masks, tokens, tree and rows, and where frontier values are used."""

    masks: ReadMasks
    tokens: BatchTokens
    rows: BatchRows
    used: Sequence[Booleans]
    head_keys: Sequence[Integers]
    split: SplitPrefixes | None


def plan_call(call: Call, mode: str, wanted: Sequence[bool]) -> PlannedCall:
    """Read the masks of a call, build its tree and rows, and choose a schedule for the frontier values `wanted`."""
    executable, ranks = call.executable, call.context.ranks

    def read_with_limits() -> tuple[_Read, Limits]:
        read = _read(call, wanted)
        return read, _limits(call, read.rows, mode)

    read, limits = ranks.agreed(read_with_limits)
    masks, tokens, rows, tree = read.masks, read.tokens, read.rows, read.rows.tree
    plan = make_plan(tree, call.context.options, mode=mode, limits=limits, segments=tokens.segments, split=read.split)
    if plan.prefix_tree is not tree:  # the plan does not share prefixes
        rows = BatchRows.of(tokens, plan.prefix_tree, read.head_keys, np.logical_or.reduce(read.used))
    ranks.require_same("the tokens of a batch", *tokens.keys, rows.head_positions, rows.position_rows, plan.schedule)
    plan.estimates.notes += _notes(call, tokens)
    gathered, in_flight = bytes_of_running()
    plan.estimates.gathered_bytes = gathered
    plan.estimates.peak_bytes = gathered + max(_peak_bytes(call, rows, plan, limits, wanted), in_flight)
    needed = [one if is_wanted else None for one, is_wanted in zip(read.used, wanted, strict=True)]
    layout = BatchLayout.of(
        executable.frontier, rows, needed, call.window, call.device, by_sequence=mode == "streaming"
    )
    known = call.context, call.args, call.dense, call.batch, call.tokens, call.device
    planned = PlannedCall(*known, masks=masks, layout=layout, plan=plan, wanted=wanted)
    if planned.restarts:
        _require_restarts(executable)
        _note_restarts()
    return planned


def _require_restarts(executable: Executable) -> None:
    """Raise for packed rows and layers that read the token before, also that of another sequence."""
    for layer in executable.recurrent:
        if layer.mask is None and not layer.mixer.may_restart:
            raise RuntimeContractError(
                "the first token of a sequence reads the one before in its row, which is of another sequence",
                where=layer.where,
                expected="one sequence per row",
                got="packed rows",
                hint="pass one sequence per row, padded on the right: tokens that rows share are computed once",
            )


def _read(call: Call, wanted: Sequence[bool]) -> _Read:
    executable, masks = call.executable, call.read_masks()
    used = [one if is_wanted else np.zeros_like(one) for one, is_wanted in zip(call.used(), wanted, strict=True)]
    reads = np.logical_or.reduce(used)
    for items, tokens_read in ((executable.trunk_inputs, masks.valid), (executable.head_inputs, reads)):
        for item in items:
            require_in_bounds(item, call.dense[item.slot], tokens_read, call.window(item.layout.frame))
    # Tables that have an entry for each column of the batch: rows without padding agree on them; of other sequences,
    # numbers are compared by value, and rows of a wide table by the column they are in.
    is_even = masks.starts is None and bool(masks.valid.all())
    tables = [item for item in executable.trunk_keys if not item.layout.is_over_sequences]
    wide = [item for item in tables if not _is_one_number(call.dense[item.slot])]
    left_out = tables if is_even else wide
    keys = [item for item in executable.trunk_keys if item not in left_out]
    trunk_keys = [call.codes(item) for item in keys]
    head_keys = [call.codes(item) for item in executable.head_keys]
    by_column = bool(wide) and not is_even
    tokens = BatchTokens.read(masks.valid, masks.starts, trunk_keys, by_column)
    tree = PrefixTree.build(tokens.keys)
    rows = BatchRows.of(tokens, tree, head_keys, reads)
    return _Read(masks, tokens, rows, used, head_keys, _split(keys, trunk_keys, by_column, tokens, tree))


def _notes(call: Call, tokens: BatchTokens) -> list[str]:
    """What a user may not have meant."""
    found = []
    if is_hidden():
        found.append("gradient checkpointing has no effect here: memory_budget decides what is computed again")
    ids = next((item for item in call.executable.trunk_inputs if item.indexes and item.is_input), None)
    everything_is_real = tokens.segments is None and len(tokens.places) == call.batch * call.tokens
    if ids is not None and everything_is_real and ids.layout.is_over_sequences:
        numbers = call.dense[ids.slot].reshape(call.batch, -1)
        if (padding := looks_padded(to_numpy(numbers))) is not None:
            found.append(f"{padding}: pass attention_mask, and padding is not run")
    return found


@functools.cache
def _note_restarts() -> None:
    logger.warning(
        "dta: rows hold several sequences, and the model's recurrences are not told where these begin (seq_idx,"
        " cu_seqlens): their states start anew with each sequence, whereas in eager mode they run on into the next one"
    )


def _split(
    keys: Sequence[ChunkInput], codes: Sequence[Integers], by_column: bool, tokens: BatchTokens, tree: PrefixTree
) -> SplitPrefixes | None:
    """What of the keys besides numbers (ids, positions) splits prefixes: values of several numbers a token.

    Not known of sequences that must agree on columns as well.
    """
    names = [item.source for item in keys]
    suspects = [name for name, item in zip(names, keys, strict=True) if None in item.layout.dims]
    if not suspects or by_column:
        return None
    flat = {name: code.reshape(-1)[tokens.places] for name, code in zip(names, codes, strict=True)}
    return SplitPrefixes.of(tree, flat, tokens.begins, suspects)


def _limits(call: Call, rows: BatchRows, mode: str) -> Limits:
    """What the planner needs to know of this model, machine and batch."""
    executable, asked_for = call.executable, call.context.options.memory_budget
    joint, whole = executable.joint, _bytes_of_part(call, executable.whole)
    kinds = {part.graphs: part for part in executable.parts}
    known = {graphs: _bytes_of_part(call, part) for graphs, part in kinds.items()}
    budget = default_budget(call.device, int(whole.sums)) if asked_for is None else asked_for
    return Limits(
        budget if mode == "transparent" else None,
        whole.footprint,
        call.context.calibration(call.device, _runs_generated(call)).cost_model(),
        rows.head_starts,
        chunk_sizes(budget, joint.token_bytes + joint.head_bytes),
        whole.sums,
        tuple(known[part.graphs]._replace(sent=part.written_bytes) for part in executable.parts),
        asked_for is not None,
        _by_stages(call, list(known.values()), rows) if mode == "transparent" and len(known) > 1 else None,
    )


def _by_stages(call: Call, parts: Sequence[PartBytes], rows: BatchRows) -> tuple[int, tuple[int, ...]]:
    """What may be kept, and sizes of chunks, where the sums and the activations of one part are there at a time."""
    budget = call.context.options.memory_budget
    if budget is None:
        handed = rows.tree.num_rows * sum(part.written_bytes for part in call.executable.parts)
        budget = default_budget(call.device, int(max(part.sums for part in parts) + handed))
    widest = max(part.footprint.graph_token + part.footprint.graph_head for part in parts)
    return budget, chunk_sizes(budget, widest, BY_STAGES)


def _runs_generated(call: Call) -> bool:
    generated = call.executable.joint.generated
    return generated is not None and generated.is_used


def _bytes_of_part(call: Call, part: Part) -> PartBytes:
    graphs, mixers = part.graphs, [call.executable.mixers[i] for i in part.layers]
    recurrent = [layer for layer in mixers if isinstance(layer, RecurrentLayer)]
    # A model whose only recurrences have states without entries still goes by them.
    state = max(sum(layer.running.bytes for layer in recurrent), 1) if recurrent else 0
    footprint = Footprint(graphs.token_bytes, graphs.head_bytes, graphs.kv_bytes, graphs.working, state)
    sums = 0
    if call.executable.training:
        parameters = call.parameters(part)
        trained = (parameters[i] for i in graphs.grad_parameters)
        sums = sum(one.numel() * statistics_dtype(one.dtype).itemsize for one in trained)
    return PartBytes(footprint, sums, part.written_bytes)


def _peak_bytes(call: Call, rows: BatchRows, plan: Plan, limits: Limits, wanted: Sequence[bool]) -> float:
    """Most bytes that a call and its backward allocate at one time, besides what was gathered from other ranks."""
    heads, by_stages = len(rows.head_positions), plan.schedule.sweep == "stages"
    features = [value.dtype.itemsize * math.prod(value.features) for value in call.executable.frontier]
    stored = [heads * size if is_wanted else 0 for size, is_wanted in zip(features, wanted, strict=True)]
    dense = [
        call.batch * call.window(value.layout.frame)[1] * size if is_wanted else 0
        for value, size, is_wanted in zip(call.executable.frontier, features, wanted, strict=True)
    ]
    parts = [
        known._replace(returned=sum(dense[i] + stored[i] for i in part.frontier))
        for known, part in zip(
            limits.parts_of(plan.schedule.sweep),
            call.executable.parts if by_stages else (call.executable.whole,),
            strict=True,
        )
    ]
    stack_tokens = plan.simulation.peak_stack_tokens
    first, second = bytes_of_halves(rows.tree, plan.schedule, parts, stack_tokens, rows.head_starts)
    forward = sum(stored) + first
    if not call.executable.training or plan.schedule.mode == "score":
        return max(forward, sum(stored) + sum(dense))
    return max(forward, sum(dense) + second)  # values stay as long as the user has them


@dataclasses.dataclass(frozen=True)
class Run:
    """A call that was run: its dense frontier values and its outputs.

    Attributes:
        outputs_of: the outputs for other frontier values.
    """

    call: PlannedCall
    frontier: Sequence[torch.Tensor]
    outputs: tuple[Any, ...]
    outputs_of: Callable[[Sequence[torch.Tensor]], tuple[Any, ...]]


def _runs(plan: Plan) -> list[int]:
    """Tokens of every chunk run of a schedule."""
    return [op.chunk.tokens for op in plan.schedule.ops if isinstance(op, (Anchor, Forward, Backward))]


def _graphs(plan: Plan) -> set[str]:
    """Names of the executable graphs that a schedule runs."""
    found: set[str] = set()
    for op in (op for _, schedule in plan.schedule.kinds for op in schedule.ops):
        match op:
            case Anchor(_, out):
                found.add("forward_only" if out else "cache_only")
            case Forward():
                found.add("forward")
            case Backward():
                found.add("backward")
    return found


def _is_one_number(table: torch.Tensor) -> bool:
    """Whether a table by column has one number for each, so that values are compared as fast as columns."""
    return table.numel() == max(table.shape, default=1)
