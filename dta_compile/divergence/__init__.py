"""Diagnose lost sharing in a batch: where near-equal sequences diverge, by which causes, and what that costs."""

from dta_compile.divergence.losses import CauseOfLoss, Losses, Place, find_losses

__all__ = ["CauseOfLoss", "Losses", "Place", "find_losses"]
