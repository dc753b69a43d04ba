"""Names of ops for `torch.profiler`, and of plans for structured traces; next to nothing where neither is on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch._logging._internal import trace_structured
from torch.autograd import profiler

from dta_compile.plan import Op
from dta_compile.plan.timeline import op_name

_NOTHING = contextlib.nullcontext()


def named(op: Op) -> contextlib.AbstractContextManager[Any]:
    """What runs inside has the op's name for a profiler, if there is one."""
    # What every profiler of torch sets, for all threads; `record_function` alone costs microseconds also without one.
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return torch.profiler.record_function(f"dta {op_name(op)}")


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """A text for `TORCH_TRACE`, which the tool `tlparse` shows; it is made only where somebody asks for it."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
