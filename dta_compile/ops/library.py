"""The operator library `dta`, and its operators `stop_gradient` and `refused`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.torch_compat.tensors import TorchDispatchMode

LIBRARY = torch.library.Library("dta", "DEF")


def define(
    schema: str,
    fake: Callable[..., Any],
    run: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """Define an operator of the library and return it.

    Args:
        schema: in torch's form, `name(Tensor value) -> Tensor`.
        fake: makes the results of a trace, without values.
        run: computes the results; None: the operator stands in graphs only, or gets an implementation elsewhere.
        save, backward: its derivative, if it has one; see `torch.library.register_autograd`.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    torch.library.register_fake(f"dta::{name}", fake, lib=LIBRARY)
    if run is not None:
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    if backward is not None:
        torch.library.register_autograd(f"dta::{name}", backward, setup_context=save, lib=LIBRARY)
    return getattr(torch.ops.dta, name).default


def _refused(value: torch.Tensor, what: str, expected: str, got: str, hint: str) -> torch.Tensor:
    raise RefusalError(what, expected=expected, got=got, hint=hint)


STOP_GRADIENT = define(
    "stop_gradient(Tensor value) -> Tensor",
    lambda value: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device),
)
# A call that one of our functions refuses. A traced function cannot raise: Dynamo would break the graph there and
# continue. Instead the operator is applied to a value that all results depend on: the backend raises its error for the
# graph, and the operator itself raises if it runs (in eager mode, or under another backend).
REFUSED = define(
    "refused(Tensor value, str what, str expected, str got, str hint) -> Tensor",
    lambda value, *_: torch.empty_like(value),
    _refused,
)


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
