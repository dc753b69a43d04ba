"""From a prefix tree to a schedule: the strategies `vanilla`, `dfs` and `dense` in every mode.

All of them follow a depth-first order of the leaves. Leaf `i` owns the part of its path that no later leaf shares;
these parts partition the tree, and going from leaf `i` to the next backpropagates exactly the part of leaf `i`.
Parts are cut into pieces of at most `chunk_size` tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, groupby, pairwise

from dta_compile.errors import PlanError
from dta_compile.options import Options
from dta_compile.plan.order import branch_depths, leaf_order
from dta_compile.plan.prefix_tree import PrefixTree
from dta_compile.plan.schedule import MODES, Anchor, Attach, Backward, Forward, Op, Pop, Restore, Schedule, Slice

__all__ = ["build_schedule", "choose_kept"]


def build_schedule(tree: PrefixTree, options: Options, mode: str, keep_tokens: int | None = None) -> Schedule:
    """Schedule for all sequences of `tree`.

    Args:
        tree: for the strategy "dense" an unshared one.
        options: `chunk_size`, `order` and `strategy` ("vanilla", "dfs" or "dense") are used.
        mode: "score" (outputs only), "transparent" (all outputs first, then one attach, then backward) or
            "streaming" (the paper's loop: losses attached as their last tokens are reached).
        keep_tokens: most tokens whose graphs the transparent mode keeps from its first to its second phase; None
            keeps all. One piece is always kept.

    Raises:
        PlanError: unknown mode, or a strategy that cannot run on this tree.
    """
    _check(tree, options, mode)
    walk = _Walk(tree, options)
    builder = _Builder(walk)
    if mode == "streaming":
        builder.streaming()
    else:
        walk_order = [piece for pieces in walk.pieces for piece in reversed(pieces)]
        builder.outputs(set() if mode == "score" else choose_kept(walk_order, keep_tokens))
        if mode == "transparent":
            builder.backwards()
    return Schedule(tuple(builder.ops), options.strategy, options.order, mode, options.chunk_size)


def choose_kept(pieces: Sequence[Slice], keep_tokens: int | None) -> set[Slice]:
    """Which pieces keep their graph from the outputs phase to their backward.

    Args:
        pieces: in the order of their backwards. The first one runs last in the outputs phase and goes backward right
            after, so it is always kept; the ones after it as long as the sum of tokens is at most `keep_tokens`.
    """
    if keep_tokens is None:
        return set(pieces)
    count = bisect_right(list(accumulate(piece.tokens for piece in pieces)), keep_tokens)
    return set(pieces[: max(count, 1)])


class _Walk:
    """A depth-first walk over the leaves; leaf `i` owns depths `[low[i], stop[i])` of its path.

    Attributes:
        sequence: a sequence that ends at leaf `i`.
        low: branch depth of leaf `i` and leaf `i + 1`, 0 for the last.
        pieces: what leaf `i` owns, cut into slices, ascending.
        above: the later leaf that owns the token just above `low[i]`, -1 at the root.
        ending: sequences whose last token leaf `i` is the first to reach.
    """

    def __init__(self, tree: PrefixTree, options: Options) -> None:
        leaves = leaf_order(tree, options.order)
        self.vanilla = options.strategy == "vanilla"
        self.chunk_size = options.chunk_size
        self.num_sequences = len(tree.lengths)
        self.empty: list[int] = (tree.lengths == 0).nonzero()[0].tolist()
        self.sequence: list[int] = tree.sequence[leaves].tolist()
        self.stop: list[int] = tree.stop[leaves].tolist()
        self.low = branch_depths(tree, leaves)
        self.above = _owners_above(self.low)
        self.ending = _first_reached(tree, leaves)
        self.pieces = [
            [piece for a, b in bounds for piece in _cut(sequence, a, b, self.chunk_size)]
            for sequence, bounds in zip(self.sequence, self._bounds(tree, leaves), strict=True)
        ]
        self._starts = [[piece.start for piece in pieces] for pieces in self.pieces]

    def _bounds(self, tree: PrefixTree, leaves: list[int]) -> Iterator[list[tuple[int, int]]]:
        """What to cut evenly per leaf: all that it owns (Algorithm 3), or every node of it apart (Algorithm 2)."""
        start, parent = tree.start.tolist(), tree.parent.tolist()
        for leaf, low, stop in zip(leaves, self.low, self.stop, strict=True):
            if not self.vanilla:
                yield [(low, stop)]
                continue
            depths, node = [stop], leaf
            while depths[-1] > low:
                depths.append(start[node])
                node = parent[node]
            depths.reverse()
            yield list(pairwise(depths))

    def parts(self, i: int, start: int, stop: int) -> list[tuple[Slice, Slice]]:
        """`(piece, its part)` of the pieces on the path of leaf `i` that overlap depths `[start, stop)`, ascending."""
        found: list[tuple[Slice, Slice]] = []
        while stop > start:
            for k in reversed(range(bisect_right(self._starts[i], stop - 1))):
                piece = self.pieces[i][k]
                low = max(piece.start, start)
                found.append((piece, Slice(piece.sequence, low, min(piece.stop, stop))))
                if low == start:
                    return found[::-1]
            i, stop = self.above[i], self.low[i]
        return found[::-1]


class _Builder:
    """Emits ops while tracking the depth of the stack and which pieces have a live graph."""

    def __init__(self, walk: _Walk) -> None:
        self.walk = walk
        self.ops: list[Op] = []
        self.depth = 0
        self.live: set[Slice] = set()

    def outputs(self, kept: Collection[Slice]) -> None:
        """Phase 1: all outputs, every token once, along the reversed order; one attach of all sequences.

        With nothing kept (scoring) the stack ends empty, else it ends with the path of the first leaf.
        """
        walk = self.walk
        for i in reversed(range(len(walk.sequence))):
            if i + 1 < len(walk.sequence):
                self.pop(walk.sequence[i + 1], walk.low[i])
            for piece in walk.pieces[i]:
                if piece in kept:
                    self.forward(piece, out=True)
                else:
                    self.anchor(piece, out=True)
        if walk.sequence and not kept:
            self.pop(walk.sequence[0], 0)
        self.attach(range(walk.num_sequences))

    def backwards(self) -> None:
        """Phase 2: leaf after leaf, rebuild the stack below the last piece, then backpropagate what the leaf owns."""
        for i, pieces in enumerate(self.walk.pieces):
            if i:
                self.rebuild(i, pieces[-1].start)
            self.backpropagate(pieces)

    def streaming(self) -> None:
        """The paper's loop (Algorithms 2 and 3): forward to a leaf, attach its losses, backpropagate what it owns.

        Algorithm 3 forwards the whole new suffix with a graph, and its upper part once more without. Here only the
        last piece has a graph, since pieces above it are recomputed anyway.
        """
        walk = self.walk
        for i, pieces in enumerate(walk.pieces):
            if walk.vanilla:
                for piece, _ in walk.parts(i, self.depth, walk.stop[i]):
                    self.forward(piece, out=True)
            else:
                for part in _cut(walk.sequence[i], self.depth, pieces[-1].start, walk.chunk_size):
                    self.anchor(part, out=True)
                self.forward(pieces[-1], out=True)
            self.attach(walk.ending[i] if i else sorted(walk.ending[i] + walk.empty))
            self.backpropagate(pieces)
        if not walk.pieces:
            self.attach(walk.empty)

    def rebuild(self, i: int, stop: int) -> None:
        """Push what the path of leaf `i` lacks above depth `stop`: what was kept is copied, the rest is run again."""
        walk = self.walk
        for kept, run in groupby(walk.parts(i, self.depth, stop), key=lambda found: found[0] in self.live):
            pieces, parts = zip(*run, strict=True)
            if kept:
                self.ops += [Restore((part,)) for part in parts]
                self.depth = parts[-1].stop
            elif walk.vanilla:
                for piece in pieces:
                    self.forward(piece)
            else:  # without graphs the bounds of pieces do not matter: as few chunks as possible
                for part in _cut(walk.sequence[i], self.depth, parts[-1].stop, walk.chunk_size):
                    self.anchor(part)

    def backpropagate(self, pieces: Sequence[Slice]) -> None:
        """Backward and pop of pieces from the last to the first; those without a live graph are recomputed."""
        for piece in reversed(pieces):
            if piece not in self.live:
                self.forward(piece)
            self.ops.append(Backward((piece,)))
            self.live.remove(piece)
            self.pop(piece.sequence, piece.start)

    def anchor(self, piece: Slice, out: bool = False) -> None:
        self.ops.append(Anchor((piece,), out))
        self.depth = piece.stop

    def forward(self, piece: Slice, out: bool = False) -> None:
        self.ops.append(Forward((piece,), out))
        self.live.add(piece)
        self.depth = piece.stop

    def attach(self, sequences: Sequence[int]) -> None:
        if sequences:
            self.ops.append(Attach(tuple(sequences)))

    def pop(self, sequence: int, depth: int) -> None:
        """Pop down to `depth`, where the stack holds a path of `sequence`."""
        if self.depth > depth:
            self.ops.append(Pop((Slice(sequence, depth, self.depth),)))
            self.depth = depth


def _check(tree: PrefixTree, options: Options, mode: str) -> None:
    if mode not in MODES:
        raise PlanError("unknown mode", expected=", ".join(MODES), got=repr(mode))
    if options.strategy == "auto":
        raise PlanError("a schedule needs a chosen strategy", expected="vanilla, dfs or dense", got="auto")
    if options.strategy == "dense" and tree.shared:
        raise PlanError("dense does not share prefixes", expected="PrefixTree.build(..., share=False)", got="a tree")


def _cut(sequence: int, start: int, stop: int, chunk_size: int) -> list[Slice]:
    """`[start, stop)` in the fewest slices of at most `chunk_size` tokens, of equal size to a token."""
    tokens = max(stop - start, 0)
    count = -(-tokens // chunk_size)
    bounds = [start + tokens * k // count for k in range(count + 1)] if count else []
    return [Slice(sequence, a, b) for a, b in pairwise(bounds)]


def _owners_above(low: list[int]) -> list[int]:
    """For every leaf, the next later leaf that owns tokens above its own part; -1 at the root."""
    above = [-1] * len(low)
    path: list[int] = []
    for i in reversed(range(len(low))):
        while path and low[path[-1]] >= low[i]:
            path.pop()
        above[i] = path[-1] if path else -1
        path.append(i)
    return above


def _first_reached(tree: PrefixTree, leaves: list[int]) -> list[list[int]]:
    """For every leaf, the sequences (ascending) that end on its path but not on the path of an earlier leaf."""
    parent = tree.parent.tolist()
    visited = [False] * len(parent)
    reached = []
    for node in leaves:
        ending: list[int] = []
        while node >= 0 and not visited[node]:
            visited[node] = True
            ending += tree.sequences_ending_at(node)
            node = parent[node]
        reached.append(sorted(ending))
    return reached
