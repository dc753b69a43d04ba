"""Replace functions of other packages in graphs for this backend.

The replacements are loaded with these packages, long before anything is compiled. `capture.dynamo.running` gives the
answer when it is loaded with the backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_answer: Callable[[], bool] | None = None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def traces_for_this_backend() -> bool:
    """Return whether Dynamo is tracing for this backend; Dynamo calls this while tracing and takes a constant."""
    return _answer is not None and _answer()


def in_our_graphs(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes `ours` in graphs for this backend, and `original` elsewhere.

    `ours` returns `NotImplemented` for calls that it leaves to `original`.
    """

    @functools.wraps(original, updated=())
    def replacement(*args: Any, **kwargs: Any) -> Any:
        is_traced = torch.compiler.is_compiling() and traces_for_this_backend()
        result = ours(*args, **kwargs) if is_traced else NotImplemented
        return original(*args, **kwargs) if result is NotImplemented else result

    return replacement


def answer_with(answer: Callable[[], bool]) -> None:
    """Install the function that answers `traces_for_this_backend`."""
    global _answer
    _answer = answer
