"""emit: turn the executable graphs into code, and the stages of a chunk and of its parts into numbers of slots."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Literal

from dta_compile.executable.chunk import ChunkGraphs, Linear, Stage, StageCode
from dta_compile.executable.code import Code
from dta_compile.passes.contracts import contract
from dta_compile.passes.gradients.accumulate import with_sums
from dta_compile.passes.memory.working_memory import add_peak
from dta_compile.passes.program import Program
from dta_compile.passes.stage_graphs import ChunkStages, Memory, StageGraphs
from dta_compile.passes.to_executable.parts import parts_of
from dta_compile.passes.value_bytes import Bytes, Peaks, total


@contract(reads=["stages"], fills=["joint", "parts"])
def emit(program: Program) -> None:
    """Fill `program.joint` and `program.parts`."""
    codes = tuple(map(_code_of, program.stages.kinds))
    program.joint = _Emitter(program.stages, codes).graphs()
    known: dict[Hashable, ChunkGraphs] = {}  # equal parts share their graphs

    def graphs_of_part(part: ChunkStages, received: tuple[int, ...]) -> ChunkGraphs:
        facts = part.stages, part.inputs, part.whole, part.of_head, part.outputs, part.differentiated, received
        if facts not in known:
            known[facts] = _Emitter(part, codes, received).graphs()
        return known[facts]

    program.parts = tuple(parts_of(program.stages, graphs_of_part))


def _code_of(kind: StageGraphs) -> StageCode:
    """Return the code of a kind of stage; a graph with several names has one code."""
    code = functools.cache(Code.of)
    backward = None if kind.backward is None else code(with_sums(kind.backward), boxed=True)
    return StageCode(code(kind.cache_only), code(kind.forward_only), code(kind.forward), backward)


class _Emitter:
    """Builds the `ChunkGraphs` of a chunk or a part: numbers slots and kept values, and computes peaks."""

    def __init__(self, chunk: ChunkStages, codes: Sequence[StageCode], received: tuple[int, ...] = ()) -> None:
        self.chunk, self.codes, self.received = chunk, codes, received
        stages = list(chunk.of_kinds())
        self.transposed = sorted({stage.reads[i] for stage, kind in stages for i in kind.transposed})
        trained = {stage.reads[i] for stage, kind in stages if kind.backward for i in kind.parameters}
        self.trained = sorted(trained)
        inputs = {value.place[1] for values in chunk.kept_of_stages for value in values if value.place[0] == "slot"}
        self.backward_inputs = sorted(slot for slot in inputs if slot < chunk.inputs)
        crossing = inputs - set(self.backward_inputs)
        # The kept values, in the order in which the forward computes them.
        places: list[tuple[str, int]] = [("slot", slot) for slot in self.backward_inputs]
        self.keeps: list[tuple[int, ...]] = []
        for number, (stage, kind) in enumerate(stages):
            own = [value.place[1] for value in kind.kept if value.place[0] == "saved"]
            places += [(f"saved {number}", i) for i in sorted(own)]
            self.keeps.append(tuple(slot for slot in stage.writes if slot in crossing))
            places += [("slot", slot) for slot in self.keeps[-1]]
        self.position = {place: i for i, place in enumerate(places)}

    def graphs(self) -> ChunkGraphs:
        chunk, kept = self.chunk, self.chunk.kept_bytes(self.received)
        values = {value.place: value for values in chunk.kept_of_stages for value in values}
        kinds = list(chunk.of_kinds())
        states = [
            (layer, tuple(self.position[kept_values[i].place] for i in places))
            for (stage, kind), kept_values in zip(kinds, chunk.kept_of_stages, strict=True)
            for layer, places in zip(stage.layers, kind.states, strict=False)  # no states where nothing is trained
        ]
        sources = self._sources()
        return ChunkGraphs(
            kinds=tuple(self.codes),
            stages=tuple(self._stages()),
            inputs=chunk.inputs,
            received=self.received,
            slots=self._slot(max([chunk.inputs - 1, *(slot for stage in chunk.stages for slot in stage.writes)]) + 1),
            transposed=tuple(self.transposed),
            outputs=tuple(map(self._slot, chunk.outputs)),
            backward_inputs=tuple(self.backward_inputs),
            saved_states=tuple(places for _, places in sorted(states)),
            differentiated=chunk.differentiated,
            grad_parameters=tuple(self.trained),
            grad_sources=tuple(frozenset(sources[slot]) for slot in self.trained),
            token_bytes=kept.per_token,
            head_bytes=kept.per_head_row,
            kv_bytes=sum(kind.state_bytes for _, kind in kinds),
            result_bytes=sum(kind.result_bytes for _, kind in kinds),
            head_dims=tuple(values[place].head_dim for place in self.position),
            head_rows_separable=all(kind.separable for _, kind in kinds),
            working=self._working(),
            generated=chunk.generated,
        )

    def _slot(self, slot: int) -> int:
        """Return the number of a slot in the executable, where slots of transposes follow those of inputs."""
        return slot if slot < self.chunk.inputs else slot + len(self.transposed)

    def _stages(self) -> Iterable[Stage]:
        chunk = self.chunk
        stages = list(chunk.of_kinds())
        reads = [slot for stage in chunk.stages for slot in stage.reads]
        left = Counter(reads)
        transposed = {slot: chunk.inputs + i for i, slot in enumerate(self.transposed)}
        accumulators = {slot: i for i, slot in enumerate(self.trained)}
        taken: set[int] = set()  # kept values that an earlier stage takes
        anchors = self.anchors
        for number, (stage, kind) in enumerate(stages):
            left.subtract(stage.reads)
            done = {slot for slot in stage.reads if not left[slot] and slot >= chunk.inputs} - set(chunk.outputs)
            kept = [self.position[value.place] for value in chunk.kept_of_stages[number] if kind.backward]
            yield Stage(
                kind=stage.kind,
                layers=stage.layers,
                reads=tuple(
                    transposed[slot] if i in kind.transposed else self._slot(slot) for i, slot in enumerate(stage.reads)
                ),
                writes=tuple(map(self._slot, stage.writes)),
                last_reads=tuple(map(self._slot, sorted(done))),
                saved_writes=tuple(map(self._slot, self.keeps[number])),
                backward_reads=tuple(kept),
                last_backward_reads=tuple(dict.fromkeys(position for position in kept if position not in taken)),
                tangents=tuple(self._slot(stage.writes[i]) for i in kind.differentiated),
                gradients=tuple(self._slot(stage.reads[i]) for i in kind.gradients if i not in kind.parameters),
                accumulators=tuple(accumulators[stage.reads[i]] for i in kind.parameters),
                anchor=anchors[number],
            )
            taken |= set(kept)

    @functools.cached_property
    def anchors(self) -> list[Literal["cache_only", "forward_only"] | None]:
        """Return `Stage.anchor` by stage: an anchor runs stages with mixers, and stages that these depend on."""
        needed: set[int] = set()
        anchors: list[Literal["cache_only", "forward_only"] | None] = []
        for stage in reversed(self.chunk.stages):
            is_read = not needed.isdisjoint(stage.writes)
            runs = is_read or bool(stage.layers)
            anchors.append(("forward_only" if is_read else "cache_only") if runs else None)
            needed |= set(stage.reads) if runs else set()
        return anchors[::-1]

    def _sources(self) -> dict[int, set[int]]:
        """By slot, return the positions of the frontier values that its gradient comes from."""
        chunk = self.chunk
        sources: dict[int, set[int]] = {}
        for i in chunk.differentiated:
            sources.setdefault(chunk.outputs[i], set()).add(i)
        for stage, kind in reversed(list(chunk.of_kinds())):
            for position, written in zip(kind.gradients, kind.sources, strict=True):
                for i in written:
                    sources.setdefault(stage.reads[position], set()).update(sources.get(stage.writes[i], ()))
        return sources

    def _working(self) -> dict[str, tuple[Linear, ...]]:
        """Return the peaks of a whole chunk, by graph."""
        peaks = {name: self._forward_peaks(name) for name in ("cache_only", "forward_only", "forward")}
        if self.chunk.differentiated:
            peaks |= {name: self._backward_peaks(name) for name in ("backward", "first_backward")}
        return {name: tuple((*map(float, part),) for part in parts) for name, parts in peaks.items()}  # type: ignore[misc]

    def _forward_peaks(self, name: str) -> Peaks:
        """Return the peaks of a forward graph: each stage allocates on top of what earlier stages have left."""
        chunk, anchors, live = self.chunk, self.anchors, _Live()
        left = Counter(slot for stage in chunk.stages for slot in stage.reads)
        returned = set() if name == "cache_only" else set(chunk.outputs)
        kept_memory = (
            {value.memory for values in chunk.kept_of_stages for value in values} if name == "forward" else set()
        )
        peaks: list[Bytes] = [Bytes()]
        for number, (stage, kind) in enumerate(chunk.of_kinds()):
            graph = anchors[number] if name == "cache_only" else name
            if graph is None:
                continue
            for peak in kind.working[graph]:
                add_peak(peaks, live.total.plus(peak))
            left.subtract(stage.reads)
            for memory, size in map(chunk.memory_of_slots.__getitem__, stage.writes):
                live.add(memory, size)
            for value in chunk.kept_of_stages[number] if name == "forward" else ():
                if value.memory[0] == "saved":
                    live.add(value.memory, value.bytes)
            for slot in {*stage.reads, *stage.writes} - returned:
                storage = chunk.memory_of_slots.get(slot)
                if not left[slot] and storage is not None and storage[0] not in kept_memory:
                    live.remove(storage[0])
        return tuple(peaks)

    def _backward_peaks(self, name: str) -> Peaks:
        """Return the peaks of a backward: each stage allocates on top of values kept for earlier stages, and of the
        gradients that these take. "first_backward" begins the sums of parameter gradients, which stay."""
        chunk, held, tangents, sums = self.chunk, _Live(), _Live(), _Live()
        stages = list(zip(chunk.of_kinds(), chunk.kept_of_stages, strict=True))
        for value in (value for values in chunk.kept_of_stages for value in values):
            held.add(value.memory, value.bytes)
        for i in chunk.differentiated:
            tangents.add(("slot", chunk.outputs[i]), self._gradient(chunk.outputs[i]))
        memories = [{value.memory for value in values} if kind.backward else set() for (_, kind), values in stages]
        uses = Counter(memory for handed_over in memories for memory in handed_over)
        peaks: list[Bytes] = [held.total.plus(tangents.total)]
        around: dict[int, list[Bytes]] = {}  # by kind: what other stages hold while one of it runs
        for ((stage, kind), values), handed_over in zip(reversed(stages), reversed(memories), strict=True):
            if kind.backward is None:
                continue
            handed = total({value.memory: value.bytes for value in values}.values())  # counted in the stage's peak
            for i in kind.differentiated:
                tangents.remove(("slot", stage.writes[i]))
            of_stage: list[Memory] = (
                [("slot", stage.reads[i]) for i in kind.parameters] if name == "first_backward" else []
            )
            for own in of_stage:
                sums.remove(own)
            others = held.total.minus(handed).plus(tangents.total).plus(sums.total)
            around.setdefault(stage.kind, []).append(others)
            uses.subtract(handed_over)
            for memory in handed_over:
                if not uses[memory]:
                    held.remove(memory)
            for i in kind.gradients:
                if i not in kind.parameters:
                    tangents.add(("slot", stage.reads[i]), self._gradient(stage.reads[i]))
            for own, size in zip(of_stage, kind.sums, strict=False):
                sums.add(own, size)
        for number, amounts in around.items():
            for others in _without_midpoints(amounts):
                for peak in chunk.kinds[number].working[name]:
                    add_peak(peaks, others.plus(peak))
        return tuple(peaks)

    def _gradient(self, slot: int) -> Bytes:
        """Return the bytes of a slot's gradient: those of the slot, or zero for inputs of the chunk."""
        return self.chunk.memory_of_slots[slot][1] if slot in self.chunk.memory_of_slots else Bytes()


def _without_midpoints(amounts: Sequence[Bytes]) -> Iterator[Bytes]:
    """Leave out amounts halfway between their neighbours, as of copies of a layer: one of these is no smaller."""
    for number, own in enumerate(amounts):
        if not 0 < number < len(amounts) - 1 or amounts[number - 1].plus(amounts[number + 1]) != own.times(2):
            yield own


class _Live:
    """Allocated storages, and their total bytes."""

    def __init__(self) -> None:
        self.sizes: dict[Memory, Bytes] = {}
        self.total = Bytes()

    def add(self, memory: Memory, size: Bytes) -> None:
        """Allocate a storage, if it is not allocated yet."""
        if memory not in self.sizes:
            self.sizes[memory] = size
            self.total = self.total.plus(size)

    def remove(self, memory: Memory) -> None:
        """Free a storage, if it is allocated."""
        self.total = self.total.minus(self.sizes.pop(memory, Bytes()))
