"""Kernel that only a working interpreter runs: it loops up to a loaded number."""

import triton
import triton.language as tl


@triton.jit
def count_kernel(count, counted):
    total = 0
    for _ in range(tl.load(count)):
        total += 1
    tl.store(counted, total)
