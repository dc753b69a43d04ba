"""Stages of a chunk between the passes `joint` and `emit`: the graphs of each kind, and the slots that stages share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from torch import fx

from dta_compile.executable.chunk import Generated
from dta_compile.executable.pieces import Piece
from dta_compile.passes.value_bytes import Bytes, ChunkSizes, Peaks, total

GRAPHS = ("cache_only", "forward_only", "forward", "backward")

# The storage of a value. In a stage: ("read" | "written" | "saved", position). In a chunk: ("slot", slot) or
# ("saved", number of the stage, position).
Memory = tuple[str | int, ...]


class KeptValue(NamedTuple):
    """A value that a stage keeps for its backward.

    Attributes:
        place: ("read", i), ("written", i) or ("saved", i): the input or output of the forward that it is.
        memory: its storage.
        bytes: the bytes of that storage if it belongs to a chunk; zero for parameters.
        head_dim: the dimension that runs over head rows; None if there is none.
    """

    place: tuple[str, int]
    memory: Memory
    bytes: Bytes
    head_dim: int | None


@dataclasses.dataclass(frozen=True)
class StageGraphs:
    """Graphs of one kind of stage. The forward graphs take `path`, then the values that the stage reads.

    Attributes:
        cache_only: writes the states of its mixers to the path; returns nothing.
        forward_only: writes states, returns the values that the stage writes.
        forward: writes states, returns the values that the stage writes, then the saved values.
        backward: takes `path`, the `kept` values and gradients of the `differentiated` ones, and (after the accumulate
            pass) accumulators for the `parameters` among the `gradients`; returns the other gradients.
        kept: the values kept for the backward, in the order of its inputs.
        states: for each mixer, the positions of its states among the kept values.
        differentiated: positions of the written values whose gradients are taken.
        gradients: positions of the read values that get a gradient; `parameters`: those that are parameters.
        sources: for each of `gradients`, the positions of the written values that it comes from.
        written: the storage of each written value, and its bytes if it belongs to a chunk.
        state_bytes: bytes per token that its mixers keep on the path.
        result_bytes: bytes per token of the results of its mixers without running states.
        separable: the backward may be run for a part of the head rows.
        transposed: positions of the read values that the forward graphs take transposed, as matrix products read them.
        working: per graph, the bytes that it allocates at its peak, for the backward with the values that it is
            handed and frees; "first_backward" also begins the sums of gradients of its parameters.
        sums: bytes of these sums by parameter, after a first backward.
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
    result_bytes: float = 0.0
    separable: bool = True
    transposed: tuple[int, ...] = ()
    working: dict[str, Peaks] = dataclasses.field(default_factory=dict)
    sums: tuple[Bytes, ...] = ()

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The graphs by name; without a backward, `forward` is `forward_only`."""
        return {name: module for name in GRAPHS if (module := getattr(self, name)) is not None}

    @property
    def modules(self) -> list[fx.GraphModule]:
        """The distinct graphs."""
        return list(dict.fromkeys(self.graphs.values()))


class StageOfChunk(NamedTuple):
    """A stage: the position of its kind, the indices of its mixer layers, and the slots that it reads and writes."""

    kind: int
    layers: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ChunkStages:
    """The stages of a chunk, in order, and their kinds.

    Attributes:
        sizes: computes bytes of values from the numbers of tokens and head rows.
        inputs: the number of inputs of a chunk; they are the first slots.
        whole: the number of inputs that do not run over tokens or head rows (parameters, constants); they come first.
        of_head: slots of the inputs that run over head rows.
        outputs: slots of the frontier values.
        differentiated: positions of the frontier values whose gradients the backward takes.
        generated: the generated code that the graphs call, if there is any.
        bodies: by piece that the graphs call, its graph.
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
        """The distinct graphs of all kinds."""
        return list(dict.fromkeys(module for kind in self.kinds for module in kind.modules))

    def of_kinds(self) -> Iterator[tuple[StageOfChunk, StageGraphs]]:
        """Yield every stage with its graphs."""
        return ((stage, self.kinds[stage.kind]) for stage in self.stages)

    def whole_reads(self, stage: StageOfChunk) -> set[int]:
        """Return the positions of a stage's reads that are parameters or constants."""
        return {i for i, slot in enumerate(stage.reads) if slot < self.whole}

    @functools.cached_property
    def memory_of_slots(self) -> dict[int, tuple[Memory, Bytes]]:
        """By slot that a stage writes, its storage and bytes; a view has the storage of the slot that it is of."""
        memory_of: dict[int, tuple[Memory, Bytes]] = {}
        for number, (stage, kind) in enumerate(self.of_kinds()):
            for slot, (memory, size) in zip(stage.writes, kind.written, strict=True):
                memory_of[slot] = self._memory(number, memory, memory_of), size
        return memory_of

    def _memory(self, number: int, memory: Memory, known: dict[int, tuple[Memory, Bytes]]) -> Memory:
        """Return a storage of a stage as a storage of the chunk."""
        kind, place = memory
        stage = self.stages[number]
        if kind == "saved":
            return ("saved", number, place)
        slot = (stage.reads if kind == "read" else stage.writes)[int(place)]
        return known[slot][0] if kind == "read" and slot in known else ("slot", slot)

    @functools.cached_property
    def kept_of_stages(self) -> list[list[KeptValue]]:
        """The kept values of each stage, with places as ("slot", slot) or ("saved <stage>", position), and storages of
        the chunk."""
        kept_values: list[list[KeptValue]] = []
        for number, (stage, kind) in enumerate(self.of_kinds()):
            slots = {"read": stage.reads, "written": stage.writes}
            kept_values.append([])
            for value in kind.kept:
                of, position = value.place
                place = ("slot", slots[of][position]) if of in slots else (f"saved {number}", position)
                memory = self._memory(number, value.memory, self.memory_of_slots)
                kept_values[-1].append(value._replace(place=place, memory=memory))
        return kept_values

    def kept_bytes(self, received: Collection[int] = ()) -> Bytes:
        """Return the bytes that one chunk keeps for its backward, each storage once.

        Args:
            received: slots of values that other parts have sent, which are kept for the part whether its graph is or
                not.
        """
        memory = {value.memory: value.bytes for values in self.kept_of_stages for value in values}
        elsewhere = {("slot", slot) for slot in received}
        return total(size for place, size in memory.items() if place not in elsewhere)
