"""Operators of integers, some of which are formulas, without rounding and wrapping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import z3

from dta_compile.proofs.cases import Untranslatable, exact_int, formula
from dta_compile.proofs.terms import Apply

Proves = Callable[[z3.BoolRef], bool]

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
ALWAYS = {"lt": math.inf, "le": math.inf, "gt": -math.inf, "ge": -math.inf}  # comparisons with it hold


def arithmetic(term: Apply, args: list[Any], proves: Proves) -> Any:
    """The operator of a term of integers, as if they were unbounded; raises `Untranslatable`."""
    name, kwargs = term.name, dict(term.kwargs)
    if name in ("floor", "trunc", "ceil"):
        return _rounded(name, args[0])
    if name == "_to_copy":
        return args[0] if term.dtype.is_floating_point else _rounded("trunc", args[0])
    if name == "div" and kwargs.get("rounding_mode") is None:
        return _quotient(term, *args)
    if any(z3.is_real(arg) for arg in args if isinstance(arg, z3.ExprRef)):
        raise Untranslatable(term)
    ints: list[Any] = [arg if isinstance(arg, z3.ExprRef) or arg is None else exact_int(arg, term) for arg in args]
    if name in SIMPLE:
        return SIMPLE[name](*ints)
    if name in ("add", "sub", "rsub"):
        first, second = ints[:2] if name != "rsub" else ints[1::-1]
        factor = exact_int(kwargs.get("alpha", 1), term)
        if factor != 1 and term.dtype.is_floating_point:
            raise Untranslatable(term, "a product that may be rounded")
        second = factor * second
        return first + second if name == "add" else first - second
    if name in ("clamp", "clamp_min", "clamp_max"):
        bounds = {key: None if bound is None else exact_int(bound, term) for key, bound in kwargs.items()}
        return _clamped(name, ints, bounds)
    if name in ("floor_divide", "remainder", "fmod", "div"):
        mode = "floor" if name in ("floor_divide", "remainder") else kwargs.get("rounding_mode", "trunc")
        if not proves(formula(ints[1]) > 0):
            raise Untranslatable(term, "division by what may not be positive")
        return _divided(ints[0], ints[1], mode, name in ("remainder", "fmod"))
    raise Untranslatable(term)


def _quotient(term: Apply, dividend: Any, divisor: Any) -> Any:
    """A quotient that floating point does not round: by a power of two, and of one it is not too small for it."""
    is_power = isinstance(divisor, (int, float)) and divisor >= 1 and math.frexp(divisor)[0] == 0.5
    if not is_power or z3.is_real(dividend) or 1 / divisor < torch.finfo(term.dtype).tiny:
        raise Untranslatable(term, "a quotient that is rounded")
    return z3.ToReal(dividend) / int(divisor)


def _divided(dividend: Any, divisor: Any, mode: str, takes_rest: bool) -> Any:
    dividend, divisor = formula(dividend), formula(divisor)
    quotient, rest = dividend / divisor, dividend % divisor  # z3 rounds down
    if mode == "trunc":
        negative = (-((-dividend) / divisor), -((-dividend) % divisor))
        quotient, rest = (z3.If(dividend >= 0, a, b) for a, b in zip((quotient, rest), negative, strict=True))
    return rest if takes_rest else quotient


def compared(name: str, a: Any, b: Any) -> z3.BoolRef:
    """A comparison of two numbers, at least one of them a formula."""
    if not isinstance(a, z3.ExprRef):
        mirrored = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(name, name)
        return compared(mirrored, b, a)
    if isinstance(b, z3.ExprRef):
        return COMPARISONS[name](a, b)
    if math.isnan(b):
        return z3.BoolVal(name == "ne")
    if math.isinf(b):
        return z3.BoolVal(name == "ne" or ALWAYS.get(name) == b)
    if b == int(b):
        return COMPARISONS[name](a, int(b))
    return COMPARISONS[name](z3.ToReal(a) if z3.is_int(a) else a, z3.Q(*b.as_integer_ratio()))


def _rounded(name: str, value: Any) -> Any:
    if not z3.is_real(value):
        return value
    down, up = z3.ToInt(value), -z3.ToInt(-value)
    return {"floor": down, "ceil": up}.get(name, z3.If(value >= 0, down, up))


def _extreme(name: str, a: Any, b: Any) -> Any:
    a, b = formula(a), formula(b)
    return z3.If(a <= b, a, b) if name == "minimum" else z3.If(a >= b, a, b)


def _clamped(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    value, *bounds = args
    low = bounds[0] if bounds and name != "clamp_max" else kwargs.get("min")
    high = bounds[0] if bounds and name == "clamp_max" else bounds[1] if len(bounds) > 1 else kwargs.get("max")
    value = value if low is None else _extreme("maximum", value, low)
    return value if high is None else _extreme("minimum", value, high)


SIMPLE: dict[str, Callable[..., Any]] = {
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "abs": lambda a: z3.If(a >= 0, a, -a),
    "minimum": lambda a, b: _extreme("minimum", a, b),
    "maximum": lambda a, b: _extreme("maximum", a, b),
}
