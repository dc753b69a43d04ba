"""Prefix trees, schedules and plans: numpy and networkx, never torch."""

from __future__ import annotations

from dta_compile.plan.balance import balance
from dta_compile.plan.cost import CostModel, choose
from dta_compile.plan.order import leaf_order
from dta_compile.plan.plan import Plan, Stats, make_plan, plan
from dta_compile.plan.planner import build_schedule, choose_kept
from dta_compile.plan.prefix_tree import PrefixTree
from dta_compile.plan.schedule import (
    Anchor,
    Attach,
    Backward,
    Chunk,
    Forward,
    Op,
    Pop,
    Restore,
    Schedule,
    Slice,
)
from dta_compile.plan.verify import Simulation, simulate, verify

__all__ = [
    "Anchor",
    "Attach",
    "Backward",
    "Chunk",
    "CostModel",
    "Forward",
    "Op",
    "Plan",
    "Pop",
    "PrefixTree",
    "Restore",
    "Schedule",
    "Simulation",
    "Slice",
    "Stats",
    "balance",
    "build_schedule",
    "choose",
    "choose_kept",
    "leaf_order",
    "make_plan",
    "plan",
    "simulate",
    "verify",
]
