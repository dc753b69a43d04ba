"""Where every token of a batch lives in the prefix tree: tree rows for the trunk, head rows for the head.

The dense world speaks of (row of the batch, column), the tree of its own rows. A tree row is one token of the tree; a
head row is one distinct use of a tree row by the head (a tree row with two different labels has two, one whose output
nobody uses has none). Head rows are sorted by tree row, so that a range of tree rows is a range of head rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dta_compile.plan import PrefixTree
from dta_compile.plan.tree.lexicographic import combine

LONGEST_RUN = 64  # equal sequences of one token behind one another that each are a sequence

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]


@dataclasses.dataclass
class BatchTokens:
    """The real tokens of a batch, the sequences that they are of, and what makes their prefixes the same.

    Attributes:
        valid: `[B, S]` real tokens; the others are padding and get no rows.
        places: `[P]` place of every real token in the flattened batch, `row * S + column`, ascending.
        segments: `(row, segment)` of every sequence where rows are packed, ascending; None: a sequence for every row.
        begins: for every sequence the position of its first token, which counts as `places` does.
        keys: for every sequence the codes of its real tokens; two sequences share rows as long as their codes agree.
        alike: `[P]` the position whose row each token shares; None: each has its own, all tokens are in `keys`.
    """

    valid: Booleans
    places: Integers
    segments: list[tuple[int, int]] | None
    begins: Integers
    keys: list[Integers]
    alike: Integers | None = None

    @classmethod
    def read(
        cls, valid: Booleans, starts: Booleans | None, trunk_keys: Sequence[Integers], by_column: bool
    ) -> BatchTokens:
        """Tokens of a batch.

        Args:
            valid: `[B, S]` real tokens.
            starts: `[B, S]` real tokens that begin a sequence; None: a sequence for every row.
            trunk_keys: `[B, S]` codes of everything that the trunk reads token by token.
            by_column: whether sequences must agree on the columns of their tokens as well.
        """
        places = np.flatnonzero(valid)
        if starts is None:
            rows, lengths = np.arange(len(valid)), np.count_nonzero(valid, axis=1)
            begins = np.cumsum(lengths) - lengths
        else:
            begins = np.flatnonzero(_take(starts, places))
            lengths = np.diff(begins, append=len(places))
            rows = places[begins] // valid.shape[1]
        codes = [_take(key, places) for key in trunk_keys]
        if by_column:
            first = np.repeat(rows * valid.shape[1] - begins, lengths)
            codes.append(places - np.arange(len(places)) - first)  # the column of each token, less its depth
        combined = combine(codes, len(places))
        if starts is None:
            return cls(valid, places, None, begins, np.split(combined, begins[1:]))
        owners = _owners(begins, lengths, combined)
        kept = owners == np.arange(len(begins))
        segments = list(zip(rows[kept].tolist(), _rank_in_run(rows)[kept].tolist(), strict=True))
        alike = None if kept.all() else np.where(np.repeat(kept, lengths), np.arange(len(places)), -1)
        if alike is not None:
            alike[begins[~kept]] = begins[owners[~kept]]
        stops = (begins + lengths)[kept]
        keys = [combined[begin:stop] for begin, stop in zip(begins[kept].tolist(), stops.tolist(), strict=True)]
        return cls(valid, places, segments, begins[kept], keys, alike)

    def row_of(self, sequence: int) -> int:
        """The row that a sequence is in."""
        return sequence if self.segments is None else self.segments[sequence][0]

    def places_of(self, sequence: int) -> Integers:
        """The places of a sequence's tokens."""
        begin = int(self.begins[sequence])
        return self.places[begin : begin + len(self.keys[sequence])]

    def rows_in(self, tree: PrefixTree) -> Integers:
        """`[P]` row in the tree of the keys."""
        rows = tree.token_rows()
        if self.alike is None:
            return rows
        own = self.alike == np.arange(len(self.alike))
        index = np.cumsum(own) - 1  # of a token among those of the keys
        found: Integers = rows[index[self.alike]]
        return found


def _owners(begins: Integers, lengths: Integers, codes: Integers) -> Integers:
    """For every sequence itself, or the first of a long run of equal sequences of one token that it is in.

    Such runs are padding at the end of a packed row, where positions are zero: rows of one sequence each would be
    planned one by one.
    """
    numbers = np.arange(len(begins))
    same = np.zeros(len(begins), np.bool_)
    same[1:] = (lengths[1:] == 1) & (lengths[:-1] == 1) & (codes[begins[1:]] == codes[begins[:-1]])
    first = np.maximum.accumulate(np.where(same, 0, numbers))
    length_of_run = np.bincount(first, minlength=len(begins))
    return np.where(length_of_run[first] > LONGEST_RUN, first, numbers)


@dataclasses.dataclass
class BatchRows:
    """The correspondence between a batch and its prefix tree; positions count the real tokens, as in `BatchTokens`.

    Attributes:
        tree: prefix tree of the sequences' keys.
        tokens: the batch.
        position_rows: `[P]` tree row of every position.
        row_positions: `[R]` a position of every tree row (they all agree on what the trunk reads).
        head_rows: `[B, S]` head row of every token whose output is used; H, one past the last, of all others.
        head_positions: `[H]` a position of every head row.
        head_starts: `[R + 1]` the head rows of tree row r are `head_starts[r]` to `head_starts[r + 1]`.
    """

    tree: PrefixTree
    tokens: BatchTokens
    position_rows: Integers
    row_positions: Integers
    head_rows: Integers
    head_positions: Integers
    head_starts: Integers

    @classmethod
    def of(cls, tokens: BatchTokens, tree: PrefixTree, head_keys: Sequence[Integers], used: Booleans) -> BatchRows:
        """Rows of a batch in a tree of its keys (shared or not).

        Args:
            tokens: the batch.
            tree: `PrefixTree.build(tokens.keys)`, or the same unshared.
            head_keys: `[B, S]` codes; two tokens of a tree row with equal codes share a head row.
            used: `[B, S]` tokens whose outputs are used.
        """
        position_rows = tokens.rows_in(tree)
        row_positions = _first_index(position_rows, tree.num_rows)
        needed = np.flatnonzero(_take(used, tokens.places))
        rows, places = _take(position_rows, needed), _take(tokens.places, needed)
        chosen, head_of, head_starts = _distinct_uses(rows, [_take(key, places) for key in head_keys], tree.num_rows)
        head_rows = np.full(tokens.valid.shape, len(chosen), np.int64)
        head_rows.reshape(-1)[places] = head_of
        return cls(tree, tokens, position_rows, row_positions, head_rows, needed[chosen], head_starts)

    def coordinates(self, positions: Integers) -> tuple[Integers, Integers]:
        """Row of the batch and column of positions."""
        rows, columns = np.divmod(self.tokens.places[positions], self.tokens.valid.shape[1])
        return rows, columns


def _distinct_uses(rows: Integers, codes: Sequence[Integers], num_rows: int) -> tuple[Integers, Integers, Integers]:
    """Head rows for `N` uses of tree rows: one for every distinct pair of a tree row and its `codes`.

    Most uses of a row agree with its first one, so only those that do not are sorted.

    Returns:
        `[H]` a use of every head row; `[N]` head row of every use; `[R + 1]` where the head rows of a tree row begin.
    """
    first = _first_index(rows, num_rows)
    leader = first[rows]
    differs = np.zeros(len(rows), bool)
    for code in codes:
        differs |= code != code[leader]
    other = np.flatnonzero(differs)
    distinct = combine([rows[other], *(code[other] for code in codes)], len(other))  # ascending with the tree row
    _, chosen, inverse = np.unique(distinct, return_index=True, return_inverse=True)
    chosen = other[chosen]
    has_use = first < len(rows)
    starts = np.concatenate([[0], np.cumsum(has_use + np.bincount(rows[chosen], minlength=num_rows))])
    # Of a row's head rows the first use has the first, the others follow.
    of_chosen = starts[:-1][rows[chosen]] + 1 + _rank_in_run(rows[chosen])
    head_of = starts[:-1][rows]
    head_of[other] = of_chosen[inverse.reshape(-1)]
    uses = np.empty(starts[-1], np.int64)
    uses[starts[:-1][has_use]] = first[has_use]
    uses[of_chosen] = chosen
    return uses, head_of, starts


def _rank_in_run(values: Integers) -> Integers:
    """For sorted `values`: how many equal ones come before each."""
    ranks: Integers = np.arange(len(values)) - np.searchsorted(values, values)
    return ranks


def _first_index(values: Integers, count: int) -> Integers:
    """`[count]` first index of every number in `values`; `len(values)` if there is none."""
    first = np.full(count, len(values), np.int64)
    first[values[::-1]] = np.arange(len(values))[::-1]  # the last assignment stays
    return first


def _take(values: npt.NDArray, places: Integers) -> npt.NDArray:
    """Entries of the flattened `values` at ascending `places` without duplicates."""
    flat = values.reshape(-1)
    return flat if len(places) == len(flat) else flat[places]


LEAST_RUN, LEAST_SHARE = 4, 0.05


def looks_padded(ids: npt.NDArray[Any]) -> str | None:
    """Say which rows `[B, S]` begin or end in runs of one token, as padding does; None if these are few tokens."""
    for word, rows in (("end", ids[:, ::-1]), ("begin", ids)):
        differs = rows != rows[:, :1]
        runs = np.where(differs.any(1), differs.argmax(1), rows.shape[1])
        long = rows[runs >= LEAST_RUN, 0]
        if len(long) < 2:
            continue
        tokens, counts = np.unique(long, return_counts=True)
        token = tokens[counts.argmax()]
        padded = (runs >= LEAST_RUN) & (rows[:, 0] == token)
        count, total = int(padded.sum()), int(runs[padded].sum())
        if count >= 2 and total >= LEAST_SHARE * rows.size:
            return (
                f"{count} of {len(ids)} rows {word} in runs of token {token}, {total:,} tokens in all, "
                "which looks like padding"
            )
    return None
