"""Divide a chunk into parts: consecutive stages, executed for all chunks before the next part starts.

A part is the unit of rematerialisation: its inputs are kept between forward and backward, and all that it computes is
computed again. So parts are layers: a part begins at each stage with a mixer, and the last part where head rows are
first read. `emit` calls this.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from dta_compile.executable.chunk import ChunkGraphs, Part
from dta_compile.passes.stage_graphs import ChunkStages, Memory

# Makes executable graphs from stages and the slots that they receive from other parts.
Emit = Callable[[ChunkStages, tuple[int, ...]], ChunkGraphs]


def parts_of(chunk: ChunkStages, emit: Emit) -> list[Part]:
    """Return the parts of a chunk, in order; one part if the chunk is a single stage."""
    bounds = list(itertools.pairwise([*_first_stages(chunk), len(chunk.stages)]))
    readers: dict[int, list[int]] = {}  # by slot, the parts that read it, ascending
    for number, (first, stop) in enumerate(bounds):
        for slot in {slot for stage in chunk.stages[first:stop] for slot in stage.reads}:
            readers.setdefault(slot, []).append(number)
    return [_part(chunk, number, *bounds[number], readers, emit) for number in range(len(bounds))]


def _first_stages(chunk: ChunkStages) -> list[int]:
    """Return the stages that parts begin with. Only values over tokens cross between parts: a value over head rows
    stays in its part, since a backward may run for a subset of the head rows."""
    stages = chunk.stages
    begins = {number for number, stage in enumerate(stages) if stage.layers}
    begins |= {number for number, stage in enumerate(stages) if not chunk.of_head.isdisjoint(stage.reads)}
    last_read = {slot: number for number, stage in enumerate(stages) for slot in stage.reads}
    for number, stage in enumerate(stages):
        for slot in stage.writes:
            if chunk.memory_of_slots[slot][1].per_head_row:
                begins -= set(range(number + 1, last_read.get(slot, number) + 1))
    return sorted(begins | {0})


def _part(
    chunk: ChunkStages, number: int, first: int, stop: int, readers: Mapping[int, Sequence[int]], emit: Emit
) -> Part:
    """Make some stages a chunk of their own. Its inputs are the chunk's inputs that they read, then slots of other
    parts; its outputs are slots that later parts read, then frontier values. Its mixer layers count from zero."""
    stages = chunk.stages[first:stop]
    own = [slot for stage in stages for slot in stage.writes]
    is_last = stop == len(chunk.stages)
    writes = [slot for slot in own if readers.get(slot, [number])[-1] > number]
    frontier = [i for i, slot in enumerate(chunk.outputs) if slot in own or (is_last and slot < chunk.inputs)]
    outputs = [*writes, *(chunk.outputs[i] for i in frontier)]
    needed = {slot for stage in stages for slot in stage.reads}.union(outputs).difference(own)
    inputs = sorted(slot for slot in needed if slot < chunk.inputs)
    reads = sorted(needed.difference(inputs))
    local = {slot: i for i, slot in enumerate([*inputs, *reads, *own])}
    layers = [layer for stage in stages for layer in stage.layers]
    taken = {stage.writes[i] for stage in stages for i in chunk.kinds[stage.kind].differentiated}
    differentiated = [i for i, slot in enumerate(writes) if slot in taken]
    differentiated += [len(writes) + i for i, value in enumerate(frontier) if value in chunk.differentiated]
    of_part = dataclasses.replace(
        chunk,
        stages=tuple(
            stage._replace(
                layers=tuple(map(layers.index, stage.layers)),
                reads=_renumbered(local, stage.reads),
                writes=_renumbered(local, stage.writes),
            )
            for stage in stages
        ),
        inputs=len(inputs) + len(reads),
        whole=sum(slot < chunk.whole for slot in inputs),
        of_head=frozenset(local[slot] for slot in chunk.of_head.intersection(inputs)),
        outputs=_renumbered(local, outputs),
        differentiated=tuple(differentiated),
    )
    of_storages: dict[Memory, tuple[float, set[int]]] = {}
    for slot in writes:
        storage, size = chunk.memory_of_slots[slot]
        of_storages.setdefault(storage, (size.per_token, set()))[1].update(readers[slot])
    return Part(
        graphs=emit(of_part, tuple(range(len(inputs), len(inputs) + len(reads)))),
        inputs=tuple(inputs),
        layers=tuple(layers),
        reads=tuple(reads),
        writes=tuple(writes),
        frontier=tuple(frontier),
        written=tuple((size, tuple(sorted(numbers - {number}))) for size, numbers in of_storages.values()),
    )


def _renumbered(local: dict[int, int], slots: Sequence[int]) -> tuple[int, ...]:
    return tuple(local[slot] for slot in slots)
