"""Schedules: the closed set of operations that the runtime executes, with a text form that parses back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from dta_compile.errors import ScheduleError

__all__ = [
    "MODES",
    "Anchor",
    "Attach",
    "Backward",
    "Chunk",
    "Forward",
    "Op",
    "Pop",
    "Restore",
    "Schedule",
    "Slice",
    "chunk_tokens",
    "format_chunk",
    "format_op",
]

MODES = ("score", "transparent", "streaming")


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """The tokens at depths `[start, stop)` of the path of `sequence`; printed `s3[100:612]`."""

    sequence: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"s{self.sequence}[{self.start}:{self.stop}]"


Chunk = tuple[Slice, ...]
"""What one op runs: slices that hang below one point of the stack, joined by `+` in print. One slice today."""


@dataclasses.dataclass(frozen=True, slots=True)
class Anchor:
    """Run `chunk` forward without a graph; its KV becomes the top of the stack. `out`: its outputs are written."""

    chunk: Chunk
    out: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Forward:
    """As `Anchor`, keeping the graph until the chunk's `Backward`."""

    chunk: Chunk
    out: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Attach:
    """The losses of `sequences` become due: all their outputs have been written."""

    sequences: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Backward:
    """Consume the graph of `chunk`; the gradients of the KV it read are added to the stack below it."""

    chunk: Chunk


@dataclasses.dataclass(frozen=True, slots=True)
class Pop:
    """Take `chunk` off the top of the stack."""

    chunk: Chunk


@dataclasses.dataclass(frozen=True, slots=True)
class Restore:
    """Copy the KV of `chunk`, which a kept graph covers, onto the top of the stack."""

    chunk: Chunk


Op = Anchor | Forward | Attach | Backward | Pop | Restore

_KINDS: dict[str, type[Op]] = {
    kind.__name__.lower(): kind for kind in (Anchor, Forward, Attach, Backward, Pop, Restore)
}
_HEADER = "# dta schedule strategy={strategy} order={order} mode={mode} chunk_size={chunk_size}"
_HEADER_PATTERN = re.compile(r"# dta schedule strategy=(\S+) order=(\S+) mode=(\S+) chunk_size=([1-9]\d*)")
_SLICE_PATTERN = re.compile(r"s(\d+)\[(\d+):(\d+)\]")
_SEQUENCES_PATTERN = re.compile(r"s(\d+)(?:\.\.s(\d+))?")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Operations in the order of execution.

    The stack holds the KV of one root path, depths `[0, depth)`. `anchor`, `forward` and `restore` of a slice that
    starts above the stack's top first cut the stack to its start; then depth is the slice's stop.

    Attributes:
        ops: the operations.
        strategy: planner strategy that made it.
        order: leaf order that it follows.
        mode: "score" (outputs only), "transparent" (all outputs, one attach, then backward) or "streaming" (losses
            attached as their last tokens are reached).
        chunk_size: most tokens of a chunk that is run or restored.
    """

    ops: tuple[Op, ...]
    strategy: str
    order: str
    mode: str
    chunk_size: int

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The listing: a header, then line `k` for `ops[k - 1]`."""
        header = _HEADER.format(strategy=self.strategy, order=self.order, mode=self.mode, chunk_size=self.chunk_size)
        return [header, *map(format_op, self.ops)]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Schedule from its text, `parse(str(s)) == s`; blank lines and lines of comment (`#`) may be added.

        Raises:
            ScheduleError: names the line, what was expected and what was found there.
        """
        lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        number, header = lines[0] if lines else (1, "")
        match = _HEADER_PATTERN.fullmatch(header)
        if not match:
            raise _syntax_error("a schedule has no header", number, header, _HEADER, header)
        strategy, order, mode, chunk_size = match.groups()
        if mode not in MODES:
            raise _syntax_error("unknown mode", number, header, ", ".join(MODES), mode)
        ops = tuple(_parse_op(number, line) for number, line in lines[1:] if not line.startswith("#"))
        return cls(ops, strategy, order, mode, int(chunk_size))


def chunk_tokens(chunk: Chunk) -> int:
    """Tokens of all slices of a chunk."""
    return sum(part.tokens for part in chunk)


def format_chunk(chunk: Chunk) -> str:
    """`s3[100:612]`, the slices joined by `+`."""
    return "+".join(map(str, chunk))


def format_op(op: Op) -> str:
    """One line of the listing."""
    body = " ".join(_sequence_runs(op.sequences)) if isinstance(op, Attach) else format_chunk(op.chunk)
    out = " out" if isinstance(op, (Anchor, Forward)) and op.out else ""
    return f"{type(op).__name__.lower():<8} {body}{out}".rstrip()


def _sequence_runs(sequences: Iterable[int]) -> Iterator[str]:
    """`s0..s15 s18`: runs of consecutive sequences, short ones spelled out."""
    run: list[int] = []
    for sequence in [*sequences, -1]:
        if run and sequence != run[-1] + 1:
            yield from [f"s{run[0]}..s{run[-1]}"] if len(run) > 2 else [f"s{s}" for s in run]
            run = []
        run.append(sequence)


def _parse_op(number: int, line: str) -> Op:
    name, *words = line.split()
    kind = _KINDS.get(name)
    if kind is None:
        raise _syntax_error("unknown operation", number, line, ", ".join(_KINDS), name)
    if kind is Attach:
        return Attach(tuple(s for word in words for s in _parse_sequences(number, line, word)))
    if not words:
        raise _syntax_error("an operation without a chunk", number, line, f"{name} s0[0:1]", line)
    chunk = tuple(_parse_slice(number, line, word) for word in words[0].split("+"))
    if kind in (Anchor, Forward) and words[1:] == ["out"]:
        return kind(chunk, True)
    if words[1:]:
        raise _syntax_error("too many words", number, line, f"{name} {words[0]}", line)
    return kind(chunk)  # type: ignore[arg-type]


def _parse_slice(number: int, line: str, word: str) -> Slice:
    match = _SLICE_PATTERN.fullmatch(word)
    if not match:
        raise _syntax_error("not a slice of a sequence", number, line, "s<sequence>[<start>:<stop>]", word)
    return Slice(*map(int, match.groups()))


def _parse_sequences(number: int, line: str, word: str) -> range:
    match = _SEQUENCES_PATTERN.fullmatch(word)
    if not match:
        raise _syntax_error("not a run of sequences", number, line, "s<first> or s<first>..s<last>", word)
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise _syntax_error("a run of sequences is empty", number, line, "s<first>..s<last> with first <= last", word)
    return range(first, last + 1)


def _syntax_error(what: str, number: int, line: str, expected: str, got: str) -> ScheduleError:
    return ScheduleError(what, where=f"line {number}: {line}", expected=expected, got=got or "nothing")
