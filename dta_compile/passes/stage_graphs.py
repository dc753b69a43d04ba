"""The graphs of a chunk between the passes: those of each kind of stage, and how stages hang together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import fx

from dta_compile.executable.chunk import Generated
from dta_compile.executable.pieces import Piece
from dta_compile.passes.chunk_bytes import Bytes, ChunkSizes, Peaks

__all__ = ["ChunkStages", "KeptValue", "Memory", "StageGraphs", "StageOfChunk"]

GRAPHS = ("cache_only", "forward_only", "forward", "backward")

# The memory that a value is in: "read" and "written" with a position (or, in a chunk, a slot), "saved" with a name.
Memory = tuple[str | int, ...]


class KeptValue(NamedTuple):
    """A value that is kept for the backward of a stage.

    Attributes:
        place: ("read", i), ("written", i) or ("saved", i): where the forward has it.
        memory: what it lies in.
        bytes: of that memory, if it belongs to a chunk; of parameters none.
        head_dim: the dimension that runs over head rows.
    """

    place: tuple[str, int]
    memory: Memory
    bytes: Bytes
    head_dim: int | None


@dataclasses.dataclass(frozen=True)
class StageGraphs:
    """A kind of stage. Its graphs take `path`, then what the stage reads.

    Attributes:
        cache_only: writes the states of its mixers to the path; returns nothing.
        forward_only: writes states, returns what the stage writes.
        forward: writes states, returns what the stage writes, then the saved values.
        backward: takes `path`, the `kept` values and gradients of the `differentiated` ones, and (after the accumulate
            pass) accumulators for the `parameters` among the `gradients`; returns the other gradients.
        kept: in the order of `backward`.
        states: for each mixer, where its states are among the kept values.
        differentiated: positions of what is written whose gradients are taken.
        gradients: positions of what is read that gets a gradient; `parameters`: those of them that are parameters.
        sources: for each of `gradients`, the positions of what is written that it comes from.
        written: the memory of what is written, and its bytes, if it belongs to a chunk.
        state_bytes: what its mixers keep on the path, per token.
        separable: the backward may be run for some of the head rows.
        transposed: positions of what is read that the graphs but the backward take transposed, as products read it.
        working: per graph, the bytes that it allocates at its peak. The backward's includes the values that it is
            handed and frees.
    """

    cache_only: fx.GraphModule
    forward_only: fx.GraphModule
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    kept: tuple[KeptValue, ...] = ()
    states: tuple[tuple[int, ...], ...] = ()
    differentiated: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    sources: tuple[frozenset[int], ...] = ()
    written: tuple[tuple[Memory, Bytes], ...] = ()
    state_bytes: float = 0.0
    separable: bool = True
    transposed: tuple[int, ...] = ()
    working: dict[str, Peaks] = dataclasses.field(default_factory=dict)

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The graphs that there are, by name; without a backward, `forward` is `forward_only`."""
        return {name: module for name in GRAPHS if (module := getattr(self, name)) is not None}

    @property
    def modules(self) -> list[fx.GraphModule]:
        """The graphs, each once."""
        return list(dict.fromkeys(self.graphs.values()))


class StageOfChunk(NamedTuple):
    """A stage: the position of its kind, the numbers of its mixers' layers, and the slots that it reads and writes."""

    kind: int
    layers: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ChunkStages:
    """The stages of a chunk, in order, and their kinds.

    Attributes:
        sizes: of values, in terms of tokens and head rows.
        inputs: how many inputs a chunk has, which are the first slots.
        whole: how many of these do not run over tokens or head rows, the first ones: parameters and constants.
        of_head: the inputs that run over head rows.
        outputs: slots of the frontier values.
        differentiated: positions of the frontier values whose gradients the backward takes.
        generated: the code that graphs call, if any is generated for them.
        bodies: of the pieces that graphs call.
    """

    kinds: tuple[StageGraphs, ...]
    stages: tuple[StageOfChunk, ...]
    sizes: ChunkSizes
    inputs: int
    whole: int
    of_head: frozenset[int]
    outputs: tuple[int, ...]
    differentiated: tuple[int, ...]
    generated: Generated | None = None
    bodies: Mapping[Piece, fx.GraphModule] = dataclasses.field(default_factory=dict)

    @property
    def modules(self) -> list[fx.GraphModule]:
        """The graphs of all kinds, each once."""
        return list(dict.fromkeys(module for kind in self.kinds for module in kind.modules))

    def of_kinds(self) -> Iterator[tuple[StageOfChunk, StageGraphs]]:
        """Every stage with its graphs."""
        return ((stage, self.kinds[stage.kind]) for stage in self.stages)

    def whole_reads(self, stage: StageOfChunk) -> set[int]:
        """The positions of what a stage reads of parameters and constants."""
        return {i for i, slot in enumerate(stage.reads) if slot < self.whole}

    @functools.cached_property
    def memory_of_slots(self) -> dict[int, tuple[Memory, Bytes]]:
        """By slot that a stage writes, the memory that it is in, and its bytes: a stage may write a view of what it
        reads."""
        found: dict[int, tuple[Memory, Bytes]] = {}
        for number, (stage, kind) in enumerate(self.of_kinds()):
            for slot, (memory, size) in zip(stage.writes, kind.written, strict=True):
                found[slot] = self._memory(number, memory, found), size
        return found

    def _memory(self, number: int, memory: Memory, known: dict[int, tuple[Memory, Bytes]]) -> Memory:
        """The memory of a value of a stage, as a memory of the chunk."""
        kind, place = memory
        stage = self.stages[number]
        if kind == "saved":
            return ("saved", number, place)
        slot = (stage.reads if kind == "read" else stage.writes)[int(place)]
        return known[slot][0] if kind == "read" and slot in known else ("slot", slot)

    @functools.cached_property
    def kept_of_stages(self) -> list[list[KeptValue]]:
        """What each stage's backward takes, with slots for positions and memory of the chunk; of saved values the
        stage's own numbers, after its number."""
        found = []
        for number, (stage, kind) in enumerate(self.of_kinds()):
            slots = {"read": stage.reads, "written": stage.writes}
            found.append(
                [
                    value._replace(
                        place=(
                            ("slot", slots[value.place[0]][value.place[1]])
                            if value.place[0] in slots
                            else (f"saved {number}", value.place[1])
                        ),
                        memory=self._memory(number, value.memory, self.memory_of_slots),
                    )
                    for value in kind.kept
                ]
            )
        return found

    @functools.cached_property
    def kept_bytes(self) -> Bytes:
        """What one chunk keeps for its backward."""
        memory = {value.memory: value.bytes for values in self.kept_of_stages for value in values}
        return functools.reduce(Bytes.plus, memory.values(), Bytes())
