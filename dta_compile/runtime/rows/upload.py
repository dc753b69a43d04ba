"""Upload small arrays of the planner to the device without synchronisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Copy an array to the device, from pinned memory: a copy from pageable memory would synchronise with the GPU."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # Only copies from pinned memory are asynchronous; accelerators other than CUDA may not support it.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
