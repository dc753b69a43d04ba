"""Execution of planned schedules: the path stack, attention, the executor, and the autograd function around them."""

from dta_compile.runtime import linear_log_prob

__all__ = ["linear_log_prob"]
