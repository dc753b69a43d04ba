"""Attention provider for a sliding window beside which some tokens stay visible (the first ones, in StreamingLLM).

Another provider computes the window. What a query reads beyond it are few keys, by plain math here; both parts are
merged by their log-sum-exps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.products import product_of_read
from dta_compile.runtime.attention.chosen_keys import query_slices
from dta_compile.runtime.attention.provider import Operands, Provider, Tensors
from dta_compile.runtime.attention.reference import grads_of_read, merge_with, repeat_heads, sum_groups, weights_of


class _Columns(NamedTuple):
    """Keys of tokens that stay visible: indices of those above the chunk, and of those in it."""

    above: torch.Tensor
    own: torch.Tensor


@dataclasses.dataclass(frozen=True)
class KeptKeys:
    """Provider for operands whose limit has tokens that are kept.

    Attributes:
        window: computes the keys within the window.
    """

    window: Provider

    replayable = False

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Provider.forward`."""
        out, logsumexp = self.window.forward(_in_window(x))
        columns, dtype = _columns(x), statistics_dtype(x.query.dtype)
        merged = out.to(dtype)
        (key, value), groups = _keys_and_values(x, columns), x.query.shape[1] // x.key.shape[1]
        key, value = (repeat_heads(tensor, groups) for tensor in (key, value))
        for queries, read in _blocks(x, columns):
            scores, _ = x.scoring.scores(x.query[:, :, queries].to(dtype) @ key.mT)
            scores = scores.masked_fill_(~read, float("-inf"))
            of_part = scores.logsumexp(-1)
            part = product_of_read(weights_of(scores, of_part), value, read)
            merge_with(merged[:, :, queries], logsumexp[:, :, queries], part, of_part)
        return merged.to(out.dtype), logsumexp

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
        of_prefix = prefix_key_grad, prefix_value_grad
        of_query, *of_states = self.window.backward(grad, out, logsumexp, _in_window(x), *of_prefix)
        columns, dtype = _columns(x), statistics_dtype(x.query.dtype)
        (key, value), groups = _keys_and_values(x, columns), x.query.shape[1] // x.key.shape[1]
        key, value = (repeat_heads(tensor, groups) for tensor in (key, value))
        sums = torch.zeros_like(key), torch.zeros_like(value)
        for queries, read in _blocks(x, columns):
            query, own_grad, own_out = (tensor[:, :, queries].to(dtype) for tensor in (x.query, grad, out))
            scores, slope = x.scoring.scores(query @ key.mT)
            scores = scores.masked_fill_(~read, float("-inf"))
            lse = logsumexp[:, :, queries]
            more, *of_part, _ = grads_of_read(own_grad, own_out, query, key, value, scores, lse, slope, read)
            of_query[:, :, queries] += more.to(of_query.dtype)
            for total, part in zip(sums, of_part, strict=True):
                total += part
        for total, above, own in zip(sums, of_prefix, of_states, strict=True):
            of_above, of_own = sum_groups(total, groups).split([len(index) for index in columns], 2)
            above.index_add_(2, columns.above, of_above.to(above.dtype))
            own.index_add_(2, columns.own, of_own.to(own.dtype))
        return of_query, *of_states


def _in_window(x: Operands) -> Operands:
    """Return the operands of the window alone."""
    assert x.limit is not None
    return x._replace(limit=x.limit.range)


def _columns(x: Operands) -> _Columns:
    """Return the keys that stay visible; made once per shape."""
    assert x.limit is not None
    derived, key = x.chunk.derived, (KeptKeys, x.limit.kept, x.key.device)
    if key not in derived:
        kept = np.array(x.limit.kept, np.int64)
        indices = kept[kept < x.chunk.start], np.flatnonzero(np.isin(x.chunk.depths, kept))
        derived[key] = _Columns(*(torch.from_numpy(index).to(x.key.device) for index in indices))
    columns: _Columns = derived[key]
    return columns


def _keys_and_values(x: Operands, columns: _Columns) -> list[torch.Tensor]:
    """Return keys and values that stay visible, `[1, Hkv, n, D]`, in the dtype of sums."""
    both = (x.prefix_key, x.key), (x.prefix_value, x.value)
    parts = ([above.index_select(2, columns.above), own.index_select(2, columns.own)] for above, own in both)
    return [torch.cat(part, 2).to(statistics_dtype(x.query.dtype)) for part in parts]


def _blocks(x: Operands, columns: _Columns) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield queries, and which of these keys each of them reads, beyond the window, `[queries, n]`."""
    assert x.limit is not None
    table, above = x.table(), columns.above
    number = torch.arange(table.tokens, device=above.device)
    depths = torch.cat([above, table.depths[columns.own]])
    for queries in query_slices(x.query.shape[1], table.tokens, len(depths)) if len(depths) else ():
        own_number = number[queries, None]
        own = (columns.own <= own_number) & (own_number < table.ends[columns.own])
        read = torch.cat([own.new_ones((len(own), len(above))), own], 1)
        yield queries, read & (depths < x.limit.first(table.depths[queries, None]))
