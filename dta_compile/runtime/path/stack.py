"""The path stack: states of mixer layers along one root-to-leaf path, and their gradients (paper section 3.1).

The opaque mixer operators of chunk graphs call it; the executor cuts and refills it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from dta_compile.executable.layers import MixerLayer, RecurrentLayer
from dta_compile.runtime.path.chunk_shape import ChunkShape, ChunkTable
from dta_compile.runtime.path.fillers import require_hidden
from dta_compile.runtime.path.mixer_runtime import (
    AnyRuntime,
    LayerInputs,
    LayerRuntime,
    RecurrentInputs,
    RecurrentRuntime,
    Tensors,
)
from dta_compile.runtime.path.running_states import RunningStates, Snapshots
from dta_compile.runtime.path.token_states import HostReach, PathStates, Reach


@dataclasses.dataclass(frozen=True)
class SpineStates:
    """States of a spine that starts at depth `start`, for all layers.

    Attributes:
        states: states of its tokens by layer; key and value `[1, Hkv, n, D]` for attention.
        running: running states at some of its depths, by recurrent layer.
    """

    start: int
    states: Sequence[Tensors]
    running: Sequence[Snapshots]


class PathStack:
    """States of the current path and their gradients, per mixer layer, preallocated for the deepest path.

    Chunk graphs call `mix`, `write` and `mix_backward`. The executor sets `chunk` before it runs a graph, and calls
    `finish` after a backward graph of all layers.

    Attributes:
        chunk: chunk that is running.
        depths: depths at which the forward of the chunk stores running states.
        pending: depth from which on all gradients of states are zero, in all layers.
        runtimes: implementation of each layer.
        states: states of tokens, by layer.
        running: running states, by recurrent layer.
        recorded: by layer, the results that `mix` records, unless None; only of layers without a running state.
        results: by layer, results that `mix` returns once instead of running the layer.
        fillers: by layer, the largest finite number by which its mask hides keys, if scores may be as low.
        norms: `[layers, 3]` largest norms of the scaled queries, the keys and the tables of these layers so far.
    """

    def __init__(
        self, layers: Sequence[MixerLayer], runtimes: Sequence[AnyRuntime], capacity: int, device: torch.device
    ) -> None:
        """`capacity`: tokens of the deepest path; `layers` are numbered from zero."""
        self.chunk = ChunkShape.of(0, 0, ())
        self.depths: tuple[int, ...] = ()
        self.pending = 0
        self.recorded: dict[int, Tensors] | None = None
        self.results: dict[int, Tensors] = {}
        self.layers, self.runtimes, self.capacity, self.device = layers, runtimes, capacity, device
        self.token_states = PathStates([layer.states for layer in layers], capacity, device)
        self.states = self.token_states.of_layers
        self.fillers: Mapping[int, float] = {}
        self.norms = torch.empty(len(layers), 3, dtype=torch.float64, device=device)
        self._latest: tuple[ChunkShape, int, Reach] | None = None
        self.running = {
            number: RunningStates(layer.running, device)
            for number, layer in enumerate(layers)
            if isinstance(layer, RecurrentLayer)
        }

    def allocate_gradients(self) -> None:
        """Allocate zeroed gradients of states; needed before the first backward."""
        self.token_states.allocate_gradients()

    def watch(self, fillers: Mapping[int, float]) -> None:
        """Measure the queries and keys of these layers from now on, and forget what was measured."""
        self.fillers = fillers
        if fillers:
            self.norms.zero_()

    def require_hidden(self) -> None:
        """Raise `RefusalError` unless masks have hidden their keys from all chunks so far; synchronises the device."""
        require_hidden(self.layers, self.fillers, self.norms)

    def waits_for(self, start: int) -> bool:
        """Return whether gradients may be pending for a chunk whose spine begins at depth `start`."""
        return start < self.pending

    def finish(self) -> None:
        """Update `pending` after the backward of `chunk`: gradients are pending above it, not for its spine."""
        if self.pending <= self.chunk.start + self.chunk.spine:
            self.pending = self.chunk.start

    def cut(self, depth: int) -> None:
        """Cut the path at a depth: drop the running states below."""
        for running in self.running.values():
            running.cut(depth)

    def copy(self, start: int, stop: int) -> SpineStates:
        """Copy the states at depths `[start, stop)`; return them with the running states at `(start, stop]`."""
        return SpineStates(start, [states.copy(start, stop) for states in self.states], self.snapshots(start, stop))

    def snapshots(self, start: int, stop: int) -> list[Snapshots]:
        """Return the running states at depths `(start, stop]`, by recurrent layer."""
        return [running.part(start, stop) for running in self.running.values()]

    def put(self, spine: SpineStates, start: int, stop: int) -> None:
        """Copy the states of a spine at depths `[start, stop)` back onto the path."""
        for states, sources in zip(self.states, spine.states, strict=True):
            states.put(start, states.part(sources, start - spine.start, stop - spine.start))
        for running, snapshots in zip(self.running.values(), spine.running, strict=True):
            running.put(start, {depth: state for depth, state in snapshots.items() if start < depth <= stop})

    def of_layers(self, layers: Sequence[int]) -> StagePath:
        """Return the view of the path for the mixers of a stage."""
        return StagePath(self, layers)

    def write(self, layer: int, *states: torch.Tensor) -> None:
        """Copy the states of the chunk's spine onto the path."""
        self._measure_keys(layer, states)
        self.states[layer].write(self._reach(), states)

    def mix(self, layer: int, *arguments: Any) -> torch.Tensor | Tensors:
        """Run a mixer's `chunk` operator over the chunk and the path above; write the spine's states to the path."""
        mixer = self.layers[layer].mixer
        operands = mixer.operands_of(arguments)
        constants = arguments[len(operands) :]
        if layer in self.running:
            return self._run(layer, operands, constants)
        self.write(layer, *mixer.states_of(operands))
        self._measure_queries(layer, operands, constants)
        results = self.results.pop(layer, None)
        if results is None:
            results = self._runtime(layer).forward(self._inputs(layer, operands, constants))
        self._record(layer, results)
        return as_returned(results)

    def mix_backward(self, layer: int, grad: torch.Tensor, *arguments: Any) -> torch.Tensor | Tensors:
        """Run a mixer's `backward` operator; return the gradients of the chunk's operands.

        Adds the gradients of the states above to the path, and consumes the gradients that later chunks added for the
        spine.
        """
        mixer, states, reach = self.layers[layer].mixer, self.states[layer], self._reach()
        operands, results, constants = mixer.backward_arguments(arguments)
        if layer in self.running:
            grads = self._run_backward(layer, grad, operands, constants)
        else:
            inputs = self._inputs(layer, operands, constants)
            grads = self._runtime(layer).backward(grad, results, inputs, states.gradients_above(reach))
            states.take(reach, mixer.states_of(grads))
        return as_returned(tuple(map(in_dtype_of, operands, grads)))

    def _record(self, layer: int, results: Tensors) -> None:
        if self.recorded is not None:
            self.recorded[layer] = tuple(result.clone() for result in results)  # the graph may write over its own

    def _measure_keys(self, layer: int, states: Tensors) -> None:
        if layer in self.fillers:
            for column, state in enumerate(states[::2], 1):  # keys, and tables by distance
                self._measure(layer, column, state)

    def _measure_queries(self, layer: int, operands: Tensors, constants: tuple[Any, ...]) -> None:
        if layer in self.fillers:
            self._measure(layer, 0, operands[0], constants[0])

    def _measure(self, layer: int, column: int, vectors: torch.Tensor, scale: float = 1.0) -> None:
        """Update `norms` by queries, keys or tables; a token that is not finite is none that a mask could hide."""
        norms = torch.linalg.vector_norm(vectors.detach(), dim=-1, dtype=torch.float64).mul_(scale)
        largest = self.norms[layer, column]
        torch.maximum(largest, norms.nan_to_num_(0.0, 0.0, 0.0).amax(), out=largest)

    def _run(self, layer: int, operands: Tensors, constants: tuple[Any, ...]) -> torch.Tensor:
        """Run a recurrence over the chunk from the running state above it."""
        running, start = self.running[layer], self.chunk.start
        inputs = RecurrentInputs(operands, constants, running.at(start), self.chunk)
        out, states = self._recurrence(layer).forward(inputs, self.depths)
        if self.chunk.spine:
            running.put(start, dict(zip(self.depths, states, strict=True)))
        return out

    def _run_backward(self, layer: int, grad: torch.Tensor, operands: Tensors, constants: tuple[Any, ...]) -> Tensors:
        running, start = self.running[layer], self.chunk.start
        inputs = RecurrentInputs(operands, constants, running.at(start), self.chunk)
        pending = running.take_gradients(start, start + self.chunk.spine)
        grads, of_state = self._recurrence(layer).backward(grad, inputs, pending)
        running.add_gradient(start, of_state)
        return grads

    def _runtime(self, layer: int) -> LayerRuntime:
        return cast(LayerRuntime, self.runtimes[layer])

    def _recurrence(self, layer: int) -> RecurrentRuntime:
        return cast(RecurrentRuntime, self.runtimes[layer])

    def _inputs(self, layer: int, operands: Tensors, constants: tuple[Any, ...]) -> LayerInputs:
        return LayerInputs(operands, constants, self.states[layer].above(self._reach()), self.chunk, self.table)

    def _reach(self) -> Reach:
        """Return the ranges of the path that the chunk reads and writes, cached for all layers."""
        latest = self._latest
        if latest is None or latest[0] is not self.chunk or latest[1] != self.pending:
            start, spine = self.chunk.start, self.chunk.spine
            reach = HostReach(start, spine, min(self.pending - start, spine))
            self._latest = latest = self.chunk, self.pending, reach
        return latest[2]

    def table(self) -> ChunkTable:
        """Return the chunk's shape on the device."""
        return self.chunk.table(self.device)


class StagePath:
    """View of a path stack for a stage, which numbers its layers from zero.

    Args:
        layers: numbers of the stage's layers in the stack.
    """

    __slots__ = ("_layers", "_path")

    def __init__(self, path: PathStack, layers: Sequence[int]) -> None:
        self._path, self._layers = path, layers

    def write(self, layer: int, *states: torch.Tensor) -> None:
        """See `PathStack.write`."""
        self._path.write(self._layers[layer], *states)

    def mix(self, layer: int, *arguments: Any) -> torch.Tensor | Tensors:
        """See `PathStack.mix`."""
        return self._path.mix(self._layers[layer], *arguments)

    def mix_backward(self, layer: int, grad: torch.Tensor, *arguments: Any) -> torch.Tensor | Tensors:
        """See `PathStack.mix_backward`."""
        return self._path.mix_backward(self._layers[layer], grad, *arguments)


def in_dtype_of(operand: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the dtype of its operand."""
    dtype = operand.dtype
    return gradient if gradient.dtype is dtype else gradient.to(dtype)  # `to` costs host time even as a no-op


def as_returned(results: Tensors) -> torch.Tensor | Tensors:
    """Unwrap a single result, like an operator with one output."""
    return results if len(results) > 1 else results[0]
