"""Operators of mixtures of experts over (token, expert) slots, products of groups of slots, and their kernels."""

from dta_compile.ops.experts import operators

__all__ = ["operators"]
