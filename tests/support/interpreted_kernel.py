"""A kernel that only an interpreter that works can run: it loops up to a number that it has loaded."""

import triton
import triton.language as tl


@triton.jit
def count_kernel(count, counted):
    total = 0
    for _ in range(tl.load(count)):
        total += 1
    tl.store(counted, total)
