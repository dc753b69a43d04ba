"""Plan a call whose ranks run one prefix tree: gather keys, deal the tree out, move inputs to where they are read.

Every rank has planned the tree of its own rows (`plan_call`) before. `over_ranks` is the entry.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dta_compile.distributed.group import Group
from dta_compile.executable.chunk import Part
from dta_compile.executable.executable import ChunkInput
from dta_compile.plan.cost import Limits
from dta_compile.plan.division.pieces import Dealing
from dta_compile.plan.one_tree import LATENCY, schedule_of
from dta_compile.plan.plan import Plan, plan_one_tree
from dta_compile.plan.simulate import simulate
from dta_compile.runtime.calls.executor import Executor
from dta_compile.runtime.calls.masks import ReadMasks
from dta_compile.runtime.calls.mixers import runtimes_of
from dta_compile.runtime.calls.planned_call import PlannedCall
from dta_compile.runtime.calls.ranks import Ranks
from dta_compile.runtime.one_tree.facts import Facts, facts_of, masks_of, require_alike, rows_of_all
from dta_compile.runtime.one_tree.frontier import ComputedRows, OwnedRows
from dta_compile.runtime.one_tree.path import PiecePath
from dta_compile.runtime.one_tree.piece_executor import PieceExecutor
from dta_compile.runtime.one_tree.routes import HeadRoutes, StateRoutes, head_routes, numbers_by_rank, transfer
from dta_compile.runtime.path.mixer_runtime import AnyRuntime
from dta_compile.runtime.rows.batch_rows import BatchRows, Integers
from dta_compile.runtime.rows.buffers import Gathered
from dta_compile.runtime.rows.dense_to_tree import entries_first, entry_index
from dta_compile.runtime.rows.upload import upload

# Bytes a second between ranks, and seconds of a message: NVLink of a node; gloo over the loopback, as measured.
LINKS = {"cuda": (2e11, LATENCY), "cpu": (1e9, 1.2e-4)}
# Most of own trees' time that one tree may take to be chosen: the host has more to do for it, 1% to 3% in benchmarks.
WORTHWHILE = 0.95


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

    def _executor(self, *arguments: Any) -> Executor:
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


class _Way(NamedTuple):
    """One tree over the ranks of a group, or over those of this rank's part of it.

    Attributes:
        size: number of ranks of each part.
        facts: what these ranks tell, in order.
        rows: rows of their tokens.
        begins: `[size + 1]` position of each rank's first token.
        plan: plan of this rank.
    """

    size: int
    facts: Sequence[Facts]
    rows: BatchRows
    begins: list[int]
    plan: Plan


def over_ranks(own: PlannedCall, mode: str, group: Group, is_forced: bool) -> PlannedCall:
    """Plan one tree of the rows of all ranks, or of each of several equal parts of them, whichever takes least time.

    A collective of all ranks, which decide alike. Returns `own`, the call over this rank's rows, where that is cheaper.

    Args:
        is_forced: run one tree over all ranks whatever it costs.

    Raises:
        RuntimeContractError: on all ranks, if their calls do not fit, or one of them has raised an error.
    """
    facts = [*group.gather_checked(lambda: facts_of(own, is_forced))]
    require_alike(facts)
    limits = own.plan.limits.agreed([of_rank.limits for of_rank in facts]).of_sweep("stages")
    sizes = [size for size in range(group.size, 1, -1) if group.size % size == 0] or [1]
    ways: list[_Way] = []

    def planned() -> list[float]:
        ways.extend(_way(own, mode, facts, limits, group.rank, size) for size in (sizes[:1] if is_forced else sizes))
        return [way.plan.estimates.seconds for way in ways]

    # A part plans its own tree alone, so the others learn of its time, or of its error.
    seconds = [max(of_ranks) for of_ranks in zip(*group.gather_checked(planned), strict=True)]
    slowest = max(limits.cost.estimate(of_rank.counts) for of_rank in facts)
    way = ways[seconds.index(min(seconds))]
    times = zip(ways, seconds, strict=True)
    relative = [f"{number / max(slowest, 1e-9):.2f} over {of_way.size} ranks" for of_way, number in times]
    note = f"of the time of own trees, one tree takes {', '.join(relative)}"
    if not is_forced and min(seconds) >= WORTHWHILE * slowest:
        own.plan.estimates.notes.append(note)
        return own
    way.plan.estimates.notes += [*own.plan.estimates.notes, *([] if is_forced else [note])]
    return _piece_call(own, GroupRanks(group, own.context.ranks), group.part(way.size), way)


def _way(own: PlannedCall, mode: str, facts: Sequence[Facts], limits: Limits, rank: int, size: int) -> _Way:
    """Plan one tree over the ranks of this rank's part."""
    first = rank // size * size
    members = facts[first : first + size]
    rows, begins = rows_of_all(own, members)
    limits = dataclasses.replace(limits, head_starts=rows.head_starts)
    link = LINKS.get(own.device.type, LINKS["cpu"])
    plan = plan_one_tree(rows.tree, own.plan.options, limits, mode, rank - first, size, *link)
    return _Way(size, members, rows, begins, plan)


def _piece_call(own: PlannedCall, ranks: Ranks, group: Group, way: _Way) -> PieceCall:
    """Return the call of a rank's pieces; `ranks` decide together, `group` runs one tree."""
    rows, begins, plan = way.rows, way.begins, way.plan
    assert plan.dealing is not None
    routes, heads = StateRoutes(plan.dealing, group.rank), head_routes(rows, plan.dealing, begins, group.rank)
    of_tokens = rows.head_rows.reshape(-1)[begins[group.rank] : begins[group.rank + 1]]
    layout = dataclasses.replace(own.layout, rows=_own_heads(own, of_tokens, heads, len(rows.head_positions)))
    wanted = [number for number, is_wanted in enumerate(own.wanted) if is_wanted]
    spans = masks_of(way.facts) or own.masks
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


class _OwnHeads(NamedTuple):
    """Head row of every token `[B, S]` of this rank's batch, among its own; see `BatchRows.head_rows`."""

    head_rows: Integers
    num_head_rows: int


def _own_heads(own: PlannedCall, of_tokens: Integers, heads: HeadRoutes, count: int) -> _OwnHeads:
    """Number this rank's head rows, given that of each of its tokens among all `count` of the tree."""
    head_rows, is_used = np.full(own.masks.valid.shape, len(heads.owned), np.int64), of_tokens < count
    places = np.flatnonzero(own.masks.valid)[is_used]
    head_rows.reshape(-1)[places] = np.searchsorted(heads.owned, of_tokens[is_used])
    return _OwnHeads(head_rows, len(heads.owned))


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
