"""Verify schedules: replay them without tensors and reject any that breaks a rule. Every schedule passes here."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from itertools import pairwise
from typing import NoReturn

import numpy as np

from dta_compile.errors import ScheduleError
from dta_compile.plan.division.pieces import Dealing
from dta_compile.plan.interpret import Interpreter
from dta_compile.plan.one_tree import chunks_of
from dta_compile.plan.schedule import Anchor, Attach, Backward, Forward, Op, Pop, Restore, Schedule, extent
from dta_compile.plan.simulate import Simulation, by_group, simulate
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.prefix_tree import IntArray, PrefixTree
from dta_compile.plan.tree.segments import segments

_WINDOW = 6  # rows of the listing shown on either side of the offending one


def verify(
    tree: PrefixTree,
    schedule: Schedule,
    head_starts: IntArray | None = None,
    states: bool = False,
    dealing: Dealing | None = None,
    rank: int = 0,
) -> Simulation:
    """Like `check`; return the counts of the schedule (see `simulate`)."""
    check(tree, schedule, states, dealing, rank)
    return simulate(tree, schedule, head_starts)


def check(
    tree: PrefixTree, schedule: Schedule, states: bool = False, dealing: Dealing | None = None, rank: int = 0
) -> None:
    """Replay `schedule` against `tree`.

    Args:
        states: the model has running states, so every chunk must find the state at its start on the stack.
        dealing: pieces of the tree over ranks, of which the schedule runs those of `rank`.

    Raises:
        ScheduleError: a rule is broken; shows the rule, what was expected and found, and the listing around the
            offending line, which is marked `>>`.
        PlanError: the pieces of `dealing` do not divide the tree, or read what comes later.
    """
    if dealing is not None:
        dealing.check()
        for _, kind in schedule.kinds:
            _PieceReplay(dealing, rank, kind).run()
        return
    if schedule.groups:
        _check_groups(tree, schedule)
        for part, run, _ in by_group(tree, schedule):
            check(part, run, states)
        return
    if schedule.stride > 1:
        _check_stride(tree, schedule)
    for _, kind in schedule.kinds:
        replay = _Replay(tree, kind, states)
        if kind.chunks != schedule.chunks:
            expected, got = (" ".join(map(str, side.chunks)) for side in (schedule, kind))
            replay.fail("all parts of a sweep of stages run the same chunks", expected, got)
        replay.run()


def _check_groups(tree: PrefixTree, schedule: Schedule) -> None:
    replay = _Replay(tree, dataclasses.replace(schedule, ops=()), False)
    if (
        schedule.mode != "transparent"
        or not replay.by_stages
        or schedule.keeps
        or schedule.others
        or schedule.stride > 1
    ):
        replay.fail("groups are swept by stages and keep nothing", "transparent mode, anchors", str(schedule)[:200])
    grouped = sorted(sequence for group in schedule.groups for sequence in group.sequences)
    if grouped != list(range(len(tree.lengths))):
        got = " ".join(f"s{sequence}" for sequence in grouped)
        replay.fail("every sequence is in one group", f"s0..s{len(tree.lengths) - 1}", got or "none")


def _check_stride(tree: PrefixTree, schedule: Schedule) -> None:
    last = schedule.parts - 1
    others = [schedule.of_part(run.first) for run in schedule.others if run.first < last]
    keeps = any(kind.keeps for kind in (schedule.kinds[0][1], *others))
    if schedule.mode != "transparent" or schedule.sweep != "stages" or keeps:
        replay = _Replay(tree, dataclasses.replace(schedule, ops=()), False)
        replay.fail(
            "parts of a stretch are swept by stages and keep nothing", "transparent mode, anchors", f"{schedule}"[:200]
        )


class _Replay(Interpreter):
    """Interpreter that checks every op before it runs; arrays have one entry per tree row unless stated otherwise.

    The rows with waiting gradients, not yet backpropagated, are always the first `gradient_depth` tokens of the stack.
    """

    def __init__(self, tree: PrefixTree, schedule: Schedule, has_states: bool) -> None:
        super().__init__(tree, schedule)
        self.tree = tree
        self.sequence = 0  # that errors name while the stack is empty
        self.schedule, self.has_states = schedule, has_states
        self.by_stages = schedule.sweep == "stages"
        self.crossed = frozenset(schedule.chunks) if self.by_stages else frozenset()
        self.gradient_depth = 0
        self.written = np.zeros(tree.num_rows, np.bool_)
        self.finished = np.zeros(tree.num_rows, np.bool_)  # backpropagated
        self.graph = np.full(tree.num_rows, -1)  # position of the op whose live graph covers the row, -1 for none
        self.has_attached = False
        self.attached = np.zeros(len(tree.lengths), np.bool_)  # per sequence
        self.complete = np.zeros(len(tree.stop), np.bool_)  # per node: all outputs of its path are written
        self.last_row = tree.row + tree.stop - tree.start - 1  # per node
        self.parent_row = np.arange(-1, tree.num_rows - 1)  # -1 for the first tokens
        self.parent_row[tree.row] = np.where(tree.parent < 0, -1, self.last_row[tree.parent])
        self.children = np.bincount(self.parent_row[self.parent_row >= 0], minlength=tree.num_rows)
        self.counts = np.zeros(tree.num_rows + 1, np.int64)  # scratch; the last entry is for row -1
        # Of every chunk that has been checked by itself: its rows, and the children inside the chunk of each.
        self.checked: dict[Chunk, tuple[IntArray, IntArray]] = {}
        self.open_children = self.children.copy()  # not backpropagated yet
        # Number of sequences that end at the row and are not attached yet.
        self.unattached = np.bincount(self.last_row[tree.end_node[tree.end_node >= 0]], minlength=tree.num_rows)

    def run(self) -> None:
        for op in self.schedule.ops:
            self.check(op)
            self.step(op)
        self.check_end()

    def check(self, op: Op) -> None:
        match op:
            case Attach(sequences):
                self.attach(sequences)
            case Pop(part):
                self.check_slice(part)
                self.pop(part)
            case Restore(part):
                self.check_slice(part)
                self.check_size(part.tokens)
                self.restore(part)
            case Anchor(chunk) | Forward(chunk):
                self.forward(op, chunk, self.check_chunk(chunk))
            case Backward(chunk):
                self.backward(chunk, self.check_chunk(chunk))

    def check_slice(self, part: Slice) -> None:
        lengths = self.tree.lengths
        if not 0 <= part.sequence < len(lengths):
            self.fail("slices name a sequence of the batch", f"s0..s{len(lengths) - 1}", str(part))
        if not 0 <= part.start < part.stop <= lengths[part.sequence]:
            self.fail("slices lie inside their sequence", f"part of [0:{lengths[part.sequence]}]", str(part))
        for depth in (part.start, part.stop):
            first, last = self.tree.unit_at(part.sequence, depth)
            if first < last:
                self.fail("tokens that read each other both ways are not cut", f"[{first}:{last}] whole", str(part))

    def check_size(self, tokens: int) -> None:
        if tokens > self.schedule.chunk_size:
            self.fail("chunks hold at most chunk_size tokens", f"<= {self.schedule.chunk_size}", f"{tokens}")

    def check_chunk(self, chunk: Chunk) -> IntArray:
        """Check a chunk by itself, and return its rows, slice after slice."""
        if chunk not in self.checked:
            self.checked[chunk] = self.check_slices(chunk)
        if self.by_stages and self.has_attached and chunk not in self.crossed:
            self.fail(
                "the second half of a sweep of stages runs chunks of the first, whose hidden states are there",
                ", ".join(map(str, list(self.crossed)[:4])),
                str(chunk),
            )
        return self.checked[chunk][0]

    def check_slices(self, chunk: Chunk) -> tuple[IntArray, IntArray]:
        if not chunk.slices:
            self.fail("a chunk has slices", "a spine or a branch", "neither")
        for part in chunk.slices:
            self.check_slice(part)
        self.check_size(chunk.tokens)
        rows = np.concatenate([self.tree.rows(part.sequence, part.start, part.stop) for part in chunk.slices])
        self.counts[rows] = numbers = np.arange(len(rows))
        if (self.counts[rows] != numbers).any():
            self.fail("slices of a chunk do not overlap", "distinct tokens", str(chunk))
        self.counts[rows] = 0
        inside = self.children_inside(rows)
        if chunk.branches:
            self.check_packed(chunk, rows, inside)
        return rows, inside

    def check_packed(self, chunk: Chunk, rows: IntArray, inside: IntArray) -> None:
        """Check that branches continue the stack or an earlier slice, and have all their descendants in the chunk."""
        first = chunk.slices[0]
        for part, segment in zip(chunk.slices, segments(self.tree, chunk), strict=True):
            if segment.parent < 0 and not (
                part.start == chunk.start and self.tree.same_path(first.sequence, part.sequence, part.start)
            ):
                self.fail(
                    "a branch continues the stack where the chunk starts, or an earlier slice; listed depth-first",
                    f"above {part} a token of the chunk, or s{first.sequence}[0:{chunk.start}]",
                    str(chunk),
                )
        outside = (self.children[rows] - inside)[chunk.spine.tokens if chunk.spine else 0 :]
        if outside.any():
            self.fail(
                "what continues a branch lies in its chunk",
                "whole subtrees beside the spine",
                f"{outside.sum()} continuations elsewhere",
            )

    def check_prefix(self, part: Slice) -> None:
        """Check that the stack holds the KV that `part` reads: all tokens of its path above it."""
        if part.start > self.depth or not self.tree.same_path(self.sequence, part.sequence, part.start):
            self.fail(
                "the stack holds the KV of the tokens above a chunk",
                f"s{part.sequence}[0:{part.start}] on the stack",
                self.stack(),
            )

    def check_push(self, part: Slice) -> None:
        """Check that the stack can be cut to the start of `part`, and `part` be pushed."""
        self.check_prefix(part)
        depth = part.start
        if depth < self.gradient_depth and self.tree.same_path(
            self.sequence, part.sequence, min(part.stop, self.gradient_depth)
        ):
            depth = part.stop  # recomputed KV of the same tokens keeps their waiting gradients
        self.check_gradients(depth)

    def check_state(self, chunk: Chunk) -> None:
        """Check that the stack holds the running state at a chunk's start; `check_prefix` has checked the path."""
        if not self.has_states or chunk.start == 0:
            return
        at = bisect_right(self.states, (chunk.start, math.inf))
        if at == 0 or self.states[at - 1][0] != chunk.start:
            depths = ", ".join(str(depth) for depth, _ in self.states[:at])
            self.fail(
                "the stack holds the running state at the start of a chunk",
                f"the state at depth {chunk.start} of s{chunk.slices[0].sequence}",
                f"states at {depths}" if depths else "no states",
            )

    def check_states(self, op: Anchor | Forward) -> None:
        """Check the depths of the running states that a chunk's spine keeps."""
        spine, states = op.chunk.spine, op.states
        if spine is None:
            self.fail("running states are kept of a spine", "no states, or a spine", str(op.chunk))
        if states[-1] > spine.stop or any(a >= b for a, b in pairwise((spine.start, *states))):
            self.fail(
                "running states are kept at depths of the spine",
                f"ascending, {spine.start} < depth <= {spine.stop}",
                ", ".join(map(str, states)),
            )

    def check_gradients(self, depth: int) -> None:
        if depth < self.gradient_depth:
            self.fail(
                "tokens leave the stack only after the backward that their KV gradients wait for",
                f"backward of s{self.sequence}[{depth}:{self.gradient_depth}] first",
                f"a cut to {depth} with gradients waiting up to {self.gradient_depth}",
            )

    def forward(self, op: Anchor | Forward, chunk: Chunk, rows: IntArray) -> None:
        if chunk.spine is None:
            self.check_prefix(chunk.slices[0])
        else:
            self.check_push(chunk.spine)
        self.check_state(chunk)
        if op.states:
            self.check_states(op)
        if isinstance(op, Forward):
            self.check_graph(chunk, rows)
            self.graph[rows] = self.position
        elif op.kv and (self.schedule.mode != "transparent" or chunk.spine is None or not op.out):
            self.fail(
                "KV is kept for a spine from the first to the second phase",
                "transparent mode, a spine, out",
                str(op.chunk),
            )
        else:
            self.check_results(op)
        self.write(op, rows)

    def write(self, op: Anchor | Forward, rows: IntArray) -> None:
        if op.out and self.has_attached and self.schedule.mode != "streaming":
            self.fail("outputs are written before the attach that hands them out", "no out", f"{op.chunk} out")
        if self.by_stages and not self.has_attached and (not op.out or self.written[rows].any()):
            rule = "the first half of a sweep of stages hands on the hidden states of every token once"
            self.fail(rule, "out, of other tokens than before", f"{op.chunk}{' out' * op.out}")
        self.written[rows] |= op.out

    def check_results(self, op: Anchor) -> None:
        if op.results and (not self.by_stages or self.schedule.mode != "transparent" or not op.out):
            self.fail(
                "results of attention are kept from the first to the second half of a sweep of stages",
                "transparent mode, a sweep of stages, out",
                str(op.chunk),
            )

    def check_graph(self, chunk: Chunk, rows: IntArray) -> None:
        if self.schedule.mode == "score":
            self.fail("scoring keeps no graphs", "anchor", "forward")
        if self.finished[rows].any():
            self.fail("every token is backpropagated once", "tokens before their backward", f"{chunk} is done")
        owner = int(self.graph[rows].max())
        if owner >= 0:
            got = f"a graph of {extent(self.schedule.ops[owner])}"
            self.fail("a token has one live graph", "no live graph", got)

    def restore(self, part: Slice) -> None:
        if self.kept.of(part) is None:
            self.fail("a restore copies from one spine that is kept", f"kept KV that covers {part}", self.graphs_text())
        self.check_push(part)

    def attach(self, sequences: tuple[int, ...]) -> None:
        if self.schedule.mode != "streaming" and (self.has_attached or self.finished.any()):
            rule = f"{self.schedule.mode} mode attaches once, before any backward"
            self.fail(rule, "one attach", "another one, or too late")
        self.has_attached = True
        if self.by_stages and self.depth:
            self.fail("other parts run between the halves of a sweep of stages", "an empty stack", self.stack())
        for sequence in sequences:
            if not 0 <= sequence < len(self.attached):
                self.fail("sequences are of the batch", f"s0..s{len(self.attached) - 1}", f"s{sequence}")
            if self.attached[sequence]:
                self.fail("every sequence is attached once", f"s{sequence} not attached yet", "attached before")
            self.check_written(sequence)
            self.attached[sequence] = True
            if self.tree.lengths[sequence]:
                self.unattached[self.last_row[self.tree.end_node[sequence]]] -= 1

    def check_written(self, sequence: int) -> None:
        node = int(self.tree.end_node[sequence])
        while node >= 0 and not self.complete[node]:
            outputs = self.written[self.tree.row[node] : self.last_row[node] + 1]
            if not outputs.all():
                self.fail(
                    "all outputs of a sequence are written before it is attached",
                    f"outputs of s{sequence}[0:{self.tree.lengths[sequence]}]",
                    f"none yet of token {self.tree.start[node] + int(outputs.argmin())}",
                )
            self.complete[node] = True
            node = int(self.tree.parent[node])

    def backward(self, chunk: Chunk, rows: IntArray) -> None:
        if self.schedule.mode == "score":
            self.fail("scoring runs nothing backward", "no backward", "backward")
        if chunk not in self.live:
            self.fail("backward consumes the graph of exactly its chunk", f"a graph of {chunk}", self.graphs_text())
        self.check_prefix(chunk.slices[0])
        self.check_state(chunk)
        # Sequences that end below the chunk were checked at the backward of their last token.
        if self.unattached[rows].any():
            self.fail(
                "backward comes after the attach of all sequences through the chunk",
                f"attach of {self.unattached_text(rows)} first",
                "not attached",
            )
        self.check_descendants(chunk, rows)
        if chunk.start >= self.gradient_depth:
            self.gradient_depth = chunk.start
        elif chunk.spine is not None:  # takes the gradients that wait on the stack from its start on
            if self.tree.row_at(self.sequence, chunk.start) != rows[0]:
                self.fail(
                    "a spine takes the KV gradients that wait at its place, so they must be its own",
                    f"backward of s{self.sequence}[{chunk.start}:{self.gradient_depth}] first",
                    f"gradients waiting up to {self.gradient_depth}",
                )
            self.gradient_depth = chunk.start
        self.finished[rows] = True
        self.graph[rows] = -1
        if chunk.start:
            above = self.parent_row[rows[0]]
            self.open_children[above] -= np.count_nonzero(self.parent_row[rows] == above)

    def check_descendants(self, chunk: Chunk, rows: IntArray) -> None:
        open_below = self.open_children[rows] - self.checked[chunk][1]
        if open_below.any():
            worst = int(rows[np.flatnonzero(open_below)[-1]])
            self.fail(
                "backward comes after the backward of everything below",
                f"no open branches below {chunk}",
                f"{open_below.sum()} open, the last below token {self.depth_of(worst)}",
            )

    def children_inside(self, rows: IntArray) -> IntArray:
        """Return, for every row of a chunk, the number of its children inside the chunk."""
        above = self.parent_row[rows]
        np.add.at(self.counts, above, 1)
        inside = self.counts[rows]
        self.counts[above] = 0
        return inside

    def depth_of(self, row: int) -> int:
        node = int(np.searchsorted(self.tree.row, row, side="right")) - 1
        return int(self.tree.start[node]) + row - int(self.tree.row[node])

    def pop(self, part: Slice) -> None:
        if part.stop != self.depth or not self.tree.same_path(self.sequence, part.sequence, self.depth):
            self.fail("pop takes what is on top of the stack", f"s{self.sequence}[..:{self.depth}]", str(part))
        self.check_gradients(part.start)

    def check_end(self) -> None:
        if self.depth:
            self.fail("the stack is empty at the end", "depth 0", self.stack())
        if self.live:
            self.fail("no graph is live at the end", "none", self.graphs_text())
        if self.results:
            self.fail("kept results of attention are used", "a forward of their chunk", str(next(iter(self.results))))
        if not self.attached.all():
            missing = np.flatnonzero(~self.attached)
            self.fail("every sequence is attached once", "all attached", f"s{missing[0]} is not ({len(missing)} such)")
        if self.schedule.mode != "score" and not self.finished.all():
            count = np.count_nonzero(~self.finished)
            self.fail("every token is backpropagated once", f"{len(self.finished)} tokens", f"{count} are left")

    def stack(self) -> str:
        return f"s{self.sequence}[0:{self.depth}]" if self.depth else "an empty stack"

    def graphs_text(self) -> str:
        return ", ".join(str(chunk) for chunk in list(self.live)[:4]) or "no live graph"

    def unattached_text(self, rows: IntArray) -> str:
        ends = self.tree.end_node[~self.attached]
        here = np.flatnonzero(~self.attached)[np.isin(self.last_row[ends], rows) & (ends >= 0)]
        return " ".join(f"s{sequence}" for sequence in here[:4])

    def fail(self, rule: str, expected: str, got: str) -> NoReturn:
        lines = self.schedule.lines()
        row = min(self.position + 1, len(lines))  # line 0 is the header
        lines.append("(end)")
        window = range(max(row - _WINDOW, 0), min(row + _WINDOW + 1, len(lines)))
        listing = "\n".join(f"  {'>>' if k == row else '  '} {k:>4}  {lines[k]}" for k in window)
        raise ScheduleError(f"illegal schedule: {rule}\n{listing}", expected=expected, got=got)


class _PieceReplay(_Replay):
    """Replay of the schedule of one rank, whose chunks are its pieces of a tree over ranks.

    Other ranks run the same ops on the pieces of the same round, so what a piece reads is there if its own round comes
    after all earlier ones; their rows count as done from the start.
    """

    def __init__(self, dealing: Dealing, rank: int, schedule: Schedule) -> None:
        super().__init__(dealing.tree, schedule, False)
        self.pieces = {chunk: number for number, chunk in enumerate(chunks_of(dealing, rank))}
        own = np.zeros(dealing.tree.num_rows, np.bool_)
        own[dealing.rows(rank)] = True
        self.others, self.written = ~own, ~own
        self.rounds: set[int] = set()  # whose states are there
        if schedule.chunks != tuple(self.pieces) or not self.by_stages:
            expected = " ".join(map(str, self.pieces)) or "no chunks"
            got = " ".join(map(str, schedule.chunks)) or "no chunks"
            self.fail(f"a sweep of stages runs the pieces of rank {rank}, in order", expected, got)

    def check_packed(self, chunk: Chunk, rows: IntArray, inside: IntArray) -> None:
        """Check nothing: branches of a piece hang from any depth of the path, and go on in other pieces."""

    def forward(self, op: Anchor | Forward, chunk: Chunk, rows: IntArray) -> None:
        number = self.pieces[chunk]
        if missing := set(range(number)) - self.rounds:
            expected, got = f"rounds 0 to {number - 1} before it", f"no states of round {min(missing)}"
            self.fail("a piece reads states of earlier rounds", expected, got)
        if op.states or (isinstance(op, Anchor) and op.kv):
            self.fail("states of a piece are exchanged, not kept", "no flags but out and results", str(op.chunk))
        if isinstance(op, Forward):
            self.check_graph(chunk, rows)
            self.graph[rows] = self.position
        else:
            self.check_results(op)
        self.write(op, rows)
        self.rounds.add(number)

    def attach(self, sequences: tuple[int, ...]) -> None:
        super().attach(sequences)
        self.finished |= self.others
        self.rounds = {self.pieces[chunk] for chunk in self.live}  # other parts run in between

    def backward(self, chunk: Chunk, rows: IntArray) -> None:
        number = self.pieces[chunk]
        if self.schedule.mode == "score":
            self.fail("scoring runs nothing backward", "no backward", "backward")
        if chunk not in self.live:
            self.fail("backward consumes the graph of exactly its chunk", f"a graph of {chunk}", self.graphs_text())
        if not self.attached.all():
            self.fail("backward comes after the attach of all sequences", "attach first", "not attached")
        for piece in self.crossed:
            if self.pieces[piece] > number and not self.finished[self.checked[piece][0]].all():
                what = "a piece waits for the gradients that later rounds have for its states"
                self.fail(what, "their backward first", str(piece))
        self.finished[rows] = True
        self.graph[rows] = -1

    def pop(self, part: Slice) -> None:
        self.fail("states above a piece are exchanged, not kept on a stack", "anchor, forward, backward", "pop")

    def restore(self, part: Slice) -> None:
        self.fail("states above a piece are exchanged, not kept on a stack", "anchor, forward, backward", "restore")
