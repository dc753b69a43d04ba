"""Tell replacements of other packages' functions whether Dynamo is tracing for this backend.

The replacements are loaded with these packages, long before anything is compiled. `capture.dynamo` installs the
answer here when it is loaded with the backend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_answer: Callable[[], bool] | None = None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def traces_for_this_backend() -> bool:
    """Return whether Dynamo is tracing for this backend; Dynamo calls this while tracing and takes a constant."""
    return _answer is not None and _answer()


def answer_with(answer: Callable[[], bool]) -> None:
    """Install the function that answers `traces_for_this_backend`."""
    global _answer
    _answer = answer
