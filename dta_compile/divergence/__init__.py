"""Where the sequences of a batch could share more than they do, why they do not, and what that costs."""

from dta_compile.divergence.losses import CauseOfLoss, Losses, Place, find_losses

__all__ = ["CauseOfLoss", "Losses", "Place", "find_losses"]
