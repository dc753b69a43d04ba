"""Reference attention provider in plain torch, which other providers are tested against, and shared helpers.

Attention over parts of the keys is merged by the log-sum-exps of their scores: the output of a part is weighted by
`exp(log-sum-exp of the part - log-sum-exp of all)` (FlashAttention-2, Dao, 2023, section 3.1).
"""

from __future__ import annotations

import torch

from dta_compile.ops.products import product_of_read
from dta_compile.runtime.attention.interface import Operands, Tensors


class Reference:
    """Provider by a plain softmax over all keys at once, in at least float32: the definition of correct."""

    replayable = True

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Provider.forward`."""
        scores, value, _ = self._scores_and_values(x)
        logsumexp, read = scores.logsumexp(-1), self._allowed(x)
        weights = weights_of(scores, logsumexp)
        return product_of_read(weights, value, read).to(x.query.dtype), logsumexp

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
        scores, value, slope = self._scores_and_values(x)
        grad, out, query = (tensor.to(value.dtype) for tensor in (grad, out, x.query))
        prefix, groups, read = x.prefix_key.shape[2], self._groups(x), self._allowed(x)
        key = self._wide(x, x.prefix_key, x.key)
        grad_query, grad_key, grad_value = grads_of_read(grad, out, query, key, value, scores, logsumexp, slope, read)
        grad_key, grad_value = sum_groups(grad_key, groups), sum_groups(grad_value, groups)
        prefix_key_grad += grad_key[:, :, :prefix]
        prefix_value_grad += grad_value[:, :, :prefix]
        return grad_query.to(x.query.dtype), grad_key[:, :, prefix:], grad_value[:, :, prefix:]

    def _groups(self, x: Operands) -> int:
        return x.query.shape[1] // x.key.shape[1]

    def _scores_and_values(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
        """Return scores, values, and the derivative of the scores by the query-key products."""
        value = self._wide(x, x.prefix_value, x.value)
        scores, slope = capped(x.query.to(value.dtype) @ self._wide(x, x.prefix_key, x.key).mT, x.scale, x.softcap)
        return scores.masked_fill(~self._allowed(x), float("-inf")), value, slope

    def _wide(self, x: Operands, prefix: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Concatenate to `[1, Hq, p + c, D]` in at least float32; 0 beyond the chunk's start, since 0 * NaN is NaN."""
        beyond = torch.arange(prefix.shape[2], device=own.device) >= x.table().start
        both = torch.cat([prefix.masked_fill(beyond[:, None], 0), own], 2)
        return repeat_heads(both, self._groups(x)).to(torch.promote_types(x.query.dtype, torch.float32))

    def _allowed(self, x: Operands) -> torch.Tensor:
        """Return the mask, bool `[c, p + c]`: which of the `p + c` keys each of the `c` queries reads."""
        table, device = x.table(), x.query.device
        number = torch.arange(table.tokens, device=device)
        above = torch.arange(x.prefix_key.shape[2], device=device)
        prefix = (above < table.start).expand(table.tokens, -1)
        own = (number <= number[:, None]) & (number[:, None] < table.ends)
        if x.limit is not None:
            first = x.limit.first(table.depths)[:, None]
            prefix, own = prefix & (above >= first), own & (table.depths >= first)
        return torch.cat([prefix, own], 1)


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
    """Return gradients of queries, keys and values over the pairs `read [q, k]`; `scores [..., q, k]` are masked."""
    weights = weights_of(scores, logsumexp)
    grad_scores = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) * slope
    grad_scores = grad_scores.masked_fill_(~read, 0)
    return (
        product_of_read(grad_scores, key, read),
        product_of_read(grad_scores.mT, query, read.mT),
        product_of_read(weights.mT, grad, read.mT),
    )


def capped(products: torch.Tensor, scale: float, softcap: float) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Scale and cap query-key products; return scores and their derivative by the products."""
    if not softcap:
        return products * scale, scale
    tanh = (products * (scale / softcap)).tanh()
    return tanh * softcap, (1 - tanh.square()) * scale


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
