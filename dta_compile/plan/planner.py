"""Turn a chunk tree into a schedule, by one walk for all strategies and modes.

Backwards run in the order of the chunk tree. The first phase, which computes outputs only, runs the chunks in reverse
order, so that the graphs and KV kept last are needed first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from dta_compile.errors import PlanError
from dta_compile.options import Options
from dta_compile.plan.schedule import MODES, Anchor, Attach, Backward, Forward, Op, Pop, Restore, Schedule
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.chunk_tree import ChunkTree, chunk_size_of, chunk_tree, cut
from dta_compile.plan.tree.prefix_tree import PrefixTree


@dataclasses.dataclass(frozen=True)
class Keep:
    """Graphs, KV and results of attention that the transparent mode keeps from its first to its second phase.

    Attributes:
        graphs: chunks (positions in the chunk tree) whose graphs are kept; None: all. In a sweep of chunks the graph of
            chunk 0 is always kept, because its backward comes right after its forward.
        kv: chunks that keep the KV of their spine, without a graph.
        results: in a sweep of stages, chunks that keep the results of attention, without a graph.
    """

    graphs: frozenset[int] | None = None
    kv: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()


KEEP_ALL = Keep()
KEEP_NOTHING = Keep(frozenset())


def build_schedule(
    tree: PrefixTree, options: Options, mode: str, keep: Keep = KEEP_ALL, chunks: ChunkTree | None = None
) -> Schedule:
    """Build the schedule for all sequences of `tree`.

    Args:
        tree: the prefix tree; an unshared one for the strategy "dense".
        options: `chunk_size`, `order`, `sweep` and `strategy` ("packed", "dfs", "vanilla" or "dense") are used.
        mode: "score" (outputs only), "transparent" (all outputs first, then one attach, then backward) or
            "streaming" (the paper's loop: losses attached as their last tokens are reached).
        keep: graphs and KV that the transparent mode keeps.
        chunks: `chunk_tree(tree, options)`, if the caller has it.

    Raises:
        PlanError: unknown mode, or a strategy that cannot run on this tree.
    """
    _check(tree, options, mode)
    by_stages = options.sweep == "stages" and mode != "streaming"
    walk = _Walk(tree, options, chunks or chunk_tree(tree, options), by_stages)
    if mode == "score":
        walk.outputs(KEEP_NOTHING, training=False)
    elif mode == "transparent":
        walk.outputs(keep, training=True)
        walk.backwards()
    else:
        walk.streaming()
    sweep = "stages" if by_stages else "chunks"
    return Schedule(tuple(walk.ops), options.strategy, options.order, mode, chunk_size_of(tree, options), sweep)


def rebuilt_slices(tree: PrefixTree, options: Options, chunks: ChunkTree) -> Iterator[tuple[int, Slice]]:
    """Yield the parts of spines that the second phase rebuilds on the stack if nothing is kept, with their chunks."""
    walk = _Walk(tree, options, chunks)
    walk.outputs(KEEP_NOTHING, training=True)
    for index, chunk in enumerate(chunks.chunks):
        yield from walk.missing(index)
        walk.put_path(index)
        walk.put(index, chunk)


class _Walk:
    """Emitter of ops that tracks the stack and the kept chunks.

    Attributes:
        ops: ops emitted so far.
        stacked: chunks whose spines are on the stack, bottom first; the last one up to `depth`.
        level: for every chunk its index in `stacked`, -1 if it is not there.
        live: chunks with a live graph.
        stored: chunks whose spine's KV is kept.
    """

    def __init__(self, tree: PrefixTree, options: Options, chunks: ChunkTree, by_stages: bool = False) -> None:
        self.tree, self.options = tree, options
        self.chunks, self.parent, self.block = chunks.chunks, chunks.parent, chunks.block
        self.vanilla = options.strategy == "vanilla"
        self.by_stages = by_stages
        self.ops: list[Op] = []
        self.stacked: list[int] = []
        self.level = [-1] * len(self.chunks)
        self.depth = 0
        self.live: set[int] = set()
        self.stored: set[int] = set()

    def outputs(self, keep: Keep, training: bool) -> None:
        """Emit phase 1: compute all outputs, every token once, then attach all sequences.

        Scoring leaves the stack empty, and so does a sweep of stages: other parts run before the second phase.
        """
        first_stays = not self.by_stages
        for index in reversed(range(len(self.chunks))):
            self.pop(self.chunks[index].start)
            if training and ((index == 0 and first_stays) or keep.graphs is None or index in keep.graphs):
                self.forward(index, out=True)
            else:
                kv = index in keep.kv and self.chunks[index].spine is not None
                self.ops.append(Anchor(self.chunks[index], True, kv, results=index in keep.results))
                self.put(index, self.chunks[index])
                if kv:
                    self.stored.add(index)
        if not training or self.by_stages:
            self.pop(0)
        self.attach(range(len(self.tree.lengths)))

    def backwards(self) -> None:
        """Emit phase 2: for every chunk, rebuild the stack below it, rerun it if its graph was not kept, backward."""
        for index in range(len(self.chunks)):
            self.put_path(index)
            if index not in self.live:
                self.forward(index)
            self.backward(index)

    def streaming(self) -> None:
        """Emit the paper's loop (Algorithms 2 and 3): forward to a chunk, attach losses that end in it, backward.

        Algorithm 3 forwards a whole suffix with a graph, and its upper part once more without. Here only the current
        chunk has a graph, because the tokens above it are recomputed anyway.
        """
        ending = self._sequences_ending()
        written = [chunk.start for chunk in self.chunks]  # depth up to which the outputs of each spine are written
        for index, chunk in enumerate(self.chunks):
            for above, part in self.missing(index):
                written[above] = max(written[above], part.stop)
            self.put_path(index, out=True)
            if index not in self.live:
                spine_done = chunk.spine is not None and written[index] >= chunk.spine.stop
                self.forward(index, out=bool(chunk.branches) or not spine_done)
            self.attach(sorted(ending[index] + ([] if index else self._empty())))
            self.backward(index)
        if not self.chunks:
            self.attach(self._empty())

    def missing(self, index: int) -> list[tuple[int, Slice]]:
        """Return the chunks above a chunk with the parts of their spines that the stack lacks, bottom first."""
        parts = []
        limit, above = self.chunks[index].start, self.parent[index]
        while above >= 0:
            spine, level = self.chunks[above].spine, self.level[above]
            assert spine is not None
            low = spine.start
            if level >= 0:
                low = self.chunks[self.stacked[level + 1]].start if level + 1 < len(self.stacked) else self.depth
            if low < limit:
                parts.append((above, Slice(spine.sequence, low, limit)))
            if level >= 0:
                break
            limit, above = spine.start, self.parent[above]
        return parts[::-1]

    def put_path(self, index: int, out: bool = False) -> None:
        """Complete the stack below a chunk: restore kept spines, run the others again."""
        missing = self.missing(index)
        for kept, run in groupby(missing, key=lambda entry: entry[0] in self.live or entry[0] in self.stored):
            parts = list(run)
            if kept:
                self.ops += [Restore(part) for _, part in parts]
            elif self.by_stages:  # hidden states exist for whole chunks only; these anchors stop at keys and values
                for above, _ in parts:
                    self.ops.append(Anchor(self.chunks[above]))
                    self.put(above, self.chunks[above])
                continue
            elif self.vanilla:
                for above, _ in parts:
                    self.forward(above, out)
            else:  # without graphs the bounds of chunks do not matter: use as few runs as possible
                first, last = parts[0][1], parts[-1][1]
                size = chunk_size_of(self.tree, self.options)
                pieces = cut(last.sequence, first.start, last.stop, size, self.block, self.tree)
                self.ops += [Anchor(Chunk(piece), out) for piece in pieces]
            for above, part in parts:
                self.put(above, Chunk(part))

    def put(self, index: int, chunk: Chunk) -> None:
        """Track that the spine of chunk `index`, or a part of it, goes on the stack."""
        if chunk.spine is None:
            return
        while self.stacked and self.stacked[-1] != self.parent[index] and self.stacked[-1] != index:
            self.level[self.stacked.pop()] = -1
        if self.level[index] < 0:
            self.level[index] = len(self.stacked)
            self.stacked.append(index)
        self.depth = chunk.spine.stop

    def forward(self, index: int, out: bool = False) -> None:
        self.ops.append(Forward(self.chunks[index], out))
        self.live.add(index)
        self.put(index, self.chunks[index])

    def backward(self, index: int) -> None:
        chunk = self.chunks[index]
        self.ops.append(Backward(chunk))
        self.live.discard(index)
        self.stored.discard(index)
        if chunk.spine is not None:
            self.pop(chunk.start)

    def attach(self, sequences: Iterable[int]) -> None:
        due = tuple(sequences)
        if due:
            self.ops.append(Attach(due))

    def pop(self, depth: int) -> None:
        """Emit a pop down to `depth`, if the stack is deeper."""
        if self.depth <= depth:
            return
        spine = self.chunks[self.stacked[-1]].spine
        assert spine is not None
        self.ops.append(Pop(Slice(spine.sequence, depth, self.depth)))
        self.depth = depth
        while self.stacked and self.chunks[self.stacked[-1]].start >= depth:
            self.level[self.stacked.pop()] = -1

    def _sequences_ending(self) -> list[list[int]]:
        """Return, for every chunk, the sequences whose last token it holds."""
        tree = self.tree
        owner = np.empty(tree.num_rows, np.int64)
        for index, chunk in enumerate(self.chunks):
            for start, stop in tree.chunk_ranges(chunk):
                owner[start:stop] = index
        ending: list[list[int]] = [[] for _ in self.chunks]
        last_row = (tree.row + tree.stop - tree.start - 1).tolist()
        for sequence, node in enumerate(tree.end_node.tolist()):
            if node >= 0:
                ending[owner[last_row[node]]].append(sequence)
        return ending

    def _empty(self) -> list[int]:
        empty: list[int] = (self.tree.lengths == 0).nonzero()[0].tolist()
        return empty


def _check(tree: PrefixTree, options: Options, mode: str) -> None:
    if mode not in MODES:
        raise PlanError("unknown mode", expected=", ".join(MODES), got=repr(mode))
    if options.strategy == "auto":
        raise PlanError("a schedule needs a chosen strategy", expected="packed, dfs, vanilla or dense", got="auto")
    if options.strategy == "dense" and tree.shared:
        raise PlanError("dense does not share prefixes", expected="PrefixTree.build(..., share=False)", got="a tree")
