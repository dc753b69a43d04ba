"""`tracing`, the context in which passes call `make_fx` with symbolic sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx

from dta_compile.attributes import attribute_set
from dta_compile.torch_compat.tensors import FakeTensorMode, enable_python_dispatcher
from dta_compile.torch_compat.tracing import proxy_tensor, use_lazy_graph_modules


@contextlib.contextmanager
def tracing(mode: FakeTensorMode | None) -> Iterator[None]:
    """Set up `make_fx` over fake tensors of a mode; new nodes take the stack trace of the node that is interpreted.

    Two services of torch are switched off, which take a fifth of the time and have no use here: the FakeTensor cache
    (with symbolic sizes a lookup takes longer than computing the result, and layers that are copies are not traced
    again) and the second description of each value, `meta["tensor_meta"]`. So is autocast's cache of casts of weights,
    which would hand traced casts to later calls.
    """
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            stack.enter_context(attribute_set(mode, "cache_enabled", False))
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(fx.traceback.preserve_node_meta())
        stack.enter_context(use_lazy_graph_modules(True))  # most traces are rewritten before they run, or never run
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        stack.enter_context(attribute_set(proxy_tensor, "_extract_tensor_metadata", lambda value: None))
        yield
