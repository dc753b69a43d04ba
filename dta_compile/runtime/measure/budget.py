"""How many bytes of activations may be kept from forward to backward, and what becomes of freed ones."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib

import torch

from dta_compile.plan.cost import BUDGET_SHARE

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def default_budget(device: torch.device, taken: int = 0) -> int:
    """Half of the device's free memory, in bytes, but for those that the call will have taken in any case."""
    return max(int((free_bytes(device) - taken) * BUDGET_SHARE), 0)


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now: on the GPU, or of system memory within the container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(_system_bytes(), _container_bytes())


@functools.cache
def keep_freed_pages() -> None:
    """Let freed activations stay with the process, for the next step, as torch's allocator for GPUs does.

    By default glibc returns large blocks to the system at once, and every step pays again for mapping and zeroing their
    pages: up to 5% of its time. Once per process, glibc only; `DTA_KEEP_PAGES=0` leaves the allocator as it is.
    """
    if os.environ.get("DTA_KEEP_PAGES") == "0":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    # Before glibc 2.35 the most is half of a heap, 32 MiB. Without a threshold of ours glibc's own must go on adapting,
    # which setting the other one would end.
    if mallopt(_M_MMAP_THRESHOLD, 2**30) or mallopt(_M_MMAP_THRESHOLD, 2**25):
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _system_bytes() -> int:
    try:
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _container_bytes() -> int:
    """Limit minus use of the control group (version 2), where there is one; files kept in memory are not in use."""
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return 2**63
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(facts.get("inactive_file", 0))
        return int(limit) - used
    except (OSError, ValueError):
        return 2**63
