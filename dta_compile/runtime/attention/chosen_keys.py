"""Learned sparse attention over chunk and path: choose keys by their index scores, and attend to chosen keys.

Chosen keys are stored as depths (a token's position within its own sequence), or as block indices, `depth // block
size`, so that a choice is right for every sequence that shares the query. Choosing and reading loop over slices of the
queries, to bound memory.
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
        limit: attention span that the keys are chosen from; None: all keys above the query.
        row_tokens: tokens of a row of the batch.
        from_first: True: every sequence begins at the first token of a row, so that `topk` gets the same scores in the
            same order as in eager mode, and ties break alike. False: a tie at the cut-off is an error.
        where: the user's source line.
        forced: scores by query and block that replace those of the index, NaN where none does; None: there are none.
    """

    limit: Limit | None
    row_tokens: int
    from_first: bool
    where: str
    forced: Term | None = None

    replayable = False  # sizes depend on the chunk's start, and checks read results on the host

    @property
    def key(self) -> Hashable:
        """See `LayerRuntime.key`."""
        return self.limit, self.row_tokens

    def forward(self, x: LayerInputs) -> Tensors:
        """Return the depths or block indices chosen for each query, `[1, H or 1, c, most]`, and `NONE` after them.

        The index has queries `[1, H, c, D]`, weights `[1, H, c, 1]` and keys `[1, H or 1, p + c, D]`, of which `p` are
        of tokens above the chunk.
        """
        (query, weights, own_keys), (prefix_keys,), (scale, *constants) = x.operands, x.above, x.constants
        choosing, table, prefix = Choosing(*constants), x.table(), prefix_keys.shape[2]
        block, stride = choosing.block, choosing.stride
        keys, key_depths = torch.cat([prefix_keys, own_keys], 2), depths_of(table, prefix)
        slices = query_slices(query.shape[1], query.shape[2], keys.shape[2])
        window_ends = None if stride == 1 else ends_of(key_depths, stride)
        if window_ends is not None:
            keys, key_depths = keys[:, :, window_ends], key_depths[window_ends] // stride
        columns, choices = -(-self.row_tokens // block) * block // stride, []
        for queries in slices:
            depths = table.depths[queries, None].long()
            may_read = keys_above(table, prefix, self.limit, queries)
            may_read = may_read if window_ends is None else may_read[:, window_ends]
            of_keys = index_scores(query[:, :, queries], weights[:, :, queries], keys, scale, choosing)[0]
            # Scores by depth, `[H or 1, queries, columns]`. Those of keys that may not be read go to a column that is
            # cut off, as several may have the same depth.
            scores = of_keys.new_full((*of_keys.shape[:2], columns + 1), float("-inf"))
            column = torch.where(may_read, key_depths, columns).expand_as(of_keys)
            scores = scores.scatter_(2, column, of_keys)[..., :columns]
            if choosing.of_windows:
                choices.append(chosen_windows(scores, depths[:, 0] + 1, choosing))
                continue
            if block > 1:
                scores = scores.unflatten(2, (-1, block)).amax(-1)
            ranked = self._with_forced(scores, depths)
            best, indices = ranked.topk(min(choosing.most, scores.shape[2]))
            choice = indices * stride + stride - 1  # the depth of a window's last token
            is_read = choice <= depths // block
            if self.limit is not None:
                is_read &= choice >= self.limit.first(depths) // block
            if choosing.leaves_out:
                is_read &= best != float("-inf")
            if self.forced is not None:
                self._require_keys(is_read & (scores.gather(2, indices) != float("-inf")))
            choice = choice.masked_fill(~is_read, NONE)
            if not self.from_first:
                self._refuse_ties(ranked, best, choice)
            choices.append(padded_to(choosing.most, choice))
        return (torch.cat(choices, 1)[None],)

    def _with_forced(self, scores: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        """Return scores `[H, queries, blocks]` with the forced ones substituted; `depths [queries, 1]` of queries."""
        if self.forced is None:
            return scores
        assert self.from_first, "a column of a row is a depth only where sequences begin at the first one"
        indices = {"query": depths, "block": torch.arange(scores.shape[2], device=scores.device)[None]}
        forced = torch.as_tensor(Evaluation({}, int, indices)(self.forced), dtype=scores.dtype, device=scores.device)
        return torch.where(forced.isnan(), scores, forced)

    def _require_keys(self, is_read: torch.Tensor) -> None:
        """Raise unless every query may read a key of a chosen block: attention over no key depends on its mask."""
        if not bool(is_read.any(-1).all()):
            raise RuntimeContractError(
                "a learned index chooses no key that a query may read",
                where=self.where,
                expected="at least one chosen block with a readable key for every query",
                got=f"{int((~is_read.any(-1)).sum())} queries without a key",
                hint="set the score of the query's own block to inf, or those of fewer blocks than topk selects",
            )

    def backward(self, grad: torch.Tensor, results: Tensors, x: LayerInputs, above_grads: Tensors) -> Tensors:
        """A choice has no gradient."""
        raise AssertionError("a choice of keys has no backward")

    def _refuse_ties(self, scores: torch.Tensor, best: torch.Tensor, choice: torch.Tensor) -> None:
        """Raise if keys that are chosen, and others that are not, have the same score."""
        scores, best, choice = scores.flatten(0, 1), best.flatten(0, 1), choice.flatten(0, 1)
        last = best[:, -1:]
        is_tied = ((scores == last).sum(1) > (best == last).sum(1)) & (choice[:, -1] != NONE)
        if bool(is_tied.any()):
            query = int(is_tied.nonzero()[0, 0])
            raise RuntimeContractError(
                "a learned index chooses some of several keys with the same score, and torch does not say which",
                where=self.where,
                expected="different scores, or sequences that begin at the first token of a row",
                got=f"{int((scores[query] == last[query]).sum())} keys of score {float(last[query]):g}",
                hint="pass one sequence per row, padded on the right",
            )


def ends_of(depths: torch.Tensor, stride: int) -> torch.Tensor:
    """Return the indices of the last tokens of whole windows of `stride` tokens, given the depths of tokens."""
    return (depths % stride == stride - 1).nonzero()[:, 0]


@dataclasses.dataclass(frozen=True)
class Blockwise(Reference):
    """Attention provider for operands that kernels do not take: a choice of blocks of keys, or a bias by distance.

    Attributes:
        block: keys of a block, as they are chosen.
    """

    block: int = 1

    replayable = False  # sizes depend on the chunk's start

    def _blocks(self, x: Operands) -> Iterator[tuple[slice, torch.Tensor]]:
        table, prefix, tokens = x.table(), x.chunk.start, x.query.shape[2]
        key_depths, deepest = depths_of(table, prefix), x.chunk.height
        for queries in query_slices(x.query.shape[1], tokens, prefix + tokens):
            read = keys_above(table, prefix, x.limit, queries)
            if x.choice is not None:
                is_chosen = are_chosen(x.choice[0, :, queries], -(-deepest // self.block))
                by_head = read & is_chosen.index_select(2, key_depths // self.block)
                groups = x.query.shape[1] // len(by_head)
                read = by_head.repeat_interleave(groups, 0) if len(by_head) > 1 else by_head[0]
            yield queries, read if x.stride == 1 else read.index_select(-1, ends_of(key_depths, x.stride))


def query_slices(heads: int, queries: int, keys: int) -> Iterator[slice]:
    """Yield slices of the queries with about `MOST_PAIRS` scores each."""
    size = max(1, MOST_PAIRS // max(heads * keys, 1))
    for first in range(0, queries, size):
        yield slice(first, min(first + size, queries))
