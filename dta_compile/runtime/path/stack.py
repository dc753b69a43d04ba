"""The path stack: what mixers keep of the tokens of one root-to-leaf path, and its gradients (paper section 3.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch

from dta_compile.executable.layers import MixerLayer, RecurrentLayer
from dta_compile.runtime.path.chunk_shape import ChunkShape, ChunkTable
from dta_compile.runtime.path.interface import (
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
    """The states of a spine that starts at depth `start`, all layers.

    Attributes:
        states: those of its tokens: of attention, key and value `[1, Hkv, n, D]`.
        running: running states at some of its depths, of the layers that have any.
    """

    start: int
    states: Sequence[Tensors]
    running: Sequence[Snapshots]


class PathStack:
    """States of the active path and their gradients, per mixer layer, preallocated to the deepest path.

    Chunk graphs call `mix`, `write` and `mix_backward`; the executor sets `chunk` before it runs a graph, and calls
    `finish` after a backward graph, when all layers have been through.

    Attributes:
        chunk: the chunk being run.
        depths: where running states are to be kept as it runs forward.
        pending: gradients of states are zero from this depth on, in all layers.
        runtimes: how each layer is computed.
        states: what each layer keeps of tokens.
        running: what recurrent layers keep, by layer.
    """

    def __init__(
        self,
        layers: Sequence[MixerLayer],
        runtimes: Sequence[AnyRuntime],
        capacity: int,
        device: torch.device,
    ) -> None:
        """Of these layers, which it counts from zero."""
        self.chunk = ChunkShape.of(0, 0, ())
        self.depths: tuple[int, ...] = ()
        self.pending = 0
        self.layers, self.runtimes, self.capacity, self.device = layers, runtimes, capacity, device
        self.token_states = PathStates([layer.states for layer in layers], capacity, device)
        self.states = self.token_states.of_layers
        self._latest: tuple[ChunkShape, int, Reach] | None = None
        self.running = {
            number: RunningStates(layer.running, device)
            for number, layer in enumerate(layers)
            if isinstance(layer, RecurrentLayer)
        }

    def allocate_gradients(self) -> None:
        """Zeroed gradients of states; needed before the first backward."""
        self.token_states.allocate_gradients()

    def waits_for(self, start: int) -> bool:
        """Whether gradients may be pending for a chunk whose spine begins at depth `start`."""
        return start < self.pending

    def finish(self) -> None:
        """The backward graph of `chunk` ran: what was pending for its spine is taken, gradients are pending above."""
        if self.pending <= self.chunk.start + self.chunk.spine:
            self.pending = self.chunk.start

    def cut(self, depth: int) -> None:
        """The path ends at a depth: running states below are not needed any more."""
        for running in self.running.values():
            running.cut(depth)

    def copy(self, start: int, stop: int) -> SpineStates:
        """Copies of the states at depths `[start, stop)`, and the running states after these."""
        return SpineStates(start, [states.copy(start, stop) for states in self.states], self.snapshots(start, stop))

    def snapshots(self, start: int, stop: int) -> list[Snapshots]:
        """The running states at depths `(start, stop]`."""
        return [running.part(start, stop) for running in self.running.values()]

    def put(self, spine: SpineStates, start: int, stop: int) -> None:
        """Put the states of a spine that are of depths `[start, stop)` back on the path."""
        for states, kept in zip(self.states, spine.states, strict=True):
            states.put(start, states.part(kept, start - spine.start, stop - spine.start))
        for running, snapshots in zip(self.running.values(), spine.running, strict=True):
            running.put(start, {depth: state for depth, state in snapshots.items() if start < depth <= stop})

    def of_layers(self, layers: Sequence[int]) -> StagePath:
        """The path for the mixers of a stage."""
        return StagePath(self, layers)

    def write(self, layer: int, *states: torch.Tensor) -> None:
        """Put the spine's part of a chunk's states on the path."""
        self.states[layer].write(self._reach(), states)

    def mix(self, layer: int, *arguments: Any) -> torch.Tensor | Tensors:
        """A mixer's `chunk` operator over a chunk and the path before it; the states of its spine go on the path."""
        mixer = self.layers[layer].mixer
        operands = mixer.operands_of(arguments)
        constants = arguments[len(operands) :]
        if layer in self.running:
            return self._run(layer, operands, constants)
        self.write(layer, *mixer.states_of(operands))
        return _as_returned(self._runtime(layer).forward(self._inputs(layer, operands, constants)))

    def mix_backward(self, layer: int, grad: torch.Tensor, *arguments: Any) -> torch.Tensor | Tensors:
        """A mixer's `backward` operator: gradients of a chunk's operands.

        Adds the gradients of the states above to the path, and takes from it what later chunks left for the spine's.
        """
        mixer, states, reach = self.layers[layer].mixer, self.states[layer], self._reach()
        operands, results, constants = mixer.backward_arguments(arguments)
        if layer in self.running:
            grads = self._run_backward(layer, grad, operands, constants)
        else:
            inputs = self._inputs(layer, operands, constants)
            grads = self._runtime(layer).backward(grad, results, inputs, states.gradients_above(reach))
            states.take(reach, mixer.states_of(grads))
        return _as_returned(tuple(map(_in_dtype_of, operands, grads)))

    def _run(self, layer: int, operands: Tensors, constants: tuple[Any, ...]) -> torch.Tensor:
        """A recurrence over a chunk, from the running state above it."""
        running, start = self.running[layer], self.chunk.start
        inputs = RecurrentInputs(operands, constants, running.at(start), self.chunk)
        out, kept = self._recurrence(layer).forward(inputs, self.depths)
        if self.chunk.spine:
            running.put(start, dict(zip(self.depths, kept, strict=True)))
        return out

    def _run_backward(self, layer: int, grad: torch.Tensor, operands: Tensors, constants: tuple[Any, ...]) -> Tensors:
        running, start = self.running[layer], self.chunk.start
        inputs = RecurrentInputs(operands, constants, running.at(start), self.chunk)
        waiting = running.take_gradients(start, start + self.chunk.spine)
        grads, of_state = self._recurrence(layer).backward(grad, inputs, waiting)
        running.add_gradient(start, of_state)
        return grads

    def _runtime(self, layer: int) -> LayerRuntime:
        return cast(LayerRuntime, self.runtimes[layer])

    def _recurrence(self, layer: int) -> RecurrentRuntime:
        return cast(RecurrentRuntime, self.runtimes[layer])

    def _inputs(self, layer: int, operands: Tensors, constants: tuple[Any, ...]) -> LayerInputs:
        return LayerInputs(operands, constants, self.states[layer].above(self._reach()), self.chunk, self.table)

    def _reach(self) -> Reach:
        """What the chunk reads and writes of the path; all layers ask alike."""
        latest = self._latest
        if latest is None or latest[0] is not self.chunk or latest[1] != self.pending:
            start, spine = self.chunk.start, self.chunk.spine
            reach = HostReach(start, spine, min(self.pending - start, spine))
            self._latest = latest = self.chunk, self.pending, reach
        return latest[2]

    def table(self) -> ChunkTable:
        """The chunk's shape on the device."""
        return self.chunk.table(self.device)


class StagePath:
    """A path for a stage, which counts its layers from zero.

    Args:
        layers: by the stage's own number of a layer, that of the chunk.
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


def _in_dtype_of(operand: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    dtype = operand.dtype
    return gradient if gradient.dtype is dtype else gradient.to(dtype)  # which takes the host longer also for nothing


def _as_returned(results: Tensors) -> torch.Tensor | Tensors:
    """The results as an operator returns them: one by itself."""
    return results if len(results) > 1 else results[0]
