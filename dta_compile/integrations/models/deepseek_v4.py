"""DeepSeek-V4's layers with compressed keys, in graphs for this backend and with `attn_implementation="dta"`.

transformers pools the keys of every `m` tokens of a row into one compressed key, so that the number of keys depends on
the row's length. The same numbers, computed at every token for the window that ends there, are token by token:

- A pool is attention by each feature over the `m` tokens of a window: a token's gate is its score, for every query.
- Overlapping windows also pool other features of the tokens before them. Both tokens at one place of the two windows
  are first merged into one, whose score is the log-sum-exp of both.
- Attention reads only the compressed keys at the ends of whole windows (`ops.attention`).

Importing this module replaces the layers' `forward` in transformers if its source has the hash `KNOWN`; `registration`
imports it with the model.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dta_compile.integrations.keywords import refuse_unknown
from dta_compile.integrations.models.known_source import is_known
from dta_compile.integrations.tracing import traces_for_this_backend
from dta_compile.integrations.transformers_attention import CausalMask
from dta_compile.ops.attention import ATTENTION_CALL, CHOSEN_COMPRESSED_CALL, COMPRESSED_CALL, Masking
from dta_compile.ops.causal_attention import call
from dta_compile.ops.chosen_keys import CHOOSE_KEYS_CALL, Choosing
from dta_compile.ops.compressed_keys import TOKENS_OF_ROWS
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.library import REFUSED
from dta_compile.ops.scoring import UNSCALED, Scoring

FUNCTION = "DeepSeek-V4's attention with compressed keys"
MODULE = sys.modules["transformers.models.deepseek_v4.modeling_deepseek_v4"]
HINT = 'call the model with use_cache=False; to generate, load it with attn_implementation="eager"'
# Functions that `attention_forward` replaces, and the hash of their source without comments; others stay in use.
REPLACED = (
    "DeepseekV4Attention.forward",
    "DeepseekV4HCACompressor.forward",
    "DeepseekV4CSACompressor.forward",
    "DeepseekV4Indexer.forward",
    "DeepseekV4IndexerScorer.forward",
    "eager_attention_forward",
)
KNOWN = "795a8cba8899acf4"


def attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
    position_ids: torch.Tensor,
    attention_mask: CausalMask | torch.Tensor | None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention; arguments as in `DeepseekV4Attention.forward`.

    Args:
        hidden_states: `[B, S, D]`.
        position_ids: `[B or 1, S]`; the call fails unless they number the tokens of a row.

    Raises:
        RefusalError: an argument is unknown, there is a cache, or the layer has dropout.
    """
    hidden_states = refuse_unknown(hidden_states, FUNCTION, kwargs)
    if cache is not None:
        what = f"{FUNCTION} is handed a cache, which keeps a part of a window for later calls"
        hidden_states = REFUSED(hidden_states, what, "no cache", "a cache", HINT)
    if self.training and self.attention_dropout:
        got = f"attention_dropout={self.attention_dropout}"
        hidden_states = REFUSED(hidden_states, f"{FUNCTION} has dropout", "dropout 0", got, "set it to 0")
    (batch, tokens, _), rotate = hidden_states.shape, MODULE.apply_rotary_pos_emb
    cos, sin = position_embeddings[self.rope_layer_type]
    residual = self.q_a_norm(self.q_a_proj(hidden_states))
    query = self.q_b_proj(residual).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
    query = rotate(self.q_b_norm(query), cos, sin)
    key = self.kv_norm(self.kv_proj(hidden_states)).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
    key = rotate(key, cos, sin)

    compressor, real = self.compressor, TOKENS_OF_ROWS(position_ids, _segments(attention_mask))
    masking = _masking(attention_mask, self.scaling)
    if tokens < compressor.compress_rate:  # no whole window: the compressor's weights get no gradient
        out = call(query, key, key, self.sinks, masking)
    else:
        windows = _compressed(compressor, hidden_states, real)
        operands = query, key, key, self.sinks, windows, windows
        if hasattr(compressor, "indexer"):
            choice = _chosen(compressor.indexer, hidden_states, residual, position_ids, real)
            out = CHOSEN_COMPRESSED_CALL(*operands, choice, *masking.arguments, compressor.compress_rate)
        else:
            out = COMPRESSED_CALL(*operands, *masking.arguments, compressor.compress_rate)

    out = rotate(out, cos, -sin).transpose(1, 2).reshape(batch, tokens, self.config.o_groups, -1)
    return self.o_b_proj(self.o_a_proj(out).flatten(2)), None


def _masking(mask: CausalMask | torch.Tensor | None, scale: float) -> Masking:
    if isinstance(mask, CausalMask):
        return Masking(None, True, mask.segments, mask.window or 0, Scoring(scale))
    return Masking(mask, mask is None, None, 0, Scoring(scale))


def _segments(mask: CausalMask | torch.Tensor | None) -> torch.Tensor | None:
    """Return the segments of a mask, `[B or 1, S]`, or which tokens are real; None if all are real."""
    if mask is None or isinstance(mask, CausalMask):
        return None if mask is None else mask.segments
    own = mask[:, 0].diagonal(dim1=-2, dim2=-1)  # a real token reads itself
    return own if mask.dtype is torch.bool else own == 0


def _compressed(compressor: Any, hidden_states: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return the compressed keys `[B, 1, S, D]` of the windows that end at each token, in place of `forward`."""
    stride, width, tokens = compressor.compress_rate, compressor.head_dim, hidden_states.shape[1]
    columns = torch.arange(tokens, device=hidden_states.device)
    key = compressor.kv_proj(hidden_states)
    gate = compressor.gate_proj(hidden_states) + F.embedding(columns % stride, compressor.position_bias)
    wide = torch.promote_types(gate.dtype, statistics_dtype(key.dtype))
    pooled, gate = key.to(wide), gate.to(wide)
    if pooled.shape[-1] == 2 * width:
        overlapping = torch.cat([pooled[..., :width], gate[..., :width]], -1)
        earlier, earlier_gate = F.pad(overlapping, (0, 0, stride, 0))[:, :tokens].chunk(2, -1)
        pooled, gate = pooled[..., width:], gate[..., width:]
        is_first = (columns < stride)[:, None]
        share = torch.where(is_first, 0.0, torch.sigmoid(earlier_gate - gate))
        pooled = pooled + share * (earlier - pooled)
        gate = torch.where(is_first, gate, torch.logaddexp(earlier_gate, gate))
    scores, values = (tensor.transpose(1, 2)[..., None] for tensor in (gate, pooled))  # [B, D, S, 1]
    masking = Masking(None, True, real, stride, UNSCALED)
    pooled = ATTENTION_CALL(torch.ones_like(scores), scores, values, *masking.arguments)[..., 0].transpose(1, 2)
    pooled = compressor.kv_norm(pooled.to(key.dtype))
    begins = (columns - (stride - 1)).clamp(min=0)[None]
    cos, sin = compressor.rotary_emb(pooled, position_ids=begins, layer_type=compressor.rope_layer_type)
    rotated: torch.Tensor = MODULE.apply_rotary_pos_emb(pooled[:, None], cos, sin)
    return rotated


def _chosen(
    indexer: Any, hidden_states: torch.Tensor, residual: torch.Tensor, position_ids: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """Return the choice of compressed keys `[B, 1, S, count]` that `DeepseekV4Indexer.forward` makes."""
    scorer, (batch, tokens, _) = indexer.scorer, hidden_states.shape
    key = _compressed(indexer, hidden_states, real)
    cos, sin = indexer.rotary_emb(hidden_states, position_ids=position_ids, layer_type=indexer.rope_layer_type)
    query = indexer.q_b_proj(residual).view(batch, tokens, -1, indexer.head_dim).transpose(1, 2)
    query = MODULE.apply_rotary_pos_emb(query, cos, sin)
    weights = scorer.weights_proj(hidden_states).float() * scorer.weights_scaling
    operands = (tensor.detach() for tensor in (query.float(), weights.transpose(1, 2)[..., None], key.float()))
    masking = Masking(None, True, real, 0, Scoring(scorer.softmax_scale))
    how = Choosing(indexer.index_topk, 1, True, False, False, indexer.compress_rate)
    choice: torch.Tensor = CHOOSE_KEYS_CALL(*operands, *masking.arguments, *how, None)
    return choice


def _replaced(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_over_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        trains = kwargs.get("cache") is None or torch.is_grad_enabled()  # else it generates
        is_traced = torch.compiler.is_compiling() and traces_for_this_backend() and trains
        if self.compressor is not None and (is_traced or isinstance(kwargs.get("attention_mask"), CausalMask)):
            return attention_forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return forward_over_tokens


if is_known(MODULE, REPLACED, KNOWN):
    MODULE.DeepseekV4Attention.forward = _replaced(MODULE.DeepseekV4Attention.forward)
