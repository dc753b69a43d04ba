"""Operators of our own, which passes and runtime speak of: loaded together, so before whatever names one."""

from dta_compile.ops import (
    add_product,
    attention,
    autograd_function,
    collectives,
    experts,
    library,
    lm_head,
    mixer,
)

__all__ = [
    "add_product",
    "attention",
    "autograd_function",
    "collectives",
    "experts",
    "library",
    "lm_head",
    "mixer",
]
