"""Whether Triton kernels run: on a GPU, or in tests on a CPU by Triton's interpreter."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Return whether Triton kernels support the device and dtype of this tensor."""
    is_there = tensor.device.type == "cuda" or (tensor.device.type == "cpu" and is_interpreted())
    return is_there and tensor.dtype in KERNEL_TYPES and has_triton()


@functools.cache
def has_triton() -> bool:
    """Return whether the package `triton` is installed."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU, as in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
