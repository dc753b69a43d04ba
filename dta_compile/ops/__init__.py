"""Operators of our own, which passes and runtime speak of: loaded together, so before whatever names one."""

from dta_compile.ops import (
    attention,
    autograd_function,
    collectives,
    experts,
    library,
    lm_head,
    mixer,
    products,
)

__all__ = [
    "attention",
    "autograd_function",
    "collectives",
    "experts",
    "library",
    "lm_head",
    "mixer",
    "products",
]
