"""Attention of a chunk by FlashAttention's kernels for sequences of different lengths: torch's, or `flash_attn`'s.

A chunk takes few calls: one that is causal within every slice; then for every level of the chunk's tree one of all that
hangs from slices of the level against them, gathered; and one over the stack, in place. They are merged by log-sum-exp,
and the backward of each is exact given the merged output and log-sum-exp.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.plan.tree.segments import Rectangle
from dta_compile.runtime.attention.interface import Operands, Provider, Tensors
from dta_compile.runtime.attention.merge import merge_with
from dta_compile.runtime.attention.reference import Reference
from dta_compile.runtime.path.chunk_shape import ChunkShape
from dta_compile.runtime.rows.upload import upload

__all__ = ["VarlenAttention", "VarlenKernel", "make_flash_attn", "make_varlen"]

TYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256


class Lengths(NamedTuple):
    """Where sequences lie behind one another: int32 `[n + 1]` offsets on the device, and the longest of them."""

    offsets: torch.Tensor
    longest: int


class VarlenKernel(Protocol):
    """One library's kernels. Tensors are `[tokens, heads, features]`, log-sum-exps `[heads, tokens]` in float32."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: KernelCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp."""

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        x: KernelCall,
    ) -> Tensors:
        """Gradients of queries, keys and values."""


class KernelCall(NamedTuple):
    """One kernel call.

    Attributes:
        queries, keys: how they are divided into sequences.
        causal: query k of a sequence reads its keys up to the k-th.
        query_rows, key_rows: which of the chunk's tokens they are; None: all of them, in order.
        on_stack: the keys are the stack's.
        scale, softcap: of the scores, see `Operands`.
    """

    queries: Lengths
    keys: Lengths
    causal: bool = False
    query_rows: torch.Tensor | None = None
    key_rows: torch.Tensor | None = None
    on_stack: bool = False
    scale: float = 1.0
    softcap: float = 0.0


def make_varlen(query: torch.Tensor, value: torch.Tensor, softcap: float) -> Provider | str:
    """The provider with torch's kernels, or what it takes instead."""
    if softcap:
        return "scores without a soft cap"
    return VarlenAttention(_TorchKernel()) if _fits(query, value) else _REQUIREMENT


def make_flash_attn(query: torch.Tensor, value: torch.Tensor, softcap: float) -> Provider | str:
    """The provider with the kernels of the package `flash_attn`, or what it takes instead."""
    if not _has_flash_attn():
        return "the package flash-attn, version 2.6 or later"
    return VarlenAttention(_PackageKernel()) if _fits(query, value) else _REQUIREMENT


_REQUIREMENT = (
    f"bfloat16 or float16 on a GPU, keys and values of one size that is at most {LARGEST_HEAD} and divides by 8"
)


def _fits(query: torch.Tensor, value: torch.Tensor) -> bool:
    width = query.shape[-1]
    return (
        query.device.type == "cuda"
        and query.dtype in TYPES
        and width == value.shape[-1]
        and width <= LARGEST_HEAD
        and width % 8 == 0
    )


@functools.cache
def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


class VarlenAttention:
    """FlashAttention with variable lengths; where a window or chunks of the sequence cut into a chunk, plain math."""

    replayable = False

    def __init__(self, kernel: VarlenKernel) -> None:
        self.kernel = kernel

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Provider.forward`."""
        if x.chunk.cut_by(x.limit) is not None:
            return Reference().forward(x)
        first, *others = _calls(x)
        query, keys_of = _tokens_first(x.query), _KeysAndValues(x)
        part, logsumexp = self.kernel.forward(query, *keys_of(first), first)
        dtype = statistics_dtype(x.query.dtype)
        out = part if not others else part.to(dtype)
        for call in others:
            rows = call.query_rows
            part, part_logsumexp = self.kernel.forward(_at(query, rows), *keys_of(call), call)
            merged, merged_logsumexp = _at(out, rows), logsumexp if rows is None else logsumexp.index_select(1, rows)
            merge_with(merged, merged_logsumexp.t(), part, part_logsumexp.t())
            if rows is not None:
                out.index_copy_(0, rows, merged)
                logsumexp.index_copy_(1, rows, merged_logsumexp)
        return out.to(x.query.dtype).transpose(0, 1)[None], logsumexp[None]

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
        if x.chunk.cut_by(x.limit) is not None:
            return Reference().backward(grad, out, logsumexp, x, prefix_key_grad, prefix_value_grad)
        keys_of = _KeysAndValues(x)
        grad, query, out = (_tokens_first(tensor).contiguous() for tensor in (grad, x.query, out))
        dtype = statistics_dtype(x.query.dtype)
        totals = tuple(torch.zeros_like(_tokens_first(t), dtype=dtype) for t in (x.query, x.key, x.value))
        above = (_tokens_first(prefix_key_grad), _tokens_first(prefix_value_grad))
        for call in _calls(x):
            rows = call.query_rows
            statistics = logsumexp[0] if rows is None else logsumexp[0].index_select(1, rows).contiguous()
            grads = self.kernel.backward(
                _at(grad, rows), _at(query, rows), *keys_of(call), _at(out, rows), statistics, call
            )
            _add(totals[0], rows, grads[0])
            for total, part in zip(above if call.on_stack else totals[1:], grads[1:], strict=True):
                _add(total, call.key_rows, part)
        grad_query, grad_key, grad_value = (total.transpose(0, 1)[None] for total in totals)
        return grad_query.to(x.query.dtype), grad_key, grad_value


class _KeysAndValues:
    """Those that a call reads, as the kernels want them."""

    def __init__(self, x: Operands) -> None:
        self.own = _tokens_first(x.key), _tokens_first(x.value)
        self.stack = _tokens_first(x.prefix_key), _tokens_first(x.prefix_value)

    def __call__(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self.stack if call.on_stack else self.own
        return _at(key, call.key_rows), _at(value, call.key_rows)


def _calls(x: Operands) -> list[KernelCall]:
    derived, device = x.chunk.derived, x.query.device
    key = KernelCall, device, x.scale, x.softcap
    if key not in derived:
        derived[key] = [call._replace(scale=x.scale, softcap=x.softcap) for call in _calls_of(x.chunk, device)]
    calls: list[KernelCall] = derived[key]
    return calls


def _calls_of(chunk: ChunkShape, device: torch.device) -> Iterator[KernelCall]:
    slices = _lengths([part.last - part.first for part in chunk.segments], device)
    yield KernelCall(slices, slices, causal=True)
    for level in _levels(chunk):
        queries = [(found.query_first, found.query_last) for found in level]
        keys = [(found.key_first, found.key_last) for found in level]
        yield KernelCall(
            _lengths([last - first for first, last in queries], device),
            _lengths([last - first for first, last in keys], device),
            query_rows=_numbers(queries, device),
            key_rows=_numbers(keys, device),
        )
    if chunk.start:
        yield KernelCall(_lengths([chunk.tokens], device), _lengths([chunk.start], device), on_stack=True)


def _levels(chunk: ChunkShape) -> list[list[Rectangle]]:
    """Rectangles by how many slices lie above their keys: no token is a query twice in a level."""
    level_of: dict[int, int] = {}  # by the first token of a slice
    for part in chunk.segments:
        above = chunk.segments[part.parent].first if part.parent >= 0 else None
        level_of[part.first] = 0 if above is None else level_of[above] + 1
    levels: dict[int, list[Rectangle]] = {}
    for found in chunk.rectangles:
        levels.setdefault(level_of[found.key_first], []).append(found)
    return [levels[level] for level in sorted(levels)]


def _lengths(lengths: Sequence[int], device: torch.device) -> Lengths:
    return Lengths(upload(np.cumsum([0, *lengths], dtype=np.int32), device), max(lengths))


def _numbers(ranges: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    return upload(np.concatenate([np.arange(first, last) for first, last in ranges]), device)


def _tokens_first(tensor: torch.Tensor) -> torch.Tensor:
    """`[1, H, n, D]` as `[n, H, D]`, dense in its last dimension as the kernels want it."""
    tensor = tensor[0].transpose(0, 1)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _at(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


def _add(total: torch.Tensor, rows: torch.Tensor | None, part: torch.Tensor) -> None:
    if rows is None:
        total += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))


class _TorchKernel:
    """`aten::_flash_attention_*`, which `torch.nn.attention.varlen` calls; the same from torch 2.11 to 2.15."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: KernelCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result = torch.ops.aten._flash_attention_forward(
            q, k, v, x.queries.offsets, x.keys.offsets, x.queries.longest, x.keys.longest, 0.0, x.causal, False,
            scale=x.scale,
        )  # fmt: skip
        return result[0], result[1]

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        x: KernelCall,
    ) -> Tensors:
        seed = torch.empty(2, dtype=torch.int64, device=q.device)  # of dropout, of which there is none
        grads: Tensors = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, logsumexp, x.queries.offsets, x.keys.offsets, x.queries.longest, x.keys.longest, 0.0,
            x.causal, seed, seed[:0], scale=x.scale,
        )  # fmt: skip
        return grads


class _PackageKernel:
    """Version 2 of the package `flash_attn`, from 2.6 on."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: KernelCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out, logsumexp, *_ = _flash_attn_varlen_forward(
            q, k, v, x.queries.offsets, x.keys.offsets, x.queries.longest, x.keys.longest, dropout_p=0.0,
            softmax_scale=x.scale, causal=x.causal, softcap=x.softcap,
        )  # fmt: skip
        return out, logsumexp

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        x: KernelCall,
    ) -> Tensors:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_attn_varlen_backward(
            grad, q, k, v, out, logsumexp, *grads, x.queries.offsets, x.keys.offsets, x.queries.longest, x.keys.longest,
            dropout_p=0.0, softmax_scale=x.scale, causal=x.causal, window_size_left=-1, window_size_right=-1,
            softcap=x.softcap, alibi_slopes=None, deterministic=False,
        )  # fmt: skip
        return grads
