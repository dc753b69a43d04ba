"""Dense attention over a batch in plain torch, one block of queries at a time: exact, without `[S, S]` in memory.

It serves calls without a prefix tree: generation and evaluation with `attn_implementation="dta"`, and the captured
program in the self-check.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.products import product_of_read
from dta_compile.ops.scoring import Scoring

MOST_PAIRS = 2**22  # scores of a block, over all sequences and heads
LEAST_ROWS = 16  # queries of a block


class _Block(NamedTuple):
    """Queries `[first, last)` against keys `[low, high)`; `allowed` is a mask `[B or 1, 1 or H, 1, q, k]`."""

    first: int
    last: int
    low: int
    high: int
    allowed: torch.Tensor | None
    bias: torch.Tensor | None

    def queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """Slice `[..., S, D]` to the block's queries."""
        return tensor[..., self.first : self.last, :]

    def keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """Slice `[..., S, D]` to the block's keys."""
        return tensor[..., self.low : self.high, :]

    def read(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return `[..., q, k]` with zeros at pairs that are not allowed."""
        return pairs if self.allowed is None else pairs.masked_fill(~self.allowed, 0)

    def product(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return `weights [..., q, k] @ values`, unaffected by NaN and infinity at keys that are not attended to."""
        return weights @ values if self.allowed is None else product_of_read(weights, values, self.allowed)

    def transposed_product(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the same with transposed weights, a sum over queries."""
        return weights.mT @ values if self.allowed is None else product_of_read(weights.mT, values, self.allowed.mT)


class _Scores(NamedTuple):
    """Attention weights of a block `[B, Hkv, g, q, k]`, weights of the sinks `[B, Hkv, g, q]`, None without, and the
    derivative of scores by products."""

    weights: torch.Tensor
    of_sinks: torch.Tensor | None
    slope: torch.Tensor | float


class _Attention:
    """One call. Query heads are grouped by the key head that they read: `[B, Hkv, g, S, D]`."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: torch.Tensor | None,
        is_causal: bool,
        segments: torch.Tensor | None,
        window: int,
        *scoring: float,
    ) -> None:
        self.kv_heads, self.dtype = key.shape[1], statistics_dtype(query.dtype)
        self.query, self.key, self.value = self.grouped(query), key[:, :, None], value[:, :, None]
        self.sinks = None if sinks is None else sinks.to(self.dtype).view(1, self.kv_heads, -1, 1)
        self.mask, self.is_causal, self.segments, self.window = mask, is_causal, segments, window
        self.scoring = Scoring(*scoring)

    def grouped(self, tensor: torch.Tensor) -> torch.Tensor:
        """View `[B, Hq, ...]` as `[B, Hkv, g, ...]`."""
        return tensor.unflatten(1, (self.kv_heads, -1))

    def blocks(self) -> Iterator[_Block]:
        """Yield blocks of queries, each with all keys that its queries attend to."""
        batch, kv_heads, groups, queries, _ = self.query.shape
        keys = self.key.shape[3]
        rows = max(LEAST_ROWS, MOST_PAIRS // max(batch * kv_heads * groups * keys, 1))
        begins = _first_columns(self.segments)
        for first in range(0, queries, rows):
            last = min(first + rows, queries)
            low = max(0, first - self.window + 1) if self.window else 0
            if begins is not None:
                low = max(low, begins[first])
            high = last if self.is_causal else keys
            allowed, bias = self._masks(first, last, low, high)
            yield _Block(first, last, low, high, allowed, bias)

    def _masks(self, first: int, last: int, low: int, high: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        query = torch.arange(first, last, device=self.query.device)[:, None]
        key = torch.arange(low, high, device=self.query.device)
        allowed = torch.ones((), dtype=torch.bool, device=self.query.device)
        if self.is_causal:
            allowed = key <= query
        if self.window:
            allowed = allowed & (query - key < self.window)
        if self.segments is not None:
            own, theirs = self.segments[:, first:last, None], self.segments[:, None, low:high]
            allowed = allowed & ((own == theirs) & (theirs != 0))[:, None, None]
        bias = None
        if self.mask is not None:
            mask = self.mask.expand(*self.mask.shape[:-2], self.query.shape[3], self.key.shape[3])
            mask = mask[..., first:last, low:high]
            mask = mask[(None,) * (4 - mask.dim())]
            mask = mask[:, :, None] if mask.shape[1] == 1 else self.grouped(mask)
            if mask.dtype is torch.bool:
                allowed = allowed & mask
            else:
                bias = mask.to(self.dtype)
        return (allowed if allowed.dim() else None), bias

    def scores(self, block: _Block) -> _Scores:
        """Return weights that sum to one including those of the sinks; zeros where a query attends to nothing."""
        products = block.queries(self.query).to(self.dtype) @ block.keys(self.key).to(self.dtype).mT
        scores, slope = self.scoring.scores(products)
        if block.bias is not None:
            scores = scores + block.bias
        if block.allowed is not None:
            scores = scores.masked_fill(~block.allowed, float("-inf"))
        logsumexp = scores.logsumexp(-1)
        if self.sinks is not None:
            logsumexp = torch.logaddexp(logsumexp, self.sinks)
        base = logsumexp.masked_fill(logsumexp == float("-inf"), 0)
        of_sinks = None if self.sinks is None else (self.sinks - base).exp()
        return _Scores(block.read((scores - base[..., None]).exp()), of_sinks, slope)


def dense_mask(tokens: int, device: torch.device, segments: torch.Tensor | None, window: int) -> torch.Tensor:
    """Materialise a causal mask as bool `[B or 1, 1, S, S]`; arguments as in `ops.attention.Masking`."""
    index = torch.arange(tokens, device=device)
    allowed = (index <= index[:, None])[None, None]
    if window:
        allowed = allowed & (index[:, None] - index < window)
    if segments is not None:
        same = (segments[:, :, None] == segments[:, None]) & (segments != 0)[:, None]
        allowed = allowed & same[:, None]
    return allowed


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, *masking: object
) -> torch.Tensor:
    """Return attention `[B, Hq, S, Dv]` of query `[B, Hq, S, D]`, key `[B, Hkv, K, D]` and value `[B, Hkv, K, Dv]`.

    Args:
        sinks: `[Hq]` or None.
        masking: see `ops.attention.Masking`; a causal call has as many keys as queries.
    """
    call = _Attention(query, key, value, sinks, *masking)  # type: ignore[arg-type]
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    for block in call.blocks():
        part = block.product(call.scores(block).weights, block.keys(call.value).to(call.dtype))
        block.queries(out).copy_(part.flatten(1, 2))
    return out


def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    *masking: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `attend`'s tensors; that of the sinks is empty if there are none."""
    call = _Attention(query, key, value, sinks, *masking)  # type: ignore[arg-type]
    of_query = query.new_empty(query.shape, dtype=call.dtype)
    of_key, of_value = (tensor.new_zeros(tensor.shape, dtype=call.dtype) for tensor in (key, value))
    of_sinks = query.new_zeros(0 if sinks is None else sinks.shape, dtype=call.dtype)
    for block in call.blocks():
        scores, own = call.scores(block), call.grouped(block.queries(grad)).to(call.dtype)
        block.keys(of_value).add_(block.transposed_product(scores.weights, own).sum(2))
        of_weights = block.read(own @ block.keys(call.value).to(call.dtype).mT)
        delta = (scores.weights * of_weights).sum(-1)
        of_scores = block.read(scores.weights * (of_weights - delta[..., None]) * scores.slope)
        if scores.of_sinks is not None:
            of_sinks -= (scores.of_sinks * delta).sum((0, 3)).flatten()
        keys, queries = block.keys(call.key).to(call.dtype), block.queries(call.query).to(call.dtype)
        block.queries(of_query).copy_(block.product(of_scores, keys).flatten(1, 2))
        block.keys(of_key).add_(block.transposed_product(of_scores, queries).sum(2))
    sink_dtype = query.dtype if sinks is None else sinks.dtype
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_sinks.to(sink_dtype)


def _first_columns(segments: torch.Tensor | None) -> list[int] | None:
    """Return for each query the first column that it or a later query attends to; None if segments do not increase."""
    if segments is None or not segments.numel():
        return None
    numbers = segments.to(torch.int64)
    highest = numbers.cummax(1).values
    if not bool(((numbers == highest) | (numbers == 0)).all()):
        return None  # a segment number may occur again later
    columns = torch.arange(numbers.shape[1], device=numbers.device)
    begins = torch.where(torch.diff(highest, prepend=highest[:, :1]) != 0, columns, 0).cummax(1).values
    columns_by_query: list[int] = begins.amin(0).tolist()
    return columns_by_query
