"""Streaming rollouts: `RolloutTree` stores them as a prefix tree and selects batches. Never imports torch."""

from __future__ import annotations

from dta_compile.rollouts.pool import Rollout, RolloutBatch, RolloutTreeStats
from dta_compile.rollouts.tree import RolloutTree

__all__ = ["Rollout", "RolloutBatch", "RolloutTree", "RolloutTreeStats"]
