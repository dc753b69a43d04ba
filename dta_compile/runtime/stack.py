"""The path stack: keys, values and their gradients for the tokens of one root-to-leaf path (paper section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dta_compile.passes.attention_op import statistics_dtype
from dta_compile.passes.program import AttentionLayer
from dta_compile.runtime.attention import Operands, Provider, provider_for


class PathStack:
    """KV of the active path and its gradients, per layer, preallocated to the deepest path.

    Chunk graphs call `attend`, `write` and `attend_backward`; the executor sets `start`, the depth of the chunk being
    run. KV gradients are summed in float32 (float64 for float64 models) whatever the model's dtype is.
    """

    def __init__(self, layers: Sequence[AttentionLayer], capacity: int, device: torch.device) -> None:
        self.start = 0
        self.layers, self.capacity, self.device = layers, capacity, device
        self.keys = [self._buffer(layer, layer.key_dim, layer.dtype) for layer in layers]
        self.values = [self._buffer(layer, layer.value_dim, layer.dtype) for layer in layers]
        self.key_grads: list[torch.Tensor] = []
        self.value_grads: list[torch.Tensor] = []
        self.providers: dict[int, Provider] = {}

    def _buffer(self, layer: AttentionLayer, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((1, layer.kv_heads, self.capacity, width), dtype=dtype, device=self.device)

    def allocate_gradients(self) -> None:
        """Zeroed KV gradients; needed before the first backward."""
        if not self.key_grads:
            for layer in self.layers:
                dtype = statistics_dtype(layer.dtype)
                self.key_grads.append(self._buffer(layer, layer.key_dim, dtype))
                self.value_grads.append(self._buffer(layer, layer.value_dim, dtype))

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """Put a chunk's `[1, Hkv, c, D]` keys and values of one layer on the stack at `start`."""
        stop = self.start + key.shape[2]
        self.keys[layer][:, :, self.start : stop] = key
        self.values[layer][:, :, self.start : stop] = value

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float, window: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a chunk over the path before it and itself; its KV goes on the stack."""
        self.write(key, value, layer)
        operands = self._operands(query, key, value, layer, scale, window)
        return self._provider(layer, query, value).forward(operands)

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
        window: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value of a chunk.

        Adds the prefix's KV gradients to the stack, and takes from it what later chunks left for this chunk's KV.
        """
        operands = self._operands(query, key, value, layer, scale, window)
        grads = self._provider(layer, query, value).backward(grad, out, logsumexp, operands)
        start, stop = self.start, self.start + key.shape[2]
        key_grads, value_grads = self.key_grads[layer], self.value_grads[layer]
        if grads.prefix_key is not None and grads.prefix_value is not None:
            key_grads[:, :, :start] += grads.prefix_key
            value_grads[:, :, :start] += grads.prefix_value
        grad_key = (key_grads[:, :, start:stop] + grads.key).to(key.dtype)
        grad_value = (value_grads[:, :, start:stop] + grads.value).to(value.dtype)
        key_grads[:, :, start:stop] = 0
        value_grads[:, :, start:stop] = 0
        return grads.query, grad_key, grad_value

    def _operands(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float, window: int
    ) -> Operands:
        prefix_key, prefix_value = self.keys[layer][:, :, : self.start], self.values[layer][:, :, : self.start]
        return Operands(query, key, value, prefix_key, prefix_value, scale, window)

    def _provider(self, layer: int, query: torch.Tensor, value: torch.Tensor) -> Provider:
        if layer not in self.providers:
            self.providers[layer] = provider_for(query, value)
        return self.providers[layer]
