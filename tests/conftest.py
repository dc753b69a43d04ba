"""One thread for the tiny tensors of the tests (on shared cores, waiting for other threads outlasts the work), and a
folder of their own for calibrations."""

import os
import tempfile

import torch

torch.set_num_threads(1)
os.environ["DTA_CACHE_DIR"] = tempfile.mkdtemp(prefix="dta_compile_tests_")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined: they then run on a CPU
