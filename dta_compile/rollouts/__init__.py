"""The stream of rollouts: the tree that they wait in, and which of them are the next batch. Never imports torch."""

from __future__ import annotations

from dta_compile.rollouts.pool import Rollout, RolloutBatch, RolloutTreeStats
from dta_compile.rollouts.tree import RolloutTree

__all__ = ["Rollout", "RolloutBatch", "RolloutTree", "RolloutTreeStats"]
