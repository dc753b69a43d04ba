"""The numbers that the symbols of a trace stand for in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from dta_compile.executable.executable import NumberSpec
from dta_compile.executable.layouts import Frame

__all__ = ["Sizes"]


class Sizes:
    """Numbers for the size symbols of one call."""

    def __init__(self, symbols: Mapping[sympy.Symbol, tuple[int, int | None]]) -> None:
        """`symbols`: where inputs give each, see `Executable.symbols`."""
        self._sources = symbols

    def evaluate(self, expr: sympy.Expr | None, args: Sequence[object]) -> int:
        """The value of a size expression for the call's inputs; None counts as 1."""
        return 1 if expr is None else int(self.value(expr, args))

    def number(self, spec: NumberSpec, args: Sequence[object]) -> int | float | bool:
        """The number for the call's inputs."""
        return bool(self._substituted(spec.expr, args)) if spec.is_bool else self.value(spec.expr, args)

    def shape(self, shape: Sequence[sympy.Expr], args: Sequence[object]) -> list[int]:
        """The sizes for the call's inputs."""
        return [int(self.value(size, args)) for size in shape]

    def value(self, expr: sympy.Expr, args: Sequence[object]) -> int | float:
        """The value of an expression of sizes and numbers, a `float` if it is no integer."""
        found = self._substituted(expr, args)
        return int(found) if found.is_integer else float(found)

    def values(self, args: Sequence[object]) -> dict[sympy.Symbol, int]:
        """The value of every symbol that an input gives."""
        return {symbol: self._value(symbol, args) for symbol in self._sources}

    def _substituted(self, expr: sympy.Expr, args: Sequence[object]) -> sympy.Expr:
        return expr.subs({symbol: self._value(symbol, args) for symbol in expr.free_symbols})

    def _value(self, symbol: Any, args: Sequence[Any]) -> int:
        index, dim = self._sources[symbol]
        return args[index] if dim is None else int(args[index].shape[dim])

    def window(self, frame: Frame, args: Sequence[object]) -> tuple[int, int]:
        """`(start, length)` of a frame."""
        return self.evaluate(frame.start, args), self.evaluate(frame.length, args)
