"""Bytes that torch allocates on the CPU, counted for all threads.

The profiler counts those of threads that it watches; gloo's threads free what others allocate.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils import cpp_extension


@functools.cache
def counting() -> ctypes.CDLL:
    """Build the counting allocator and install it for all later allocations of this process."""
    libraries = str(Path(torch.__file__).parent / "lib")
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/allocations.so"
        command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O2", "-shared", "-fPIC", "-o", file]
        command += [f"-I{path}" for path in cpp_extension.include_paths()]
        source = str(Path(__file__).with_suffix(".cpp"))
        subprocess.run([*command, source, f"-L{libraries}", "-lc10"], check=True)
        library = ctypes.CDLL(file)
    library.live_bytes.restype = library.peak_bytes.restype = ctypes.c_long
    library.count_allocations()
    return library


def allocated_at_the_peak(run: Callable[[], object]) -> int:
    """Return the most bytes that live at one time during a run, beyond those at its beginning."""
    library = counting()
    library.begin()
    before = library.live_bytes()
    run()
    return int(library.peak_bytes() - before)
