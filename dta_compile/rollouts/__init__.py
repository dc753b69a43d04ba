"""Which rows come together: `RolloutTree` streams rollouts, `PrefixSampler` orders an epoch. Never imports torch."""

from __future__ import annotations

from dta_compile.rollouts.pool import Rollout, RolloutBatch, RolloutTreeStats
from dta_compile.rollouts.sampler import PrefixSampler
from dta_compile.rollouts.tree import RolloutTree

__all__ = ["PrefixSampler", "Rollout", "RolloutBatch", "RolloutTree", "RolloutTreeStats"]
