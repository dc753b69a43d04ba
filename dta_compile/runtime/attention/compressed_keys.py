"""Runtime of attention layers that also read compressed keys, one for every window of `stride` tokens of a path.

Queries read the keys of tokens by any provider, and the compressed keys of the windows that are complete at their own
token block by block; both parts are merged by their log-sum-exps, as parts of one softmax (see `reference`).
"""

from __future__ import annotations

import dataclasses

import torch

from dta_compile.ops.attention import by_tokens
from dta_compile.ops.scoring import Scoring
from dta_compile.runtime.attention.chosen_keys import Blockwise, ends_of
from dta_compile.runtime.attention.layer import AttentionRuntime
from dta_compile.runtime.attention.provider import Operands
from dta_compile.runtime.attention.reference import merge_with
from dta_compile.runtime.path.mixer_runtime import LayerInputs, Tensors


@dataclasses.dataclass(frozen=True)
class CompressedRuntime(AttentionRuntime):
    """Runtime of a layer with sinks and compressed keys; `limit` is the attention span over the keys of tokens."""

    replayable = False

    def backward(self, grad: torch.Tensor, results: Tensors, x: LayerInputs, above_grads: Tensors) -> Tensors:
        """Return gradients of query, key, value, sinks, compressed key and value."""
        windows, ends = self._windows(x)
        of_query, *others = super().backward(grad, results, x, above_grads[:2])
        (out, logsumexp), (of_keys, of_values) = results, (self._at_ends(grad, x) for grad in above_grads[2:])
        further, *of_windows = Blockwise().backward(grad, out, logsumexp, windows, of_keys, of_values)
        for like, part in zip(x.operands[4:6], of_windows, strict=True):
            others.append(torch.zeros_like(like, dtype=part.dtype).index_copy_(2, ends, part))
        return (by_tokens(of_query + further), *map(by_tokens, others[:2]), others[2], *map(by_tokens, others[3:]))

    def _without_sinks(self, x: LayerInputs) -> Tensors:
        out, logsumexp = super()._without_sinks(x)
        wide = out.to(logsumexp.dtype)
        merge_with(wide, logsumexp, *Blockwise().forward(self._windows(x)[0]))
        return wide.to(out.dtype), logsumexp

    def _sinks(self, x: LayerInputs) -> Tensors:
        return x.operands[3:4]

    def _windows(self, x: LayerInputs) -> tuple[Operands, torch.Tensor]:
        """Return the attention call over compressed keys, and which tokens of the chunk have one."""
        (*scoring, stride), query = x.constants, x.operands[0]
        ends = ends_of(x.table().depths, stride)
        key, value = (operand.index_select(2, ends) for operand in x.operands[4:6])
        above_key, above_value = (self._at_ends(states, x) for states in x.above[2:])
        choice = x.operands[6] if len(x.operands) > 6 else None
        call = Operands(query, key, value, above_key, above_value, x.chunk, x.table, Scoring(*scoring), None)
        return call._replace(choice=choice, stride=stride), ends

    @staticmethod
    def _at_ends(states: torch.Tensor, x: LayerInputs) -> torch.Tensor:
        """Return the view of the path's states at the last tokens of windows."""
        return states[:, :, x.constants[2] - 1 :: x.constants[2]]
