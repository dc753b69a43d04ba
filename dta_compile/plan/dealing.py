"""Deal one prefix tree out over ranks: which tokens each computes, and which states it reads of others.

Rows of a tree are in depth-first order, so all rows above a row come before it. The rows are cut into *pieces* of equal
cost, consecutive ranges `[start, stop)`, which go to the ranks in turn: piece `p` to rank `p % ranks` in round
`p // ranks`. The rows above a piece that are not in it lie on a single path, that of its first row: what a rank reads
of others is one path per piece, and other ranks have computed it in the same round or in an earlier one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dta_compile.errors import PlanError
from dta_compile.options import Options
from dta_compile.plan.cost import Limits
from dta_compile.plan.events import Work
from dta_compile.plan.schedule import Anchor, Attach, Backward, Forward, Op, Schedule, extent
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.lexicographic import IntArray
from dta_compile.plan.tree.prefix_tree import PrefixTree

ONE_TREE = "one_tree"
"""Name of the strategy."""
NVLINK = 4.5e11  # bytes a second that an H100 sends to, and as many that it receives from, the others of its node
LATENCY = 2e-5  # seconds until a message is there, between GPUs of a node; an assumption
GRADIENTS = 2  # bytes of gradients of states, in float32, relative to states in 16 bits
IN_TURN = 0.2  # share of a recurrent model's time that is spent in its recurrences, an assumption


class KeptByParts(NamedTuple):
    """What parts of the model keep from the first half of a schedule to the second.

    Attributes:
        graphs: number of parts, counted from the last, that keep their graphs.
        results: whether the others keep the results of attention.
    """

    graphs: int = 0
    results: bool = False


NOTHING_KEPT = KeptByParts()


@dataclasses.dataclass(frozen=True, eq=False)
class Dealing:
    """Pieces of a tree over ranks.

    Attributes:
        tree: the prefix tree of all ranks' sequences.
        ranks: number of ranks.
        bounds: `[rounds * ranks + 1]` ascending rows; piece `p` has the rows `[bounds[p], bounds[p + 1])`.
        costs: `[ranks]` cost of each rank's rows, in the unit of the rates that they were dealt out by.
    """

    tree: PrefixTree
    ranks: int
    bounds: IntArray
    costs: IntArray | Sequence[float]

    @classmethod
    def of(
        cls,
        tree: PrefixTree,
        ranks: int,
        most_tokens: int,
        rates: tuple[float, float] = (1.0, 0.0),
        more: npt.NDArray[np.float64] | float = 0.0,
    ) -> Dealing:
        """Deal a tree out in pieces of at most `most_tokens` tokens, or of the longest unit if that has more.

        Args:
            rates: cost per token, and per query-key pair; a token at depth d has d + 1 pairs.
            more: `[num_rows]` cost of each row besides, such as that of its head rows.
        """
        token, pair = rates
        total = np.concatenate([[0.0], np.cumsum(token + pair * (tree.depths() + 1.0) + more)])
        most, rounds = max(most_tokens, tree.longest_unit), 1
        bounds = _cut(tree, total, ranks)
        while np.diff(bounds).max(initial=0) > most:
            rounds = max(rounds + 1, -(-tree.num_rows // (most * ranks)))
            finer = _cut(tree, total, ranks * rounds)
            if not np.diff(finer).all():  # every rank takes part in every round but the only one
                break
            bounds = finer
        return cls(tree, ranks, bounds, [float(cost) for cost in _by_rank(np.diff(total[bounds]), ranks)])

    @property
    def rounds(self) -> int:
        """Number of pieces of each rank."""
        return (len(self.bounds) - 1) // self.ranks

    @property
    def imbalance(self) -> float:
        """Largest cost of a rank over the mean: 1.0 if all have equal work."""
        return max(self.costs) * self.ranks / sum(self.costs) if any(self.costs) else 1.0

    @functools.cached_property
    def tokens(self) -> list[int]:
        """Number of tokens of each rank."""
        counts: list[int] = _by_rank(np.diff(self.bounds), self.ranks).tolist()
        return counts

    def piece(self, rank: int, number: int) -> tuple[int, int]:
        """Return the rows `[start, stop)` of a rank in a round."""
        piece = number * self.ranks + rank
        return int(self.bounds[piece]), int(self.bounds[piece + 1])

    def rows(self, rank: int) -> IntArray:
        """Return the rows of a rank, ascending."""
        pieces = (np.arange(*self.piece(rank, number)) for number in range(self.rounds))
        return np.concatenate([np.zeros(0, np.int64), *pieces])

    def owners(self, rows: IntArray) -> IntArray:
        """Return the piece that each row is in."""
        owners: IntArray = np.searchsorted(self.bounds, rows, side="right") - 1
        return owners

    def above(self, rank: int, number: int) -> IntArray:
        """Return the rows above a rank's piece that are not in it, by depth; empty if the piece is."""
        ranges = (np.arange(*part) for part in self._above(rank, number))
        return np.concatenate([np.zeros(0, np.int64), *ranges])

    def _place(self, rank: int, number: int) -> tuple[int, int]:
        """Return a sequence and the depth in it at which a piece begins; depth 0 if the piece is empty."""
        (start, stop), tree = self.piece(rank, number), self.tree
        if start == stop:
            return 0, 0
        node = int(np.searchsorted(tree.row, start, side="right")) - 1
        return int(tree.sequence[node]), int(tree.start[node]) + start - int(tree.row[node])

    def _above(self, rank: int, number: int) -> list[tuple[int, int]]:
        """Return `above` as ascending ranges of rows."""
        sequence, depth = self._place(rank, number)
        return self.tree.row_ranges(sequence, 0, depth) if depth else []

    def starts(self, rank: int, number: int) -> IntArray:
        """Return the depths of the path above a rank's piece at which tokens of the piece continue it, descending."""
        (start, stop), tree = self.piece(rank, number), self.tree
        if start == stop:
            return np.zeros(0, np.int64)
        nodes = np.arange(*np.searchsorted(tree.row, (start + 1, stop)))  # those that begin after the first row
        parents = tree.parent[nodes]
        above = np.where(parents < 0, -1, tree.row[parents] + tree.stop[parents] - tree.start[parents] - 1)
        depths = np.concatenate([[len(self.above(rank, number))], tree.start[nodes[above < start]]])
        return np.unique(depths)[::-1]

    @functools.cached_property
    def traffic(self) -> IntArray:
        """Tokens above its piece that a rank reads of another one, `[rounds, readers, sources]`; 0 of itself."""
        counts = np.zeros((self.rounds, self.ranks, self.ranks), np.int64)
        for number, rank in np.ndindex(self.rounds, self.ranks):
            if ranges := self._above(rank, number):
                edges = np.array(ranges)
                before = np.cumsum(edges[:, 1] - edges[:, 0])  # rows of the path up to the end of each range
                rows = np.stack([before - (edges[:, 1] - edges[:, 0]), before], 1)
                counts[number, rank] = _by_rank(
                    np.diff(np.interp(self.bounds, edges.reshape(-1), rows.reshape(-1))), self.ranks
                )
                counts[number, rank, rank] = 0
        return counts

    @functools.cached_property
    def tops(self) -> list[IntArray]:
        """By round, the rows above most pieces, which their ranks send to all at once: a path, by depth.

        Any two of them are above a common piece, so they lie on one path. None if a rank has no piece in the round.
        """
        tops = []
        for number in range(self.rounds):
            changes = np.zeros(self.tree.num_rows + 1, np.int64)
            for part in (part for rank in range(self.ranks) for part in self._above(rank, number)):
                changes[list(part)] += 1, -1
            pieces = np.diff(self.bounds[number * self.ranks :][: self.ranks + 1])
            least = max(self.ranks // 2, 2) if pieces.all() else self.ranks
            tops.append(np.flatnonzero(np.cumsum(changes)[:-1] > least))
        return tops

    def of_top(self, rank: int, number: int) -> int:
        """Return how many rows of a round's top, the first ones, are above a rank's piece."""
        above, top = self.above(rank, number), self.tops[number]
        size = min(len(above), len(top))
        return int(np.count_nonzero(above[:size] == top[:size]))

    @property
    def received(self) -> list[int]:
        """Number of tokens whose states each rank receives in a forward of a layer."""
        counts: list[int] = self.traffic.sum((0, 2)).tolist()
        return counts

    @functools.cached_property
    def held(self) -> list[int]:
        """Most tokens of which each rank holds a layer's states besides the piece that it runs.

        Those are the path above a piece, and the rank's own tokens that pieces of later rounds read.
        """
        is_read, counts = np.zeros(self.tree.num_rows, np.bool_), [0] * self.ranks
        for number in reversed(range(self.rounds)):
            for rank in range(self.ranks):
                counts[rank] += int(np.count_nonzero(is_read[slice(*self.piece(rank, number))]))
            for rank in range(self.ranks) if number else ():
                for start, stop in self._above(rank, number):
                    is_read[start:stop] = True
        rounds = range(self.rounds)
        return [max(self._place(rank, number)[1] for number in rounds) + own for rank, own in enumerate(counts)]

    def in_turn(self, number: int) -> int:
        """Return how many tokens, at most, a rank waits for in a round before its recurrences can begin.

        A rank sends running states when it has run its piece, so waiting times add up along the pieces of a path.
        """
        waits = [0] * self.ranks
        for rank in range(self.ranks):
            depths = self.starts(rank, number)
            rows = self.above(rank, number)[depths[depths > 0] - 1]
            rounds, sources = np.divmod(self.owners(rows), self.ranks)
            for source in np.unique(sources[rounds == number]).tolist():
                start, stop = self.piece(source, number)
                waits[rank] = max(waits[rank], waits[source] + stop - start)
        return max(waits)

    def chunks(self, rank: int) -> list[Chunk]:
        """Return the pieces of a rank as chunks, without those that are empty; see `chunk_of`."""
        pieces = [self.piece(rank, number) for number in range(self.rounds)]
        return [chunk_of(self.tree, start, stop) for start, stop in pieces if start < stop]

    def schedule(
        self, rank: int, options: Options, mode: str, parts: int = 1, kept: KeptByParts = NOTHING_KEPT
    ) -> Schedule:
        """Return the ops of a rank, for a sweep of stages.

        The states that other pieces read are exchanged while an op runs: all ranks run the ops of a round together. The
        second half computes again the states of all rounds that later ones read, and goes backward through the rounds.

        Args:
            parts: number of parts of the model.
            kept: what they keep from the first half to the second.
        """
        chunks = self.chunks(rank)
        size = max((chunk.tokens for chunk in chunks), default=1)

        def ops(keeps: bool) -> Schedule:
            results = kept.results and mode != "score"
            first: list[Op] = [
                Forward(chunk, True) if keeps else Anchor(chunk, True, results=results) for chunk in chunks
            ]
            if sequences := tuple(range(len(self.tree.lengths))):
                first.append(Attach(sequences))
            second: list[Op] = [] if keeps else [Anchor(chunk) for chunk in chunks[:-1]]
            for chunk in reversed(chunks):
                second += [Backward(chunk)] if keeps else [Forward(chunk), Backward(chunk)]
            return Schedule(
                (*first, *(() if mode == "score" else second)), ONE_TREE, options.order, mode, size, "stages"
            )

        if mode == "score" or not kept.graphs:
            return ops(False)
        return ops(False).with_parts([(parts - kept.graphs, ops(False)), (kept.graphs, ops(True))])

    def check(self) -> None:
        """Verify that the pieces divide the rows of the tree, and that what a piece reads is computed no later.

        Raises:
            PlanError: they do not; a mistake of the planner.
        """
        bounds = self.bounds
        divides = bounds[0] == 0 and bounds[-1] == self.tree.num_rows and (np.diff(bounds) >= 0).all()
        if not divides or (self.rounds > 1 and not np.diff(bounds).all()):
            raise PlanError("pieces of a tree do not divide its rows", got=str(bounds.tolist())[:200])
        for piece in range(len(bounds) - 1):
            edges = [edge for part in self._above(piece % self.ranks, piece // self.ranks) for edge in part]
            if edges and (edges[-1] > bounds[piece] or (np.diff(edges) < 0).any()):
                raise PlanError("a piece of a tree reads rows that come later", got=f"piece {piece}: {edges[-1] - 1}")
            if (row := _outside_unit(self.tree, int(bounds[piece]))) != bounds[piece]:
                raise PlanError("a piece of a tree cuts tokens that read each other", got=f"row {bounds[piece]}: {row}")


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
        of_rank = (int(_by_rank(np.diff(total[dealing.bounds]), ranks).max(initial=0)) for total in (pairs, heads))
        return _kept(Work(0, 0, max(dealing.tokens), *of_rank), limits, dealing.rounds)

    dealing = dealt(KeptByParts(parts))
    if not trains or not parts or limits.budget is None:
        return dealing, KeptByParts(parts * trains)
    dealing = dealt(kept_of(dealing))
    return dealing, kept_of(dealing)


def _kept(most: Work, limits: Limits, rounds: int) -> KeptByParts:
    """Return what parts keep within the budget so that least is computed again; `most`: work of a rank, all parts."""
    parts, budget, best = limits.parts, limits.budget or 0, (0.0, NOTHING_KEPT)
    forward, attention = map(limits.cost.forward.seconds, (most._replace(heads=0), Work(pairs=most.pairs)))
    # The last part goes backward right after its forward: one piece of it is not kept beside others.
    graphs = [part.footprint.graph(most) * (number > 0 or rounds > 1) for number, part in enumerate(reversed(parts))]
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
        top = dealing.owners(dealing.tops[number]) % dealing.ranks
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


def _cut(tree: PrefixTree, total: IntArray, pieces: int) -> IntArray:
    """Cut rows with the running `total` of their costs into pieces of equal cost, outside of units."""
    bounds: IntArray = np.searchsorted(total, total[-1] * np.arange(1, pieces) / pieces).astype(np.int64)
    before = np.maximum(bounds - 1, 0)
    aims = total[-1] * np.arange(1, pieces) / pieces
    bounds = np.where(aims - total[before] < total[bounds] - aims, before, bounds)  # the nearer of two
    if tree.units is not None:
        bounds = np.array([_outside_unit(tree, bound) for bound in bounds.tolist()], np.int64)
    return np.concatenate([[0], np.maximum.accumulate(bounds), [tree.num_rows]]).astype(np.int64)


def _outside_unit(tree: PrefixTree, row: int) -> int:
    """Return the row, or the nearest bound of the unit that it would cut."""
    if not 0 < row < tree.num_rows:
        return row
    node = int(np.searchsorted(tree.row, row, side="right")) - 1
    depth = int(tree.start[node]) + row - int(tree.row[node])
    above, below = tree.unit_at(int(tree.sequence[node]), depth)
    if above == below or depth == int(tree.start[node]):  # no unit is cut, as none reaches over a fork
        return row
    return row + (above - depth if depth - above <= below - depth else below - depth)


def _by_rank(values: IntArray, ranks: int) -> IntArray:
    summed: IntArray = values.reshape(-1, ranks).sum(0)
    return summed
