"""How many bytes of activations may be kept from forward to backward."""

from __future__ import annotations

import os
import pathlib

import torch

DEFAULT_SHARE = 0.5  # of the memory that is free when the call starts


def default_budget(device: torch.device) -> int:
    """Half of the device's free memory, in bytes."""
    return int(free_bytes(device) * DEFAULT_SHARE)


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now: on the GPU, or of system memory within the container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(_system_bytes(), _container_bytes())


def _system_bytes() -> int:
    try:
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _container_bytes() -> int:
    """Limit minus use of the control group, where there is one."""
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        return int(limit) - int((group / "memory.current").read_text()) if limit != "max" else 2**63
    except (OSError, ValueError):
        return 2**63
