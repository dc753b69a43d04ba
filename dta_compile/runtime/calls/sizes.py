"""Evaluate size expressions (sympy over SymInt symbols) for the inputs of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from dta_compile.executable.executable import NumberSpec
from dta_compile.executable.layouts import Frame


class Sizes:
    """Evaluator of size expressions, given which inputs define the symbols."""

    def __init__(self, symbols: Mapping[sympy.Symbol, tuple[int, int | None]]) -> None:
        """`symbols`: by symbol, the input (and dimension) that defines it, see `Executable.symbols`."""
        self._sources = symbols

    def evaluate(self, expr: sympy.Expr | None, args: Sequence[object]) -> int:
        """Return the integer value of a size expression; 1 for None."""
        return 1 if expr is None else int(self.value(expr, args))

    def number(self, spec: NumberSpec, args: Sequence[object]) -> int | float | bool:
        """Return the value of a number output."""
        return bool(self._substituted(spec.expr, args)) if spec.is_bool else self.value(spec.expr, args)

    def shape(self, shape: Sequence[sympy.Expr], args: Sequence[object]) -> list[int]:
        """Return the integer sizes of a symbolic shape."""
        return [int(self.value(size, args)) for size in shape]

    def value(self, expr: sympy.Expr, args: Sequence[object]) -> int | float:
        """Return the value of an expression: an `int` if it is integral, else a `float`."""
        number = self._substituted(expr, args)
        return int(number) if number.is_integer else float(number)

    def values(self, args: Sequence[object]) -> dict[sympy.Symbol, int]:
        """Return the values of all symbols that inputs define."""
        return {symbol: self._value(symbol, args) for symbol in self._sources}

    def _substituted(self, expr: sympy.Expr, args: Sequence[object]) -> sympy.Expr:
        return expr.subs({symbol: self._value(symbol, args) for symbol in expr.free_symbols})

    def _value(self, symbol: Any, args: Sequence[Any]) -> int:
        index, dim = self._sources[symbol]
        return args[index] if dim is None else int(args[index].shape[dim])

    def window(self, frame: Frame, args: Sequence[object]) -> tuple[int, int]:
        """Return `(start, length)` of a frame."""
        return self.evaluate(frame.start, args), self.evaluate(frame.length, args)
