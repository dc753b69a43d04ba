"""Timeline of a schedule, predicted by the cost model and measured, as events of trace viewers (`trace_files`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dta_compile.plan.cost import Limits
from dta_compile.plan.division.pieces import Dealing
from dta_compile.plan.interpret import Work, interpret
from dta_compile.plan.one_tree import chunks_of
from dta_compile.plan.peak_memory import bytes_by_op
from dta_compile.plan.schedule import Attach, Op, Schedule, extent, format_op
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.prefix_tree import PrefixTree
from dta_compile.trace_files import TICKS, Event, Process, as_speedscope

if TYPE_CHECKING:
    from dta_compile.plan.summary import Estimates

SECOND = 1_000_000 * TICKS
Rounds = Mapping[Chunk | Slice | None, Mapping[str, int]]
"""Facts of pieces of a tree over ranks, by chunk."""
LONGEST_NAME = 60  # characters of an op's name in a trace; the event's facts hold the whole text


class OpCost(NamedTuple):
    """Work of an op, and the seconds that the cost model predicts for it."""

    op: Op
    work: Work
    seconds: float


def op_name(op: Op) -> str:
    """Return a short name of the op for traces and profilers: `forward s8[0:451]+4 branches`."""
    kind, part = type(op).__name__.lower(), extent(op)
    if isinstance(op, Attach):
        return f"{kind} {len(op.sequences)} sequences"
    if isinstance(part, Chunk) and len(part.branches) > 1:
        return f"{kind} {part.spine or ''}+{len(part.branches)} branches"
    return f"{kind} {part}"


def op_costs(tree: PrefixTree, schedule: Schedule, limits: Limits) -> Iterator[OpCost]:
    """Yield work and predicted seconds of every op; in a sweep of chunks they sum to `CostModel.estimate`."""
    cost = limits.cost
    for event in interpret(tree, schedule, limits.head_starts):
        rates = cost.backward if event.op.graph == "backward" else cost.forward
        seconds = rates.seconds(event.work) if event.op.graph else cost.restore * event.restored
        yield OpCost(event.op, event.work, seconds)


def processes(
    tree: PrefixTree,
    schedule: Schedule,
    limits: Limits,
    estimates: Estimates,
    rank: int,
    epoch: float | None = None,
    dealing: Dealing | None = None,
) -> list[Process]:
    """Return the trace of one rank's plan: the prediction, and the measured run if there was one.

    Args:
        rank: rank that the tracks are named after.
        epoch: origin of the measured run's times (seconds since 1970); None: the start of the run.
        dealing: pieces of the tree over ranks, of which the schedule runs those of `rank`; ops name their rounds.
    """
    levels = _levels(tree, schedule, limits)
    rounds: Rounds = {}
    if dealing is not None:
        pieces = (dealing.piece(rank, number) for number in range(dealing.rounds))
        numbers = [number for number, (start, stop) in enumerate(pieces) if start < stop]
        received = dealing.traffic[:, rank].sum(1).tolist()
        rounds = {
            chunk: {"round": number, "tokens received": received[number]}
            for number, chunk in zip(numbers, chunks_of(dealing, rank), strict=True)
        }
    traces = [_predicted(tree, schedule, limits, levels, rank, rounds)]
    if estimates.runs:
        begin = 0.0 if epoch is None or estimates.began is None else estimates.began - epoch
        traces.append(_measured(schedule, estimates, levels, rank, begin, rounds))
    return traces


def _predicted(
    tree: PrefixTree, schedule: Schedule, limits: Limits, levels: list[dict[str, float]], rank: int, rounds: Rounds
) -> Process:
    events: list[Event] = []
    clock = 0.0
    for op, work, seconds in op_costs(tree, schedule, limits):
        start, clock = clock, clock + seconds
        events.append(Event(_short(op, rounds), _ticks(start), _ticks(clock), _facts(op, work, rounds)))
    counters = [(event.stop, level) for event, level in zip(events, levels, strict=True)]
    return Process(f"rank {rank}: predicted ({limits.cost.source})", {"schedule": events}, counters)


def _measured(
    schedule: Schedule, estimates: Estimates, levels: list[dict[str, float]], rank: int, begin: float, rounds: Rounds
) -> Process:
    """Return the measured run; host and stream have a track each, except on a CPU, where they are the same."""
    level_of = {id(op): level for op, level in zip(schedule.ops, levels, strict=True)}
    runs: list[Event] = []
    launches: list[Event] = []
    counters = []
    for run in estimates.runs:
        name, facts = _short(run.op, rounds), _facts(run.op, run.work, rounds)
        for events, start, seconds in (
            (runs, run.start, run.seconds),
            (launches, run.launched, run.launch_seconds),
        ):
            first = max(_ticks(begin + start), events[-1].stop if events else 0)
            events.append(Event(name, first, first + max(_ticks(seconds), 1), facts))
        if id(run.op) in level_of:
            counters.append((_ticks(begin + run.start + run.seconds), level_of[id(run.op)]))
    on_host = all(run.start == run.launched for run in estimates.runs)
    tracks = {estimates.stream: runs} | ({} if on_host else {"host": launches})
    return Process(f"rank {rank}: measured", tracks, counters)


def _facts(op: Op, work: Work, rounds: Rounds) -> dict[str, object]:
    amounts = {name: amount for name, amount in work._asdict().items() if amount}
    return {"op": format_op(op), **amounts, **rounds.get(extent(op), {})}


def _short(op: Op, rounds: Rounds) -> str:
    name = op_name(op)
    if number := rounds.get(extent(op)):
        name = f"round {number['round']}: {name}"
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..."


def _levels(tree: PrefixTree, schedule: Schedule, limits: Limits) -> list[dict[str, float]]:
    """Return the tokens held after every op by counter name, and bytes where they are known."""
    footprint = limits.footprint
    levels: list[dict[str, float]] = []
    for live in bytes_by_op(tree, schedule, footprint, limits.head_starts):
        levels.append({f"{name} tokens": tokens for name, tokens in live.held._asdict().items()})
        if not footprint.counts_tokens:
            stack = footprint.kv_token * live.held.stack
            levels[-1] |= {"live bytes": live.kept + stack, "peak bytes of the op": live.peak + stack}
    return levels


def _ticks(seconds: float) -> int:
    return round(seconds * SECOND)


def tree_as_speedscope(tree: PrefixTree, title: str) -> str:
    """Format the tree as a speedscope file with two weights a segment: its tokens, and those of all its sequences."""
    sizes = tree.stop - tree.start
    parents = tree.parent.tolist()
    counts = [len(tree.sequences_ending_at(node)) for node in range(len(parents))]
    for node in range(len(parents) - 1, -1, -1):  # children have larger numbers
        if parents[node] >= 0:
            counts[parents[node]] += counts[node]
    columns = zip(tree.sequence.tolist(), tree.start.tolist(), tree.stop.tolist(), counts, strict=True)
    names = [f"s{sequence}[{start}:{stop}] in {count:,}" for sequence, start, stop, count in columns]
    profiles = {
        "tokens of the tree": sizes.tolist(),
        "tokens of all sequences": (sizes * np.array(counts, np.int64)).tolist(),
    }
    return as_speedscope(title, names, parents, profiles)
