"""Whether Triton's kernels run here: on a GPU, or on a CPU by Triton's interpreter, to test them."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether kernels take tensors like this one, by its device and its dtype."""
    is_there = tensor.device.type == "cuda" or (tensor.device.type == "cpu" and is_interpreted())
    return is_there and tensor.dtype in KERNEL_TYPES and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, to test them."""
    return os.environ.get("TRITON_INTERPRET") == "1"
