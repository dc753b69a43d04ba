"""Name ops for `torch.profiler` and write plans to structured traces; nearly free when both are off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

from dta_compile.plan import Op
from dta_compile.plan.timeline import op_name
from dta_compile.torch_compat.tracing import trace_structured

_NOTHING = contextlib.nullcontext()


def named(op: Op) -> contextlib.AbstractContextManager[Any]:
    """Return a context that names an op for an active profiler."""
    # Set by every profiler of torch, for all threads. `record_function` costs microseconds even without a profiler.
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return torch.profiler.record_function(f"dta {op_name(op)}")


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Write a text to `TORCH_TRACE`, shown by `tlparse`; `text` is called only if tracing is on."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
