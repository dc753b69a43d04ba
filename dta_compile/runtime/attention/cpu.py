"""Attention provider for CPUs: the C++ kernel of `ops.tree_attention` if it is compiled, else torch's flash kernel.

Torch's kernel runs the parts of `cpu_parts`, merged by log-sum-exp. It supports grouped queries (torch 2.9 and later),
so keys and values are never repeated. Given the merged output and log-sum-exp, the backward of each part is exact.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from dta_compile.executable.pieces import TreeAttention, running_library
from dta_compile.ops.attention import by_tokens, empty_by_tokens
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.products import are_bounded
from dta_compile.ops.tree_attention import kernel
from dta_compile.ops.tree_attention.kernel import Keys, States
from dta_compile.runtime.attention.chosen_keys import query_slices
from dta_compile.runtime.attention.cpu_parts import Part, parts_of
from dta_compile.runtime.attention.provider import Operands, Tensors
from dta_compile.runtime.attention.reference import Reference, merge_with

aten = torch.ops.aten


class FlashCPU:
    """Provider for float32, float64 and bfloat16, with equal head sizes of keys and values.

    Both kinds of kernels return the same values up to rounding, so that a call may switch between them. Parts are
    summed in at least float32.
    """

    replayable = False

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Provider.forward`."""
        if (library := _library(x)) is not None:
            return kernel.forward(library, x.query, _states(x), _keys(x), x.scoring.scale)
        x, dtype = x.with_dense_rows(), statistics_dtype(x.query.dtype)
        first, *others = parts = _parts(x, x.query)
        _, heads, tokens, _ = x.query.shape
        if (first.first, first.last) == (0, tokens):
            out, logsumexp = _flash(x, first)
            out, parts = out.to(dtype) if others else out, others
        else:  # allocate in the layout of the kernel's results
            out = empty_by_tokens(x.query, dtype=dtype)
            logsumexp = x.query.new_empty((1, tokens, heads), dtype=dtype).transpose(1, 2)
        for part in parts:
            _merge(_rows(out, part), _rows(logsumexp, part), *_flash(x, part), part.fresh)
        return out.to(x.query.dtype), logsumexp

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
        if (library := _library(x)) is not None:
            keys, of_prefix = (_states(x), _keys(x), x.scoring.scale), (prefix_key_grad, prefix_value_grad)
            return kernel.backward(library, grad, out, logsumexp, x.query, *keys, of_prefix)
        x, dtype, start = x.with_dense_rows(), statistics_dtype(x.query.dtype), x.chunk.start
        first, *others = parts = _parts(x, x.query, grad, out)
        tokens = x.query.shape[2]
        if (first.first, first.last, first.spans) == (0, tokens, ((start, start + tokens),)):
            grads = (grad.to(dtype) for grad in _flash_backward(grad, out, logsumexp, x, first))
            grad_query, grad_key, grad_value = grads
            grad_key, grad_value, parts = by_tokens(grad_key), by_tokens(grad_value), others
        else:
            grad_query, grad_key, grad_value = (empty_by_tokens(t, dtype=dtype) for t in (x.query, x.key, x.value))
            if not first.fresh_keys:
                for grad_own in (grad_key, grad_value):
                    grad_own.zero_()
        for part in parts:
            query_part, key_part, value_part = _flash_backward(grad, out, logsumexp, x, part)
            target, query_part = _aligned(_rows(grad_query, part), query_part)
            if part.fresh:
                target.copy_(query_part)
            else:
                target += query_part
            _add(key_part, part, start, prefix_key_grad, grad_key)
            _add(value_part, part, start, prefix_value_grad, grad_value)
        return grad_query.to(x.query.dtype), grad_key, grad_value


def _library(x: Operands) -> ctypes.CDLL | None:
    """Return the compiled C++ library; None: torch's kernel computes this."""
    return None if not x.scoring.is_linear or x.query.dtype not in kernel.DTYPES else running_library(TreeAttention())


def _states(x: Operands) -> States:
    return States(x.key, x.value, x.prefix_key, x.prefix_value)


def _keys(x: Operands) -> Keys:
    """Return the C++ kernel's description of which keys are read; made once per shape."""
    chunk, limit = x.chunk, x.chunk.cut_by(x.limit)
    if (Keys, limit, x.units) not in chunk.derived:
        begins = chunk.begins if x.units else np.arange(chunk.tokens)
        arrays = begins, chunk.subtree_ends, chunk.depths
        begin, end, depth = (torch.from_numpy(array.astype(np.int32)) for array in arrays)
        chunk.derived[Keys, limit, x.units] = Keys(begin, end, depth, *(limit[:2] if limit else ()))
    keys: Keys = chunk.derived[Keys, limit, x.units]
    return keys


def _parts(x: Operands, *of_queries: torch.Tensor) -> list[Part]:
    """Return the parts of a chunk, with plain math for parts that are not full unless all numbers are bounded.

    Torch's kernel multiplies masked pairs by zero, and 0 * NaN is NaN.
    """
    parts, limit, start = parts_of(x.chunk, x.limit, x.units, x.query.dtype), x.chunk.cut_by(x.limit), x.chunk.start
    lowest = start if limit is None else max(int(limit.first(np.array(start))), 0)  # first stack token under a mask
    above = [] if lowest == start else [x.prefix_key[:, :, lowest:], x.prefix_value[:, :, lowest:]]
    if are_bounded(*of_queries, x.key, x.value, *above):
        return parts
    return [part._replace(plain=not part.full) for part in parts]


def _flash(x: Operands, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp of one part.

    In full parts the queries of a group become rows over the same keys, `[1, Hkv, g * q]`, for larger products.
    """
    query, key, value = _rows(x.query, part), *_keys_and_values(x, part)
    if part.plain or not x.scoring.is_linear:
        return _Plain(part).forward(_of_part(x, query, key, value))
    if part.full:
        query = query.reshape(1, key.shape[1], -1, query.shape[3])
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, part.causal, attn_mask=part.mask, scale=x.scoring.scale
    )
    return out, logsumexp


def _flash_backward(grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, x: Operands, part: Part) -> Tensors:
    """Return gradients of one part's queries (rows of a group as in `_flash`), keys and values.

    The kernel parallelises over key heads. If there are fewer than threads, key heads become the batch, and each is
    expanded to `spread` heads for groups of query heads.
    """
    key, value = _keys_and_values(x, part)
    (_, heads, _, width), kv_heads, threads = x.query.shape, key.shape[1], torch.get_num_threads()
    groups = heads // kv_heads
    spread = next((s for s in range(1, groups) if groups % s == 0 and s * kv_heads >= threads), groups)
    grad, query, out, logsumexp = (_rows(t, part) for t in (grad, x.query, out, logsumexp))
    if part.plain or not x.scoring.is_linear:
        plain = _of_part(x, query, key, value)
        return _Plain(part).backward(grad, out, logsumexp, plain, plain.prefix_key, plain.prefix_value)
    if part.full:
        grad, query, out = (t.reshape(1, kv_heads * spread, -1, width) for t in (grad, query, out))
        logsumexp = logsumexp.reshape(1, kv_heads * spread, -1)
    if spread > 1:
        grad, query, out, logsumexp = (t[0].unflatten(0, (kv_heads, -1)) for t in (grad, query, out, logsumexp))
        key, value = (t.transpose(0, 1).expand(-1, spread, -1, -1) for t in (key, value))
    grads: Tensors = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, logsumexp, 0.0, part.causal, attn_mask=part.mask, scale=x.scoring.scale
    )
    return grads if spread == 1 else (grads[0].flatten(0, 1)[None], grads[1].sum(1)[None], grads[2].sum(1)[None])


@dataclasses.dataclass(frozen=True)
class _Plain(Reference):
    """A part by plain math, a few queries at a time: torch's kernel lacks soft caps and reads masked keys."""

    part: Part

    def _blocks(self, x: Operands) -> Iterator[tuple[slice, torch.Tensor]]:
        keys = x.key.shape[2]
        for queries in query_slices(x.query.shape[1], x.query.shape[2], keys):
            read = torch.ones((queries.stop - queries.start, keys), dtype=torch.bool, device="cpu")
            if self.part.causal:
                read.tril_(queries.start)
            elif self.part.mask is not None:
                read = self.part.mask[queries] == 0
            yield queries, read


def _of_part(x: Operands, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Operands:
    """Return the operands of a part for `_Plain`: all keys are its own, and queries are in the dtype of sums."""
    query = query.to(statistics_dtype(query.dtype))
    return x._replace(query=query, key=key, value=value, prefix_key=key[:, :, :0], prefix_value=value[:, :, :0])


def _rows(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """Slice a tensor to the queries of a part."""
    return _cut(tensor, part.first, part.last)


def _keys_and_values(x: Operands, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a part, `[1, Hkv, n, D]`."""
    keys = [_span(x.prefix_key, x.key, span, x.chunk.start) for span in part.spans]
    values = [_span(x.prefix_value, x.value, span, x.chunk.start) for span in part.spans]
    return (keys[0], values[0]) if len(keys) == 1 else (torch.cat(keys, 2), torch.cat(values, 2))


def _add(grad: torch.Tensor, part: Part, start: int, prefix_grad: torch.Tensor, own_grad: torch.Tensor) -> None:
    """Write or add the gradient of a part's keys (or values) to the gradients of stack and chunk."""
    begin = 0
    for first, last in part.spans:
        target, added = _span(prefix_grad, own_grad, (first, last), start), _cut(grad, begin, begin + last - first)
        if part.fresh_keys:
            target.copy_(added)
        else:
            target += added
        begin += last - first


def _span(prefix: torch.Tensor, own: torch.Tensor, span: tuple[int, int], start: int) -> torch.Tensor:
    first, last = span
    return _cut(prefix, first, last) if last <= start else _cut(own, first - start, last - start)


def _cut(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    return tensor if last - first == tensor.shape[2] else tensor[:, :, first:last]


def _aligned(whole: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reshape `whole [1, H, q, ...]` and a part's result, whose rows may be queries of a group, to equal shapes."""
    if whole.shape == part.shape:
        return whole, part
    return whole.unflatten(1, (part.shape[1], -1)), part.unflatten(2, (-1, whole.shape[2]))


def _merge(
    out: torch.Tensor, logsumexp: torch.Tensor, part_out: torch.Tensor, part_logsumexp: torch.Tensor, fresh: bool
) -> None:
    """Merge a part into the results of its queries, in place."""
    out, part_out = _aligned(out, part_out)
    logsumexp, part_logsumexp = _aligned(logsumexp, part_logsumexp)
    if fresh:
        out.copy_(part_out)
        logsumexp.copy_(part_logsumexp)
        return
    merge_with(out, logsumexp, part_out, part_logsumexp)
