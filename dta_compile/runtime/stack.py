"""The path stack: keys, values and their gradients for the tokens of one root-to-leaf path (paper section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.passes.program import AttentionLayer
from dta_compile.runtime.attention.chunk_shape import ChunkShape, ChunkTable
from dta_compile.runtime.attention.interface import Operands, Provider
from dta_compile.runtime.attention.providers import provider_for


class PathStack:
    """KV of the active path and its gradients, per layer, preallocated to the deepest path.

    Chunk graphs call `attend`, `write` and `attend_backward`; the executor sets `chunk` before it runs a graph, and
    calls `finish` after a backward graph, when all layers have been through. KV gradients are summed in float32
    (float64 for float64 models) whatever the model's dtype is.

    Attributes:
        chunk: the chunk being run.
        waiting: KV gradients are zero from this depth on, in all layers.
        windows: by layer, the tokens that a token attends to, itself included; 0: all above it.
    """

    def __init__(
        self, layers: Sequence[AttentionLayer], capacity: int, device: torch.device, attention: str = "auto"
    ) -> None:
        self.chunk = ChunkShape.of(0, 0, ())
        self.waiting = 0
        self.windows = [0] * len(layers)
        self.layers, self.capacity, self.device, self.attention = layers, capacity, device, attention
        self.keys = [self._buffer(layer, layer.key_dim, layer.dtype) for layer in layers]
        self.values = [self._buffer(layer, layer.value_dim, layer.dtype) for layer in layers]
        self.key_grads: list[torch.Tensor] = []
        self.value_grads: list[torch.Tensor] = []
        self.providers: list[Provider] = [self._provider(layer) for layer in layers]

    def _provider(self, layer: AttentionLayer) -> Provider:
        query, value = (
            torch.empty((1, 1, 0, width), dtype=layer.dtype, device=self.device)
            for width in (layer.key_dim, layer.value_dim)
        )
        return provider_for(self.attention, query, value)

    def _buffer(self, layer: AttentionLayer, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((1, layer.kv_heads, self.capacity, width), dtype=dtype, device=self.device)

    def allocate_gradients(self) -> None:
        """Zeroed KV gradients; needed before the first backward."""
        if not self.key_grads:
            for layer in self.layers:
                dtype = statistics_dtype(layer.dtype)
                self.key_grads.append(self._buffer(layer, layer.key_dim, dtype))
                self.value_grads.append(self._buffer(layer, layer.value_dim, dtype))

    def waits_for(self, start: int) -> bool:
        """Whether KV gradients may wait for a chunk whose spine begins at depth `start`."""
        return start < self.waiting

    def finish(self) -> None:
        """The backward graph of `chunk` ran: what waited for its spine is taken, gradients wait above it."""
        if self.waiting <= self.chunk.start + self.chunk.spine:
            self.waiting = self.chunk.start

    def copy(self, start: int, stop: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of the keys and values `[1, Hkv, stop - start, D]` at depths `[start, stop)`, per layer."""
        both = zip(self.keys, self.values, strict=True)
        return [(key[:, :, start:stop].clone(), value[:, :, start:stop].clone()) for key, value in both]

    def put(self, start: int, kv: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put keys and values `[1, Hkv, n, D]`, one pair per layer, on the stack at depth `start`."""
        for layer, (key, value) in enumerate(kv):
            self._put(start, key, value, layer)

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """Put the spine's part of a chunk's `[1, Hkv, c, D]` keys and values on the stack."""
        spine = self.chunk.spine
        if spine < key.shape[2]:
            key, value = key[:, :, :spine], value[:, :, :spine]
        self._put(self.chunk.start, key, value, layer)

    def _put(self, start: int, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        stop = start + key.shape[2]
        self.keys[layer][:, :, start:stop] = key
        self.values[layer][:, :, start:stop] = value

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a chunk over the path before it and itself; the KV of its spine goes on the stack."""
        self.write(key, value, layer)
        operands = self._operands(query, key, value, layer, scale)
        return self.providers[layer].forward(operands)

    def attend_backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        layer: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value of a chunk.

        Adds the prefix's KV gradients to the stack, and takes from it what later chunks left for the spine's KV.
        """
        buffers = self.key_grads[layer], self.value_grads[layer]
        operands = self._operands(query, key, value, layer, scale)
        grads = self.providers[layer].backward(grad, out, logsumexp, operands, *self._above(buffers))
        self._take(buffers, grads[1:])
        return grads[0], grads[1].to(key.dtype), grads[2].to(value.dtype)

    def _above(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The part of buffers that the chunk reads."""
        return [buffer[:, :, : self.chunk.start] for buffer in buffers]

    def _take(self, buffers: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Add what waits for the chunk's spine to the spine's gradients, and zero it."""
        start = self.chunk.start
        taken = min(self.waiting - start, self.chunk.spine)
        if taken > 0:
            for buffer, own in zip(buffers, grads, strict=True):
                waiting = buffer[:, :, start : start + taken]
                own[:, :, :taken] += waiting
                waiting.zero_()

    def _operands(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float
    ) -> Operands:
        start = self.chunk.start
        prefix_key, prefix_value = self.keys[layer][:, :, :start], self.values[layer][:, :, :start]
        return Operands(query, key, value, prefix_key, prefix_value, self.chunk, self.table, scale, self.windows[layer])

    def table(self) -> ChunkTable:
        """The chunk's shape on the device."""
        return self.chunk.table(self.device)
