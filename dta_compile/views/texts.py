"""Write plans as text: the prefix tree for a terminal and in Graphviz DOT, a whole plan as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import networkx
from rich.markup import escape
from rich.tree import Tree

from dta_compile.plan import Plan

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
    """Return the prefix tree in Graphviz DOT."""
    lines = ["digraph prefix_tree {", "  rankdir=LR; node [shape=box, fontname=monospace];"]
    lines += [f'  n{node} [label="{_label(data)}"];' for node, data in plan.tree.nodes(data=True)]
    lines += [f"  n{parent} -> n{child};" for parent, child in plan.tree.edges]
    return "\n".join([*lines, "}", ""])
