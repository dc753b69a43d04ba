"""Map every token of a batch to its row in the prefix tree: tree rows for the trunk, head rows for the head.

Dense values are indexed by (row of the batch, column), values of the tree by tree row. A tree row is one token of the
tree; a head row is one distinct use of a tree row by the head (a tree row with two different labels has two, one whose
output is unused has none). Head rows are sorted by tree row, so that a range of tree rows is a range of head rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dta_compile.plan import PrefixTree
from dta_compile.plan.tree.lexicographic import combine

LONGEST_RUN = 64  # longer runs of equal sequences of one token are merged into one sequence

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]


@dataclasses.dataclass
class BatchTokens:
    """Real tokens of a batch, divided into sequences, with the codes of their prefix keys.

    Attributes:
        valid: `[B, S]` real tokens; the others are padding and get no rows.
        places: `[P]` flat index of every real token, `row * S + column`, ascending. A *position* indexes this array.
        segments: `(row, segment)` of every sequence where rows are packed, ascending; None: one sequence per row.
        begins: position of the first token of every sequence.
        keys: codes of the tokens of every sequence; two sequences share rows as long as their codes agree.
        alike: `[P]` position whose tree row each token takes; None: every token is in `keys`.
        units: of every sequence `[n, 2]` depths of tokens that only come together, see `PrefixTree`; None: no layer has
            such tokens.
    """

    valid: Booleans
    places: Integers
    segments: list[tuple[int, int]] | None
    begins: Integers
    keys: list[Integers]
    alike: Integers | None = None
    units: list[Integers] | None = None

    @classmethod
    def read(
        cls,
        valid: Booleans,
        starts: Booleans | None,
        trunk_keys: Sequence[Integers],
        by_column: bool,
        joined: Booleans | None = None,
    ) -> BatchTokens:
        """Divide the tokens of a batch into sequences and combine their key codes.

        Args:
            valid: `[B, S]` real tokens.
            starts: `[B, S]` real tokens that begin a sequence; None: one sequence per row.
            trunk_keys: `[B, S]` codes of each per-token input of the trunk.
            by_column: whether sequences share a token only in the same column.
            joined: `[B, S]` tokens that read, and are read by, the one before: those of a block but its first. As each
                depends on the whole block, its code tells that, so that sequences share whole blocks.
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
        units: list[Integers] | None = None
        if joined is not None and joined.any():
            runs = _runs(_take(joined, places))
            combined = _with_units(combined, runs)
            bounds = np.searchsorted(runs[:, 0], np.append(begins, len(places)))
            units = [runs[a:b] - begin for a, b, begin in zip(bounds, bounds[1:], begins, strict=False)]
        if starts is None:
            return cls(valid, places, None, begins, np.split(combined, begins[1:]), None, units)
        owners = _owners(begins, lengths, combined)
        is_owner = owners == np.arange(len(begins))
        segments = list(zip(rows[is_owner].tolist(), _rank_in_run(rows)[is_owner].tolist(), strict=True))
        alike = None if is_owner.all() else np.where(np.repeat(is_owner, lengths), np.arange(len(places)), -1)
        if alike is not None:
            alike[begins[~is_owner]] = begins[owners[~is_owner]]
        stops = (begins + lengths)[is_owner]
        keys = [combined[begin:stop] for begin, stop in zip(begins[is_owner].tolist(), stops.tolist(), strict=True)]
        units = None if units is None else [units[number] for number in np.flatnonzero(is_owner)]
        return cls(valid, places, segments, begins[is_owner], keys, alike, units)

    def of(self, sequences: Sequence[int]) -> BatchTokens:
        """Return the tokens of some of the sequences. The numbers of sequences stay: the others are empty."""
        chosen = np.zeros(len(self.keys), np.bool_)
        chosen[list(sequences)] = True
        own = np.arange(len(self.places)) if self.alike is None else self.alike
        kept = chosen[np.searchsorted(self.begins, own, side="right") - 1] if len(own) else np.zeros(0, np.bool_)
        number = np.cumsum(kept) - 1
        valid = np.zeros_like(self.valid)
        valid.reshape(-1)[self.places[kept]] = True
        begins = np.zeros_like(self.begins)
        chosen_begins = chosen & (self.begins < len(number))  # empty sequences at the end begin behind all tokens
        begins[chosen_begins] = number[self.begins[chosen_begins]]
        keys = [key if is_chosen else key[:0] for key, is_chosen in zip(self.keys, chosen, strict=True)]
        alike = None if self.alike is None else number[self.alike[kept]]
        return BatchTokens(valid, self.places[kept], self.segments, begins, keys, alike, self.units)

    def row_of(self, sequence: int) -> int:
        """Return the row of the batch that holds a sequence."""
        return sequence if self.segments is None else self.segments[sequence][0]

    def places_of(self, sequence: int) -> Integers:
        """Return the flat indices of a sequence's tokens."""
        begin = int(self.begins[sequence])
        return self.places[begin : begin + len(self.keys[sequence])]

    def rows_in(self, tree: PrefixTree) -> Integers:
        """Return `[P]` the tree row of every real token."""
        rows = tree.token_rows()
        if self.alike is None:
            return rows
        own = self.alike == np.arange(len(self.alike))
        index = np.cumsum(own) - 1  # index of a token among the tokens of `keys`
        token_rows: Integers = rows[index[self.alike]]
        return token_rows


def _runs(joined: Booleans) -> Integers:
    """Return `[n, 2]` first and one past the last of each run of tokens that are joined with the one before."""
    last = np.flatnonzero(np.diff(joined, append=False) & joined) + 1
    first = np.flatnonzero(np.diff(joined, prepend=False) & joined) - 1
    return np.stack([first, last], 1)


def _with_units(codes: Integers, runs: Integers) -> Integers:
    """Combine the code of each token of a run with one of the codes of all its tokens."""
    numbers: dict[bytes, int] = {}
    contents = np.zeros_like(codes)
    for first, last in runs.tolist():
        contents[first:last] = numbers.setdefault(codes[first:last].tobytes(), len(numbers) + 1)
    return combine([codes, contents], len(codes))


def _owners(begins: Integers, lengths: Integers, codes: Integers) -> Integers:
    """Return for every sequence its own index, or that of the first sequence of its run of equal one-token sequences.

    Runs longer than `LONGEST_RUN` are padding at the end of a packed row, where all positions are zero; unmerged, each
    of these tokens would be planned as a sequence.
    """
    numbers = np.arange(len(begins))
    same = np.zeros(len(begins), np.bool_)
    same[1:] = (lengths[1:] == 1) & (lengths[:-1] == 1) & (codes[begins[1:]] == codes[begins[:-1]])
    first = np.maximum.accumulate(np.where(same, 0, numbers))
    length_of_run = np.bincount(first, minlength=len(begins))
    return np.where(length_of_run[first] > LONGEST_RUN, first, numbers)


@dataclasses.dataclass
class BatchRows:
    """Maps between a batch and its prefix tree; positions count the real tokens, as in `BatchTokens`.

    Attributes:
        tree: prefix tree of the sequences' keys.
        tokens: tokens of the batch.
        position_rows: `[P]` tree row of every position.
        row_positions: `[R]` one position of every tree row (all of them have the same trunk inputs).
        head_positions: `[H]` one position of every head row.
        head_starts: `[R + 1]` the head rows of tree row r are `head_starts[r]` to `head_starts[r + 1]`.
        needed: `[N]` positions whose outputs are used.
        exceptions: some of `needed`, by index, and their head rows; all others have the first one of their tree row.
    """

    tree: PrefixTree
    tokens: BatchTokens
    position_rows: Integers
    row_positions: Integers
    head_positions: Integers
    head_starts: Integers
    needed: Integers
    exceptions: tuple[Integers, Integers]

    @classmethod
    def of(cls, tokens: BatchTokens, tree: PrefixTree, head_keys: Sequence[Integers], used: Booleans) -> BatchRows:
        """Map the tokens of a batch to the rows of a tree of its keys (shared or not).

        Args:
            tokens: tokens of the batch.
            tree: `PrefixTree.build(tokens.keys)`, or the same unshared.
            head_keys: `[B, S]` codes; two tokens of a tree row with equal codes share a head row.
            used: `[B, S]` tokens whose outputs are used.
        """
        position_rows = tokens.rows_in(tree)
        row_positions = tree.depths() + np.repeat(tokens.begins[tree.sequence], tree.stop - tree.start)
        all_places = tokens.places
        needed = np.arange(len(all_places)) if used.all() else np.flatnonzero(_take(used, all_places))
        rows, places = _take(position_rows, needed), _take(all_places, needed)
        first = row_positions if len(needed) == len(all_places) else _first_index(rows, tree.num_rows)
        chosen, exceptions, head_starts = _distinct_uses(rows, [_take(key, places) for key in head_keys], first)
        return cls(tree, tokens, position_rows, row_positions, needed[chosen], head_starts, needed, exceptions)

    @property
    def num_head_rows(self) -> int:
        """Number of head rows, H."""
        return len(self.head_positions)

    @functools.cached_property
    def head_rows(self) -> Integers:
        """`[B, S]` head row of every token whose output is used; H, one past the last, for all others."""
        head_rows = np.full(self.tokens.valid.shape, len(self.head_positions), np.int64)
        places, (index, heads) = _take(self.tokens.places, self.needed), self.exceptions
        head_rows.reshape(-1)[places] = self.head_starts[_take(self.position_rows, self.needed)]
        head_rows.reshape(-1)[places[index]] = heads
        return head_rows

    @functools.cached_property
    def row_coordinates(self) -> tuple[Integers, Integers]:
        """Row and column in the batch of `row_positions`."""
        return self.coordinates(self.row_positions)

    @functools.cached_property
    def head_coordinates(self) -> tuple[Integers, Integers]:
        """Row and column in the batch of `head_positions`."""
        return self.coordinates(self.head_positions)

    def coordinates(self, positions: Integers) -> tuple[Integers, Integers]:
        """Return row and column in the batch of each position."""
        rows, columns = np.divmod(self.tokens.places[positions], self.tokens.valid.shape[1])
        return rows, columns


def _distinct_uses(
    rows: Integers, codes: Sequence[Integers], first: Integers
) -> tuple[Integers, tuple[Integers, Integers], Integers]:
    """Assign head rows to `N` uses of tree rows: one per distinct pair of a tree row and its `codes`.

    Most uses of a row agree with one of them, `first` (`[R]`, N for rows without a use), so only the others are sorted.

    Returns:
        `[H]` one use of every head row; the uses that do not agree with the first of their row, and their head rows;
        `[R + 1]` first head row of every tree row, which is that of its first use.
    """
    leader = first[rows]
    differs = np.zeros(len(rows), bool)
    for code in codes:
        differs |= code != code[leader]
    other = np.flatnonzero(differs)
    distinct = combine([rows[other], *(code[other] for code in codes)], len(other))  # sorted by tree row
    _, chosen, inverse = np.unique(distinct, return_index=True, return_inverse=True)
    chosen = other[chosen]
    has_use = first < len(rows)
    starts = np.concatenate([[0], np.cumsum(has_use + np.bincount(rows[chosen], minlength=len(first)))])
    of_chosen = starts[:-1][rows[chosen]] + 1 + _rank_in_run(rows[chosen])
    uses = np.empty(starts[-1], np.int64)
    uses[starts[:-1][has_use]] = first[has_use]
    uses[of_chosen] = chosen
    return uses, (other, of_chosen[inverse.reshape(-1)]), starts


def _rank_in_run(values: Integers) -> Integers:
    """Return for each of the sorted `values` the number of equal ones before it."""
    ranks: Integers = np.arange(len(values)) - np.searchsorted(values, values)
    return ranks


def _first_index(values: Integers, count: int) -> Integers:
    """Return `[count]` the first index of every number below `count` in `values`; `len(values)` if it is absent."""
    first = np.full(count, len(values), np.int64)
    first[values[::-1]] = np.arange(len(values))[::-1]  # the last assignment wins
    return first


def _take(values: npt.NDArray, places: Integers) -> npt.NDArray:
    """Take entries of the flattened `values` at `places`, which are ascending and distinct."""
    flat = values.reshape(-1)
    return flat if len(places) == len(flat) else flat[places]


LEAST_RUN, LEAST_SHARE = 4, 0.05


def looks_padded(ids: npt.NDArray[Any], tree_tokens: int, share: bool) -> str | None:
    """Describe rows of ids `[B, S]` that begin or end in runs of one token, like padding; None if they cost little.

    Args:
        tree_tokens: tokens that are run.
        share: prefixes are shared.
    """
    for word, rows in (("end", ids[:, ::-1]), ("begin", ids)):
        differs = rows != rows[:, :1]
        runs = np.where(differs.any(1), differs.argmax(1), rows.shape[1])
        long = rows[runs >= LEAST_RUN, 0]
        if len(long) < 2:
            continue
        tokens, counts = np.unique(long, return_counts=True)
        token = tokens[counts.argmax()]
        padded = (runs >= LEAST_RUN) & (rows[:, 0] == token)
        if counts.max() < 2 or (word == "begin" and len(np.unique(runs[padded])) == 1):  # an image, or shared anyway
            continue
        bare = [row[run * of_row :] for row, run, of_row in zip(rows, runs, padded, strict=True)]
        saved = tree_tokens - PrefixTree.build([row[::-1] if word == "end" else row for row in bare], share).num_rows
        if saved >= LEAST_SHARE * tree_tokens:
            return (
                f"{counts.max()} of {len(ids)} rows {word} in runs of token {token}, which looks like padding and "
                f"costs {saved:,} of {tree_tokens:,} tokens that are run"
            )
    return None
