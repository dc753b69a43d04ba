"""Tensors that stand for outputs of a graph while the compiled function builds its return value from them."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from dta_compile.errors import RefusalError
from dta_compile.executable.executable import TensorSpec


class StandIn(torch.Tensor):
    """A tensor without values: any operator on it raises."""

    origin: str

    @staticmethod
    def __new__(
        cls: type[StandIn], shape: Sequence[int], dtype: torch.dtype, device: torch.device, where: str
    ) -> StandIn:
        """`where` is the user's line that the value comes from."""
        follows = dtype.is_floating_point or dtype.is_complex
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device, requires_grad=follows)
        made.origin = where
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn(shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise used_as_a_whole(func, next((arg.origin for arg in args if isinstance(arg, cls)), ""))


def used_as_a_whole(user: object, where: str) -> RefusalError:
    """The error for code that needs an output of a streaming step for the whole batch."""
    return RefusalError(
        "a value of a streaming step is used outside of loss_fn: it never exists for the whole batch",
        where=where,
        expected="one graph from the inputs to the return value",
        got=f"{user} on an output of the graph",
        hint="remove the graph break after the model (torch.compile(..., fullgraph=True) points at it), and move what"
        " follows into loss_fn",
    )


def tensors_of(returned: Any) -> list[torch.Tensor]:
    """The tensors of a return value, in order: in tuples, lists, mappings (so in ModelOutput) and dataclasses."""
    return list(_tensors_of(returned))


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, field.name) for field in dataclasses.fields(value))
    else:
        return
    for part in parts:
        yield from _tensors_of(part)


class StandIns:
    """The stand-ins of one call, known by their positions among the graph's outputs, and kept alive by others only."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[StandIn]] = {}

    def make(self, position: int, value: TensorSpec, shape: Sequence[int], where: str) -> StandIn:
        """The one for an output like this."""
        made = StandIn(shape, value.dtype, value.device, where)
        self._known[position] = weakref.ref(made)
        return made

    def position(self, tensor: torch.Tensor) -> int | None:
        """Which output a tensor stands for."""
        return next((i for i, known in self._known.items() if known() is tensor), None)

    def alive(self, expected: Collection[object] = ()) -> set[int]:
        """Positions of those that somebody still refers to, where it is `expected` or not."""
        found = {i for i, known in self._known.items() if known() is not None}
        if not found.issubset(expected):
            gc.collect()  # what refers to it may be a cycle that nobody refers to; slow, so only if in doubt
            found = {i for i in found if self._known[i]() is not None}
        return found

    def where(self, position: int) -> str:
        """The user's line of one that is alive."""
        made = self._known[position]()
        return "" if made is None else made.origin
