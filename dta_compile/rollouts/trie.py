"""A compressed prefix tree that grows and shrinks one sequence at a time.

`PrefixTree` is the tree of a finished batch; this is the one that waits for the batch. It knows nothing of policies,
batches or threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

MAX_SEGMENT = 4096
"""Most tokens of a node. It bounds what a split or a merge copies, however long the sequences are."""


class Node:
    """A segment of tokens without branch or sequence end inside.

    Attributes:
        segment: the tokens, as the bytes of an array: comparing them to a sequence is then one `memcmp`.
        parent: None for the root, whose segment is empty.
        stop: tokens from the root to the segment's end. Splits and merges never change it, so that a node keeps on
            standing for the sequences that end at it.
        children: by their first token, in the order of arrival.
        ending: names of the sequences that end here, in the order of arrival.
    """

    __slots__ = ("children", "ending", "parent", "segment", "stop")

    def __init__(self, segment: bytes, parent: Node | None, stop: int) -> None:
        self.segment, self.parent, self.stop = segment, parent, stop
        self.children: dict[bytes, Node] = {}
        self.ending: dict[int, None] = {}


class ForkPoint:
    """Where a sequence leaves the tree: `shared` tokens lead there, the last `inside` bytes of them within `node`."""

    __slots__ = ("inside", "node", "shared")

    def __init__(self, node: Node, inside: int, shared: int) -> None:
        self.node, self.inside, self.shared = node, inside, shared


class Trie:
    """Prefix tree of named sequences of tokens; duplicates, empty ones and prefixes of others are allowed.

    A sequence is a key: `array.tobytes()` of its tokens as `dtype`. Inserting one costs a `memcmp` over its tokens and
    a step in Python for every node on its path. There are at most four nodes per sequence and two per `MAX_SEGMENT`
    tokens, and a removed sequence takes with it what no other one needs.

    Attributes:
        tokens: tokens of the tree, each shared one counted once.
    """

    def __init__(self, dtype: npt.DTypeLike = np.int32) -> None:
        self.dtype = np.dtype(dtype)
        self.root = Node(b"", None, 0)
        self.tokens = 0

    def find(self, key: bytes) -> ForkPoint:
        """The longest prefix of `key` that is in the tree. Changes nothing."""
        width, node, at = self.dtype.itemsize, self.root, 0
        while (child := node.children.get(key[at : at + width])) is not None:
            if not key.startswith(child.segment, at):
                inside = self._common_bytes(child.segment, key, at)
                return ForkPoint(child, inside, (at + inside) // width)
            node, at = child, at + len(child.segment)
        return ForkPoint(node, len(node.segment), at // width)

    def insert(self, name: int, key: bytes, fork: ForkPoint) -> Node:
        """Add a sequence at the fork that `find` has given since the tree last changed; its last node.

        All memory is allocated before the first change, so that a failure leaves the tree as it was.
        """
        width = self.dtype.itemsize
        branch, head = fork.node, None
        if fork.inside < len(branch.segment):
            head, rest = self._cut(branch, fork.inside)
        above = branch if head is None else head
        first, last = self._chain(above, key, fork.shared)
        last.ending[name] = None
        if first is not None:  # of three changes only this one may allocate; where it fails, `head` is not linked yet
            above.children[key[fork.shared * width : (fork.shared + 1) * width]] = first
        if head is not None:
            assert branch.parent is not None
            branch.parent.children[branch.segment[:width]] = head
            branch.parent, branch.segment = head, rest
            self._merge(branch)  # what remains of it may now be short enough
        self.tokens += len(key) // width - fork.shared
        return last

    def remove(self, name: int, node: Node) -> None:
        """Take away the sequence `name` that ends at `node`, and the tokens that were its own."""
        del node.ending[name]
        width = self.dtype.itemsize
        while not node.ending and not node.children and node.parent is not None:
            parent = node.parent
            del parent.children[node.segment[:width]]
            self.tokens -= len(node.segment) // width
            node = parent
        above = node.parent
        self._merge(node)
        if above is not None:
            self._merge(above)

    def key(self, node: Node) -> bytearray:
        """The tokens from the root to the end of `node`, as new writable memory."""
        segments, above = [], node
        while above.parent is not None:
            segments.append(above.segment)
            above = above.parent
        return bytearray().join(reversed(segments))

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _cut(self, node: Node, inside: int) -> tuple[Node, bytes]:
        """A node for the first `inside` bytes of `node`, above it but not yet linked, and the bytes that remain."""
        width = self.dtype.itemsize
        rest = node.segment[inside:]
        head = Node(node.segment[:inside], node.parent, node.stop - len(rest) // width)
        head.children[rest[:width]] = node
        return head, rest

    def _chain(self, above: Node, key: bytes, shared: int) -> tuple[Node | None, Node]:
        """New nodes below `above` for what follows the first `shared` tokens, not yet linked: the first and the last.

        None and `above` itself if nothing follows.
        """
        width, first, last = self.dtype.itemsize, None, above
        for at in range(shared * width, len(key), MAX_SEGMENT * width):
            segment = key[at : at + MAX_SEGMENT * width]
            node = Node(segment, last, last.stop + len(segment) // width)
            if first is None:
                first = node
            else:
                last.children[segment[:width]] = node
            last = node
        return first, last

    def _merge(self, node: Node) -> None:
        """Join a node without branch or sequence end to its only child, if that is not too long."""
        if node.parent is None or node.ending or len(node.children) != 1:
            return
        width = self.dtype.itemsize
        (child,) = node.children.values()
        if len(node.segment) + len(child.segment) <= MAX_SEGMENT * width:
            child.segment, child.parent = node.segment + child.segment, node.parent
            node.parent.children[node.segment[:width]] = child

    def _common_bytes(self, segment: bytes, key: bytes, at: int) -> int:
        """Bytes of the whole tokens that `segment` and `key[at:]` have in common at their beginning."""
        width = self.dtype.itemsize
        size = min(len(segment), len(key) - at) // width
        differs = np.frombuffer(segment, self.dtype, size) != np.frombuffer(key, self.dtype, size, at)
        depth = int(differs.argmax())
        return width * (depth if differs[depth] else size)
