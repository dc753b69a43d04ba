"""Figures of schedules, by themselves."""

from dta_compile.plan import PartBytes, bytes_of_halves


def peak_bytes(tree, schedule, footprint, head_starts=None):
    """Peak bytes of both halves, without the stack, gradient sums and values passed between parts."""
    return bytes_of_halves(tree, schedule, [PartBytes(footprint)], 0, head_starts)
