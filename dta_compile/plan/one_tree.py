"""Run one prefix tree over ranks: deal it out within a memory budget, the ops of a rank, what ranks wait for."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from dta_compile.options import Options
from dta_compile.plan.cost import Limits
from dta_compile.plan.division.pieces import Dealing
from dta_compile.plan.interpret import Work
from dta_compile.plan.schedule import Anchor, Attach, Backward, Forward, Op, Schedule, extent
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.prefix_tree import PrefixTree

ONE_TREE = "one_tree"
"""Name of the strategy."""
NVLINK = 4.5e11  # bytes a second that an H100 sends to, and as many that it receives from, the others of its node
LATENCY = 2e-5  # seconds until a message is there, between GPUs of a node; an assumption
GRADIENTS = 2  # bytes of gradients of states, in float32, relative to states in 16 bits
BLOCK_BYTES = 2**24  # of keys and values that a rank receives at once: if less, messages and kernels are too many
MOST_BLOCKS = 4
IN_TURN = 0.2  # share of a recurrent model's time that is spent in its recurrences, an assumption


def blocks(size: int) -> int:
    """Return in how many parts, by heads, the bytes that a rank receives in a layer travel."""
    return max(1, min(MOST_BLOCKS, size // BLOCK_BYTES))


class KeptByParts(NamedTuple):
    """What parts of the model keep from the first half of a schedule to the second.

    Attributes:
        graphs: number of parts, counted from the last, that keep their graphs.
        results: whether the others keep the results of attention.
    """

    graphs: int = 0
    results: bool = False


NOTHING_KEPT = KeptByParts()


def schedule_of(
    dealing: Dealing, rank: int, options: Options, mode: str, parts: int = 1, kept: KeptByParts = NOTHING_KEPT
) -> Schedule:
    """Return the ops of a rank, for a sweep of stages.

    The states that other pieces read are exchanged while an op runs: all ranks run the ops of a round together. The
    second half computes again the states of all rounds that later ones read, and goes backward through the rounds.

    Args:
        parts: number of parts of the model.
        kept: what they keep from the first half to the second.
    """
    chunks = chunks_of(dealing, rank)
    size = max((chunk.tokens for chunk in chunks), default=1)

    def ops(keeps: bool) -> Schedule:
        results = kept.results and mode != "score"
        first: list[Op] = [Forward(chunk, True) if keeps else Anchor(chunk, True, results=results) for chunk in chunks]
        if sequences := tuple(range(len(dealing.tree.lengths))):
            first.append(Attach(sequences))
        second: list[Op] = [] if keeps else [Anchor(chunk) for chunk in chunks[:-1]]
        for chunk in reversed(chunks):
            second += [Backward(chunk)] if keeps else [Forward(chunk), Backward(chunk)]
        return Schedule((*first, *(() if mode == "score" else second)), ONE_TREE, options.order, mode, size, "stages")

    if mode == "score" or not kept.graphs:
        return ops(False)
    return ops(False).with_parts([(parts - kept.graphs, ops(False)), (kept.graphs, ops(True))])


def chunks_of(dealing: Dealing, rank: int) -> list[Chunk]:
    """Return the pieces of a rank as chunks, without those that are empty; see `chunk_of`."""
    pieces = [dealing.piece(rank, number) for number in range(dealing.rounds)]
    return [chunk_of(dealing.tree, start, stop) for start, stop in pieces if start < stop]


def chunk_of(tree: PrefixTree, start: int, stop: int) -> Chunk:
    """Return the rows `[start, stop)` as a chunk of branches: consecutive rows of one path are one slice.

    A branch continues an earlier one, or the path above the first row at any depth (other than in other chunks).
    """
    first = int(np.searchsorted(tree.row, start, side="right")) - 1
    nodes = range(first, int(np.searchsorted(tree.row, stop)))
    slices: list[Slice] = []
    for node in nodes:
        row, depth = int(tree.row[node]), int(tree.start[node])
        low, high = max(start, row), min(stop, row + int(tree.stop[node]) - depth)
        part = Slice(int(tree.sequence[node]), depth + low - row, depth + high - row)
        if slices and slices[-1].stop == part.start and tree.parent[node] == node - 1:
            part = Slice(part.sequence, slices.pop().start, part.stop)
        slices.append(part)
    return Chunk(None, tuple(slices))


def deal_out(tree: PrefixTree, options: Options, limits: Limits, mode: str, ranks: int) -> tuple[Dealing, KeptByParts]:
    """Deal a tree out by the limits that ranks agree on.

    Returns:
        the pieces, and what parts keep within the budget.
    """
    sizes = limits.chunk_sizes if options.chunk_size is None else (options.chunk_size,)
    forward, backward = limits.cost.forward, limits.cost.backward
    heads = np.arange(tree.num_rows + 1) if limits.head_starts is None else limits.head_starts
    trains, parts, pairs = mode != "score", len(limits.parts), np.append(0, np.cumsum(tree.depths() + 1))

    def dealt(kept: KeptByParts) -> Dealing:
        again = trains * (1 - kept.graphs / max(parts, 1))  # share of the forward that runs twice
        token = (1 + again) * forward.token + trains * backward.token
        pair = (1 + again * (not kept.results)) * forward.pair + trains * backward.pair
        more = (forward.head + trains * backward.head) * np.diff(heads)
        return Dealing.of(tree, ranks, max(sizes), (token, pair), more)

    def kept_of(dealing: Dealing) -> KeptByParts:
        of_rank = (int(dealing.by_rank(np.diff(total[dealing.bounds])).max(initial=0)) for total in (pairs, heads))
        return _kept(Work(0, 0, max(dealing.tokens), *of_rank), limits, dealing.rounds, max(dealing.above_all))

    dealing = dealt(KeptByParts(parts))
    if not trains or not parts or limits.budget is None:
        return dealing, KeptByParts(parts * trains)
    dealing = dealt(kept_of(dealing))
    return dealing, kept_of(dealing)


def _kept(most: Work, limits: Limits, rounds: int, above: int) -> KeptByParts:
    """Return what parts keep within the budget so that least is computed again.

    Args:
        most: work of a rank, all parts.
        above: tokens whose states kept graphs of a part read.
    """
    parts, budget, best = limits.parts, limits.budget or 0, (0.0, NOTHING_KEPT)
    forward, attention = map(limits.cost.forward.seconds, (most._replace(heads=0), Work(pairs=most.pairs)))
    # The last part goes backward right after its forward: one piece of it is not kept beside others.
    bytes_of = [part.footprint.graph(most) + part.footprint.kv_token * above for part in reversed(parts)]
    graphs = [size * (number > 0 or rounds > 1) for number, size in enumerate(bytes_of)]
    results = [most.tokens * part.footprint.result_token * (attention > 0) for part in reversed(parts)]
    for kept in range(len(parts) + 1):
        for others in {0.0, sum(results[kept:])}:
            if sum(graphs[:kept]) + others <= budget:
                saved = kept * forward + (len(parts) - kept) * attention * (others > 0)
                best = max(best, (saved, KeptByParts(kept, others > 0)))
    return best[1]


def exchange_seconds(
    dealing: Dealing, schedule: Schedule, limits: Limits, link: float, latency: float = LATENCY
) -> float:
    """Return the seconds that ranks wait for each other in a step, besides those that they compute.

    All ranks run a round together, layer by layer. In every forward of a layer the busiest rank receives, or sends, the
    states of `traffic`, in a message to each other rank; those of `tops` go from rank to rank, in one message of each
    rank that has any. Their gradients take the same way back. None of it is taken to be hidden behind computation.
    Running states are computed by one rank after the other.

    Args:
        schedule: ops of a rank that has pieces.
        link: bytes a second that a rank receives, and sends at the same time.
        latency: seconds of a message.
    """
    layers = sum(part.footprint.kv_token > 0 or part.footprint.has_states for part in limits.parts)
    forward, backward = limits.cost.forward.token, limits.cost.backward.token
    kinds = [(share, Counter((extent(op), type(op) is Backward) for op in run.ops)) for share, run in schedule.kinds]
    seconds = 0.0
    for number, chunk in enumerate(schedule.chunks):
        top = dealing.holders_of(dealing.tops[number])
        traffic, tops = dealing.traffic[number].copy(), np.bincount(top, minlength=dealing.ranks)
        for rank in range(dealing.ranks):
            traffic[rank] -= np.bincount(top[: dealing.of_top(rank, number)], minlength=dealing.ranks)
        np.fill_diagonal(traffic, 0)
        tokens, messages = (int(max(counts.sum(0).max(), counts.sum(1).max())) for counts in (traffic, traffic > 0))
        messages += int(np.count_nonzero(tops)) * math.ceil(math.log2(dealing.ranks))
        sent, wait = limits.footprint.kv_token * (tokens + len(top)) / link, layers * messages * latency
        in_turn = IN_TURN * dealing.in_turn(number) if limits.footprint.has_states else 0.0
        for share, runs in kinds:
            seconds += share * runs[chunk, False] * (sent + wait + in_turn * forward)
            seconds += share * runs[chunk, True] * (GRADIENTS * sent + wait + in_turn * backward)
    return seconds
