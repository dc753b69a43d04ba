"""Whether Dynamo is tracing for this backend, asked by what stands in for functions of other packages.

They are loaded with these packages, long before anything is compiled. `capture.dynamo`, which knows the answer, is
loaded with the backend, and leaves the question here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo

_answer: Callable[[], bool] | None = None


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def traces_for_this_backend() -> bool:
    """Whether the graph is for this backend that Dynamo is tracing, which calls this and takes it for a constant."""
    return _answer is not None and _answer()


def answer_with(answer: Callable[[], bool]) -> None:
    """Have the question answered by a function, from now on."""
    global _answer
    _answer = answer
