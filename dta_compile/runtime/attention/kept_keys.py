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
from dta_compile.runtime.attention.chosen_keys import query_slices
from dta_compile.runtime.attention.provider import Operands, Provider, Tensors
from dta_compile.runtime.attention.reference import Reference, merge_with


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
        columns = _columns(x)
        if not any(map(len, columns)):
            return out, logsumexp
        merged = out.to(statistics_dtype(x.query.dtype))
        merge_with(merged, logsumexp, *_BesideWindow(columns).forward(_beside_window(x, columns)))
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
        columns = _columns(x)
        if not any(map(len, columns)):
            return of_query, *of_states
        beside = _beside_window(x, columns)
        of_above = [torch.zeros_like(t, dtype=beside.query.dtype) for t in (beside.prefix_key, beside.prefix_value)]
        more, *of_own = _BesideWindow(columns).backward(grad, out, logsumexp, beside, *of_above)
        of_query += more.to(of_query.dtype)
        for total, part in zip(of_prefix, of_above, strict=True):
            total.index_add_(2, columns.above, part.to(total.dtype))
        for total, part in zip(of_states, of_own, strict=True):
            total.index_add_(2, columns.own, part.to(total.dtype))
        return of_query, *of_states


@dataclasses.dataclass(frozen=True)
class _BesideWindow(Reference):
    """Provider of what queries read of keys that stay visible, beyond the window; see `_beside_window`."""

    columns: _Columns

    def _blocks(self, x: Operands) -> Iterator[tuple[slice, torch.Tensor]]:
        assert x.limit is not None
        table, above, own = x.table(), *self.columns
        number = torch.arange(table.tokens, device=above.device)
        depths = torch.cat([above, table.depths[own]])
        for queries in query_slices(x.query.shape[1], table.tokens, len(depths)):
            own_number = number[queries, None]
            reads_own = (own <= own_number) & (own_number < table.ends[own])
            read = torch.cat([reads_own.new_ones((len(own_number), len(above))), reads_own], 1)
            yield queries, read & (depths < x.limit.first(table.depths[queries, None]))


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


def _beside_window(x: Operands, columns: _Columns) -> Operands:
    """Return the operands with keys and values that stay visible alone, and queries in the dtype of sums."""
    prefix_key, prefix_value = (states.index_select(2, columns.above) for states in (x.prefix_key, x.prefix_value))
    key, value = (states.index_select(2, columns.own) for states in (x.key, x.value))
    query = x.query.to(statistics_dtype(x.query.dtype))
    return x._replace(query=query, key=key, value=value, prefix_key=prefix_key, prefix_value=prefix_value)
