"""Pieces of a chunk's graphs: functions of their own, which run as generated code where they have any."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from dta_compile.executable.code import CppSource, Source
from dta_compile.executable.layers import AttentionLayer, MixerLayer
from dta_compile.ops.tree_attention import kernel


@dataclasses.dataclass(frozen=True)
class TreeAttention:
    """Attention of a chunk in one call; any two are the same."""

    @property
    def source(self) -> CppSource:
        """What is compiled."""
        return _source()

    @staticmethod
    def takes(layer: MixerLayer, device: str) -> bool:
        """Whether a layer on this type of device can be computed by it."""
        return (
            isinstance(layer, AttentionLayer)
            and device == "cpu"
            and layer.dtype in kernel.DTYPES
            and layer.key_dim == layer.states[1].shape[3]
            and not layer.softcap
            and kernel.can_be_built()
        )


@functools.cache
def _source() -> CppSource:
    return CppSource(kernel.source())


Run = Callable[[list[Any]], Sequence[torch.Tensor]]


class Code(NamedTuple):
    """Generated code, ready to be run.

    Attributes:
        run: from a list of sizes and tensors, which it empties, to new tensors.
        serves: whether it may be run for these sizes.
        strides: of its tensors, for these sizes.
    """

    run: Run
    serves: Callable[..., bool]
    strides: Callable[..., tuple[tuple[int, ...], ...]]


AnyCode = Code | ctypes.CDLL


class Piece:
    """A function of sizes, then tensors, to a tuple of new tensors.

    It runs as the code that is `running` for it. Generated code is made for certain strides and for sizes of two or
    more (1 is special in all of torch, and 0 leaves nothing to run); inputs that lie in memory otherwise are copied,
    other sizes run the body's operators.

    Attributes:
        source: the operators.
    """

    def __init__(self, name: str, source: Source) -> None:
        self.__name__ = name  # in printed graphs
        self.source, self.sizes = source, source.sizes
        self.latest: tuple[Code, tuple[int, ...], list[tuple[int, ...]] | None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what was compiled."""
        return Piece, (self.__name__, self.source)

    @functools.cached_property
    def body(self) -> Callable[..., Sequence[torch.Tensor]]:
        """The operators, one by one."""
        return self.source.function()

    def __call__(self, *arguments: Any) -> Sequence[torch.Tensor]:
        sizes, tensors = arguments[: self.sizes], arguments[self.sizes :]
        code, latest = _running.codes.get(self), self.latest
        found = [tensor.stride() for tensor in tensors]
        if latest is not None and latest[0] is code and latest[1] == sizes and latest[2] == found:
            return latest[0].run(list(arguments))
        if not isinstance(code, Code) or (strides := self._strides(code, sizes)) is None:
            return self.body(*arguments)
        alike = [_laid_out(tensor, wanted) for tensor, wanted in zip(tensors, strides, strict=True)]
        if all(map(operator.is_, alike, tensors)):
            self.latest = code, sizes, found  # strides of single entries may differ, which is nothing
        return code.run([*sizes, *alike])

    def _strides(self, code: Code, sizes: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        """Of the tensors that the code takes; None: it does not serve these sizes. All layers of a chunk ask alike."""
        latest = self.latest  # in one go: other threads may run the piece
        if latest is None or latest[0] is not code or latest[1] != sizes:
            found = list(code.strides(*sizes)) if code.serves(*sizes) else None
            self.latest = latest = code, sizes, found
        return latest[2]


Codes = Mapping[Piece | TreeAttention, AnyCode]  # what there is; the others run as operators of torch
NO_CODES: Codes = MappingProxyType({})


class _Running(threading.local):
    """What the pieces that this thread calls run as: two calls at one time may have begun with other code."""

    codes: Codes = NO_CODES


_running = _Running()


@contextlib.contextmanager
def running(codes: Codes) -> Iterator[None]:
    """Run pieces as this code."""
    before, _running.codes = _running.codes, codes
    try:
        yield
    finally:
        _running.codes = before


def running_library(functions: TreeAttention) -> ctypes.CDLL | None:
    """These functions compiled, if what this thread runs has them."""
    found = _running.codes.get(functions)
    return found if isinstance(found, ctypes.CDLL) else None


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides: itself, unless it lies in memory in another way than its traced value."""
    found = tensor.stride()
    if found == strides:
        return tensor
    if all(size == 1 or a == b for size, a, b in zip(tensor.shape, found, strides, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
