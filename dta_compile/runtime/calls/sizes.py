"""The numbers that the symbols of a trace stand for in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from dta_compile.passes.program import Frame, Program
from dta_compile.passes.symbols import symbolic

__all__ = ["Sizes"]


class Sizes:
    """Numbers for the size symbols of one call."""

    def __init__(self, program: Program) -> None:
        self._sources = program.input_symbols

    def evaluate(self, expr: sympy.Expr | None, args: Sequence[object]) -> int:
        """The value of a size expression for the call's inputs; None counts as 1."""
        return 1 if expr is None else int(self.value(expr, args))

    def number(self, value: Any, args: Sequence[object]) -> Any:
        """A symbolic number as the number that it is for the call's inputs; anything else as it is."""
        if (expr := symbolic(value)) is None:
            return value
        return bool(self._substituted(expr, args)) if isinstance(value, torch.SymBool) else self.value(expr, args)

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
