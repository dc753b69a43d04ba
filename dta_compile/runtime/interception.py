"""What an engine does in place of its work while somebody asks it to: explaining a call, or streaming it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from dta_compile.executable.executable import Executable
from dta_compile.runtime.calls.call import Call
from dta_compile.runtime.calls.planned_call import PlannedCall


class Intercepted(Protocol):
    """An engine, as far as its call may be replaced."""

    executable: Executable

    def begin(self, args: Sequence[Any]) -> Call:
        """A call with its prologue run."""

    def planned(self, args: Sequence[Any], mode: str) -> PlannedCall:
        """A call with its prologue run and its plan, in an executable that was checked."""


# Returns what the engine is to return instead of the call's outputs, or None: nothing, the engine runs as always.
Handler = Callable[[Intercepted, Sequence[Any]], tuple[Any, ...] | None]

_active = threading.local()


@contextlib.contextmanager
def intercept(handler: Handler) -> Iterator[None]:
    """Within the block, engines of this thread ask `handler(engine, inputs)` first, until it has returned outputs."""
    _active.handler = handler
    try:
        yield
    finally:
        _active.handler = None


def is_active() -> bool:
    """Whether somebody asks engines of this thread for something else than their outputs."""
    return getattr(_active, "handler", None) is not None


def handle(engine: Intercepted, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """Called by every engine at its start."""
    handler = getattr(_active, "handler", None)
    if handler is None:
        return None
    _active.handler = None  # what the handler itself calls is not meant
    outputs = handler(engine, args)
    if outputs is None:
        _active.handler = handler
    return outputs
