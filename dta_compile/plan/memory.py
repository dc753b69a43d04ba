"""Bytes: what chunks that are kept take, which ones to keep within a budget, and the peak of a whole schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dta_compile.options import Options
from dta_compile.plan.chunk_tree import ChunkTree
from dta_compile.plan.planner import KEEP_ALL, KEEP_NOTHING, Keep, rebuilt_slices
from dta_compile.plan.prefix_tree import IntArray, PrefixTree
from dta_compile.plan.schedule import Anchor, Attach, Backward, Chunk, Forward, Schedule
from dta_compile.plan.verify import Work, chunk_work

if TYPE_CHECKING:
    from dta_compile.plan.cost import CostModel

__all__ = ["Footprint", "choose_keep", "peak_bytes"]

Linear = tuple[float, float, float]
"""Bytes as `a + b * tokens + c * head rows`."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes that a model's chunks take.

    Attributes:
        graph_token, graph_head: what a kept graph holds per token and per head row.
        kv_token: keys and values of one token, all layers.
        working: what lives while a graph runs, as the largest of several linear functions; by the name of the graph:
            "cache_only", "forward_only", "forward", "backward" (whose graph is freed as it runs, and counts).
    """

    graph_token: float = 1.0
    graph_head: float = 0.0
    kv_token: float = 0.0
    working: Mapping[str, tuple[Linear, ...]] = dataclasses.field(default_factory=dict)

    def graph(self, work: Work) -> float:
        """Bytes of a kept graph."""
        return self.graph_token * work.tokens + self.graph_head * work.heads

    def kv(self, chunk: Chunk) -> float:
        """Bytes of the KV of a chunk's spine."""
        return self.kv_token * chunk.spine.tokens if chunk.spine is not None else 0.0

    def while_running(self, graph: str, work: Work) -> float:
        """Bytes that live at the peak of a graph's run, its results included."""
        return max((a + b * work.tokens + c * work.heads for a, b, c in self.working.get(graph, ())), default=0.0)


def choose_keep(
    tree: PrefixTree,
    options: Options,
    chunks: ChunkTree,
    budget: int | None,
    footprint: Footprint,
    cost: CostModel,
    head_starts: IntArray | None = None,
) -> Keep:
    """What to keep from the first to the second phase: the most seconds saved per byte first, within `budget` bytes.

    A chunk may keep the KV of its spine, which saves running it again for what continues it, or its graph, which saves
    its second forward too. None keeps all, 0 nothing (the graph of the chunk that goes backward first is not counted).
    """
    if budget is None:
        return KEEP_ALL
    if budget <= 0:
        return KEEP_NOTHING
    rebuilt = dict.fromkeys(range(len(chunks.chunks)), 0.0)  # seconds to put spines on the stack again
    if options.strategy != "vanilla":  # which rebuilds with graphs that stay
        for index, part in rebuilt_slices(tree, options, chunks):
            work = chunk_work(tree, Chunk(part), head=False)._replace(launches=1)
            rebuilt[index] += cost.forward_seconds(work) - cost.restore * part.tokens
    upgrades: list[tuple[float, int, float, bool]] = []  # seconds saved per byte, chunk, bytes, graph rather than KV
    for index, chunk in enumerate(chunks.chunks):
        if index == 0:
            continue
        work = chunk_work(tree, chunk, head_starts)
        graph, kv = footprint.graph(work), footprint.kv(chunk)
        again, below = cost.forward_seconds(work), max(rebuilt[index], 0.0)
        if below > 0 and kv > 0 and below * graph > (again + below) * kv:  # KV alone saves more per byte
            upgrades.append((below / kv, index, kv, False))
            upgrades.append((again / max(graph - kv, 1.0), index, graph, True))
        else:
            upgrades.append(((again + below) / max(graph, 1.0), index, graph, True))
    graphs, left = set(), float(budget)
    stored: dict[int, float] = {}  # bytes of the KV that is kept on its own
    for _, index, size, is_graph in sorted(upgrades, key=lambda entry: (-entry[0], entry[1])):
        more = size - stored.get(index, 0.0)
        if more > left:
            continue
        left -= more
        if is_graph:
            graphs.add(index)
            stored.pop(index, None)
        else:
            stored[index] = size
    return Keep(frozenset(graphs), frozenset(stored))


def peak_bytes(
    tree: PrefixTree, schedule: Schedule, footprint: Footprint, head_starts: IntArray | None = None
) -> tuple[float, float]:
    """Most bytes that live while a schedule runs, in its first phase and after its (first) attach.

    Counts kept graphs and KV, and what works while a graph runs; not the stack, accumulators, outputs.
    """
    graphs: dict[Chunk, float] = {}
    stored: dict[Chunk, float] = {}
    total, peaks, phase = 0.0, [0.0, 0.0], 0
    for op in schedule.ops:
        before = total
        match op:
            case Anchor(chunk, out, kv):
                work = chunk_work(tree, chunk, head_starts, out)
                running = footprint.while_running("forward_only" if out else "cache_only", work)
                if kv:
                    stored[chunk] = footprint.kv(chunk)
                    total += stored[chunk]
            case Forward(chunk):
                work = chunk_work(tree, chunk, head_starts)
                running = footprint.while_running("forward", work)
                graphs[chunk] = footprint.graph(work)
                total += graphs[chunk] - stored.pop(chunk, 0.0)
            case Backward(chunk):
                work = chunk_work(tree, chunk, head_starts)
                total -= graphs.pop(chunk, 0.0)
                before, running = total, footprint.while_running("backward", work)
            case Attach():
                phase, running = 1, 0.0
            case _:
                running = 0.0
        peaks[phase] = max(peaks[phase], before + running, total)
    return peaks[0], peaks[1]
