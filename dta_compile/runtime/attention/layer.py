"""Runtime of attention layers, called by the path stack: runs a provider and adds attention sinks."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import numpy as np
import torch

from dta_compile.ops.attention import by_tokens
from dta_compile.ops.scoring import Scoring
from dta_compile.runtime.attention.provider import Operands, Provider
from dta_compile.runtime.path.chunk_shape import Limit
from dta_compile.runtime.path.mixer_runtime import LayerInputs, Tensors


@dataclasses.dataclass(frozen=True)
class AttentionRuntime:
    """Runtime of an attention layer.

    Attributes:
        limit: attention span; None: a token attends to all above it.
        units: whether a token also attends to later ones of its unit.
        further: name of the last operand, which is no sinks: one of `Operands`, or a table by distance.
    """

    provider: Provider
    limit: Limit | None = None
    units: bool = False
    further: str | None = None

    @property
    def replayable(self) -> bool:
        """Whether the provider is replayable."""
        return self.provider.replayable

    @property
    def key(self) -> Hashable:
        """Key of CUDA graphs: the attention span."""
        return self.limit, self.units

    def forward(self, x: LayerInputs) -> Tensors:
        """Return output `[1, Hq, c, Dv]`, laid out as by `by_tokens`, and log-sum-exp `[1, Hq, c]`, sinks included."""
        out, logsumexp = self._without_sinks(x)
        for sinks in self._sinks(x):
            sinks = _by_token(sinks, logsumexp)
            out = (out * torch.sigmoid(logsumexp - sinks)[..., None]).to(out.dtype)
            logsumexp = torch.logaddexp(logsumexp, sinks)
        return by_tokens(out), logsumexp

    def backward(self, grad: torch.Tensor, results: Tensors, x: LayerInputs, above_grads: Tensors) -> Tensors:
        """Return gradients of query, key, value, sinks and bias; those by token in the layout of `by_tokens`.

        Gradients of any subset of keys are exact given output and log-sum-exp over all keys, sinks included. A sink has
        the weight `exp(sink - log-sum-exp)` and the value zero.
        """
        out, logsumexp = results
        gradients = self.provider.backward(grad, out, logsumexp, self._operands(x), *above_grads[:2])
        if self.further == "table":
            gradients = *gradients[:3], _of_table(gradients[3], x, above_grads[2])
        grads: Tensors = tuple(map(by_tokens, gradients))
        for sinks in self._sinks(x):
            share = (_by_token(sinks, logsumexp) - logsumexp).exp()
            of_sinks = -(share * (grad.to(share.dtype) * out.to(share.dtype)).sum(-1))
            of_sinks = of_sinks.sum((0, 2)) if sinks.dim() == 1 else by_tokens(of_sinks[..., None])
            grads = *grads[:3], of_sinks, *grads[3:]
        return grads

    def _without_sinks(self, x: LayerInputs) -> Tensors:
        return self.provider.forward(self._operands(x))

    def _sinks(self, x: LayerInputs) -> Tensors:
        return x.operands[3:-1] if self.further else x.operands[3:]

    def _operands(self, x: LayerInputs) -> Operands:
        (query, key, value), (prefix_key, prefix_value) = x.operands[:3], x.above[:2]
        choice, bias = (x.operands[-1] if self.further == name else None for name in ("choice", "bias"))
        if self.further == "table":
            bias = _table(x)
        how = Scoring(*x.constants[: len(Scoring._fields)]), self.limit, self.units, choice, bias
        return Operands(query, key, value, prefix_key, prefix_value, x.chunk, x.table, *how)


def _by_token(sinks: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """Return sinks by head, or by head and token, in the dtype and for the dimensions of a log-sum-exp."""
    sinks = sinks.to(logsumexp.dtype)
    return sinks[:, None] if sinks.dim() == 1 else sinks[..., 0]


def _table(x: LayerInputs) -> torch.Tensor:
    """Return the biases `[1, Hq, 1, n]` of all distances, by the tokens of the path and of the chunk that have them."""
    own = x.operands[-1].index_select(2, _tokens_by_depth(x))
    return torch.cat([x.above[2], own], 2).transpose(2, 3)


def _of_table(grad: torch.Tensor, x: LayerInputs, above_grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient `[1, Hq, c, 1]` of the table at a chunk's tokens, and add that of the tokens above."""
    start, table = x.chunk.start, x.operands[-1]
    above_grad += grad[..., :start].transpose(2, 3)
    of_table = torch.zeros_like(table, dtype=grad.dtype)
    return of_table.index_copy_(2, _tokens_by_depth(x), grad[..., start:].transpose(2, 3))


def _tokens_by_depth(x: LayerInputs) -> torch.Tensor:
    """Return one token of the chunk at each of its depths: all of them have the same entry of a table by distance."""
    chunk, device = x.chunk, x.operands[0].device
    if (_tokens_by_depth, device) not in chunk.derived:
        _, first = np.unique(chunk.depths, return_index=True)
        chunk.derived[_tokens_by_depth, device] = torch.from_numpy(first).to(device)
    tokens: torch.Tensor = chunk.derived[_tokens_by_depth, device]
    return tokens
