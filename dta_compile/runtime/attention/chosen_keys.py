"""Learned sparse attention over chunk and path: choose keys by their index scores, and attend to chosen keys.

A choice is made of depths, which are the numbers of the tokens of a query's sequence, or of depths divided by the size
of a block, so that it holds for all sequences that share the query. It is made, and read, some queries at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator

import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.ops.chosen_keys import NONE, Choosing, are_chosen, chosen_windows, index_scores, padded_to
from dta_compile.ops.dense_attention import MOST_PAIRS
from dta_compile.proofs.terms import Evaluation, Term
from dta_compile.runtime.attention.provider import Operands
from dta_compile.runtime.attention.reference import Reference, depths_of, keys_above
from dta_compile.runtime.path.chunk_shape import Limit
from dta_compile.runtime.path.mixer_runtime import LayerInputs, Tensors


@dataclasses.dataclass(frozen=True)
class ChoiceRuntime:
    """Runtime of a layer that chooses keys.

    Attributes:
        limit: the keys to choose from.
        width: tokens of a row of the batch.
        from_first: every sequence begins at the first token of a row. Then `topk` is called on the rows that it is
            called on in eager mode, which decides between equal scores. Otherwise these are refused.
        where: the user's source line.
        forced: see `AttentionLayer`.
    """

    limit: Limit | None
    width: int
    from_first: bool
    where: str
    forced: Term | None = None

    replayable = False

    @property
    def key(self) -> Hashable:
        """See `LayerRuntime.key`."""
        return self.limit, self.width

    def forward(self, x: LayerInputs) -> Tensors:
        """Return the numbers of the blocks chosen for each query, `[1, H or 1, c, count]`."""
        (query, weights, key), (above,), (scale, *constants) = x.operands, x.above, x.constants
        table, keys, how = x.table(), torch.cat([above, key], 2), Choosing(*constants)
        depths, width = depths_of(table, above.shape[2]), -(-self.width // how.block) * how.block // how.stride
        ends = None if how.stride == 1 else ends_of(depths, how.stride)
        if ends is not None:
            keys, depths = keys[:, :, ends], depths[ends] // how.stride
        parts = []
        for queries in blocks(query.shape[1], query.shape[2], above.shape[2] + key.shape[2]):
            may_read = keys_above(table, above.shape[2], self.limit, queries)
            may_read = may_read if ends is None else may_read[:, ends]
            scores = index_scores(query[:, :, queries], weights[:, :, queries], keys, scale, how)[0]
            # One more column takes the scores of keys that are not read, whatever they are.
            row = scores.new_full((*scores.shape[:2], width + 1), float("-inf"))
            columns = torch.where(may_read, depths, width).expand_as(scores)
            row = row.scatter_(2, columns, scores)[..., :width]
            if how.of_windows:
                parts.append(chosen_windows(row, table.depths[queries].long() + 1, how))
                continue
            if how.block > 1:
                row = row.unflatten(2, (-1, how.block)).amax(-1)
            best, choice = self._with_forced(row, table.depths[queries, None]).topk(min(how.most, row.shape[2]))
            choice, own = choice * how.stride + how.stride - 1, table.depths[queries, None]
            is_read = choice <= own // how.block
            if self.limit is not None:
                is_read &= choice >= self.limit.first(own) // how.block
            if how.leaves_out:
                is_read &= best != float("-inf")
            if self.forced is not None:
                self._require_keys(is_read & (row.gather(2, choice) != float("-inf")))
            choice = choice.masked_fill(~is_read, NONE)
            if not self.from_first:
                self._refuse_ties(row, best, choice)
            parts.append(padded_to(how.most, choice))
        return (torch.cat(parts, 1)[None],)

    def _with_forced(self, row: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        """Replace scores `[H, queries, blocks]` by those that are forced for queries of depths `[queries, 1]`."""
        if self.forced is None:
            return row
        indices = {"query": depths.long(), "block": torch.arange(row.shape[2], device=row.device)[None]}
        forced = torch.as_tensor(Evaluation({}, int, indices)(self.forced), dtype=row.dtype, device=row.device)
        return torch.where(forced.isnan(), row, forced)

    def _require_keys(self, is_read: torch.Tensor) -> None:
        """Raise unless every query reads a key of a block that is chosen; attention of none depends on its mask."""
        if not bool(is_read.any(-1).all()):
            raise RuntimeContractError(
                "a learned index chooses no key that a query may read",
                where=self.where,
                expected="blocks that are forced by float('inf') to have such keys, and others not to be forced out",
                got=f"{int((~is_read.any(-1)).sum())} queries without a key",
                hint="force the query's own block, or fewer blocks than are chosen",
            )

    def backward(self, grad: torch.Tensor, results: Tensors, x: LayerInputs, above_grads: Tensors) -> Tensors:
        """A choice has no gradient."""
        raise AssertionError("a choice of keys has no backward")

    def _refuse_ties(self, row: torch.Tensor, best: torch.Tensor, choice: torch.Tensor) -> None:
        """Raise if keys that are chosen, and others that are not, have the same score."""
        row, best, choice = row.flatten(0, 1), best.flatten(0, 1), choice.flatten(0, 1)
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


@dataclasses.dataclass(frozen=True)
class Blockwise(Reference):
    """Attention provider for operands that kernels do not take: a choice of blocks of keys, or a bias by distance."""

    block: int = 1  # keys of a block

    replayable = False

    def _blocks(self, x: Operands) -> Iterator[tuple[slice, torch.Tensor]]:
        table, prefix, tokens = x.table(), x.chunk.start, x.query.shape[2]
        depths = depths_of(table, prefix)
        for queries in blocks(x.query.shape[1], tokens, prefix + tokens):
            read = keys_above(table, prefix, x.limit, queries)
            if x.choice is not None:
                chosen = are_chosen(x.choice[0, :, queries], -(-x.chunk.height // self.block))
                read = read & chosen.index_select(2, depths // self.block)
                read = read.repeat_interleave(x.query.shape[1] // len(read), 0) if len(read) > 1 else read[0]
            if x.stride > 1:
                read = read.index_select(-1, ends_of(depths, x.stride))
            yield queries, read


def blocks(heads: int, queries: int, keys: int) -> Iterator[slice]:
    """Yield blocks of queries with about `MOST_PAIRS` scores each."""
    rows = max(1, MOST_PAIRS // max(heads * keys, 1))
    for first in range(0, queries, rows):
        yield slice(first, min(first + rows, queries))
