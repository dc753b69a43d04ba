"""Which rows ranks send each other: states above their pieces, inputs of rows, and frontier values of head rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dta_compile.plan.division.pieces import Dealing
from dta_compile.runtime.rows.batch_rows import BatchRows, Integers

NONE = np.zeros(0, np.int64)


class Piece(NamedTuple):
    """A piece of this rank.

    Attributes:
        start, stop: its rows of the tree.
        first: number of its first row among the rows of this rank.
        above: rows above it, by depth, that are not in it.
        of_top: how many of them, the first ones, all ranks get.
    """

    start: int
    stop: int
    first: int
    above: Integers
    of_top: int


class Read(NamedTuple):
    """Rows of one rank that another reads in a round: those of earlier rounds, then those of this round.

    Attributes:
        positions: their positions among the rows above the reader's piece, or of the top of the tree.
        earlier: rows of the tree, of earlier rounds.
        rows: rows of the tree, of this round.
    """

    positions: Integers
    earlier: Integers
    rows: Integers

    @property
    def number(self) -> int:
        """Number of rows."""
        return len(self.positions)


@dataclasses.dataclass(frozen=True, eq=False)
class StateRoutes:
    """Exchange of states of tokens in each round, as rank `rank` sees it."""

    dealing: Dealing
    rank: int

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """Pieces of this rank, by round."""
        pieces, first = [], 0
        for number in range(self.dealing.rounds):
            start, stop = self.dealing.piece(self.rank, number)
            of_top = self.dealing.of_top(self.rank, number)
            pieces.append(Piece(start, stop, first, self._above(self.rank, number), of_top))
            first += stop - start
        return pieces

    @functools.cached_property
    def shared(self) -> list[dict[int, Read]]:
        """By round, the rows of each rank that all get; see `Dealing.tops`."""
        ranks = range(self.dealing.ranks)
        return [
            {source: read for source in ranks if (read := self._of_path(top, number, source)).number}
            for number, top in enumerate(self.dealing.tops)
        ]

    @functools.cached_property
    def received(self) -> list[dict[int, Read]]:
        """By round, what else this rank reads of each rank that has any of it; of itself, only of earlier rounds."""
        ranks = range(self.dealing.ranks)
        return [
            {source: read for source in ranks if (read := self._read(self.rank, number, source)).number}
            for number in range(self.dealing.rounds)
        ]

    @functools.cached_property
    def sent(self) -> list[dict[int, Read]]:
        """By round, what else each other rank reads of this one."""
        others = [rank for rank in range(self.dealing.ranks) if rank != self.rank]
        return [
            {reader: read for reader in others if (read := self._read(reader, number, self.rank)).number}
            for number in range(self.dealing.rounds)
        ]

    @functools.cached_property
    def most_read(self) -> list[int]:
        """By round, the most tokens that a rank reads of others."""
        counts: list[int] = self.dealing.traffic.sum(2).max(1).tolist()
        return counts

    def is_earlier(self, other: int, number: int) -> bool:
        """Return whether the piece of another rank in a round comes before that of this one."""
        return self.dealing.place(other, number) < self.dealing.place(self.rank, number)

    @functools.cached_property
    def exported(self) -> list[Integers]:
        """By round, the rows of this rank's piece that ranks read in later rounds, itself included, ascending."""
        later: list[list[Integers]] = [[] for _ in range(self.dealing.rounds)]
        for number in range(1, self.dealing.rounds):
            own = (of_round[number].get(self.rank) for of_round in (self.received, self.shared))
            reads = [*self.sent[number].values(), *(read for read in own if read is not None)]
            for rows in (read.earlier for read in reads):
                rounds = self.dealing.rounds_of(rows)
                for of_round in np.unique(rounds).tolist():
                    later[of_round].append(rows[rounds == of_round])
        return [np.unique(np.concatenate([NONE, *rows])) for rows in later]

    @functools.cached_property
    def received_states(self) -> list[dict[int, list[int]]]:
        """By round, the rows of each rank after which this one reads running states: parts of its piece begin there."""
        ranks = range(self.dealing.ranks)
        return [
            {source: rows for source in ranks if (rows := self._read_states(self.rank, number, source))}
            for number in range(self.dealing.rounds)
        ]

    @functools.cached_property
    def sent_states(self) -> list[dict[int, list[int]]]:
        """By round, the rows of this rank after which each other rank reads running states."""
        others = [rank for rank in range(self.dealing.ranks) if rank != self.rank]
        return [
            {reader: rows for reader in others if (rows := self._read_states(reader, number, self.rank))}
            for number in range(self.dealing.rounds)
        ]

    @functools.cached_property
    def exported_states(self) -> list[Integers]:
        """By round, the rows of this rank's piece after which running states are read by other pieces, ascending."""
        reads = [*self.sent_states, *({0: of_round.get(self.rank, [])} for of_round in self.received_states)]
        rows = np.unique(np.array([row for read in reads for rows in read.values() for row in rows], np.int64))
        return [rows[slice(*np.searchsorted(rows, (piece.start, piece.stop)))] for piece in self.pieces]

    def _read_states(self, reader: int, number: int, source: int) -> list[int]:
        depths = self.dealing.starts(reader, number)
        rows = self._above(reader, number)[depths[depths > 0] - 1]
        read: list[int] = np.unique(rows[self.dealing.holders_of(rows) == source]).tolist()
        return read

    def _above(self, rank: int, number: int) -> Integers:
        key = rank, number
        if key not in self._paths:
            self._paths[key] = self.dealing.above(rank, number)
        return self._paths[key]

    @functools.cached_property
    def _paths(self) -> dict[tuple[int, int], Integers]:
        return {}

    def _read(self, reader: int, number: int, source: int) -> Read:
        return self._of_path(self._above(reader, number), number, source, self.dealing.of_top(reader, number))

    def _of_path(self, path: Integers, number: int, source: int, first: int = 0) -> Read:
        """Return the rows of a path that a rank has, from the depth `first` on."""
        positions = np.flatnonzero(self.dealing.holders_of(path) == source)
        positions = positions[positions >= first]
        rows = path[positions]
        is_earlier = self.dealing.rounds_of(rows) < number
        return Read(positions, rows[is_earlier], rows[~is_earlier])


class Transfer(NamedTuple):
    """An `all_to_all`: entries that this rank sends, rank after rank, and where the received ones belong.

    Attributes:
        sent: numbers of own entries, grouped by receiver.
        sizes: entries for each receiver.
        places: places of received entries, grouped by sender.
        received: entries from each sender.
    """

    sent: Integers
    sizes: list[int]
    places: Integers
    received: list[int]

    @property
    def back(self) -> Transfer:
        """The same entries on the way back."""
        return Transfer(self.places, self.received, self.sent, self.sizes)


def transfer(
    holders: Integers, entries: Integers, takers: Integers, places: Integers, rank: int, size: int
) -> Transfer:
    """Return the transfer for a list of moves, in the same order on all ranks.

    Args:
        holders, takers: rank that has each entry, and rank that takes it.
        entries, places: number of the entry at its holder, and place at its taker.
    """
    sent, received = np.flatnonzero(holders == rank), np.flatnonzero(takers == rank)
    sent = sent[np.argsort(takers[sent], kind="stable")]
    received = received[np.argsort(holders[received], kind="stable")]
    sizes, counts = (np.bincount(who, minlength=size).tolist() for who in (takers[sent], holders[received]))
    return Transfer(entries[sent], sizes, places[received], counts)


def numbers_by_rank(ranks: Integers, count: int) -> Integers:
    """Return for every entry the number of entries before it that have the same rank."""
    numbers = np.empty(len(ranks), np.int64)
    for rank in range(count):
        own = np.flatnonzero(ranks == rank)
        numbers[own] = np.arange(len(own))
    return numbers


class HeadRoutes(NamedTuple):
    """Way of frontier values from the ranks that compute head rows to those that own a token of theirs.

    Attributes:
        computed: numbers of the tree's head rows that this rank computes, ascending.
        owned: those that tokens of this rank's batch use, ascending.
        returned: transfer from computed to owned rows.
    """

    computed: Integers
    owned: Integers
    returned: Transfer


def head_routes(rows: BatchRows, dealing: Dealing, begins: Sequence[int], rank: int) -> HeadRoutes:
    """Return the routes of head rows.

    Args:
        rows: rows of all ranks' tokens, one rank after the other.
        begins: `[ranks + 1]` position of each rank's first token.
    """
    heads, size = rows.head_rows.reshape(-1), dealing.ranks
    count = len(rows.head_positions)
    owned = [np.unique(part[part < count]) for part in np.split(heads, list(begins[1:-1]))]
    tree_rows = np.searchsorted(rows.head_starts, np.arange(count), side="right") - 1
    holder = dealing.holders_of(tree_rows)
    number = numbers_by_rank(holder, size)
    moved = np.concatenate([NONE, *owned])
    takers = np.repeat(np.arange(size), [len(part) for part in owned])
    places = np.concatenate([NONE, *(np.arange(len(part)) for part in owned)])
    returned = transfer(holder[moved], number[moved], takers, places, rank, size)
    return HeadRoutes(np.flatnonzero(holder == rank), owned[rank], returned)
