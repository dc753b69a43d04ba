"""Reference attention provider in plain torch, which other providers are tested against, and shared helpers.

Attention over parts of the keys is merged by the log-sum-exps of their scores: the output of a part is weighted by
`exp(log-sum-exp of the part - log-sum-exp of all)` (FlashAttention-2, Dao, 2023, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dta_compile.ops.products import product_of_read
from dta_compile.runtime.attention.provider import Operands, Tensors
from dta_compile.runtime.path.chunk_shape import ChunkTable, Limit


class Reference:
    """Provider by a plain softmax over all keys at once, in at least float32: the definition of correct."""

    replayable = True

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Provider.forward`."""
        key, value = (self._wide(x, *both) for both in ((x.prefix_key, x.key), (x.prefix_value, x.value)))
        outs, logsumexps = [], []
        for queries, read in self._blocks(x):
            scores, _ = self._scores(x, queries, key, read)
            logsumexps.append(scores.logsumexp(-1))
            outs.append(product_of_read(weights_of(scores, logsumexps[-1]), value, read).to(x.query.dtype))
        return torch.cat(outs, 2), torch.cat(logsumexps, 2)

    def backward(
        self,
        grad: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        x: Operands,
        prefix_key_grad: torch.Tensor,
        prefix_value_grad: torch.Tensor,
    ) -> Tensors:
        """See `Provider.backward`."""
        key, value = (self._wide(x, *both) for both in ((x.prefix_key, x.key), (x.prefix_value, x.value)))
        prefix, grads, of_key, of_value = x.prefix_key.shape[2], [], torch.zeros_like(key), torch.zeros_like(value)
        of_bias: list[torch.Tensor] = []
        for queries, read in self._blocks(x):
            query, own_grad, own_out = (t[:, :, queries].to(value.dtype) for t in (x.query, grad, out))
            scores, slope = self._scores(x, queries, key, read)
            lse = logsumexp[:, :, queries]
            of_query, *others, of_scores = grads_of_read(own_grad, own_out, query, key, value, scores, lse, slope, read)
            grads.append(of_query.to(x.query.dtype))
            of_key += others[0]
            of_value += others[1]
            if x.bias is not None:
                own = of_scores.new_zeros((*of_scores.shape[:3], x.bias.shape[3]))
                own.scatter_add_(-1, _steps(x, queries, prefix), of_scores)
                of_bias.append(own.to(x.bias.dtype) if x.bias.shape[2] > 1 else own.sum(2, keepdim=True))
        of_key, of_value = (sum_groups(total, self._groups(x)) for total in (of_key, of_value))
        prefix_key_grad += of_key[:, :, :prefix]
        prefix_value_grad += of_value[:, :, :prefix]
        biases = (
            [] if x.bias is None else [torch.cat(of_bias, 2) if x.bias.shape[2] > 1 else sum(of_bias[1:], of_bias[0])]
        )
        return torch.cat(grads, 2), of_key[:, :, prefix:], of_value[:, :, prefix:], *biases

    def _groups(self, x: Operands) -> int:
        return x.query.shape[1] // x.key.shape[1]

    def _blocks(self, x: Operands) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield queries, and which keys each of them reads, bool `[queries, p + c]`."""
        every = slice(0, x.query.shape[2])
        yield every, keys_above(x.table(), x.prefix_key.shape[2], x.limit, every, x.units)

    def _scores(
        self, x: Operands, queries: slice, key: torch.Tensor, read: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return scores, and their derivative by the query-key products."""
        scores, slope = x.scoring.scores(x.query[:, :, queries].to(key.dtype) @ key.mT)
        if x.bias is not None:
            steps = _steps(x, queries, x.prefix_key.shape[2])
            bias = x.bias[:, :, queries] if x.bias.shape[2] > 1 else x.bias.expand(-1, -1, steps.shape[2], -1)
            scores = scores + bias.to(scores.dtype).gather(-1, steps)
        return scores.masked_fill(~read, float("-inf")), slope

    def _wide(self, x: Operands, prefix: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Concatenate to `[1, Hq, p + c, D]` in at least float32; 0 beyond the chunk's start, since 0 * NaN is NaN."""
        beyond = torch.arange(prefix.shape[2], device=own.device) >= x.table().start
        both = torch.cat([prefix.masked_fill(beyond[:, None], 0), own], 2)
        return repeat_heads(both, self._groups(x)).to(torch.promote_types(x.query.dtype, torch.float32))


def depths_of(table: ChunkTable, prefix: int) -> torch.Tensor:
    """Return the depths of the `p + c` keys."""
    return torch.cat([torch.arange(prefix, device=table.depths.device), table.depths.long()])


def _steps(x: Operands, queries: slice, prefix: int) -> torch.Tensor:
    """Return the entries of the bias of some queries that hold for the `p + c` keys, `[1, Hq, queries, p + c]`."""
    assert x.bias is not None
    table, (heads, last) = x.table(), (x.bias.shape[1], x.bias.shape[3] - 1)
    steps = table.depths[queries, None] - depths_of(table, prefix)
    return steps.clamp_(0, last).expand(1, heads, -1, -1)


def keys_above(
    table: ChunkTable, prefix: int, limit: Limit | None, queries: slice, units: bool = False
) -> torch.Tensor:
    """Return which of the `p + c` keys some queries may read, bool `[queries, p + c]`: those above in the tree, and
    with `units` those of their unit."""
    number = torch.arange(table.tokens, device=table.numbers.device)
    above = torch.arange(prefix, device=number.device)
    own_number, depths = number[queries, None], table.depths[queries, None]
    in_prefix = (above < table.start).expand(len(own_number), -1)
    own = ((table.begins if units else number) <= own_number) & (own_number < table.ends)
    if limit is not None:
        first = limit.first(depths)
        near, own_near = above >= first, table.depths >= first
        if limit.kept:
            kept = torch.tensor(limit.kept, device=number.device)
            near, own_near = near | torch.isin(above, kept), own_near | torch.isin(table.depths, kept)
        in_prefix, own = in_prefix & near, own & own_near
    return torch.cat([in_prefix, own], 1)


def weights_of(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """Compute attention weights in place, 0 where scores are -inf; a log-sum-exp of NaN comes from a score of NaN."""
    base = torch.where(logsumexp > float("-inf"), logsumexp, 0)
    return (scores - base[..., None]).exp_()


def grads_of_read(
    grad: torch.Tensor,
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: torch.Tensor,
    logsumexp: torch.Tensor,
    slope: torch.Tensor | float,
    read: torch.Tensor,
) -> Tensors:
    """Return gradients of queries, keys, values and scores over the pairs `read [q, k]`.

    `scores [..., q, k]` are masked.
    """
    weights = weights_of(scores, logsumexp)
    of_scores = (weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True))).masked_fill_(~read, 0)
    of_products = (of_scores * slope).masked_fill_(~read, 0)
    return (
        product_of_read(of_products, key, read),
        product_of_read(of_products.mT, query, read.mT),
        product_of_read(weights.mT, grad, read.mT),
        of_scores,
    )


def repeat_heads(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeat heads: `[1, Hkv, n, D]` to `[1, Hkv * groups, n, D]`."""
    return tensor.repeat_interleave(groups, 1) if groups > 1 else tensor


def sum_groups(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum over the heads of a group: the gradient of `repeat_heads`."""
    return tensor.unflatten(1, (-1, groups)).sum(2) if groups > 1 else tensor


def merge_with(out: torch.Tensor, logsumexp: torch.Tensor, part: torch.Tensor, part_logsumexp: torch.Tensor) -> None:
    """Merge a part into `out [..., D]` and `logsumexp [...]` in place; for two parts, shares are a sigmoid."""
    share = torch.sigmoid(part_logsumexp - logsumexp)
    out.lerp_(part.to(out.dtype), share[..., None])
    torch.logaddexp(logsumexp, part_logsumexp, out=logsumexp)


def merge_parts(parts: torch.Tensor, logsumexps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge `n` parts `[n, ..., D]` to output `[1, ..., D]` and log-sum-exp `[1, ...]`."""
    logsumexp = logsumexps.logsumexp(0, keepdim=True)
    return (parts * (logsumexps - logsumexp).exp()[..., None]).sum(0, keepdim=True), logsumexp
