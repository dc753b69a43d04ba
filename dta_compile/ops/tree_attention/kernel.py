"""Python bindings (ctypes) of the functions in `kernel.cpp`.

Shapes are as in `runtime.attention.provider`: query `[1, Hq, c, D]`, key and value of the chunk `[1, Hkv, c, D]`, and
of the prefix `[1, Hkv, p, D]`, where p is the chunk's start; float32 or float64.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pathlib
import sys
from typing import NamedTuple

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from dta_compile.ops.attention import empty_by_tokens
from dta_compile.torch_compat.operators import LIBRARY

DTYPES = {torch.float32: ("float32", "sgemm_"), torch.float64: ("float64", "dgemm_")}  # kernel suffix and BLAS function


class Keys(NamedTuple):
    """The attention pattern of a chunk.

    Attributes:
        begins: int32 `[c]`, the first token that reads each token: itself, or `ChunkShape.begins`.
        ends, depths: int32 `[c]`, `ChunkShape.subtree_ends` and `ChunkShape.depths`.
        limit, by_chunks: as in `Limit`; with a limit of 0 tokens attend to all their ancestors.
    """

    begins: torch.Tensor
    ends: torch.Tensor
    depths: torch.Tensor
    limit: int = 0
    by_chunks: bool = False


class States(NamedTuple):
    """Keys and values of the chunk and of the prefix, or their gradients."""

    key: torch.Tensor
    value: torch.Tensor
    prefix_key: torch.Tensor
    prefix_value: torch.Tensor


@functools.cache
def can_be_built() -> bool:
    """Return whether the source file and the BLAS functions exist.

    Sizes are passed as 64-bit integers, of which a 32-bit BLAS reads the lower half: that needs a little-endian CPU.
    """
    try:
        parts = source(), *(_address(product) for _, product in DTYPES.values())
    except (AttributeError, OSError):
        return False
    return all(parts) and sys.byteorder == "little"


def source() -> str:
    """Return the C++ source text."""
    return pathlib.Path(__file__).with_name("kernel.cpp").read_text()


def forward(
    library: ctypes.CDLL, query: torch.Tensor, states: States, keys: Keys, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output `[1, Hq, c, D]`, with the heads of a token adjacent in memory, and log-sum-exp `[1, Hq, c]`.

    Args:
        library: the compiled `source`.
    """
    _, heads, tokens, _ = query.shape
    out = empty_by_tokens(query)
    logsumexp = query.new_empty((1, tokens, heads)).transpose(1, 2)
    _run(library, "forward", query, states, keys, scale, out, logsumexp)
    return out, logsumexp


def backward(
    library: ctypes.CDLL,
    grad: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    query: torch.Tensor,
    states: States,
    keys: Keys,
    scale: float,
    prefix_grads: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value; add those of the prefix to `prefix_grads`."""
    grad_query = empty_by_tokens(query)
    grad_key, grad_value = (empty_by_tokens(state).zero_() for state in states[:2])
    grads = States(grad_key, grad_value, *prefix_grads)
    grad, out = _with_rows(grad), _with_rows(out)
    _run(library, "backward", query, states, keys, scale, out, logsumexp, grad, grad_query, grads)
    return grad_query, grad_key, grad_value


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("of_head", ctypes.c_int64),
        ("of_token", ctypes.c_int64),
        ("first", ctypes.c_int64),
    )

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        return cls(tensor.data_ptr(), tensor.stride(1), tensor.stride(2), 0)


class _States(ctypes.Structure):
    _fields_ = tuple((name, _Tensor) for name in States._fields)

    @classmethod
    def of(cls, states: States) -> _States:
        return cls(*map(_Tensor.of, states))


class _Call(ctypes.Structure):
    """The struct `Call` of the source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "tokens", "width", "start", "threads")),
        ("limit", ctypes.c_int64),
        ("by_chunks", ctypes.c_int64),
        ("begins", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("depths", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("gemm", ctypes.c_void_p),
        ("query", _Tensor),
        ("states", _States),
        ("out", _Tensor),
        ("logsumexp", _Tensor),
        ("grad", _Tensor),
        ("grad_query", _Tensor),
        ("grads", _States),
    )


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied if a token's features are not contiguous or tokens overlap.

    BLAS checks the row stride even if there is only one token.
    """
    if tensor.stride(3) == 1 and tensor.stride(2) >= tensor.shape[3]:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _run(
    library: ctypes.CDLL,
    name: str,
    query: torch.Tensor,
    states: States,
    keys: Keys,
    scale: float,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad: torch.Tensor | None = None,
    grad_query: torch.Tensor | None = None,
    grads: States | None = None,
) -> None:
    _, heads, tokens, width = query.shape
    dtype, gemm = DTYPES[query.dtype]
    query, states = _with_rows(query), States(*map(_with_rows, states))
    call = _Call(
        heads,
        states.key.shape[1],
        tokens,
        width,
        states.prefix_key.shape[2],
        torch.get_num_threads(),
        keys.limit,
        keys.by_chunks,
        keys.begins.data_ptr(),
        keys.ends.data_ptr(),
        keys.depths.data_ptr(),
        scale,
        _address(gemm),
        _Tensor.of(query),
        _States.of(states),
        _Tensor.of(out),
        _Tensor.of(logsumexp),
    )
    if grad is not None and grad_query is not None and grads is not None:
        call.grad, call.grad_query, call.grads = _Tensor.of(grad), _Tensor.of(grad_query), _States.of(grads)
    run = getattr(library, f"{name}_{dtype}")
    run.argtypes, run.restype = [ctypes.POINTER(_Call)], ctypes.c_bool
    # `record_function` costs microseconds even without a profiler.
    label = f"dta::tree_attention_{name}"
    with record_function(label) if profiler._is_profiler_enabled else contextlib.nullcontext():
        done = run(call)
    if not done:
        raise MemoryError(f"attention of {tokens:,} tokens and {call.start:,} above them: no memory to work in")


@functools.cache
def _address(function: str) -> int:
    """Return the address of a function of torch's BLAS; raise `AttributeError` if there is none."""
    loaded = ctypes.CDLL(LIBRARY)  # symbols of its dependencies resolve, too
    return ctypes.cast(getattr(loaded, function), ctypes.c_void_p).value or 0
