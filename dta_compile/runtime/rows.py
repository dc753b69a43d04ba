"""Where every token of a batch lives in the prefix tree: tree rows for the trunk, head rows for the head.

The dense world speaks of (sequence, column); the tree of rows. A tree row is one token of the tree; a head row is one
distinct use of a tree row by the head (a tree row with two different labels has two). Head rows are sorted by tree row,
so that a range of tree rows is a range of head rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dta_compile.plan import PrefixTree

Integers = npt.NDArray[np.int64]


@dataclasses.dataclass
class BatchRows:
    """The correspondence between a batch and its prefix tree.

    Attributes:
        tree: prefix tree of the sequences' keys.
        tokens: S, columns of the batch.
        sequences, columns: `[P]` sequence and column of every real position, sequence after sequence.
        position_rows: `[P]` tree row of every real position.
        row_positions: `[R]` a position of every tree row (they all agree on what the trunk reads).
        head_rows: `[P]` head row of every position whose output is used, -1 where it is not.
        head_positions: `[H]` a position of every head row.
        head_starts: `[R + 1]` the head rows of tree row r are `head_starts[r]` to `head_starts[r + 1]`.
    """

    tree: PrefixTree
    tokens: int
    sequences: Integers
    columns: Integers
    position_rows: Integers
    row_positions: Integers
    head_rows: Integers
    head_positions: Integers
    head_starts: Integers

    @classmethod
    def build(
        cls,
        valid: npt.NDArray[np.bool_],
        trunk_keys: Sequence[Integers],
        head_keys: Sequence[Integers],
        windows: Sequence[tuple[int, int]],
        by_column: bool,
        plan_tree: Callable[[list[Integers]], PrefixTree],
    ) -> BatchRows:
        """Rows of a batch.

        Args:
            valid: `[B, S]` real tokens; the others are padding and get no rows.
            trunk_keys: `[B, S]` codes; two positions with equal codes so far share a tree row.
            head_keys: `[B, S]` codes; two positions of a tree row with equal codes share a head row.
            windows: columns `[start, stop)` whose outputs are used.
            by_column: whether the trunk reads tables by column, so that rows must agree on their columns as well.
            plan_tree: the prefix tree to run for these sequences of codes.
        """
        tokens = valid.shape[1]
        sequences, columns = (array.astype(np.int64) for array in np.nonzero(valid))
        lengths = valid.sum(1)
        codes = [key[sequences, columns] for key in trunk_keys]
        if by_column:
            depths = np.arange(len(columns)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            codes.append(columns - depths)
        keys = combine(codes, len(columns))
        tree = plan_tree(np.split(keys, np.cumsum(lengths)[:-1]))
        position_rows = tree.token_rows()
        row_positions = _first_position(position_rows, tree.num_rows)
        used = np.zeros(tokens, bool)
        for start, stop in windows:
            used[start:stop] = True
        needed = np.flatnonzero(used[columns])
        head_codes = [key[sequences[needed], columns[needed]] for key in head_keys]
        distinct = combine([position_rows[needed], *head_codes], len(needed))
        _, first, inverse = np.unique(distinct, return_index=True, return_inverse=True)
        order = np.argsort(position_rows[needed][first], kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        head_rows = np.full(len(columns), -1, np.int64)
        head_rows[needed] = rank[inverse.reshape(-1)]
        head_positions = needed[first[order]]
        head_starts = np.searchsorted(position_rows[head_positions], np.arange(tree.num_rows + 1))
        return cls(
            tree, tokens, sequences, columns, position_rows, row_positions, head_rows, head_positions, head_starts
        )

    def frontier_map(self, batch: int, start: int, length: int) -> Integers:
        """`[batch * length]` head row of every entry of a frontier value that covers columns `[start, start + length)`.

        Padding maps to one row past the last head row.
        """
        dense = np.full((batch, self.tokens), len(self.head_positions), np.int64)
        dense[self.sequences, self.columns] = self.head_rows
        return np.ascontiguousarray(dense[:, start : start + length]).reshape(-1)


def combine(codes: Sequence[Integers], length: int) -> Integers:
    """One code per position, equal exactly where all `codes` are equal."""
    result = np.zeros(length, np.int64)
    for code in codes:
        if not length:
            break
        low, spread = int(code.min()), int(code.max()) - int(code.min()) + 1
        if spread == 1:
            continue
        bound = int(result.max()) - int(result.min()) + 1
        if bound * spread >= 2**62:
            result = np.unique(result, return_inverse=True)[1].reshape(-1).astype(np.int64)
            code = np.unique(code, return_inverse=True)[1].reshape(-1).astype(np.int64)
            low, spread = 0, int(code.max()) + 1
        result = result * spread + (code - low) if bound > 1 else code
    return result


def codes_of(values: npt.NDArray[np.generic]) -> Integers:
    """Integers that are equal exactly where the rows `values[i, ...]` are equal, bit for bit: `[n]` of `[n, ...]`."""
    flat = np.ascontiguousarray(values.reshape(len(values), -1))
    if flat.shape[1] == 1 and flat.dtype.kind in "iub":
        return flat[:, 0].astype(np.int64)
    rows = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1])))
    return np.unique(rows, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _first_position(position_rows: Integers, num_rows: int) -> Integers:
    first = np.zeros(num_rows, np.int64)
    first[position_rows[::-1]] = np.arange(len(position_rows))[::-1]
    return first
