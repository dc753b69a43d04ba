"""Repeat the stages of a copy for the copies that `fold` left out of the captured graph. Called by the pass `joint`.

A copy is some stages in a row that the next ones equal, moved by one copy: the same traces, with the same results of
the stages before them, and the next parameters of all chains. Then equal facts lead to equal facts, forward and
backward, so that any number of copies may stand between the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence

from torch import fx

from dta_compile.executable.layers import AttentionLayer, MixerLayer
from dta_compile.executable.layouts import Input
from dta_compile.passes.gradients.stage_traces import Segment, StageTrace
from dta_compile.passes.program import Program, output_node

Value = Hashable  # of the chunk: the index of a weight, or a node, of a copy with the number of the copy


class NotRepeated(Exception):
    """No stages equal the next ones: the program has to be compiled with all of its copies."""


def require_repeated(program: Program) -> None:
    """Raise `NotRepeated` for a program without some of its copies that does anything once a call."""
    if program.folding and (program.draws or program.written or program.other_batches or _ends_with_weights(program)):
        raise NotRepeated


def _ends_with_weights(program: Program) -> bool:
    """Return whether the epilogue reads weights of copies: stages alone take those of the copies left out."""
    inputs = list(program.epilogue.graph.find_nodes(op="placeholder")) if program.epilogue else []
    chains = program.folding.chains if program.folding else ()
    return any(inputs[index].users for chain in chains for index in chain if inputs)


@dataclasses.dataclass(frozen=True)
class PlacedStage:
    """A stage of a chunk: its trace, the indices of its mixer layers, and the values that it reads and writes."""

    trace: StageTrace
    layers: tuple[int, ...]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]


class Unrolled:
    """The stages of a chunk with those of copies that were left out.

    Attributes:
        inputs, outputs: those of the chunk.
        mixers: the mixer layers of the copy that is repeated.
    """

    def __init__(self, program: Program, traced: Sequence[tuple[Segment, StageTrace]]) -> None:
        self.traced, self.folding, graph = traced, program.folding, program.chunk.graph
        self.written = {node: (t, i) for t, (stage, _) in enumerate(traced) for i, node in enumerate(stage.outputs)}
        chains = self.folding.chains if self.folding else ()
        places = {index: (chain, i) for chain in chains for i, index in enumerate(chain)}
        inputs = graph.find_nodes(op="placeholder")
        specs = program.region_parameters
        index = {node: i for i, node in enumerate(program.placeholders)}
        whole = *(spec.index for spec in specs), *(index.get(node) for node in program.constant_inputs)
        self.weights = {node: i for node, i in zip(inputs, whole, strict=False) if i is not None}
        self.places = {node: places[i] for node, i in self.weights.items() if i in places}
        self.first, self.count = self._copy() if self.folding else (len(traced), 0)
        self.times = self.folding.left_out if self.folding else 0
        layers = [layer for stage, _ in traced[self.first : self.first + self.count] for layer in stage.layers]
        self.mixers = range(min(layers, default=0), min(layers, default=0) + len(layers))
        if self.folding and not self._are_mixers_equal(program.mixers):
            raise NotRepeated
        self.inputs: list[Value] = [spec.index for spec in all_parameters(program)]
        self.inputs += [self.weights.get(node, node) for node in list(inputs)[len(specs) :]]
        self.outputs = [self._at_end(node) for node in output_node(graph).args[0]]

    def stages(self) -> Iterator[PlacedStage]:
        """Yield the stages in order."""
        stop = self.first + self.count
        for segment, trace in self.traced[: self.first]:
            yield self._placed(segment, trace, 0, lambda node: node, lambda node: node)
        for copy in range(self.times + 1 if self.count else 0):
            for number in range(self.first, stop):
                segment, trace = self.traced[number]
                moved = dict(zip(segment.inputs, self.traced[number + self.count][0].inputs, strict=True))
                read, write = self._read_in(copy, moved), lambda node, copy=copy: (node, copy)
                yield self._placed(segment, trace, copy, read, write)
        for segment, trace in self.traced[stop:]:
            yield self._placed(segment, trace, self.times, self._at_end, lambda node: node)

    def _placed(
        self,
        segment: Segment,
        trace: StageTrace,
        copy: int,
        read: Callable[[fx.Node], Value],
        write: Callable[[fx.Node], Value],
    ) -> PlacedStage:
        def value(node: fx.Node) -> Value:
            if node in self.places:
                chain, i = self.places[node]
                return chain[i + copy]
            return self.weights.get(node, read(node))

        layers = tuple(layer + copy * len(self.mixers) for layer in segment.layers)
        return PlacedStage(trace, layers, tuple(map(value, segment.inputs)), tuple(map(write, segment.outputs)))

    def _read_in(self, copy: int, moved: dict[fx.Node, fx.Node]) -> Callable[[fx.Node], Value]:
        """Return what a copy reads: own results, those of the copy before it (the first: as traced), or shared ones."""

        def value(node: fx.Node) -> Value:
            stage, _ = self.written.get(node, (-1, 0))
            if stage >= self.first:
                return node, copy
            return (moved[node], copy - 1) if copy and moved[node] is not node else node

        return value

    def _at_end(self, node: fx.Node) -> Value:
        """Return the value that stages behind the copies read."""
        if node in self.weights:
            return self.weights[node]
        stage, _ = self.written.get(node, (-1, 0))
        return (node, self.times) if self.first <= stage < self.first + self.count else node

    def _copy(self) -> tuple[int, int]:
        """Return the first of the stages of a copy, and their number."""
        for count in range(1, len(self.traced) // 2 + 1):
            for first in range(len(self.traced) - 2 * count + 1):
                if self._equals_next(first, count):
                    return first, count
        raise NotRepeated

    def _equals_next(self, first: int, count: int) -> bool:
        chains = set[tuple[int, ...]]()
        for number in range(first, first + count):
            (own, trace), (other, next_trace) = self.traced[number], self.traced[number + count]
            if trace is not next_trace or not all(map(self._is_next(first, count, chains), own.inputs, other.inputs)):
                return False
        assert self.folding is not None
        return chains == set(self.folding.chains)

    def _is_next(self, first: int, count: int, chains: set[tuple[int, ...]]) -> Callable[[fx.Node, fx.Node], bool]:
        def is_next(one: fx.Node, other: fx.Node) -> bool:
            if one in self.places:
                chain, i = self.places[one]
                chains.add(chain)
                return self.places.get(other) == (chain, i + 1)
            if one not in self.written or one is other:
                return one is other and self.written.get(one, (-1, 0))[0] < first
            stage, i = self.written[one]
            return first - count <= stage and self.written.get(other) == (stage + count, i)

        return is_next

    def _are_mixers_equal(self, layers: Sequence[MixerLayer]) -> bool:
        """Return whether the mixers of the next copy equal those of this one, and come right after them."""
        start, stop, number = self.mixers.start, self.mixers.stop, len(self.mixers)
        both = [layer for stage, _ in self.traced[self.first : self.first + 2 * self.count] for layer in stage.layers]
        after = [layer.chooser for layer in layers[stop:] if isinstance(layer, AttentionLayer)]
        return (
            number > 0
            and sorted(both) == list(range(start, stop + number))
            and all(chooser is None or chooser >= start for chooser in after)
            and all(moved(one, number) == other for one, other in zip(layers[start:stop], layers[stop:], strict=False))
        )


def moved(layer: MixerLayer, by: int) -> MixerLayer:
    """Return the layer that is the same `by` layers later."""
    later = dataclasses.replace(layer, index=layer.index + by)
    if isinstance(later, AttentionLayer) and later.chooser is not None:
        return dataclasses.replace(later, chooser=later.chooser + by)
    return later


def all_mixers(program: Program) -> tuple[MixerLayer, ...]:
    """Return a program's mixer layers, with those of copies that were left out."""
    if program.folding is None:
        return tuple(program.mixers)
    layers, copy, times = program.mixers, program.copied_mixers, program.folding.left_out
    repeated = [moved(layers[i], by * len(copy)) for by in range(1, times + 1) for i in copy]
    behind = [moved(layer, times * len(copy)) for layer in layers[copy.stop :]]
    return *layers[: copy.stop], *repeated, *behind


def all_parameters(program: Program) -> tuple[Input, ...]:
    """Return the parameters that chunks read, with those of copies that were left out."""
    used = {spec.index for spec in program.region_parameters}
    for chain in program.folding.chains if program.folding else ():
        used |= set(chain) if chain[0] in used else set()
    return tuple(program.inputs[index] for index in sorted(used))


def times_of(program: Program) -> Callable[[fx.Node], int]:
    """Return how often a node of the lowered graph, or one that a pass has erased from it, stands in that of all
    copies."""
    copy, times, inside = program.copied_mixers, 1, set[fx.Node]()
    if program.folding is not None:
        times += program.folding.left_out
        first, after = program.mixer_nodes[copy.start], program.mixer_nodes[copy.stop]
        for nodes in (list(program.values), list(program.graph.nodes)):  # in order; one has those that are new, too
            inside.update(nodes[nodes.index(first) : nodes.index(after)])
    return lambda node: times if node in inside else 1
