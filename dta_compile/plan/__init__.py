"""Plan a batch: prefix tree, chunks, schedule, cost model, verifier and load balancing. Never imports torch."""

from __future__ import annotations

from dta_compile.plan.cost import CostModel, Limits, Rates
from dta_compile.plan.division.balance import balance
from dta_compile.plan.interpret import Work
from dta_compile.plan.keep import choose_keep
from dta_compile.plan.peak_memory import Footprint, PartBytes, bytes_of_halves
from dta_compile.plan.plan import Plan, make_plan, plan
from dta_compile.plan.planner import KEEP_ALL, KEEP_NOTHING, Keep, build_schedule
from dta_compile.plan.schedule import Anchor, Attach, Backward, Forward, Op, Pop, Restore, Schedule
from dta_compile.plan.simulate import Simulation, simulate
from dta_compile.plan.states import with_states
from dta_compile.plan.summary import MeasuredRun, ReplayCounts
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.chunk_tree import chunk_tree
from dta_compile.plan.tree.lexicographic import LexicographicOrder, lexicographic_order
from dta_compile.plan.tree.prefix_tree import PrefixTree
from dta_compile.plan.tree.segments import Segment, rectangles, segments
from dta_compile.plan.verify import verify

__all__ = [
    "KEEP_ALL",
    "KEEP_NOTHING",
    "Anchor",
    "Attach",
    "Backward",
    "Chunk",
    "CostModel",
    "Footprint",
    "Forward",
    "Keep",
    "LexicographicOrder",
    "Limits",
    "MeasuredRun",
    "Op",
    "PartBytes",
    "Plan",
    "Pop",
    "PrefixTree",
    "Rates",
    "ReplayCounts",
    "Restore",
    "Schedule",
    "Segment",
    "Simulation",
    "Slice",
    "Work",
    "balance",
    "build_schedule",
    "bytes_of_halves",
    "choose_keep",
    "chunk_tree",
    "lexicographic_order",
    "make_plan",
    "plan",
    "rectangles",
    "segments",
    "simulate",
    "verify",
    "with_states",
]
