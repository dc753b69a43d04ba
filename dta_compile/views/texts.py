"""Write plans as text: the prefix tree for a terminal and in Graphviz DOT, a whole plan as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import networkx
import numpy as np
from rich.markup import escape
from rich.tree import Tree

from dta_compile.plan import Plan
from dta_compile.plan.schedule import Anchor, Forward
from dta_compile.plan.tree.chunk import Chunk

GOLDEN_RATIO = 0.618034  # hue step (in turns) that keeps successive colours far apart
MOST_SEQUENCES = 6  # sequences listed in a segment's label


def tree_view(plan: Plan, most: int | None = None) -> Tree:
    """Render the prefix tree for a terminal: depth range of each segment and the sequences that end with it.

    Args:
        plan: the plan whose tree is shown.
        most: show this many of the largest segments and their ancestors; None: all.
    """
    nodes = plan.tree.nodes
    shown = set(nodes) if most is None else _largest(plan, most)
    title = f"prefix tree: {plan.stats.tree_tokens:,} tokens, {len(nodes):,} segments"
    if len(shown) < len(nodes):
        title += f", the {most} largest and what is above them"
    view = Tree(title)
    pending = [(view, plan.prefix_tree.roots)]
    while pending:
        branch, children = pending.pop()
        for child in children:
            if child in shown:
                pending.append((branch.add(escape(_label(nodes[child]))), list(plan.tree.successors(child))))
        left_out = sum(child not in shown for child in children)
        if left_out:
            branch.add(f"[dim]... and {left_out:,} more")
    return view


def _largest(plan: Plan, most: int) -> set[int]:
    """Return the `most` largest segments and their ancestors."""
    nodes = plan.tree.nodes
    largest = sorted(nodes, key=lambda node: nodes[node]["start"] - nodes[node]["stop"])[:most]
    return {*largest, *(above for node in largest for above in networkx.ancestors(plan.tree, node))}


def _label(node: dict[str, Any]) -> str:
    """Label a segment, `[0:447] 447 tokens, ends s3 s8`: depth range, size, and the sequences that end with it."""
    size = node["stop"] - node["start"]
    ends = [f"s{sequence}" for sequence in node["sequences"][:MOST_SEQUENCES]]
    more = len(node["sequences"]) - len(ends)
    label = f"[{node['start']:,}:{node['stop']:,}] {size:,} token{'s' * (size != 1)}"
    return label + (f", ends {' '.join(ends)}" if ends else "") + (f" and {more:,} more" if more else "")


def as_json(plan: Plan) -> str:
    """Return the plan as a JSON object: options, stats, tree (nodes with parents) and schedule (list of text lines)."""
    parents = {child: parent for parent, child in plan.tree.edges}
    nodes = [{"node": node, "parent": parents.get(node), **plan.tree.nodes[node]} for node in plan.tree]
    fields = {
        "options": dataclasses.asdict(plan.options),
        "reason": plan.reason,
        "stats": dataclasses.asdict(plan.stats),
        "tree": nodes,
        "schedule": str(plan.schedule).splitlines(),
    }
    if (dealing := plan.dealing) is not None:
        facts: dict[str, Any] = {"rank": plan.rank, "imbalance": dealing.imbalance, "tokens": dealing.tokens}
        facts |= {"received": dealing.received, "bounds": dealing.bounds.tolist()}
        fields["ranks"] = facts | {"holders": dealing.holders.tolist()}
    return json.dumps(fields, indent=1, default=lambda value: value.item()) + "\n"


def as_dot(plan: Plan) -> str:
    """Return the prefix tree in Graphviz DOT; each segment lists its chunks and is coloured by the first of them.

    In one tree over ranks, it lists its ranks.
    """
    lines = ["digraph prefix_tree {", "  rankdir=LR; node [shape=box, style=filled, fontname=monospace];"]
    kind, chunks = ("chunk", _chunks_of_nodes(plan)) if plan.dealing is None else ("rank", _ranks_of_nodes(plan))
    for node, data in plan.tree.nodes(data=True):
        names = ", ".join(f"{kind} {chunk}" for chunk in chunks[node])
        hue = chunks[node][0] * GOLDEN_RATIO % 1
        lines.append(f'  n{node} [label="{_label(data)}\\n{names}", fillcolor="{hue:.3f} 0.2 1.0"];')
    lines += [f"  n{parent} -> n{child};" for parent, child in plan.tree.edges]
    return "\n".join([*lines, "}", ""])


def _chunks_of_nodes(plan: Plan) -> list[list[int]]:
    """Return the chunks that run each segment, numbered in order of first execution."""
    tree = plan.prefix_tree
    numbers: dict[Chunk, int] = {}
    chunks: list[list[int]] = [[] for _ in tree.parent]
    for op in plan.schedule.ops:
        if not isinstance(op, (Anchor, Forward)) or not op.out or op.chunk in numbers:
            continue
        number = numbers[op.chunk] = len(numbers) + 1
        for start, stop in tree.chunk_ranges(op.chunk):
            first, last = np.searchsorted(tree.row, [start, stop - 1], side="right") - 1
            for node in range(first, last + 1):
                if number not in chunks[node]:
                    chunks[node].append(number)
    return chunks


def _ranks_of_nodes(plan: Plan) -> list[list[int]]:
    """Return the ranks that run each segment, in the order of its tokens."""
    tree, dealing = plan.prefix_tree, plan.dealing
    assert dealing is not None
    ends = tree.row + tree.stop - tree.start - 1
    pieces = zip(dealing.owners(tree.row).tolist(), dealing.owners(ends).tolist(), strict=True)
    return [[int(dealing.holders[piece]) for piece in range(first, last + 1)] for first, last in pieces]
