"""Whether very long slices are computed in strips on this machine: by a trial, once per process.

Strips skip pairs that torch's causal kernel computes in vain, but their products have fewer rows, and they read masks.
Which is more differs by processor: with torch 2.13, float32 and slices of 1,500 tokens, strips gain on an AMD EPYC; on
an Intel Xeon they take 1.15 times as long with heads of 64, 1.4 times with heads of 128.
"""

from __future__ import annotations

import functools
import statistics
import time

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dta_compile.runtime.attention.cpu import FlashCPU
from dta_compile.runtime.attention.interface import Operands
from dta_compile.runtime.path.chunk_shape import ChunkShape, ChunkTable

__all__ = ["strips_pay"]

_TOKENS, _WIDTH, _MOST_HEADS = 1536, 64, 16
_TRIALS = 5  # of each way, one after the other
_LEAST_GAIN = 0.05  # of the time; below it a slice is one call, as in dense training


def strips_pay(dtype: torch.dtype) -> bool:
    """Whether strips take less time; False, untried, for two bytes a number and where torch shall be deterministic."""
    if dtype.itemsize < 4 or torch.are_deterministic_algorithms_enabled():
        return False
    return _found(dtype, torch.get_num_threads())


@functools.cache
def _found(dtype: torch.dtype, threads: int) -> bool:
    """By a trial of a fifth of a second, which no dispatch mode of the caller's sees."""
    providers = FlashCPU(lambda _: False), FlashCPU(lambda _: True)
    seconds: tuple[list[float], list[float]] = [], []
    heads = min(threads, _MOST_HEADS)
    with _disable_current_modes():
        tensor = torch.ones((1, _TOKENS, heads, _WIDTH), dtype=dtype, device="cpu").transpose(1, 2)
        none = tensor[:, :, :0]
        for provider, times in [*zip(providers, seconds, strict=True)] * _TRIALS:
            chunk = ChunkShape.run(0, _TOKENS)
            x = Operands(tensor, tensor, tensor, none, none, chunk, _no_table, 1.0, None)
            started = time.perf_counter()
            out, logsumexp = provider.forward(x)
            provider.backward(tensor, out, logsumexp, x, none, none)
            times.append(time.perf_counter() - started)
    whole, in_strips = map(statistics.median, seconds)
    return in_strips < (1 - _LEAST_GAIN) * whole


def _no_table() -> ChunkTable:
    raise AssertionError("the kernels of CPUs go by the shape of a chunk")
