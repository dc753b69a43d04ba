"""Tensors without values that stand for the outputs of a graph in a streaming step.

The compiled function builds its return value from them, which tells `streaming.py` where each output goes.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from dta_compile.errors import RefusalError
from dta_compile.executable.executable import TensorSpec
from dta_compile.torch_compat.tensors import make_wrapper_subclass, no_torch_function


class StandIn(torch.Tensor):
    """Tensor without values: any operator on it raises RefusalError."""

    origin: str

    @staticmethod
    def __new__(
        cls: type[StandIn], shape: Sequence[int], dtype: torch.dtype, device: torch.device, where: str
    ) -> StandIn:
        """Return a stand-in; `where` is the user's line that computes the value."""
        requires_grad = dtype.is_floating_point or dtype.is_complex
        tensor = make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad)
        tensor.origin = where
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn(shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise used_as_a_whole(func, next((arg.origin for arg in args if isinstance(arg, cls)), ""))


def used_as_a_whole(user: object, where: str) -> RefusalError:
    """Return the error for code that needs an output of a streaming step for the whole batch."""
    return RefusalError(
        "a value of a streaming step is used outside of loss_fn: it never exists for the whole batch",
        where=where,
        expected="one graph from the inputs to the return value",
        got=f"{user} on an output of the graph",
        hint="remove the graph break after the model (torch.compile(..., fullgraph=True) points at it), and move what"
        " follows into loss_fn",
    )


def tensors_of(returned: Any) -> list[torch.Tensor]:
    """Return the tensors of a return value in order, from tuples, lists, mappings (as ModelOutput) and dataclasses."""
    if isinstance(returned, torch.Tensor):
        return [returned]
    parts: Iterable[Any] = ()
    if isinstance(returned, Mapping):
        parts = returned.values()
    elif isinstance(returned, (tuple, list)):
        parts = returned
    elif dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        parts = (getattr(returned, field.name) for field in dataclasses.fields(returned))
    return [tensor for part in parts for tensor in tensors_of(part)]


class StandIns:
    """Stand-ins of one call by output position, held by weak references."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[StandIn]] = {}

    def make(self, position: int, value: TensorSpec, shape: Sequence[int], where: str) -> StandIn:
        """Create the stand-in of an output."""
        tensor = StandIn(shape, value.dtype, value.device, where)
        self._known[position] = weakref.ref(tensor)
        return tensor

    def position(self, tensor: torch.Tensor) -> int | None:
        """Return the position of the output that a tensor stands for; None if it is no stand-in."""
        return next((i for i, known in self._known.items() if known() is tensor), None)

    def alive(self, expected: Collection[object] = ()) -> set[int]:
        """Return the positions of stand-ins that are still referenced; collects garbage if one is not `expected`."""
        positions = {i for i, known in self._known.items() if known() is not None}
        if not positions.issubset(expected):
            gc.collect()  # the reference may be from a dead cycle; collecting is slow, so only if needed
            positions = {i for i in positions if self._known[i]() is not None}
        return positions

    def where(self, position: int) -> str:
        """Return the user's line of a stand-in; "" if it is gone."""
        tensor = self._known[position]()
        return "" if tensor is None else tensor.origin
