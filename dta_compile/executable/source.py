"""Source: what code is generated from, as text and numbers that another process reads."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch


@dataclasses.dataclass(frozen=True)
class Input:
    """A tensor that code is generated for; sizes and strides are integers or expressions of `size_symbols`."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | sympy.Expr, ...]
    strides: tuple[int | sympy.Expr, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """A function of sizes, then tensors, to a tuple of new tensors; equal ones are the same function.

    Attributes:
        text: of a function `forward(self, size_0, ..., input_0, ...)`.
        names: what the text uses besides: modules by their names, and other things by themselves.
        sizes: how many it takes.
        inputs: the tensors that it takes.
        default_dtype: of torch, which `mask * 0.1` has.
    """

    text: str
    names: tuple[tuple[str, Any], ...]
    sizes: int
    inputs: tuple[Input, ...]
    default_dtype: torch.dtype = dataclasses.field(default_factory=torch.get_default_dtype)

    @property
    def devices(self) -> set[str]:
        """Types of the devices that its tensors are on."""
        return {value.device.type for value in self.inputs}

    def function(self) -> Callable[..., Sequence[torch.Tensor]]:
        """What the text says, as a function of sizes and tensors."""
        names: dict[str, Any] = {
            name: importlib.import_module(x.name) if isinstance(x, Module) else x for name, x in self.names
        }
        exec(self.text, names)
        run: Callable[..., Sequence[torch.Tensor]] = names["forward"]
        return functools.partial(run, None)


@dataclasses.dataclass(frozen=True)
class CppSource:
    """Functions in C++ that are compiled as they stand."""

    text: str

    @property
    def devices(self) -> set[str]:
        """Types of the devices that they run on."""
        return {"cpu"}


AnySource = Source | CppSource


@dataclasses.dataclass(frozen=True)
class Module:
    """A module, by its name."""

    name: str


def size_symbols(count: int) -> list[sympy.Symbol]:
    """What stands for the sizes in shapes and strides of a `Source`."""
    return [sympy.Symbol(f"size_{i}", integer=True, positive=True) for i in range(count)]
