"""Learned sparse attention over chunk and path: choose keys by their index scores, and attend to chosen keys.

A choice is made of depths, which are the numbers of the tokens of a query's sequence, so that it holds for all
sequences that share the query. It is made, and read, one block of queries at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator

import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.ops.chosen_keys import NONE, are_chosen, index_scores, padded_to
from dta_compile.ops.dense_attention import MOST_PAIRS
from dta_compile.runtime.attention.interface import Operands
from dta_compile.runtime.attention.reference import Reference, depths_of, keys_above
from dta_compile.runtime.path.chunk_shape import Limit
from dta_compile.runtime.path.interface import LayerInputs, Tensors


@dataclasses.dataclass(frozen=True)
class ChoiceRuntime:
    """Runtime of a layer that chooses keys.

    Attributes:
        limit: the keys to choose from.
        width: tokens of a row of the batch.
        from_first: every sequence begins at the first token of a row. Then `topk` is called on the rows that it is
            called on in eager mode, which decides between equal scores. Otherwise these are refused.
        where: the user's source line.
    """

    limit: Limit | None
    width: int
    from_first: bool
    where: str

    replayable = False

    @property
    def key(self) -> Hashable:
        """See `LayerRuntime.key`."""
        return self.limit, self.width

    def forward(self, x: LayerInputs) -> Tensors:
        """Return the depths of the keys chosen for each query, `[1, 1, c, count]`."""
        (query, weights, key), (above,), (scale, count, stride) = x.operands, x.above, x.constants
        table, keys = x.table(), torch.cat([above, key], 2)
        depths, width = depths_of(table, above.shape[2]), self.width // stride
        ends = None if stride == 1 else ends_of(depths, stride)
        if ends is not None:
            keys, depths = keys[:, :, ends], depths[ends] // stride
        parts = []
        for queries in blocks(query.shape[1], query.shape[2], above.shape[2] + key.shape[2]):
            may_read = keys_above(table, above.shape[2], self.limit, queries)
            may_read = may_read if ends is None else may_read[:, ends]
            scores = index_scores(query[:, :, queries], weights[:, :, queries], keys, scale)[0]
            # One more column takes the scores of keys that are not read, whatever they are.
            row = scores.new_full((len(scores), width + 1), float("-inf"))
            row = row.scatter_(1, torch.where(may_read, depths, width), scores)[:, :width]
            best, choice = row.topk(min(count, width))
            choice, own = choice * stride + stride - 1, table.depths[queries, None]
            is_read = choice <= own if self.limit is None else (choice <= own) & (choice >= self.limit.first(own))
            choice = choice.masked_fill(~is_read, NONE)
            if not self.from_first:
                self._refuse_ties(row, best, choice)
            parts.append(padded_to(count, choice))
        return (torch.cat(parts)[None, None],)

    def backward(self, grad: torch.Tensor, results: Tensors, x: LayerInputs, above_grads: Tensors) -> Tensors:
        """A choice has no gradient."""
        raise AssertionError("a choice of keys has no backward")

    def _refuse_ties(self, row: torch.Tensor, best: torch.Tensor, choice: torch.Tensor) -> None:
        """Raise if keys that are chosen, and others that are not, have the same score."""
        last = best[:, -1:]
        is_tied = ((row == last).sum(1) > (best == last).sum(1)) & (choice[:, -1] != NONE)
        if bool(is_tied.any()):
            query = int(is_tied.nonzero()[0, 0])
            raise RuntimeContractError(
                "a learned index chooses some of several keys with the same score, and torch does not say which",
                where=self.where,
                expected="different scores, or sequences that begin at the first token of a row",
                got=f"{int((row[query] == last[query]).sum())} keys of score {float(last[query]):g}",
                hint="pass one sequence per row, padded on the right",
            )


def ends_of(depths: torch.Tensor, stride: int) -> torch.Tensor:
    """Return the indices of the last tokens of whole windows of `stride` tokens, given the depths of tokens."""
    return (depths % stride == stride - 1).nonzero()[:, 0]


class Blockwise(Reference):
    """Attention provider for operands that kernels do not take: a choice of keys, or a bias by distance."""

    replayable = False

    def _blocks(self, x: Operands) -> Iterator[tuple[slice, torch.Tensor]]:
        table, prefix, tokens = x.table(), x.chunk.start, x.query.shape[2]
        depths = depths_of(table, prefix)
        for queries in blocks(x.query.shape[1], tokens, prefix + tokens):
            read = keys_above(table, prefix, x.limit, queries)
            if x.choice is not None:
                chosen = are_chosen(x.choice[0, 0, queries], x.chunk.height)
                read = read & chosen.index_select(1, depths)
            if x.stride > 1:
                read = read.index_select(1, ends_of(depths, x.stride))
            yield queries, read


def blocks(heads: int, queries: int, keys: int) -> Iterator[slice]:
    """Yield blocks of queries with about `MOST_PAIRS` scores each."""
    rows = max(1, MOST_PAIRS // max(heads * keys, 1))
    for first in range(0, queries, rows):
        yield slice(first, min(first + rows, queries))
