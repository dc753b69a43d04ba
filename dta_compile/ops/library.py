"""The operator library `dta`, and its operators `stop_gradient` and `refused`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.torch_compat.tensors import TorchDispatchMode

LIBRARY = torch.library.Library("dta", "DEF")
LIBRARY.define("stop_gradient(Tensor value) -> Tensor")
STOP_GRADIENT = torch.ops.dta.stop_gradient.default

# A call that one of our functions refuses. A traced function cannot raise: Dynamo would break the graph there and
# continue. Instead the operator is applied to a value that all results depend on: the backend raises its error for the
# graph, and the operator itself raises if it runs (in eager mode, or under another backend).
LIBRARY.define("refused(Tensor value, str what, str expected, str got, str hint) -> Tensor")
REFUSED = torch.ops.dta.refused.default


@torch.library.register_fake("dta::stop_gradient", lib=LIBRARY)
def _stop_gradient_fake(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


@torch.library.impl("dta::refused", "CompositeExplicitAutograd", lib=LIBRARY)
def _refused(value: torch.Tensor, what: str, expected: str, got: str, hint: str) -> torch.Tensor:
    raise RefusalError(what, expected=expected, got=got, hint=hint)


@torch.library.register_fake("dta::refused", lib=LIBRARY)
def _refused_fake(value: torch.Tensor, what: str, expected: str, got: str, hint: str) -> torch.Tensor:
    return torch.empty_like(value)


def refused_calls(module: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that call `REFUSED`, also inside checkpoints."""
    parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    return [node for part in parts for node in part.graph.find_nodes(op="call_function", target=REFUSED)]


def is_random(operator: Any) -> bool:
    """Return whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


class DrawCapture(TorchDispatchMode):
    """Dispatch mode that collects the results of random operators, since tracing drops operators without uses."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_random(func):
            self.results.append(result)
        return result
