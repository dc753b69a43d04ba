"""Plan a batch: prefix tree, chunks, schedule, cost model, verifier and load balancing. Never imports torch."""

from __future__ import annotations

from dta_compile.plan.balance import TreeCost, balance
from dta_compile.plan.cost import CostModel, Limits, Rates, choose, choose_keep
from dta_compile.plan.peak_memory import Footprint, LiveBytes, PartBytes, bytes_by_op, bytes_of_halves, peak_bytes
from dta_compile.plan.plan import Plan, make_plan, plan
from dta_compile.plan.planner import KEEP_ALL, KEEP_NOTHING, Keep, build_schedule
from dta_compile.plan.schedule import Anchor, Attach, Backward, Forward, Op, Pop, Restore, Schedule
from dta_compile.plan.simulate import Held, Simulation, Work, interpret, simulate
from dta_compile.plan.states import with_states
from dta_compile.plan.summary import Estimates, MeasuredRun, ReplayCounts, Stats
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.chunk_tree import ChunkTree, chunk_tree, leaf_order
from dta_compile.plan.tree.lexicographic import LexicographicOrder, lexicographic_order
from dta_compile.plan.tree.prefix_tree import PrefixTree
from dta_compile.plan.tree.segments import Rectangle, Segment, rectangles, segments
from dta_compile.plan.verify import verify

__all__ = [
    "KEEP_ALL",
    "KEEP_NOTHING",
    "Anchor",
    "Attach",
    "Backward",
    "Chunk",
    "ChunkTree",
    "CostModel",
    "Estimates",
    "Footprint",
    "Forward",
    "Held",
    "Keep",
    "LexicographicOrder",
    "Limits",
    "LiveBytes",
    "MeasuredRun",
    "Op",
    "PartBytes",
    "Plan",
    "Pop",
    "PrefixTree",
    "Rates",
    "Rectangle",
    "ReplayCounts",
    "Restore",
    "Schedule",
    "Segment",
    "Simulation",
    "Slice",
    "Stats",
    "TreeCost",
    "Work",
    "balance",
    "build_schedule",
    "bytes_by_op",
    "bytes_of_halves",
    "choose",
    "choose_keep",
    "chunk_tree",
    "interpret",
    "leaf_order",
    "lexicographic_order",
    "make_plan",
    "peak_bytes",
    "plan",
    "rectangles",
    "segments",
    "simulate",
    "verify",
    "with_states",
]
