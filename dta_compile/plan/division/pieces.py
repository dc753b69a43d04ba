"""Deal one prefix tree out over ranks: which tokens each computes, and which states it reads of others.

Rows of a tree are in depth-first order, so all rows above a row come before it. The rows are cut into *rounds*, and
each into as many *pieces* of equal cost as there are ranks, consecutive ranges `[start, stop)`. Each rank takes one
piece of a round: those with the fewest tokens so far take the longest, as pieces of equal cost are longer where less is
above them. The rows above a piece that are not in it lie on a single path, that of its first row: what a rank reads of
others is one path per piece, and other ranks have computed it in the same round or in an earlier one.
"""

from __future__ import annotations

import dataclasses
import functools
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dta_compile.errors import PlanError
from dta_compile.plan.tree.lexicographic import IntArray
from dta_compile.plan.tree.prefix_tree import PrefixTree


@dataclasses.dataclass(frozen=True, eq=False)
class Dealing:
    """Pieces of a tree over ranks.

    Attributes:
        tree: the prefix tree of all ranks' sequences.
        ranks: number of ranks.
        bounds: `[rounds * ranks + 1]` ascending rows; piece `p` has the rows `[bounds[p], bounds[p + 1])`.
        piece_costs: `[rounds * ranks]` cost of each piece, in the unit of the rates that they were dealt out by.
    """

    tree: PrefixTree
    ranks: int
    bounds: IntArray
    piece_costs: npt.NDArray[np.float64]

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

        Rounds have equally many tokens, as these bound the memory; the pieces of a round, which ranks run together,
        have equal cost.

        Args:
            rates: cost per token, and per query-key pair; a token at depth d has d + 1 pairs.
            more: `[num_rows]` cost of each row besides, such as that of its head rows.
        """
        token, pair = rates
        total = np.concatenate([[0.0], np.cumsum(token + pair * (tree.depths() + 1.0) + more)])
        most, rounds = max(most_tokens, tree.longest_unit), 1
        bounds = _cut(tree, total, 0, tree.num_rows, ranks)
        while np.diff(bounds).max(initial=0) > most:
            rounds = max(rounds + 1, -(-tree.num_rows // (most * ranks)))
            edges = _cut(tree, np.arange(tree.num_rows + 1.0), 0, tree.num_rows, rounds).tolist()
            of_rounds = [_cut(tree, total, *edge, ranks)[1:] for edge in pairwise(edges)]
            finer = np.concatenate([[0], *of_rounds]).astype(np.int64)
            if not np.diff(finer).all():  # every rank takes part in every round but the only one
                break
            bounds = finer
        return cls(tree, ranks, bounds, np.diff(total[bounds]))

    @property
    def rounds(self) -> int:
        """Number of pieces of each rank."""
        return (len(self.bounds) - 1) // self.ranks

    @functools.cached_property
    def holders(self) -> IntArray:
        """Rank of each piece, `[rounds * ranks]`: in the first round in order, then by tokens, see above."""
        sizes, tokens = np.diff(self.bounds).reshape(-1, self.ranks), np.zeros(self.ranks, np.int64)
        holders = np.tile(np.arange(self.ranks), (len(sizes), 1))
        for number, of_round in enumerate(sizes):
            if number:
                holders[number, np.argsort(-of_round, kind="stable")] = np.argsort(tokens, kind="stable")
            tokens[holders[number]] += of_round
        return holders.reshape(-1)

    @functools.cached_property
    def _places(self) -> IntArray:
        """Piece of each rank in each round, `[rounds, ranks]`."""
        places = np.argsort(self.holders.reshape(-1, self.ranks), 1)
        return places + self.ranks * np.arange(self.rounds)[:, None]

    def by_rank(self, values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
        """Return the sums of a number of each piece by rank."""
        return np.bincount(self.holders, values, self.ranks).astype(np.float64)

    @functools.cached_property
    def costs(self) -> list[float]:
        """Cost of each rank's rows."""
        costs: list[float] = self.by_rank(self.piece_costs).tolist()
        return costs

    @property
    def imbalance(self) -> float:
        """Largest cost of a rank over the mean: 1.0 if all have equal work."""
        return max(self.costs) * self.ranks / sum(self.costs) if any(self.costs) else 1.0

    @functools.cached_property
    def tokens(self) -> list[int]:
        """Number of tokens of each rank."""
        counts: list[int] = self.by_rank(np.diff(self.bounds)).astype(np.int64).tolist()
        return counts

    def piece(self, rank: int, number: int) -> tuple[int, int]:
        """Return the rows `[start, stop)` of a rank in a round."""
        piece = int(self._places[number, rank])
        return int(self.bounds[piece]), int(self.bounds[piece + 1])

    def place(self, rank: int, number: int) -> int:
        """Return how many pieces of a round come before that of a rank, in the order of rows."""
        return int(self._places[number, rank]) % self.ranks

    def rows(self, rank: int) -> IntArray:
        """Return the rows of a rank, ascending."""
        pieces = (np.arange(*self.piece(rank, number)) for number in range(self.rounds))
        return np.concatenate([np.zeros(0, np.int64), *pieces])

    def owners(self, rows: IntArray) -> IntArray:
        """Return the piece that each row is in."""
        return np.searchsorted(self.bounds, rows, side="right") - 1

    def holders_of(self, rows: IntArray) -> IntArray:
        """Return the rank that has each row."""
        return self.holders[self.owners(rows)]

    def rounds_of(self, rows: IntArray) -> IntArray:
        """Return the round that each row is computed in."""
        return self.owners(rows) // self.ranks

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
                counts[number, rank] = self.by_rank(
                    np.diff(np.interp(self.bounds, edges.reshape(-1), rows.reshape(-1)))
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
    def exported(self) -> list[int]:
        """Number of tokens of each rank that pieces of later rounds read."""
        is_read, counts = np.zeros(self.tree.num_rows, np.bool_), [0] * self.ranks
        for number in reversed(range(self.rounds)):
            for rank in range(self.ranks):
                counts[rank] += int(np.count_nonzero(is_read[slice(*self.piece(rank, number))]))
            for rank in range(self.ranks) if number else ():
                for start, stop in self._above(rank, number):
                    is_read[start:stop] = True
        return counts

    @property
    def most_above(self) -> list[int]:
        """Most tokens above a piece of each rank."""
        return [max(of_rank) for of_rank in self._depths]

    @property
    def above_all(self) -> list[int]:
        """Number of tokens above the pieces of each rank, each counted for every piece."""
        return [sum(of_rank) for of_rank in self._depths]

    @functools.cached_property
    def _depths(self) -> list[list[int]]:
        rounds = range(self.rounds)
        return [[self._place(rank, number)[1] for number in rounds] for rank in range(self.ranks)]

    @property
    def held(self) -> list[int]:
        """Most tokens of which each rank holds a layer's states besides the piece that it runs."""
        return [above + own for above, own in zip(self.most_above, self.exported, strict=True)]

    def in_turn(self, number: int) -> int:
        """Return how many tokens, at most, a rank waits for in a round before its recurrences can begin.

        A rank sends running states when it has run its piece, so waiting times add up along the pieces of a path.
        """
        waits = [0] * self.ranks
        for rank in self.holders[number * self.ranks :][: self.ranks].tolist():
            depths = self.starts(rank, number)
            rows = self.above(rank, number)[depths[depths > 0] - 1]
            for source in np.unique(self.holders_of(rows)[self.rounds_of(rows) == number]).tolist():
                start, stop = self.piece(source, number)
                waits[rank] = max(waits[rank], waits[source] + stop - start)
        return max(waits)

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
            number, rank = piece // self.ranks, int(self.holders[piece])
            edges = [edge for part in self._above(rank, number) for edge in part]
            if edges and (edges[-1] > bounds[piece] or (np.diff(edges) < 0).any()):
                raise PlanError("a piece of a tree reads rows that come later", got=f"piece {piece}: {edges[-1] - 1}")
            if (row := _outside_unit(self.tree, int(bounds[piece]))) != bounds[piece]:
                raise PlanError("a piece of a tree cuts tokens that read each other", got=f"row {bounds[piece]}: {row}")


def _cut(tree: PrefixTree, total: npt.NDArray[np.float64], start: int, stop: int, pieces: int) -> IntArray:
    """Cut the rows `[start, stop)` with the running `total` of costs into pieces of equal cost, outside of units."""
    aims = total[start] + (total[stop] - total[start]) * np.arange(1, pieces) / pieces
    bounds: IntArray = np.clip(np.searchsorted(total, aims), start, stop).astype(np.int64)
    before = np.maximum(bounds - 1, start)
    bounds = np.where(aims - total[before] < total[bounds] - aims, before, bounds)  # the nearer of two
    if tree.units is not None:
        bounds = np.array([_outside_unit(tree, bound) for bound in bounds.tolist()], np.int64)
    return np.concatenate([[start], np.maximum.accumulate(bounds), [stop]]).astype(np.int64)


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
