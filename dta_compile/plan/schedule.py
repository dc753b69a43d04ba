"""Schedules: a closed set of ops that the runtime executes, and their text form, which parses back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

from dta_compile.errors import ScheduleError
from dta_compile.plan.tree.chunk import Chunk, Slice

MODES = ("score", "transparent", "streaming")
SWEEPS = ("chunks", "stages")


@dataclasses.dataclass(frozen=True, slots=True)
class Anchor:
    """Run `chunk` forward without a graph, and push the KV of its spine onto the stack.

    Attributes:
        out: write its outputs.
        kv: keep the KV of its spine for `Restore` until the chunk's backward.
        states: ascending depths of the spine, `start < depth <= stop`, at which the running state of recurrent mixers
            (after the first `depth` tokens of the path) is pushed too, and kept wherever the KV is.
        results: keep the results of attention (output and log-sum-exps) for the chunk's next `Forward`, which then
            does not run it again.
    """

    chunk: Chunk
    out: bool = False
    kv: bool = False
    states: tuple[int, ...] = ()
    results: bool = False

    @property
    def keeps(self) -> bool:
        """Whether KV or results of attention are kept for the second phase."""
        return self.kv or self.results

    @property
    def graph(self) -> str:
        """The graph of the chunk that it runs."""
        return "forward_only" if self.out else "cache_only"


@dataclasses.dataclass(frozen=True, slots=True)
class Forward:
    """Like `Anchor`, but keep the graph, the KV and the running states until the chunk's `Backward`."""

    chunk: Chunk
    out: bool = False
    states: tuple[int, ...] = ()
    graph: ClassVar[str] = "forward"


@dataclasses.dataclass(frozen=True, slots=True)
class Attach:
    """Make the losses of `sequences` due; all their outputs have been written."""

    sequences: tuple[int, ...]
    graph: ClassVar[str] = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Backward:
    """Consume the graph of `chunk`, and add the gradients of the KV that it read to the stack below it.

    Takes the gradients of the spine's KV off the stack. Running states likewise: the state at the chunk's start gets a
    gradient, and gradients waiting for states of the spine are taken.
    """

    chunk: Chunk
    graph: ClassVar[str] = "backward"


@dataclasses.dataclass(frozen=True, slots=True)
class Pop:
    """Take `part` off the top of the stack."""

    part: Slice
    graph: ClassVar[str] = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Restore:
    """Copy the KV of `part`, a part of the spine of a kept chunk (graph or KV), onto the top of the stack.

    Running states that the chunk keeps at depths `part.start < depth <= part.stop` are restored too.
    """

    part: Slice
    graph: ClassVar[str] = ""


Op = Anchor | Forward | Attach | Backward | Pop | Restore


class PartOps(NamedTuple):
    """Ops of the consecutive parts `[first, stop)`, counted from 0, in a sweep of stages."""

    first: int
    stop: int
    ops: tuple[Op, ...]


class GroupOps(NamedTuple):
    """Ops of a group of sequences, over the tree of these alone (see `PrefixTree.of`)."""

    sequences: tuple[int, ...]
    ops: tuple[Op, ...]


_KINDS: dict[str, type[Op]] = {
    kind.__name__.lower(): kind for kind in (Anchor, Forward, Attach, Backward, Pop, Restore)
}
MOST_SEQUENCES = 2**24  # in a run such as s0..s9: bounds what a line of text can allocate
_FLAGS = ("out", "kv", "results")  # words after a chunk, in this order
_STATES = "states@"  # prefix of the list of depths, after the flags
_HEADER = "# dta schedule strategy={strategy} order={order} mode={mode} chunk_size={chunk_size}"
_BY_STAGES, _STRIDE = " sweep=stages", " stride="
_PARTS = "parts {}..{} of {}:"  # the line before ops that only these parts run
_GROUP = "group {}:"  # the line before the ops of a group
_HEADER_PATTERN = re.compile(
    rf"# dta schedule strategy=(\S+) order=(\S+) mode=(\S+) chunk_size=([1-9][0-9]{{0,17}})"
    rf"(?:({_BY_STAGES})(?:{_STRIDE}([1-9][0-9]{{0,8}}))?)?"
)
_PARTS_PATTERN = re.compile(r"parts ([0-9]{1,9})\.\.([0-9]{1,9}) of ([0-9]{1,9}):")
_SLICE_PATTERN = re.compile(r"s([0-9]{1,18})\[([0-9]{1,18}):([0-9]{1,18})\]")
_STATES_PATTERN = re.compile(_STATES + r"([0-9]{1,18}(?:,[0-9]{1,18})*)")
_SEQUENCES_PATTERN = re.compile(r"s([0-9]{1,18})(?:\.\.s([0-9]{1,18}))?")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Ops in order of execution.

    The stack holds the KV of one root path, depths `[0, depth)`. `anchor`, `forward` and `restore` of a slice with
    start < depth first cut the stack to that start; afterwards `depth` is the slice's stop. The running state of a
    recurrent mixer cannot be sliced by depth, so the stack holds snapshots at some depths in `(0, depth]`: a chunk that
    starts at a depth above 0 reads the state there, in its forward and in its backward (see `with_states`).

    In a sweep of `stages` the schedule is that of one *part* of the model: the ops up to the attach op run for the
    first part (embeddings), then for each layer, then for the head; the ops after it run for the parts in reverse.
    Hidden states pass from part to part and are kept for every chunk of the first half; stack, graphs and gradient sums
    exist for one part at a time. Some parts may have ops of their own on the same chunks, to keep more or less.

    Where hidden states of all parts would take too much memory, the sweep runs over groups of subtrees: each group has
    a schedule of its own, over the tree of its sequences alone, so that groups run again what they share. All groups go
    through all parts to write their outputs. Then, from the last group to the first, the group's second half runs;
    before it, the first half again for the hidden states, which only the last group still has. Nothing is kept from
    group to group but sums of gradients.

    With a stride, hidden states are kept where a stretch of that many parts begins (see `stretches`). Before a stretch
    goes backward, the first half runs again for all its parts but the last, which makes those in between.

    Attributes:
        strategy: planner strategy that made it.
        order: leaf order that it follows.
        mode: "score" (outputs only), "transparent" (all outputs, one attach, then backward) or "streaming" (losses
            attached as their last tokens are reached).
        chunk_size: most tokens of a chunk that is run or restored.
        sweep: "chunks" (each op runs all layers) or "stages".
        parts: number of parts; 1 where all run the same ops.
        others: runs of parts whose ops differ from `ops`, ascending.
        groups: groups of subtrees, whose ops together are `ops`; none: all sequences are swept at once.
        stride: parts of a stretch; 1: what passes between parts is kept for all of them.
    """

    ops: tuple[Op, ...]
    strategy: str
    order: str
    mode: str
    chunk_size: int
    sweep: str = "chunks"
    parts: int = 1
    others: tuple[PartOps, ...] = ()
    groups: tuple[GroupOps, ...] = ()
    stride: int = 1

    def in_groups(self, groups: Iterable[GroupOps]) -> Schedule:
        """Return this schedule with the ops of groups in place of its own."""
        groups = tuple(groups)
        return dataclasses.replace(self, ops=tuple(op for group in groups for op in group.ops), groups=groups)

    def of_group(self, number: int) -> Schedule:
        """Return the schedule of a group, counted from 0."""
        return dataclasses.replace(self, ops=self.groups[number].ops, groups=())

    def with_parts(self, numbers: Sequence[tuple[int, Schedule]]) -> Schedule:
        """Return this schedule with other ops for some parts: `(number of parts, schedule)` from the first part on."""
        runs: list[PartOps] = []
        for number, schedule in numbers:
            first = runs[-1].stop if runs else 0
            if number and runs and runs[-1].ops == schedule.ops:
                runs[-1] = runs[-1]._replace(stop=first + number)
            elif number:
                runs.append(PartOps(first, first + number, schedule.ops))
        most = max(runs, key=lambda run: run.stop - run.first)
        others = tuple(run for run in runs if run is not most)
        return dataclasses.replace(self, ops=most.ops, parts=runs[-1].stop if others else 1, others=others)

    def of_part(self, number: int) -> Schedule:
        """Return the ops of part `number`, counted from 0, as a schedule of all parts."""
        ops = next((run.ops for run in self.others if run.first <= number < run.stop), self.ops)
        return dataclasses.replace(self, ops=ops, parts=1, others=())

    def stretches(self, parts: int) -> list[range]:
        """Divide parts into stretches: each of the last two, then `stride` parts each towards the first.

        What the last two receive is needed first. They share the last layer, whose weights and gradients would be there
        while others run forward again. The first stretch takes in a single part that is left, the embedding.
        """
        last = parts - 1
        firsts = sorted({0, max(last, 0), *range(max(last - 1, 0), int(self.stride > 1), -self.stride)})
        return [range(*bounds) for bounds in pairwise([*firsts, parts])]

    @property
    def share_again(self) -> float:
        """Share of the parts that run forward again for what passes between parts."""
        if self.parts == 1:
            return 1 - 1 / self.stride
        return 1 - len(self.stretches(self.parts)) / self.parts

    @property
    def kinds(self) -> tuple[tuple[float, Schedule], ...]:
        """Distinct schedules of the parts, each with its share of the parts; that of most parts comes first."""
        shares = [((run.stop - run.first) / self.parts, self.of_part(run.first)) for run in self.others]
        rest = dataclasses.replace(self, parts=1, others=())
        return (1 - sum(share for share, _ in shares), rest), *shares

    @property
    def keeps(self) -> bool:
        """Whether activations of more than one chunk are kept from the first half to the second."""
        kept = [op for op in self.halves[0] if isinstance(op, Forward) or (isinstance(op, Anchor) and op.keeps)]
        others = [kind for _, kind in self.kinds[1:]] + [self.of_group(number) for number in range(len(self.groups))]
        return len(kept) > (self.sweep == "chunks") or any(other.keeps for other in others)

    @property
    def halves(self) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """Ops up to and including the first attach op, and the ops after it."""
        middle = next((i + 1 for i, op in enumerate(self.ops) if isinstance(op, Attach)), len(self.ops))
        return self.ops[:middle], self.ops[middle:]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Chunks of the first half, in order."""
        return tuple(op.chunk for op in self.halves[0] if isinstance(op, (Anchor, Forward)))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the listing: a header, the ops (below a line for each group), then those of parts that have others."""
        header = _HEADER.format(strategy=self.strategy, order=self.order, mode=self.mode, chunk_size=self.chunk_size)
        header += _BY_STAGES if self.sweep == "stages" else ""
        lines = [header + (f"{_STRIDE}{self.stride}" if self.stride > 1 else "")]
        for group in self.groups:
            lines += [_GROUP.format(" ".join(_sequence_runs(group.sequences))), *map(format_op, group.ops)]
        lines += [] if self.groups else map(format_op, self.ops)
        for run in self.others:
            lines += [_PARTS.format(run.first, run.stop - 1, self.parts), *map(format_op, run.ops)]
        return lines

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse a schedule, so that `parse(str(s)) == s`; blank lines and comment lines (`#`) are skipped.

        Raises:
            ScheduleError: bad syntax; names the line, what was expected and what was found.
        """
        if not isinstance(text, str):
            raise ScheduleError("a schedule is text", expected="a string", got=type(text).__name__)
        lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        number, header = lines[0] if lines else (1, "")
        match = _HEADER_PATTERN.fullmatch(header)
        if not match:
            raise _syntax_error("a schedule has no header", number, header, _HEADER, header)
        strategy, order, mode, chunk_size, by_stages, stride = match.groups()
        if mode not in MODES:
            raise _syntax_error("unknown mode", number, header, ", ".join(MODES), mode)
        rows = [(number, line) for number, line in lines[1:] if not line.startswith("#")]
        if by_stages and any(line.startswith("group") for _, line in rows):
            made = cls((), strategy, order, mode, int(chunk_size), "stages", stride=int(stride or 1))
            return made.in_groups(_parse_groups(rows))
        heads = [i for i, (_, line) in enumerate(rows) if by_stages and line.startswith("parts ")]
        ops, *others = (
            tuple(_parse_op(*row) for row in rows[start + (start in heads) : stop])
            for start, stop in pairwise([0, *heads, len(rows)])
        )
        parts, named = _parse_parts([rows[i] for i in heads])
        runs = tuple(PartOps(*run, ops) for run, ops in zip(named, others, strict=True))
        sweep = "stages" if by_stages else "chunks"
        return cls(ops, strategy, order, mode, int(chunk_size), sweep, parts, runs, stride=int(stride or 1))


def extent(op: Op) -> Chunk | Slice | None:
    """Return the chunk or slice that an op is about; None for an attach."""
    return None if isinstance(op, Attach) else op.part if isinstance(op, (Pop, Restore)) else op.chunk


def format_op(op: Op) -> str:
    """Format an op as a line of the listing."""
    words = list(_sequence_runs(op.sequences)) if isinstance(op, Attach) else [str(extent(op))]
    words += [flag for flag in _FLAGS if getattr(op, flag, False)]
    if states := getattr(op, "states", ()):
        words.append(_STATES + ",".join(map(str, states)))
    return f"{type(op).__name__.lower():<8} {' '.join(words)}".rstrip()


def _sequence_runs(sequences: Iterable[int]) -> Iterator[str]:
    """Yield runs of consecutive sequences, such as `s0..s15 s18`; runs of one or two are spelled out."""
    run: list[int] = []
    for sequence in [*sequences, -1]:
        if run and sequence != run[-1] + 1:
            yield from [f"s{run[0]}..s{run[-1]}"] if len(run) > 2 else [f"s{s}" for s in run]
            run = []
        run.append(sequence)


def _parse_parts(rows: Sequence[tuple[int, str]]) -> tuple[int, list[tuple[int, int]]]:
    """Parse `parts` lines: return the number of parts and the `(first, stop)` of every run."""
    runs: list[tuple[int, int]] = []
    parts = 1
    for number, line in rows:
        match = _PARTS_PATTERN.fullmatch(line)
        first, last, of = map(int, match.groups()) if match else (0, 0, 0)
        if not (runs[-1][1] if runs else 0) <= first <= last < of or (runs and of != parts):
            raise _syntax_error("not a run of parts", number, line, "parts <first>..<last> of <all>:, ascending", line)
        runs.append((first, last + 1))
        parts = of
    return parts, runs


def _parse_groups(rows: Sequence[tuple[int, str]]) -> Iterator[GroupOps]:
    """Parse `group` lines, each followed by its ops; the first line is one."""
    heads = [i for i, (_, line) in enumerate(rows) if line.startswith("group")]
    for head, stop in pairwise([0, *heads[1:], len(rows)]):
        number, line = rows[head]
        if not line.startswith("group") or not line.endswith(":"):
            raise _syntax_error("not a group of sequences", number, line, "group s0..s9 s12:, before its ops", line)
        sequences = tuple(s for word in line[6:-1].split() for s in _parse_sequences(number, line, word))
        yield GroupOps(sequences, tuple(_parse_op(*row) for row in rows[head + 1 : stop]))


def _parse_op(number: int, line: str) -> Op:
    name, *words = line.split()
    kind = _KINDS.get(name)
    if kind is None:
        raise _syntax_error("unknown operation", number, line, ", ".join(_KINDS), name)
    if kind is Attach:
        return Attach(tuple(s for word in words for s in _parse_sequences(number, line, word)))
    if not words:
        raise _syntax_error("an operation without a chunk", number, line, f"{name} s0[0:1]", line)
    body, flags = words[0], words[1:]
    known = [flag for flag in _FLAGS if flag in kind.__dataclass_fields__]
    more: dict[str, object] = {}
    if "states" in kind.__dataclass_fields__ and flags and flags[-1].startswith(_STATES):
        more["states"] = _parse_states(number, line, flags.pop())
    if flags != [flag for flag in known if flag in flags]:
        raise _syntax_error("unknown words after a chunk", number, line, " ".join([name, body, *known]), line)
    if kind in (Pop, Restore):
        return kind(_parse_slice(number, line, body))
    return kind(_parse_chunk(number, line, body), **dict.fromkeys(flags, True), **more)  # type: ignore[arg-type]


def _parse_chunk(number: int, line: str, word: str) -> Chunk:
    spine, *branches = word.split("+")
    if not spine and not branches:
        raise _syntax_error("a chunk without slices", number, line, "s0[0:1]+s1[0:1] or +s1[0:1]", word)
    return Chunk(
        _parse_slice(number, line, spine) if spine else None,
        tuple(_parse_slice(number, line, branch) for branch in branches),
    )


def _parse_states(number: int, line: str, word: str) -> tuple[int, ...]:
    match = _STATES_PATTERN.fullmatch(word)
    if not match:
        raise _syntax_error("not depths of running states", number, line, f"{_STATES}<depth>,<depth>,...", word)
    return tuple(map(int, match[1].split(",")))


def _parse_slice(number: int, line: str, word: str) -> Slice:
    match = _SLICE_PATTERN.fullmatch(word)
    if not match:
        raise _syntax_error("not a slice of a sequence", number, line, "s<sequence>[<start>:<stop>]", word)
    part = Slice(*map(int, match.groups()))
    if part.tokens < 1:
        raise _syntax_error("a slice is empty", number, line, "s<sequence>[<start>:<stop>] with start < stop", word)
    return part


def _parse_sequences(number: int, line: str, word: str) -> range:
    match = _SEQUENCES_PATTERN.fullmatch(word)
    if not match:
        raise _syntax_error("not a run of sequences", number, line, "s<first> or s<first>..s<last>", word)
    first, last = int(match[1]), int(match[2] or match[1])
    if last - first >= MOST_SEQUENCES:
        raise _syntax_error("a run of too many sequences", number, line, f"at most {MOST_SEQUENCES}", word)
    if last < first:
        raise _syntax_error("a run of sequences is empty", number, line, "s<first>..s<last> with first <= last", word)
    return range(first, last + 1)


def _syntax_error(what: str, number: int, line: str, expected: str, got: str) -> ScheduleError:
    return ScheduleError(what, where=f"line {number}: {line}", expected=expected, got=got or "nothing")
