"""Memory budget: bytes of activations that may be kept from forward to backward, and reuse of freed pages."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib

import torch

from dta_compile.plan.cost import BUDGET_SHARE

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def default_budget(device: torch.device, taken: int = 0) -> int:
    """Return half of the device's free memory in bytes, after subtracting `taken`, which the call needs in any case."""
    return max(int((free_bytes(device) - taken) * BUDGET_SHARE), 0)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated now: on the GPU, or of system memory within the container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(_system_bytes(), _container_bytes())


@functools.cache
def keep_freed_pages() -> None:
    """Make malloc keep freed activations for the next step, like torch's caching allocator on GPUs.

    By default glibc returns large blocks to the system at once, and every step maps and zeroes their pages again: up to
    5% of its time. Once per process, glibc only; `DTA_KEEP_PAGES=0` leaves the allocator as it is.
    """
    if os.environ.get("DTA_KEEP_PAGES") == "0":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    # Before glibc 2.35 the maximum is half of a heap, 32 MiB. If setting the mmap threshold fails, the trim threshold
    # is left alone, too, because setting it would stop glibc from adapting the mmap threshold.
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
    """Return limit minus use of the control group (version 2), if there is one; inactive page cache counts as free."""
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
