"""Methods of multimodal models that captured graphs call before the tree, with their constant arguments.

`capture.media.encoder_calls` puts the calls into graphs, by handles.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from dta_compile.integrations.fully_shard import reading_gathered

TENSOR = "<tensor>"  # stands for a tensor among the constant arguments of a method

Call = TypeVar("Call", bound="MethodCall")

_calls: dict[int, MethodCall] = {}
_handles = itertools.count()


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments of a method, with `TENSOR` in the place of tensors; a list of tensors is a tuple of `TENSOR`."""

    positional: tuple[Any, ...]
    keyword: tuple[tuple[str, Any], ...]

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Put tensors in their places."""
        left = iter(tensors)
        positional = [_filled(value, left) for value in self.positional]
        return positional, {name: _filled(value, left) for name, value in self.keyword}


def _filled(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, tensors) for item in value)
    return next(tensors) if isinstance(value, str) and value == TENSOR else value


def _tensors_in(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_tensors_in, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_tensors_in, value))
    return int(isinstance(value, str) and value == TENSOR)


class MethodCall:
    """A call of a model's method in captured graphs, with its constant arguments.

    Attributes:
        handle: the number that stands for it in the graphs of this process.
    """

    def __init__(self, module: nn.Module, method: Callable[..., Any], arguments: Arguments) -> None:
        self.handle = next(_handles)
        self.method, self.arguments = method, arguments
        self.of = weakref.ref(module)
        _calls[self.handle] = self
        weakref.finalize(module, _calls.pop, self.handle, None)

    @property
    def module(self) -> nn.Module:
        """The model that the method belongs to."""
        module = self.of()
        assert module is not None
        return module

    @property
    def name(self) -> str:
        """The method's name, with its class."""
        return f"{type(self.module).__name__}.{self.method.__name__}"

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the method with its tensor arguments, in order."""
        positional, keyword = self.arguments.filled(tensors)
        with reading_gathered():
            return self.method(self.module, *positional, **keyword)

    def names(self) -> list[str]:
        """Return the method's parameter of each tensor; empty for those that it takes by `**kwargs`."""
        signature = inspect.signature(self.method)
        bound = signature.bind(None, *self.arguments.positional, **dict(self.arguments.keyword)).arguments
        names = []
        for name, value in bound.items():
            is_own = signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD
            names += [name if is_own else ""] * _tensors_in(value)
        return names


class Positions(MethodCall):
    """A method of a model that computes positions of tokens in several axes (M-RoPE) from ids and grids of images."""

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Compute positions `[axes, B, S]`; the first of the tensors are ids `[B, S]`."""
        with torch.no_grad():
            positions: torch.Tensor = self.run(tensors)
        assert positions.shape[1:] == tensors[0].shape, self.name  # what the trace is told
        return positions


def register(kind: type[MethodCall], module: nn.Module, method: Callable[..., Any], arguments: Arguments) -> int:
    """Return the handle of a call of a model's method with constant arguments, always the same one."""
    for call in _calls.values():
        if call.of() is module and (type(call), call.method, call.arguments) == (kind, method, arguments):
            return call.handle
    return kind(module, method, arguments).handle


def call_of(kind: type[Call], handle: int) -> Call:
    """Return the call, of a kind, that a handle of this process stands for."""
    call = _calls[handle]
    assert isinstance(call, kind)
    return call
