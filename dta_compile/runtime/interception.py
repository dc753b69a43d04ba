"""What an engine does in place of its work while somebody asks it to: explaining a call, or streaming it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dta_compile.runtime.engine import Engine

# Returns what the engine is to return instead of the call's outputs, or None: nothing, the engine runs as always.
Handler = Callable[["Engine", Sequence[Any]], "tuple[Any, ...] | None"]

_active = threading.local()


@contextlib.contextmanager
def intercept(handler: Handler) -> Iterator[None]:
    """Within the block, engines of this thread ask `handler(engine, inputs)` first, until it has returned outputs."""
    _active.handler = handler
    try:
        yield
    finally:
        _active.handler = None


def handle(engine: Engine, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """Called by every engine at its start."""
    handler = getattr(_active, "handler", None)
    if handler is None:
        return None
    _active.handler = None  # what the handler itself calls is not meant
    outputs = handler(engine, args)
    if outputs is None:
        _active.handler = handler
    return outputs
