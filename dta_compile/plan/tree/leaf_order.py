"""Order the leaves of a prefix tree: depth first, with the children of every node in the order of a strategy."""

from __future__ import annotations

import random
from collections.abc import Callable

from dta_compile.errors import PlanError
from dta_compile.plan.tree.prefix_tree import PrefixTree

_SortChildren = Callable[[list[int]], list[int]]


def leaf_order(tree: PrefixTree, order: str, seed: int = 0) -> list[int]:
    """Return the leaf nodes in the order in which they go backward.

    Args:
        order: "backward_dfs" (paper Algorithm 1), "lexicographic", or "random": depth-first with the children of
            every node shuffled by `seed`.
    """
    if order == "backward_dfs":
        # Algorithm 1 orders the forwards; backwards run in reverse.
        return _depth_first(tree, _short_leaves_first(tree))[::-1]
    if order == "lexicographic":
        return list(tree.leaves)
    if order == "random":
        generator = random.Random(seed)
        return _depth_first(tree, lambda children: generator.sample(children, len(children)))
    raise PlanError("unknown leaf order", expected="backward_dfs, lexicographic or random", got=repr(order))


def branch_depths(tree: PrefixTree, leaves: list[int]) -> list[int]:
    """Return, for a depth-first order of leaves, the depth at which each branches off the next one; 0 for the last."""
    stop, parent = tree.stop.tolist(), tree.parent.tolist()
    visited = [False] * len(stop)
    depths = []
    for leaf in leaves:
        node = leaf
        while node >= 0 and not visited[node]:
            visited[node] = True
            node = parent[node]
        # In a depth-first order, the deepest visited ancestor is on the path of the preceding leaf.
        depths.append(stop[node] if node >= 0 else 0)
    return [*depths[1:], 0][: len(leaves)]


def _short_leaves_first(tree: PrefixTree) -> _SortChildren:
    """Return the child order of Algorithm 1: leaves before internal nodes, then by tail (depth of the first leaf)."""
    tail = tree.stop.tolist()
    internal = [False] * len(tail)

    def sort(children: list[int]) -> list[int]:
        return sorted(children, key=lambda child: (internal[child], tail[child]))

    for node in reversed(range(len(tail))):  # preorder numbers: children before their parents
        children = tree.children(node)
        if children:
            internal[node] = True
            tail[node] = tail[sort(children)[0]]
    return sort


def _depth_first(tree: PrefixTree, sort: _SortChildren) -> list[int]:
    leaves, pending = [], sort(tree.roots)[::-1]
    while pending:
        node = pending.pop()
        children = tree.children(node)
        if children:
            pending += sort(children)[::-1]
        else:
            leaves.append(node)
    return leaves
