"""Choose what stays in memory between forward and backward: graphs, KV and results of attention, within a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dta_compile.options import Options
from dta_compile.plan.cost import STATES_SHARE, CostModel, Limits
from dta_compile.plan.interpret import Work, chunk_work
from dta_compile.plan.peak_memory import Footprint, PartBytes
from dta_compile.plan.planner import KEEP_ALL, KEEP_NOTHING, Keep, rebuilt_slices
from dta_compile.plan.tree.chunk import Chunk
from dta_compile.plan.tree.chunk_tree import ChunkTree
from dta_compile.plan.tree.prefix_tree import IntArray, PrefixTree


def choose_keep(
    tree: PrefixTree,
    options: Options,
    chunks: ChunkTree,
    budget: int | None,
    footprint: Footprint,
    cost: CostModel,
    head_starts: IntArray | None = None,
) -> Keep:
    """Choose greedily, by seconds saved per byte, what to keep between the phases within `budget` bytes.

    A chunk may keep the KV of its spine, which saves rebuilding the spine for the chunks that continue it; in a sweep
    of stages the results of attention, which saves attention in its second forward; or its graph, which saves all of
    that and the second forward. KV and graph include the running states at which the spine is continued.
    A budget of None keeps all, 0 nothing. The chunk that goes backward first always keeps its graph and is not counted,
    except in a sweep of stages, where other parts run between its forward and its backward.
    """
    if budget is None:
        return KEEP_ALL
    if budget <= 0:
        return KEEP_NOTHING
    by_stages = options.sweep == "stages"
    states = [footprint.state * depths for depths in chunks.starts_below()]
    works = [chunk_work(tree, chunk, head_starts) for chunk in chunks.chunks]
    counted, most = range(0 if by_stages else 1, len(works)), 0.0
    for index in counted:
        lean = footprint.kv(chunks.chunks[index]) + footprint.results(chunks.chunks[index]) * by_stages
        most += max(footprint.graph(works[index]), lean) + states[index]
    if most <= budget:  # all graphs fit, whatever their chunks might keep before
        return Keep(frozenset(counted))
    rebuilt = dict.fromkeys(range(len(chunks.chunks)), 0.0)  # by chunk: seconds to put its spine on the stack again
    share = STATES_SHARE if by_stages else 1.0
    if options.strategy != "vanilla":  # vanilla rebuilds spines with graphs, which then stay
        for index, part in rebuilt_slices(tree, options, chunks):
            work = chunk_work(tree, Chunk(part), head=False)._replace(launches=1)
            rebuilt[index] += share * cost.forward.seconds(work) - cost.restore * part.tokens
    upgrades: list[tuple[float, int, _Kept]] = []  # seconds saved per byte, index of the chunk, what it keeps
    for index in counted:
        chunk, work, below = chunks.chunks[index], works[index], max(rebuilt[index], 0.0)
        kv = _Kept(footprint.kv(chunk) + states[index], below, kv=True)
        results = _Kept(footprint.results(chunk) * by_stages, cost.forward.pair * work.pairs, results=True)
        graph = _Kept(footprint.graph(work) + states[index], cost.forward.seconds(work) + below, graph=True)
        upgrades += ((gain, index, kept) for gain, kept in _upgrades(kv, results, graph))
    best, left = dict[int, _Kept](), float(budget)
    for _, index, kept in sorted(upgrades, key=lambda entry: (-entry[0], entry[1])):
        before = best.get(index, _NOTHING)
        is_more = kept.graph > before.graph or (kept.graph == before.graph and kept.seconds > before.seconds)
        if is_more and kept.size - before.size <= left:
            left -= kept.size - before.size
            best[index] = kept
    return Keep(
        *(frozenset(i for i, kept in best.items() if getattr(kept, name)) for name in ("graph", "kv", "results"))
    )


class _Kept(NamedTuple):
    """One way to keep tensors of a chunk, with their bytes and the seconds that they save."""

    size: float
    seconds: float
    graph: bool = False
    kv: bool = False
    results: bool = False

    def gain(self, before: _Kept) -> float:
        """Return the seconds saved per additional byte, compared with keeping `before`."""
        return (self.seconds - before.seconds) / max(self.size - before.size, 1.0)


_NOTHING = _Kept(0.0, 0.0)


def _upgrades(kv: _Kept, results: _Kept, graph: _Kept) -> Iterator[tuple[float, _Kept]]:
    """Yield the ways to keep tensors of a chunk, with the seconds saved per byte.

    First come the steps from nothing to the graph that save most per byte; then the leaner ways on their own, for
    budgets that the graph does not fit in.
    """
    both = _Kept(kv.size + results.size, kv.seconds + results.seconds, kv=True, results=True)
    lean = [kept for kept in (kv, results) if kept.size > 0 and kept.seconds > 0]
    lean += [both] if len(lean) == 2 else []
    kept = _NOTHING
    while not kept.graph:
        more = [way for way in lean if way.size > kept.size and way.kv >= kept.kv and way.results >= kept.results]
        gain, kept = max(((way.gain(kept), way) for way in (graph, *more)), key=lambda entry: entry[0])
        yield gain, kept
    yield from ((way.gain(_NOTHING), way) for way in lean)


def spend_rest(tree: PrefixTree, chunks: ChunkTree, keep: Keep, limits: Limits) -> tuple[int, Keep]:
    """Spend the rest of the budget after `keep` on parts that keep everything, from the last part backwards.

    Return the number of parts before the last one that keep everything, and the `Keep` of the last part. Its first
    backward comes right after its last forward, so the graph of that forward stays and is not counted.
    """
    assert limits.budget is not None
    if keep.graphs is None:
        return 0, keep
    *before, last = limits.parts
    depths, whole, left = chunks.starts_below(), limits.footprint, float(limits.budget)
    more: list[tuple[int, Work, int]] = []  # chunks whose graphs are not kept: index, work, states not kept yet
    for index, chunk in enumerate(chunks.chunks):
        work = chunk_work(tree, chunk, limits.head_starts)
        if index in keep.graphs:
            not_counted = last.footprint.graph(work) if index == 0 else 0.0
            left -= whole.graph(work) - not_counted + whole.state * depths[index]
        else:
            has_kv, has_results = index in keep.kv, index in keep.results
            left -= (whole.kv(chunk) + whole.state * depths[index]) * has_kv + whole.results(chunk) * has_results
            more.append((index, work, 0 if has_kv else depths[index]))

    def costs(part: PartBytes, amounts: Sequence[tuple[int, Work, int]]) -> float:
        size, total = part.footprint, 0.0
        for index, work, states in amounts:
            kept = size.kv(chunks.chunks[index]) * (index in keep.kv)
            kept += size.results(chunks.chunks[index]) * (index in keep.results)
            total += size.graph(work) + size.state * states - kept
        return total

    layers = 0
    for part in reversed(before):
        if (left := left - costs(part, more)) < 0:
            break
        layers += 1
    else:
        if costs(last, more[0 not in keep.graphs :]) <= left:
            return layers, KEEP_ALL
    return layers, Keep(keep.graphs | {0}, keep.kv - {0}, keep.results - {0})
