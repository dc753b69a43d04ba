"""Source: what code is generated from, as text and numbers that another process reads."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.passes.symbols import expression


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
        names: what the text uses besides: names of modules, and other things by themselves.
        sizes: how many it takes.
        inputs: the tensors that it takes.
        default_dtype: of torch, which `mask * 0.1` has.
    """

    text: str
    names: tuple[tuple[str, Any], ...]
    sizes: int
    inputs: tuple[Input, ...]
    default_dtype: torch.dtype = dataclasses.field(default_factory=torch.get_default_dtype)

    @classmethod
    def of(cls, body: fx.Graph, symbols: Sequence[sympy.Symbol], values: Sequence[torch.Tensor]) -> Source:
        """Of a graph whose placeholders are sizes, named by `symbols` in the shapes of `values`, then tensors."""
        code = body.python_code("self")
        used = set(re.findall(r"\w+", code.src))
        names = ((name, value) for name, value in sorted(code.globals.items()) if name in used)
        renamed = dict(zip(symbols, size_symbols(len(symbols)), strict=True))
        return cls(
            code.src,
            tuple((name, _Module(value.__name__) if _is_module(value) else value) for name, value in names),
            len(symbols),
            tuple(_input(value, renamed) for value in values),
        )

    @property
    def devices(self) -> set[str]:
        """Types of the devices that its tensors are on."""
        return {value.device.type for value in self.inputs}

    def function(self) -> Callable[..., Sequence[torch.Tensor]]:
        """What the text says, as a function of sizes and tensors."""
        names: dict[str, Any] = {
            name: importlib.import_module(x.name) if isinstance(x, _Module) else x for name, x in self.names
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
class _Module:
    name: str


def size_symbols(count: int) -> list[sympy.Symbol]:
    """What stands for the sizes in shapes and strides of a `Source`."""
    return [sympy.Symbol(f"size_{i}", integer=True, positive=True) for i in range(count)]


def _is_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType)


def _input(value: torch.Tensor, renamed: dict[sympy.Symbol, sympy.Symbol]) -> Input:
    shape, strides = (
        tuple(size if isinstance(size, int) else expression(size).subs(renamed) for size in sizes)
        for sizes in (value.shape, value.stride())
    )
    return Input(value.dtype, value.device, shape, strides)
