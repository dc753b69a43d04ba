"""Attention provider by Triton kernels that read the tree structure from device memory.

Queries read the stack in place, up to a length in device memory, and the chunk's own tokens by `ChunkTable`. Key and
value heads are never repeated. Gradients of keys are added up in float32 by the program that owns them; keys that are
few, or that many queries read, are shared by several programs, which add atomically. The kernels are in
`triton_kernels`; Triton's interpreter runs them on a CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dta_compile.ops import triton_use
from dta_compile.ops.attention import empty_by_tokens
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.scoring import Scoring
from dta_compile.runtime.attention.provider import Operands, Provider, Tensors
from dta_compile.runtime.attention.reference import merge_parts
from dta_compile.runtime.path.chunk_shape import LISTED_KEYS

LARGEST_HEAD = 256
# For a chunk of few tokens the stack is divided among several programs per block of queries (split-K), up to about this
# many programs in all: else most of the GPU would be idle while each program walks down the whole stack.
PROGRAMS = 256
LEAST_KEYS = 512  # least number of stack keys per program, and of queries where several share a block of keys
SHARES = 4  # programs that share a block of the chunk's own keys with many readers


def make(query: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> Provider | str:
    """Return the provider if it supports such tensors, else its requirements."""
    if not triton_use.has_triton():
        return "the package triton, on a GPU"
    if has_kernels(query, value):
        return TritonAttention()
    return f"bfloat16, float16 or float32 on a GPU, heads of at most {LARGEST_HEAD}"


def has_kernels(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernels support such tensors."""
    return triton_use.runs_kernels(query) and max(query.shape[-1], value.shape[-1]) <= LARGEST_HEAD


class Blocks(NamedTuple):
    """Tile sizes of a program, its number of warps and of pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


class TritonAttention:
    """Provider by FlashAttention's recurrence over the stack and the chunk's tree; bfloat16, float16 and float32."""

    replayable = True

    def forward(
        self, x: Operands, partial: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Provider.forward`. `partial`: output and log-sum-exp over further keys, which are overwritten."""
        from dta_compile.runtime.attention.triton_kernels import forward_kernel

        x = x.with_dense_rows()
        _, heads, tokens, _ = x.query.shape
        width = x.value.shape[-1]
        blocks = _forward_blocks(x)
        splits = _splits(x, blocks) if partial is None else 1
        # In the memory order of the next matrix product: tokens, heads, features.
        dtype = x.query.dtype if splits == 1 else torch.float32
        parts, logsumexps = partial or (
            x.query.new_empty((splits, tokens, heads, width), dtype=dtype).transpose(1, 2),
            x.query.new_empty((splits, heads, tokens), dtype=torch.float32),
        )
        grid = (heads, _blocks_of(tokens, blocks.queries), splits)
        constants = {**_constants(x, blocks), "GOES_ON": partial is not None}
        forward_kernel[grid](*_tensors(x), parts, logsumexps, *_strides(x, parts), splits, **constants)
        if splits == 1:
            return parts, logsumexps
        out, logsumexp = merge_parts(parts, logsumexps)
        return out.to(x.query.dtype), logsumexp

    def backward(
        self,
        grad: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        x: Operands,
        prefix_key_grad: torch.Tensor,
        prefix_value_grad: torch.Tensor,
        partial: torch.Tensor | None = None,
    ) -> Tensors:
        """See `Provider.backward`. `partial`: gradient of queries from further keys, which is overwritten."""
        from dta_compile.runtime.attention.triton_kernels import own_keys_kernel, queries_kernel, stack_keys_kernel

        x = x.with_dense_rows()
        grad, out = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (grad, out))
        logsumexp = logsumexp.contiguous()
        _, heads, tokens, _ = x.query.shape
        kv_heads, prefix = x.key.shape[1], x.prefix_key.shape[2]
        by_queries = _query_blocks(x)
        strides = (*_strides(x, out), *_rows_of(grad))
        grad_query = empty_by_tokens(x.query) if partial is None else partial
        delta = torch.empty_like(logsumexp)
        wide = statistics_dtype(x.query.dtype)
        grad_key, grad_value = (empty_by_tokens(tensor, dtype=wide) for tensor in (x.key, x.value))
        is_shared = _is_shared(tokens)
        if is_shared:
            grad_key.zero_(), grad_value.zero_()
        shared = (*_tensors(x), out, logsumexp, grad)
        of_queries = {**_constants(x, by_queries), "GOES_ON": partial is not None}
        queries_kernel[(heads, _blocks_of(tokens, by_queries.queries))](
            *shared, delta, grad_query, *strides, *_rows_of(grad_query), **of_queries
        )
        kernels: list[Any] = [(own_keys_kernel, _key_blocks(x, tokens), tokens, SHARES, grad_key, grad_value)]
        if prefix:
            blocks = _key_blocks(x, prefix, is_shared)
            programs = kv_heads * _blocks_of(prefix, blocks.keys)
            splits = max(1, min(PROGRAMS // programs, tokens // LEAST_KEYS))
            kernels.append((stack_keys_kernel, blocks, prefix, splits, prefix_key_grad, prefix_value_grad))
        for kernel, blocks, keys, splits, *targets in kernels:
            strides_of_targets = (stride for target in targets for stride in _rows_of(target))
            kernel[(kv_heads, _blocks_of(keys, blocks.keys), splits if is_shared else 1)](
                *shared, delta, *targets, *strides, *strides_of_targets, **_constants(x, blocks), SHARED=is_shared
            )
        return grad_query, grad_key, grad_value


def _tensors(x: Operands) -> tuple[torch.Tensor, ...]:
    return x.query, x.key, x.value, x.prefix_key, x.prefix_value, x.table().numbers


def _rows_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the strides of heads and tokens; features are contiguous."""
    return tensor.stride(1), tensor.stride(2)


def _strides(x: Operands, out: torch.Tensor) -> tuple[int, ...]:
    tensors = (x.query, x.key, x.value, x.prefix_key, x.prefix_value, out)
    return tuple(stride for tensor in tensors for stride in _rows_of(tensor))


def _constants(x: Operands, blocks: Blocks) -> dict[str, Any]:
    return {
        "tokens": x.query.shape[2],
        "scale": x.scoring.scale,
        "limit": x.limit.tokens if x.limit is not None else 0,
        "softcap": x.scoring.softcap,
        "GROUPS": x.query.shape[1] // x.key.shape[1],
        "KEY_DIM": x.query.shape[-1],
        "VALUE_DIM": x.value.shape[-1],
        "KEY_WIDTH": _padded(x.query.shape[-1]),
        "VALUE_WIDTH": _padded(x.value.shape[-1]),
        "LIMITED": x.limit is not None,
        "UNITS": x.units,
        "CHUNKED": x.limit is not None and x.limit.by_chunks,
        "CAPPED": x.scoring.softcap > 0,
        # Tensor cores round float32 to 10 bits unless told otherwise.
        "PRECISION": "ieee" if x.query.dtype is torch.float32 else "tf32",
        "QUERIES": blocks.queries,
        "KEYS": blocks.keys,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


def _padded(size: int) -> int:
    """Round up to a power of two, at least 16, as sides of blocks must be."""
    return max(16, 1 << (size - 1).bit_length())


def _blocks_of(count: int, size: int) -> int:
    return -(-count // size)


# Tiles are as large as registers and shared memory of a Hopper GPU allow with few or no spills. They divide the blocks
# of `ChunkTable` (128 queries, 64 keys) evenly.
def _forward_blocks(x: Operands) -> Blocks:
    tokens, width = x.query.shape[2], _width(x)
    if x.query.dtype is torch.float32:
        return Blocks(32, 32, 8, 2)
    if tokens <= 64 or width > 128:
        return Blocks(_few(tokens), 64, 4, 2)
    return Blocks(128, 64, 8 if width > 64 else 4, 3)


def _query_blocks(x: Operands) -> Blocks:
    if x.query.dtype is torch.float32:
        return Blocks(32, 32, 8, 1)
    tokens = x.query.shape[2]
    return Blocks(_few(tokens), 32, 8, 1) if _width(x) > 128 else Blocks(_few(tokens), 64, 4, 2)


def _key_blocks(x: Operands, keys: int, are_shared: bool = False) -> Blocks:
    """Return tiles of a kernel that owns keys: wider ones where they leave enough programs, or several share a tile."""
    blocks, wide = _query_blocks(x), 2 * LISTED_KEYS
    many = are_shared or x.key.shape[1] * _blocks_of(keys, wide) >= PROGRAMS
    return Blocks(blocks.queries, wide, 8, 2) if many and blocks.queries == 64 and _width(x) == 128 else blocks


def _width(x: Operands) -> int:
    return _padded(max(x.query.shape[-1], x.value.shape[-1]))


def _few(tokens: int) -> int:
    """Return a block size of at most 64 queries, and little more than there are."""
    return max(16, min(64, _padded(tokens)))


def _splits(x: Operands, blocks: Blocks) -> int:
    """Return the number of programs among which the stack is divided."""
    programs = x.query.shape[1] * _blocks_of(x.query.shape[2], blocks.queries)
    return max(1, min(PROGRAMS // programs, x.prefix_key.shape[2] // LEAST_KEYS))


def _is_shared(tokens: int) -> bool:
    """Return whether programs may share keys: in a large chunk, unless sums have to be made in the same order."""
    from dta_compile.runtime.attention.triton_kernels import LONG_REACH

    return tokens >= LONG_REACH.value and not torch.are_deterministic_algorithms_enabled()
