"""Plans for people and other programs: a tree for the terminal, JSON and Graphviz DOT. Never imports torch."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.tree import Tree

from dta_compile.plan.schedule import Anchor, Forward
from dta_compile.plan.tree.chunk import Chunk

if TYPE_CHECKING:
    from dta_compile.plan import Plan

__all__ = ["as_dot", "as_json", "levels", "tree_view"]

GOLDEN_RATIO = 0.618034  # steps around the colour circle that never come close to each other soon
MOST_SEQUENCES = 6  # sequences named beside a node


def tree_view(plan: Plan, most: int | None = None, deepest: int | None = None) -> Tree:
    """The prefix tree for a terminal: depths of each segment and the sequences that end with it.

    Args:
        plan: whose tree to show.
        most: show at most so many segments, breadth first, so that the shape near the root is always seen.
        deepest: show at most so many levels of segments.
    """
    nodes = plan.tree.nodes
    shown = _nodes_to_show(plan, most, deepest)
    title = f"prefix tree: {plan.stats.tree_tokens:,} tokens, {len(nodes):,} segments"
    view = Tree(title if len(shown) == len(nodes) else f"{title}, {len(shown)} of them here (--full shows all)")
    pending = [(view, _roots(plan))]
    while pending:
        branch, children = pending.pop()
        for child in children:
            if child in shown:
                pending.append((branch.add(escape(_label(nodes[child]))), list(plan.tree.successors(child))))
        left_out = sum(child not in shown for child in children)
        if left_out:
            branch.add(f"[dim]... and {left_out:,} more")
    return view


def levels(plan: Plan) -> int:
    """Most segments on a path of the tree."""
    return len(_levels(plan))


def _roots(plan: Plan) -> list[int]:
    return [node for node in plan.tree if plan.tree.in_degree(node) == 0]


def _levels(plan: Plan) -> list[list[int]]:
    """Nodes by their distance from the root."""
    found, level = [], _roots(plan)
    while level:
        found.append(level)
        level = [child for node in level for child in plan.tree.successors(node)]
    return found


def _nodes_to_show(plan: Plan, most: int | None, deepest: int | None) -> set[int]:
    breadth_first = [node for level in _levels(plan)[:deepest] for node in level]
    return set(breadth_first[:most])


def _label(node: dict[str, Any]) -> str:
    """`[0:447] 447 tokens, ends s3 s8`: depths, size, and the sequences whose last token is the segment's last."""
    size = node["stop"] - node["start"]
    ends = [f"s{sequence}" for sequence in node["sequences"][:MOST_SEQUENCES]]
    more = len(node["sequences"]) - len(ends)
    label = f"[{node['start']}:{node['stop']}] {size:,} token{'s' * (size != 1)}"
    return label + (f", ends {' '.join(ends)}" if ends else "") + (f" and {more:,} more" if more else "")


def as_json(plan: Plan) -> str:
    """The plan as a JSON object: options, stats, tree (nodes with their parent) and schedule (its text, by line)."""
    parents = {child: parent for parent, child in plan.tree.edges}
    nodes = [{"node": node, "parent": parents.get(node), **plan.tree.nodes[node]} for node in plan.tree]
    fields = {
        "options": dataclasses.asdict(plan.options),
        "reason": plan.reason,
        "stats": dataclasses.asdict(plan.stats),
        "tree": nodes,
        "schedule": str(plan.schedule).splitlines(),
    }
    return json.dumps(fields, indent=1, default=lambda value: value.item()) + "\n"


def as_dot(plan: Plan) -> str:
    """The prefix tree in Graphviz' DOT language; every segment names the chunks that run it and has their colour."""
    lines = ["digraph prefix_tree {", "  rankdir=LR; node [shape=box, style=filled, fontname=monospace];"]
    chunks = _chunks_of_nodes(plan)
    for node, data in plan.tree.nodes(data=True):
        names = ", ".join(f"chunk {chunk}" for chunk in chunks[node])
        hue = chunks[node][0] * GOLDEN_RATIO % 1
        lines.append(f'  n{node} [label="{_label(data)}\\n{names}", fillcolor="{hue:.3f} 0.2 1.0"];')
    lines += [f"  n{parent} -> n{child};" for parent, child in plan.tree.edges]
    return "\n".join([*lines, "}", ""])


def _chunks_of_nodes(plan: Plan) -> list[list[int]]:
    """For every segment the chunks that run it, numbered in the order of their first run."""
    tree = plan.prefix_tree
    numbers: dict[Chunk, int] = {}
    found: list[list[int]] = [[] for _ in tree.parent]
    for op in plan.schedule.ops:
        if not isinstance(op, (Anchor, Forward)) or not op.out or op.chunk in numbers:
            continue
        number = numbers[op.chunk] = len(numbers) + 1
        for start, stop in tree.chunk_ranges(op.chunk):
            first, last = np.searchsorted(tree.row, [start, stop - 1], side="right") - 1
            for node in range(first, last + 1):
                if number not in found[node]:
                    found[node].append(number)
    return found
