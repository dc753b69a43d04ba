"""Pieces: subgraphs of a chunk's graphs, extracted as functions, that run as generated code if they have any."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from dta_compile.attributes import attribute_set
from dta_compile.executable.code import CppSource, Source
from dta_compile.executable.layers import AttentionLayer, MixerLayer
from dta_compile.ops.attention import OVER_CHOSEN
from dta_compile.ops.tree_attention import kernel


@dataclasses.dataclass(frozen=True)
class TreeAttention:
    """Attention of a chunk as one compiled C++ call; all instances are equal."""

    @property
    def source(self) -> CppSource:
        """Return the C++ source."""
        return _source()

    @staticmethod
    def takes(layer: MixerLayer, device: str) -> bool:
        """Return whether it can compute a layer on this type of device."""
        return (
            isinstance(layer, AttentionLayer)
            and layer.mixer in OVER_CHOSEN  # which is by kinds of attention over all keys
            and device == "cpu"
            and layer.dtype in kernel.DTYPES
            and layer.key_dim == layer.states[1].shape[3]
            and layer.scoring.is_linear
            and kernel.can_be_built()
        )


@functools.cache
def _source() -> CppSource:
    return CppSource(kernel.source())


Run = Callable[[list[Any]], Sequence[torch.Tensor]]


class Code(NamedTuple):
    """Loaded generated code of a piece.

    Attributes:
        run: takes a list of sizes and tensors, and empties it; returns new tensors.
        serves: whether it may run for the given sizes.
        strides: the strides of its input tensors for the given sizes.
    """

    run: Run
    serves: Callable[..., bool]
    strides: Callable[..., tuple[tuple[int, ...], ...]]


AnyCode = Code | ctypes.CDLL


class Piece:
    """A function from sizes, then tensors, to a tuple of new tensors.

    It runs the code that `running` sets for it. Generated code is specialised to strides and to sizes of at least two
    (torch specialises 0 and 1): inputs with other strides are copied, for other sizes the operators of `source` run.
    """

    def __init__(self, name: str, source: Source) -> None:
        self.__name__ = name  # in printed graphs
        self.source, self.sizes = source, source.sizes
        self.latest: tuple[Code, tuple[int, ...], list[tuple[int, ...]] | None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the compiled body out."""
        return Piece, (self.__name__, self.source)

    @functools.cached_property
    def body(self) -> Callable[..., Sequence[torch.Tensor]]:
        """Compile the source to a function that runs the operators one by one."""
        return self.source.function()

    def __call__(self, *arguments: Any) -> Sequence[torch.Tensor]:
        sizes, tensors = arguments[: self.sizes], arguments[self.sizes :]
        code, latest = _running.codes.get(self), self.latest
        actual = [tensor.stride() for tensor in tensors]
        if latest is not None and latest[0] is code and latest[1] == sizes and latest[2] == actual:
            return latest[0].run(list(arguments))
        if not isinstance(code, Code) or (strides := self._strides(code, sizes)) is None:
            return self.body(*arguments)
        alike = [_laid_out(tensor, wanted) for tensor, wanted in zip(tensors, strides, strict=True)]
        if all(map(operator.is_, alike, tensors)):
            self.latest = code, sizes, actual  # strides of dimensions of size one may differ
        return code.run([*sizes, *alike])

    def _strides(self, code: Code, sizes: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        """Return the input strides of the code; None if it does not serve these sizes.

        Cached, since all layers of a chunk have the same sizes.
        """
        latest = self.latest  # read once: other threads may run the piece
        if latest is None or latest[0] is not code or latest[1] != sizes:
            strides = list(code.strides(*sizes)) if code.serves(*sizes) else None
            self.latest = latest = code, sizes, strides
        return latest[2]


Codes = Mapping[Piece | TreeAttention, AnyCode]  # pieces that are missing in it run as ATen operators
NO_CODES: Codes = MappingProxyType({})


class _Running(threading.local):
    """The code that pieces called by this thread run; concurrent calls may have started with different code."""

    codes: Codes = NO_CODES


_running = _Running()


def running(codes: Codes) -> AbstractContextManager[None]:
    """Make the pieces that this thread calls run this code."""
    return attribute_set(_running, "codes", codes)


def running_library(functions: TreeAttention) -> ctypes.CDLL | None:
    """Return the compiled library of these functions, if the code of this thread has it."""
    library = _running.codes.get(functions)
    return library if isinstance(library, ctypes.CDLL) else None


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor itself if it has these strides, except in dimensions of size one; otherwise a copy."""
    actual = tensor.stride()
    if actual == strides:
        return tensor
    if all(size == 1 or a == b for size, a, b in zip(tensor.shape, actual, strides, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
