"""Which of the waiting rollouts make up the next batch: the overdue, and what shares most with those chosen before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from dta_compile.rollouts.trie import Node, Trie

__all__ = ["Choice", "choose_batch"]


class Choice:
    """A batch that grows up to its limits.

    Attributes:
        names: the rollouts, in the order in which they were chosen.
        tokens: tokens of their tree.
        nodes: the root and the nodes of their tree.
    """

    def __init__(self, trie: Trie, rows: int | None, tokens: int | None) -> None:
        self.names: dict[int, None] = {}
        self.tokens = 0
        self.nodes: dict[Node, None] = {trie.root: None}
        self._most_rows, self._most_tokens = rows, tokens

    @property
    def full(self) -> bool:
        """Whether no rollout with tokens of its own fits any more."""
        return not self._has_row or (self._most_tokens is not None and self.tokens >= self._most_tokens)

    def take(self, name: int, end: Node) -> None:
        """Add a rollout that ends at `end`, if it is not in the batch yet, and fits or is the first."""
        if name in self.names or not self._has_row:
            return
        new, node = [], end
        while node not in self.nodes:
            assert node.parent is not None
            new.append(node)
            node = node.parent
        tokens = self.tokens + end.stop - node.stop
        if self.names and self._most_tokens is not None and tokens > self._most_tokens:
            return
        self.names[name] = None
        self.tokens = tokens
        self.nodes.update(dict.fromkeys(new))

    @property
    def _has_row(self) -> bool:
        return self._most_rows is None or len(self.names) < self._most_rows


def choose_batch(
    trie: Trie,
    ends: Mapping[int, Node],
    overdue: Iterable[int],
    last_chance: Collection[int],
    rows: int | None = None,
    tokens: int | None = None,
) -> Choice:
    """Choose rollouts until there are `rows` of them, or their tree has `tokens` tokens.

    The overdue come first, in their order; then those that have a last chance; then all others. Within these two,
    what shares most with the rollouts chosen before comes first; where there are none, the oldest does, so that no
    part of the tree is forgotten. Takes O(waiting rollouts) at worst.

    Args:
        ends: the last node of every waiting rollout, oldest first.
        overdue: oldest first, so that one that does not fit any more is the first of the next batch.
        last_chance: those that expire if they do not leave now, oldest first.
        rows: at least 1.
        tokens: most tokens of the tree, unless the first rollout alone has more.
    """
    choice = Choice(trie, rows, tokens)
    for name in overdue:
        if choice.full:
            break
        choice.take(name, ends[name])
    for wanted in (last_chance, ends):
        if wanted and not choice.names:
            oldest = next(iter(wanted))
            choice.take(oldest, ends[oldest])
        for name, node in _closest_first(list(choice.nodes)) if wanted else ():
            if choice.full and node not in choice.nodes:
                break
            if name in wanted:
                choice.take(name, node)
    return choice


def _closest_first(chosen: list[Node]) -> Iterator[tuple[int, Node]]:
    """Every waiting rollout and its last node, in the order of what it has in common with the tree of `chosen` nodes.

    First those that add no token, then those that leave it deepest. What leaves it at one node comes depth first, which
    keeps relatives together, and in the order of arrival.
    """
    for node in chosen:
        for name in node.ending:
            yield name, node
    known = set(chosen)
    for start in sorted(chosen, key=lambda node: -node.stop):
        stack = _others(start, known)
        while stack:
            node = stack.pop()
            for name in node.ending:
                yield name, node
            stack += _others(node, known)


def _others(node: Node, known: set[Node]) -> list[Node]:
    """Children that are not known, the first one last."""
    return [child for child in reversed(node.children.values()) if child not in known]
