"""Compressed prefix tree (radix trie) with incremental insertion and removal, the storage of `RolloutPool`.

`PrefixTree` is its immutable counterpart for a finished batch. This module knows nothing of policies, batches or
threads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dta_compile.plan.tree.lexicographic import common_run


class Node:
    """Segment of tokens that contains no branch and no sequence end except at its last token.

    Attributes:
        segment: the tokens as bytes of an array, so that comparing them to a sequence is one `memcmp`.
        parent: None for the root, whose segment is empty.
        stop: number of tokens from the root to the segment's end. Splits and merges keep it, so a node remains the end
            of the same sequences.
        children: child nodes by first token, in order of insertion.
        ending: names of the sequences that end here, in order of insertion.
    """

    __slots__ = ("children", "ending", "parent", "segment", "stop")

    def __init__(self, segment: bytes, parent: Node | None, stop: int) -> None:
        self.segment, self.parent, self.stop = segment, parent, stop
        self.children: dict[bytes, Node] = {}
        self.ending: dict[int, None] = {}


class ForkPoint(NamedTuple):
    """Point where a sequence leaves the tree, after `shared` tokens: `inside` bytes into the segment of `node`."""

    node: Node
    inside: int
    shared: int


class Trie:
    """Prefix tree of named token sequences, which may be duplicates, empty, or prefixes of one another.

    A sequence is a key: `array.tobytes()` of its tokens as `dtype`. Inserting costs a `memcmp` over its tokens, one
    Python step per node on its path, and a copy of the segment that it splits. There are at most two nodes per
    sequence. Removing a sequence frees all tokens that no other sequence needs.

    Attributes:
        tokens: number of tokens in the tree, shared ones counted once.
    """

    def __init__(self, dtype: npt.DTypeLike = np.int32) -> None:
        self.dtype = np.dtype(dtype)
        self.root = Node(b"", None, 0)
        self.tokens = 0

    def find(self, key: bytes) -> ForkPoint:
        """Find the longest prefix of `key` in the tree; changes nothing."""
        width, node, at = self.dtype.itemsize, self.root, 0
        while (child := node.children.get(key[at : at + width])) is not None:
            if not key.startswith(child.segment, at):
                inside = common_run(np.frombuffer(child.segment, self.dtype), np.frombuffer(key, self.dtype, offset=at))
                return ForkPoint(child, inside * width, at // width + inside)
            node, at = child, at + len(child.segment)
        return ForkPoint(node, len(node.segment), at // width)

    def insert(self, name: int, key: bytes, fork: ForkPoint) -> Node:
        """Insert a sequence at its fork and return its last node; `fork` is from `find` on the unchanged tree.

        All memory is allocated before the first change, so that a failure leaves the tree unchanged.
        """
        width, begin = self.dtype.itemsize, fork.shared * self.dtype.itemsize
        branch, head = fork.node, None
        if fork.inside < len(branch.segment):
            rest = branch.segment[fork.inside :]
            head = Node(branch.segment[: fork.inside], branch.parent, fork.shared)
            head.children[rest[:width]] = branch
        above = branch if head is None else head
        last = Node(key[begin:], above, len(key) // width) if begin < len(key) else above
        last.ending[name] = None
        if last is not above:  # the only one of three changes that may allocate; if it fails, `head` is not linked yet
            above.children[key[begin : begin + width]] = last
        if head is not None:
            assert branch.parent is not None
            branch.parent.children[branch.segment[:width]] = head
            branch.parent, branch.segment = head, rest
        self.tokens += len(key) // width - fork.shared
        return last

    def remove(self, name: int, node: Node) -> None:
        """Remove the sequence `name`, which ends at `node`, and all tokens that only it used."""
        del node.ending[name]
        width = self.dtype.itemsize
        while not node.ending and not node.children and node.parent is not None:
            parent = node.parent
            del parent.children[node.segment[:width]]
            self.tokens -= len(node.segment) // width
            node = parent
        if node.parent is not None and not node.ending and len(node.children) == 1:  # one segment with its only child
            (child,) = node.children.values()
            child.segment, child.parent = node.segment + child.segment, node.parent
            node.parent.children[node.segment[:width]] = child

    def key(self, node: Node) -> bytearray:
        """Return the tokens from the root to the end of `node`, as a new writable buffer."""
        segments, above = [], node
        while above.parent is not None:
            segments.append(above.segment)
            above = above.parent
        return bytearray().join(reversed(segments))
