"""Place snapshots of running states of recurrent mixers in a schedule.

Unlike KV, a running state cannot be sliced by depth: it exists only at depths where a chunk took a snapshot.
"""

from __future__ import annotations

import dataclasses

from dta_compile.plan.interpret import Interpreter, include, pop_above
from dta_compile.plan.schedule import Anchor, Forward, Restore, Schedule, extent
from dta_compile.plan.tree.chunk import Chunk
from dta_compile.plan.tree.prefix_tree import PrefixTree


def with_states(tree: PrefixTree, schedule: Schedule) -> Schedule:
    """Return a legal schedule whose chunks keep running states where later ops need them, and nowhere else.

    A liveness analysis, backwards from the last op: it tracks the depths of the path at which later ops read the state.
    The op that put a depth on the stack must keep the state there; a restore passes this on to the run that it copies.
    """
    restored: dict[int, list[int]] = {}  # by position of the source: depths that restores need from it
    needed: list[int] = []  # ascending
    ops = list(schedule.ops)
    for position, event in reversed([*enumerate(map(Interpreter(tree, schedule).step, ops))]):
        op, part = event.op, extent(event.op)
        if isinstance(op, Restore):
            restored.setdefault(event.source, []).extend(pop_above(needed, op.part.start))
        elif isinstance(op, (Anchor, Forward)) and op.chunk.spine is not None:
            depths = {*restored.pop(position, ()), *pop_above(needed, op.chunk.start)}
            ops[position] = dataclasses.replace(op, states=tuple(sorted(depths)))
        if isinstance(part, Chunk):
            include(needed, part.start)
    return dataclasses.replace(schedule, ops=tuple(ops))
