"""Operators that draw random numbers: asked of one, and noticed while they run."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def is_random(operator: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


class DrawCapture(TorchDispatchMode):
    """Collects the results of operators that draw: tracing would drop those that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_random(func):
            self.results.append(result)
        return result
