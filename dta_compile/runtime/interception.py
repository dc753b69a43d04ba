"""Replace what engines of this thread do when they are called.

`explain` and `streaming_step` call the compiled function within `intercept`, so that its engines hand their inputs to a
handler.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from dta_compile.executable.executable import Executable
from dta_compile.runtime.calls.call import Call
from dta_compile.runtime.calls.planned_call import PlannedCall


class Intercepted(Protocol):
    """Part of an engine that handlers use."""

    executable: Executable

    def begin(self, args: Sequence[Any]) -> Call:
        """Run the prologue of a call."""

    def planned(self, args: Sequence[Any], mode: str) -> PlannedCall:
        """Run the prologue of a call and plan it; run the self-check where it is due."""

    def check_padding_of(self, call: PlannedCall) -> None:
        """Check once that padding changes nothing, by scoring a call that is streamed."""


# Returns the outputs that the engine returns, or None to let the engine run as usual.
Handler = Callable[[Intercepted, Sequence[Any]], tuple[Any, ...] | None]

_active = threading.local()


@contextlib.contextmanager
def intercept(handler: Handler) -> Iterator[None]:
    """Let engines of this thread call `handler(engine, inputs)` first, until it has returned outputs."""
    _active.handler = handler
    try:
        yield
    finally:
        _active.handler = None


def is_active() -> bool:
    """Return whether a handler is set for engines of this thread."""
    return getattr(_active, "handler", None) is not None


def handle(engine: Intercepted, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the handler's outputs for an engine's call; None if the engine is to run."""
    handler = getattr(_active, "handler", None)
    if handler is None:
        return None
    _active.handler = None  # engines that the handler itself calls are not intercepted
    outputs = handler(engine, args)
    if outputs is None:
        _active.handler = handler
    return outputs
