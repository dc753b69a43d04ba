"""Plan a call whose ranks run one prefix tree: gather keys, deal the tree out, move inputs to where they are read.

Every rank has planned the tree of its own rows (`plan_call`) before. `over_ranks` is the entry.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from dta_compile.distributed.group import Group
from dta_compile.errors import RuntimeContractError
from dta_compile.executable.chunk import Part
from dta_compile.executable.executable import ChunkInput
from dta_compile.plan.dealing import LATENCY, schedule_of
from dta_compile.plan.division.pieces import Dealing
from dta_compile.plan.plan import plan_one_tree
from dta_compile.plan.simulate import Simulation, simulate
from dta_compile.plan.tree.lexicographic import codes_of, combine
from dta_compile.plan.tree.prefix_tree import PrefixTree
from dta_compile.proofs.mask_class import MaskClass
from dta_compile.runtime.calls.executor import Executor
from dta_compile.runtime.calls.masks import ReadMasks
from dta_compile.runtime.calls.mixers import runtimes_of
from dta_compile.runtime.calls.planned_call import PlannedCall
from dta_compile.runtime.calls.ranks import Ranks
from dta_compile.runtime.one_tree.executor import PieceExecutor
from dta_compile.runtime.one_tree.frontier import ComputedRows, OwnedRows
from dta_compile.runtime.one_tree.path import PiecePath
from dta_compile.runtime.one_tree.routes import HeadRoutes, StateRoutes, head_routes, numbers_by_rank, transfer
from dta_compile.runtime.path.interface import AnyRuntime
from dta_compile.runtime.rows.batch_rows import BatchRows, BatchTokens, Integers
from dta_compile.runtime.rows.buffers import Gathered
from dta_compile.runtime.rows.dense_to_tree import entries_first, entry_index, over_batch, to_numpy
from dta_compile.runtime.rows.upload import upload

# Bytes a second between ranks, and seconds of a message: NVLink of a node; gloo over the loopback, as measured.
LINKS = {"cuda": (2e11, LATENCY), "cpu": (1e9, 1.2e-4)}
# Most of own trees' time that one tree may take to be chosen: the host has more to do for it, 1% to 3% in benchmarks.
WORTHWHILE = 0.95


class _Facts(NamedTuple):
    """What a rank tells the others about its call.

    Attributes:
        tokens: `[P, C]` for every real token: whether it begins a sequence, whether it is joined with the one before,
            whether its outputs are used, and the contents of its keys.
        widths: number of columns of each trunk key, then of each head key.
        masks: class of each mask, and the numbers that they hide keys by; None: the rank has no tokens.
        spans: what layers need to know of them: spans, whether there are blocks, and the numbers.
        columns, from_first: tokens of a row, and whether every sequence begins at the first of its row.
        constants: shapes and checksums of the values that all tokens read.
        limits: properties of its machine.
        counts: counts of the schedule over its own tree.
    """

    tokens: Integers
    widths: tuple[int, ...]
    masks: tuple[list[MaskClass], list[float]] | None
    spans: Any
    columns: int
    from_first: bool
    constants: Any
    limits: Any
    counts: Simulation


@dataclasses.dataclass(frozen=True, eq=False)
class PieceCall(PlannedCall):
    """Call of a rank that runs pieces of the group's tree.

    Attributes:
        own: the call over this rank's own rows.
        group: the ranks.
        routes, heads: which rows this rank exchanges with others.
        owned: ways of frontier values to the ranks that own their tokens.
        inputs: values for this rank's rows by dense slot, `ChunkInput.by_depth`, and whether the head reads them.
        spans: masks as all ranks read them.
    """

    own: PlannedCall = dataclasses.field(kw_only=True)
    group: Group = dataclasses.field(kw_only=True)
    routes: StateRoutes = dataclasses.field(kw_only=True)
    heads: HeadRoutes = dataclasses.field(kw_only=True)
    owned: OwnedRows = dataclasses.field(kw_only=True)
    inputs: dict[tuple[int, bool, bool], Gathered] = dataclasses.field(kw_only=True)
    spans: ReadMasks = dataclasses.field(kw_only=True)

    @property
    def alone(self) -> PlannedCall:
        """See `PlannedCall.alone`."""
        return self.own

    @property
    def parts(self) -> Sequence[Part]:
        """See `PlannedCall.parts`."""
        return self.executable.parts

    @property
    def computed_rows(self) -> int:
        """See `PlannedCall.computed_rows`."""
        return self.routes.dealing.tokens[self.group.rank]

    @property
    def computed_heads(self) -> int:
        """See `PlannedCall.computed_heads`."""
        return len(self.heads.computed)

    def keeping_nothing(self) -> PieceCall:
        """See `PlannedCall.keeping_nothing`: the same pieces, for another backward, which all ranks run."""
        dealing, limits = self.routes.dealing, self.plan.limits
        schedule = schedule_of(dealing, self.group.rank, self.plan.options, "transparent")
        plan = dataclasses.replace(
            self.plan, schedule=schedule, simulation=simulate(dealing.tree, schedule, limits.head_starts)
        )
        return dataclasses.replace(self, plan=plan)

    def executor(self, part: Part | None = None) -> Executor:
        """See `PlannedCall.executor`."""
        assert part is not None
        if self.executable.joint.generated is not None:
            self.plan.estimates.codegen = str(self.executable.joint.generated)
        frontier = [self.executable.frontier[i] for i in part.frontier]
        path, codes = self.path(part), self.generated_code
        path.watch(self._fillers(part))
        arguments = part, frontier, self._chunk_data(part), self.rows, path, self.stopwatch, None, codes
        real = [numbered for numbered in enumerate(self.routes.pieces) if numbered[1].start < numbered[1].stop]
        pieces = dict(zip(self.plan.schedule.chunks, real, strict=True))
        return PieceExecutor(*arguments, pieces=pieces, computed=self.heads.computed)

    def path(self, part: Part) -> PiecePath:
        """See `PlannedCall.path`."""
        return PiecePath(*self._layers(part), self.device, self.group, self.routes)

    @functools.cached_property
    def _runtimes(self) -> list[AnyRuntime]:
        return runtimes_of(self.executable, self.spans, self.device, self.context.options.attention)

    def _gathered(self, item: ChunkInput, of_head: bool) -> Gathered:
        """See `PlannedCall`; inputs have been moved to this rank."""
        return self.inputs[item.slot, item.by_depth, of_head]


class GroupRanks(Ranks):
    """Ranks that run pieces of one tree; each may be a group of tensor-parallel ranks, which decide together first."""

    what = "one tree over ranks"

    def __init__(self, group: Group, inner: Ranks) -> None:
        super().__init__()
        self._group, self.inner = group, inner

    def check(self, require: Callable[[], None]) -> None:
        """See `Ranks.check`."""
        self.inner.check(lambda: super(GroupRanks, self).check(require))

    def with_gradient(self, active: Any, given: Sequence[bool]) -> Any:
        """See `Ranks.with_gradient`: tensor-parallel ranks have the same rows, others do not."""
        return self.inner.with_gradient(active, given)


def over_ranks(own: PlannedCall, mode: str, group: Group, is_forced: bool) -> PlannedCall:
    """Plan one tree of the rows of all ranks; return `own`, the call over this rank's rows, where that is cheaper.

    A collective of all ranks, which decide alike.

    Args:
        is_forced: run one tree whatever it costs.

    Raises:
        RuntimeContractError: on all ranks, if their calls do not fit, or one of them has raised an error.
    """
    ranks = GroupRanks(group, own.context.ranks)
    facts = [*group.gather_checked(lambda: _facts(own))]
    _require_alike(facts)
    rows, begins = _rows_of_all(own, facts)
    limits = own.plan.limits.agreed([of_rank.limits for of_rank in facts]).of_sweep("stages")
    limits = dataclasses.replace(limits, head_starts=rows.head_starts)
    link = LINKS.get(own.device.type, LINKS["cpu"])
    plan = plan_one_tree(rows.tree, own.plan.options, limits, mode, group.rank, group.size, *link)
    assert plan.dealing is not None
    slowest = max(limits.cost.estimate(of_rank.counts) for of_rank in facts)
    if not is_forced and plan.estimates.seconds >= WORTHWHILE * slowest:
        note = (
            f"one tree over {group.size} ranks would take {plan.estimates.seconds / max(slowest, 1e-9):.2f} of the time"
        )
        own.plan.estimates.notes.append(note)
        return own
    plan.estimates.notes += own.plan.estimates.notes
    routes, heads = StateRoutes(plan.dealing, group.rank), head_routes(rows, plan.dealing, begins, group.rank)
    of_tokens = rows.head_rows.reshape(-1)[begins[group.rank] : begins[group.rank + 1]]
    layout = dataclasses.replace(own.layout, rows=_own_heads(own, of_tokens, heads, len(rows.head_positions)))
    wanted = [number for number, is_wanted in enumerate(own.wanted) if is_wanted]
    spans = _spans(facts) or own.masks
    fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    fields |= {
        "context": dataclasses.replace(own.context, ranks=ranks),
        "masks": dataclasses.replace(own.masks, classes=spans.classes, fillers=spans.fillers),
        "rows": rows,
        "layout": ComputedRows(),
        "plan": plan,
        "groups": (),
    }
    return PieceCall(
        **fields,
        own=own,
        group=group,
        routes=routes,
        heads=heads,
        owned=OwnedRows(group, heads, layout, own.executable.frontier, wanted),
        inputs=_moved_inputs(own, group, rows, plan.dealing, begins),
        spans=spans,
    )


def _facts(own: PlannedCall) -> _Facts:
    executable, masks = own.executable, own.masks
    places = np.flatnonzero(masks.valid)
    starts = masks.starts
    if starts is None:
        starts = np.zeros_like(masks.valid)
        rows = np.flatnonzero(masks.valid.any(1))
        starts[rows, masks.valid.argmax(1)[rows]] = True
    joined = np.zeros_like(starts) if masks.joined is None else masks.joined
    used = np.logical_or.reduce([np.zeros_like(starts), *(mask for mask in own.layout.used if mask is not None)])
    columns = [flags.reshape(-1)[places].astype(np.int64)[:, None] for flags in (starts, joined, used)]
    items = (*executable.trunk_keys, *executable.head_keys)
    keys = [_contents(own, item).reshape(masks.valid.size, -1)[places] for item in items]
    shared = [own.dense[slot] for slot in executable.constant_inputs]
    kinds = [(tuple(value.shape), str(value.dtype)) for value in shared]
    spans = [(mask.window, mask.chunk, mask.block is not None) for mask in masks.classes], masks.fillers
    return _Facts(
        np.concatenate([*columns, *keys], 1),
        tuple(key.shape[1] for key in keys),
        (masks.classes, masks.fillers) if len(places) else None,
        spans if len(places) else None,
        masks.valid.shape[1],
        masks.from_first,
        (kinds, _checksums(shared)),
        own.plan.limits.of_machine,
        own.plan.simulation,
    )


def _contents(own: PlannedCall, item: ChunkInput) -> Integers:
    """Return `[B, S, c]` numbers that are equal where the values of a key are, on any rank.

    Values of more than 8 bytes are hashed, to 128 bits.
    """
    entries = to_numpy(entries_first(own.dense[item.slot].detach(), item.layout))
    flat = np.ascontiguousarray(entries.reshape(len(entries), -1))
    codes = codes_of(flat)[:, None]
    if flat.dtype.itemsize * flat.shape[1] not in (1, 2, 4, 8):  # else codes are the values themselves
        _, first, inverse = np.unique(codes[:, 0], return_index=True, return_inverse=True)
        hashes = [hashlib.blake2b(flat[index].tobytes(), digest_size=16).digest() for index in first.tolist()]
        codes = np.frombuffer(b"".join(hashes), np.int64).reshape(-1, 2)[inverse.reshape(-1)]
    window = own.window(item.layout.frame)
    return np.stack([over_batch(item.layout, code, own.batch, own.tokens, window) for code in codes.T], -1)


def _checksums(values: Sequence[torch.Tensor]) -> list[int]:
    """Return a checksum of each value, of 64 bits and of its order: made where it is, so that few bytes are copied.

    It is the sum of all words, each times a pseudo-random odd number that belongs to its place.
    """
    sums = []
    for value in values:
        word = torch.int32 if value.dtype.itemsize % 4 == 0 else torch.uint8
        words = value.detach().contiguous().reshape(-1).view(word).to(torch.int64)
        places = torch.arange(len(words), device=words.device) * 0x1E3779B97F4A7C15
        sums.append((words * ((places ^ (places >> 29)) * 0x3F58476D1CE4E5B9 | 1)).sum())
    return torch.stack([total.to(sums[0].device) for total in sums]).tolist() if sums else []


def _require_alike(facts: Sequence[_Facts]) -> None:
    """Raise `RuntimeContractError` unless the calls of all ranks can be parts of one."""
    for name, what in _WORDS.items():
        known = [(rank, getattr(of_rank, name)) for rank, of_rank in enumerate(facts)]
        (first, value), *others = [(rank, value) for rank, value in known if value is not None] or [(0, None)]
        for rank, other in others:
            if value != other:
                raise RuntimeContractError(
                    f"one tree over ranks: the calls of ranks {first} and {rank} differ in {what}",
                    expected="the same model and the same kinds of inputs on all ranks",
                    got=f"{name} {value!s:.100} and {other!s:.100}",
                    hint="options={'mesh': None} runs a tree of its own on each rank",
                )


_WORDS = {
    "widths": "the inputs that tell tokens apart",
    "constants": "values that all tokens read, such as tables made from the number of columns",
    "spans": "how far tokens attend",
}


def _rows_of_all(own: PlannedCall, facts: Sequence[_Facts]) -> tuple[BatchRows, list[int]]:
    """Return the rows of all ranks' tokens, one rank after the other, and `[ranks + 1]` each rank's first position."""
    tokens = np.concatenate([of_rank.tokens for of_rank in facts])
    begins = [0, *np.cumsum([len(of_rank.tokens) for of_rank in facts]).tolist()]
    starts, joined, used = (tokens[:, column].astype(np.bool_)[None] for column in range(3))
    bounds = np.cumsum([3, *facts[0].widths])
    contents = [tokens[:, a:b] for a, b in pairwise(bounds.tolist())]
    keys = [combine(list(columns.T), len(tokens))[None] for columns in contents]
    trunk = len(own.executable.trunk_keys)
    # No sequence goes on over the end of a rank.
    batch = BatchTokens.read(np.ones_like(starts), starts, keys[:trunk], False, joined if joined.any() else None)
    tree = PrefixTree.build(batch.keys, units=batch.units)
    return BatchRows.of(batch, tree, keys[trunk:], used), begins


class _OwnHeads(NamedTuple):
    """Head row of every token `[B, S]` of this rank's batch, among its own; see `BatchRows.head_rows`."""

    head_rows: Integers


def _own_heads(own: PlannedCall, of_tokens: Integers, heads: HeadRoutes, count: int) -> _OwnHeads:
    """Number this rank's head rows, given that of each of its tokens among all `count` of the tree."""
    head_rows, is_used = np.full(own.masks.valid.shape, len(heads.owned), np.int64), of_tokens < count
    places = np.flatnonzero(own.masks.valid)[is_used]
    head_rows.reshape(-1)[places] = np.searchsorted(heads.owned, of_tokens[is_used])
    return _OwnHeads(head_rows)


def _moved_inputs(
    own: PlannedCall, group: Group, rows: BatchRows, dealing: Dealing, begins: Sequence[int]
) -> dict[tuple[int, bool, bool], Gathered]:
    """Move the inputs of chunks to the ranks that compute their rows, from ranks that have such a token."""
    inputs: dict[tuple[int, bool, bool], Gathered] = {}
    tree_rows = np.arange(rows.tree.num_rows)
    of_heads = np.searchsorted(rows.head_starts, np.arange(len(rows.head_positions)), side="right") - 1
    local, depths = np.flatnonzero(own.masks.valid), rows.tree.depths()
    for of_head, items, positions, of_row in (
        (False, own.executable.trunk_inputs, rows.row_positions, tree_rows),
        (True, own.executable.head_inputs, rows.head_positions, of_heads),
    ):
        holders = np.searchsorted(begins, positions, side="right") - 1
        takers = dealing.holders_of(of_row)
        places = numbers_by_rank(takers, dealing.ranks)
        way = transfer(holders, np.arange(len(positions)), takers, places, group.rank, group.size)
        sequences, columns = np.divmod(local[positions[way.sent] - begins[group.rank]], own.tokens)
        for item in items:
            at = depths[of_row[way.sent]] if item.by_depth else columns
            index = entry_index(item, sequences, at, own.window(item.layout.frame))
            value = entries_first(own.dense[item.slot].detach(), item.layout)
            moved = group.all_to_all(value.index_select(0, upload(index, value.device)), way.sizes, way.received)
            here = torch.empty_like(moved).index_copy_(0, upload(way.places, value.device), moved)
            inputs[item.slot, item.by_depth, of_head] = Gathered(here, torch.arange(len(here), device=value.device))
    return inputs


def _spans(facts: Sequence[_Facts]) -> ReadMasks | None:
    """Return masks with what layers need to know of those of all ranks; None if no rank has tokens."""
    some = [of_rank for of_rank in facts if of_rank.masks is not None]
    if not some or some[0].masks is None:
        return None
    classes, fillers = some[0].masks
    columns = max(of_rank.columns for of_rank in some)
    from_first = all(of_rank.from_first for of_rank in some)
    valid = np.ones((1, columns), np.bool_)
    return ReadMasks(valid, None if from_first else np.zeros_like(valid), None, classes, fillers)
