"""Operators of our own, which passes and runtime speak of: loaded together, so before whatever names one."""

from dta_compile.ops import (
    add_product,
    attention,
    autograd_function,
    experts,
    library,
    linear_log_prob,
    linear_log_prob_blocks,
    mixer,
)

__all__ = [
    "add_product",
    "attention",
    "autograd_function",
    "experts",
    "library",
    "linear_log_prob",
    "linear_log_prob_blocks",
    "mixer",
]
