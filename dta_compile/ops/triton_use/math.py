# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201  (arguments of kernels have no types)
"""Functions of Triton kernels that Triton's interpreter does not have."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Compute tanh as `(1 - e) / (1 + e)` with `e = exp(-2 |x|)`; near zero, where that cancels, by a series."""
    size = tl.abs(x)
    exp_of_negative = tl.exp(-2.0 * size)
    large = (1.0 - exp_of_negative) / (1.0 + exp_of_negative)
    square = x * x
    small = size * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    magnitude = tl.where(size < 0.1, small, large)
    return tl.where(x < 0, -magnitude, magnitude)
