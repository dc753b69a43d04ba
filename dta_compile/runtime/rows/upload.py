"""Small arrays from the planner to the device, without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """The array on the device. A copy from pageable memory would wait for all that the GPU still has to do."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # Only what is pinned is copied without waiting; other accelerators than CUDA's may not know pinned memory.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
