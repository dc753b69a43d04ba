"""Replays schedules without tensors: `simulate` counts what one costs, `verify` also rejects what is illegal."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

import numpy as np

from dta_compile.errors import ScheduleError
from dta_compile.plan.prefix_tree import IntArray, PrefixTree
from dta_compile.plan.schedule import (
    Anchor,
    Attach,
    Backward,
    Chunk,
    Forward,
    Op,
    Pop,
    Restore,
    Schedule,
    Slice,
    chunk_tokens,
    format_chunk,
)

__all__ = ["Simulation", "simulate", "verify"]

_WINDOW = 6  # rows of the listing shown on either side of the offending one


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a legal schedule costs.

    Attributes:
        ops: operations.
        launches: chunk runs: anchor, forward and backward.
        forward_tokens: tokens run forward by anchor and forward.
        recomputed_tokens: tokens forwarded again: `forward_tokens` less the tokens of the tree.
        backward_tokens: tokens run backward.
        restored_tokens: tokens whose KV is copied back.
        peak_stack_tokens: most tokens on the stack.
        peak_live_tokens: most tokens whose graphs are live at one time.
        attention_pairs_forward, attention_pairs_backward: query-key pairs, the prefix and the query itself included.
    """

    ops: int
    launches: int
    forward_tokens: int
    recomputed_tokens: int
    backward_tokens: int
    restored_tokens: int
    peak_stack_tokens: int
    peak_live_tokens: int
    attention_pairs_forward: int
    attention_pairs_backward: int


def simulate(tree: PrefixTree, schedule: Schedule) -> Simulation:
    """Counts of a schedule that is known to be legal, in O(ops); `verify` is for the others."""
    tokens = dict.fromkeys((Anchor, Forward, Backward, Restore, Pop), 0)
    pairs = dict.fromkeys(tokens, 0)
    launches = depth = live = peak_depth = peak_live = 0
    for op in schedule.ops:
        if isinstance(op, Attach):
            continue
        kind, size = type(op), chunk_tokens(op.chunk)
        tokens[kind] += size
        pairs[kind] += sum(_attention_pairs(part) for part in op.chunk)
        launches += isinstance(op, (Anchor, Forward, Backward))
        live += size * isinstance(op, Forward) - size * isinstance(op, Backward)
        if isinstance(op, Pop):
            depth = op.chunk[0].start
        elif not isinstance(op, Backward):
            depth = op.chunk[-1].stop
        peak_depth, peak_live = max(peak_depth, depth), max(peak_live, live)
    forward_tokens = tokens[Anchor] + tokens[Forward]
    return Simulation(
        ops=len(schedule.ops),
        launches=launches,
        forward_tokens=forward_tokens,
        recomputed_tokens=forward_tokens - tree.num_rows,
        backward_tokens=tokens[Backward],
        restored_tokens=tokens[Restore],
        peak_stack_tokens=peak_depth,
        peak_live_tokens=peak_live,
        attention_pairs_forward=pairs[Anchor] + pairs[Forward],
        attention_pairs_backward=pairs[Backward],
    )


def verify(tree: PrefixTree, schedule: Schedule) -> Simulation:
    """Replays `schedule` against `tree` and returns its counts.

    Raises:
        ScheduleError: a rule is broken; shows the rule, what was expected and found, and the listing around the
            offending row, which is marked `>>`.
    """
    _Replay(tree, schedule).run()
    return simulate(tree, schedule)


def _attention_pairs(part: Slice) -> int:
    return (part.stop * (part.stop + 1) - part.start * (part.start + 1)) // 2


class _Replay:
    """The state that the rules of legality are about, one entry per tree row unless said otherwise.

    Rows not backpropagated yet on which gradients wait are a prefix of the stack: its first `waiting` tokens.
    """

    def __init__(self, tree: PrefixTree, schedule: Schedule) -> None:
        self.tree, self.schedule = tree, schedule
        self.position = 0  # in schedule.ops
        self.sequence, self.depth, self.waiting = 0, 0, 0  # the stack holds the first `depth` tokens of `sequence`
        self.written = np.zeros(tree.num_rows, np.bool_)
        self.finished = np.zeros(tree.num_rows, np.bool_)  # backpropagated
        self.graph = np.zeros(tree.num_rows, np.int32)  # number of the live graph that covers the row, 0 for none
        self.live: dict[Chunk, int] = {}  # chunk -> number of its graph
        self.graphs = 0
        self.attached = np.zeros(len(tree.lengths), np.bool_)  # per sequence
        self.complete = np.zeros(len(tree.stop), np.bool_)  # per node: all outputs of its path are written
        self.last_row = tree.row + tree.stop - tree.start - 1  # per node
        self.parent_row = np.arange(-1, tree.num_rows - 1)  # -1 for the first tokens
        self.parent_row[tree.row] = np.where(tree.parent < 0, -1, self.last_row[tree.parent])
        # Children not backpropagated yet, and sequences that end here and are not attached yet.
        self.open_children = np.bincount(self.parent_row[self.parent_row >= 0], minlength=tree.num_rows)
        self.unattached = np.bincount(self.last_row[tree.end_node[tree.end_node >= 0]], minlength=tree.num_rows)

    def run(self) -> None:
        for op in self.schedule.ops:
            self.step(op)
            self.position += 1
        self.check_end()

    def step(self, op: Op) -> None:
        if isinstance(op, Attach):
            return self.attach(op.sequences)
        part = self.check_chunk(op.chunk)
        if isinstance(op, Pop):
            return self.pop(part)
        self.check_size(part)
        rows = self.tree.rows(part.sequence, part.start, part.stop)
        if isinstance(op, Restore):
            return self.restore(part, rows)
        if isinstance(op, Backward):
            return self.backward(op.chunk, part, rows)
        self.forward(op, part, rows)

    def check_chunk(self, chunk: Chunk) -> Slice:
        if len(chunk) != 1:
            self.fail("a chunk is one slice", "a single slice", format_chunk(chunk))
        part, lengths = chunk[0], self.tree.lengths
        if not 0 <= part.sequence < len(lengths):
            self.fail("slices name a sequence of the batch", f"s0..s{len(lengths) - 1}", str(part))
        if not 0 <= part.start < part.stop <= lengths[part.sequence]:
            self.fail("slices lie inside their sequence", f"part of [0:{lengths[part.sequence]}]", str(part))
        return part

    def check_size(self, part: Slice) -> None:
        if part.tokens > self.schedule.chunk_size:
            self.fail("chunks hold at most chunk_size tokens", f"<= {self.schedule.chunk_size}", f"{part.tokens}")

    def check_prefix(self, part: Slice) -> None:
        """The KV that `part` reads, all tokens of its path above it, is on the stack."""
        if part.start > self.depth or not self.tree.same_path(self.sequence, part.sequence, part.start):
            self.fail(
                "the stack holds the KV of the tokens above a chunk",
                f"s{part.sequence}[0:{part.start}] on the stack",
                self.stack(),
            )

    def push(self, part: Slice) -> None:
        """Cut the stack to the start of `part`, then put `part` on top."""
        self.check_prefix(part)
        kept = part.start
        if kept < self.waiting and self.tree.same_path(self.sequence, part.sequence, min(part.stop, self.waiting)):
            kept = part.stop  # recomputed KV keeps the gradients that wait at its place
        self.check_waiting(kept)
        self.sequence, self.depth = part.sequence, part.stop

    def check_waiting(self, depth: int) -> None:
        if depth < self.waiting:
            self.fail(
                "tokens leave the stack only after the backward that their KV gradients wait for",
                f"backward of s{self.sequence}[{depth}:{self.waiting}] first",
                f"a cut to {depth} with gradients waiting up to {self.waiting}",
            )

    def forward(self, op: Anchor | Forward, part: Slice, rows: IntArray) -> None:
        self.push(part)
        if isinstance(op, Forward):
            if self.schedule.mode == "score":
                self.fail("scoring keeps no graphs", "anchor", "forward")
            if self.finished[rows].any():
                self.fail("every token is backpropagated once", "tokens before their backward", f"{part} is done")
            if self.graph[rows].any():
                self.fail("a token has one live graph", "no live graph", f"a graph of {self.owner(rows)}")
            self.graphs += 1
            self.live[op.chunk] = self.graphs
            self.graph[rows] = self.graphs
        if op.out:
            self.written[rows] = True

    def restore(self, part: Slice, rows: IntArray) -> None:
        owners = self.graph[rows]
        if owners[0] == 0 or (owners != owners[0]).any():
            self.fail("a restore copies from one kept graph", f"a live graph that covers {part}", self.graphs_text())
        self.push(part)

    def attach(self, sequences: tuple[int, ...]) -> None:
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

    def backward(self, chunk: Chunk, part: Slice, rows: IntArray) -> None:
        if self.schedule.mode == "score":
            self.fail("scoring runs nothing backward", "no backward", "backward")
        if chunk not in self.live:
            self.fail("backward consumes the graph of exactly its chunk", f"a graph of {part}", self.graphs_text())
        self.check_prefix(part)
        # Sequences that run on below the chunk were asked for by the backward of the tokens that they end with.
        if self.unattached[rows].any():
            self.fail(
                "backward comes after the attach of all sequences through the chunk",
                f"attach of {self.unattached_text(rows)} first",
                "not attached",
            )
        self.check_descendants(part, rows)
        if part.start >= self.waiting or self.tree.row_at(self.sequence, part.start) == rows[0]:
            self.waiting = part.start
        self.finished[rows] = True
        self.graph[rows] = 0
        del self.live[chunk]
        if part.start:
            self.open_children[self.parent_row[rows[0]]] -= 1

    def check_descendants(self, part: Slice, rows: IntArray) -> None:
        open_below = self.open_children[rows]
        open_below[:-1] -= 1  # the next token of the chunk itself
        if open_below.any():
            depth = part.start + int(np.flatnonzero(open_below)[-1])
            self.fail(
                "backward comes after the backward of everything below",
                f"no open branches below {part}",
                f"{open_below.sum()} open, the last below token {depth}",
            )

    def pop(self, part: Slice) -> None:
        if part.stop != self.depth or not self.tree.same_path(self.sequence, part.sequence, self.depth):
            self.fail("pop takes what is on top of the stack", f"s{self.sequence}[..:{self.depth}]", str(part))
        self.check_waiting(part.start)
        self.depth = part.start

    def check_end(self) -> None:
        if self.depth:
            self.fail("the stack is empty at the end", "depth 0", self.stack())
        if self.live:
            self.fail("no graph is live at the end", "none", self.graphs_text())
        if not self.attached.all():
            missing = np.flatnonzero(~self.attached)
            self.fail("every sequence is attached once", "all attached", f"s{missing[0]} is not ({len(missing)} such)")
        if self.schedule.mode != "score" and not self.finished.all():
            count = np.count_nonzero(~self.finished)
            self.fail("every token is backpropagated once", f"{len(self.finished)} tokens", f"{count} are left")

    def stack(self) -> str:
        return f"s{self.sequence}[0:{self.depth}]" if self.depth else "an empty stack"

    def graphs_text(self) -> str:
        return ", ".join(format_chunk(chunk) for chunk in list(self.live)[:4]) or "no live graph"

    def owner(self, rows: IntArray) -> str:
        number = self.graph[rows].max()
        return next(format_chunk(chunk) for chunk, n in self.live.items() if n == number)

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
