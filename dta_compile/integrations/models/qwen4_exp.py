"""Qwen4-Exp's index of key blocks, in graphs for this backend.

transformers pools the keys of every `m` tokens that a query may read into one index key, and chooses blocks of `m`
tokens by these, in a Python loop over rows and queries. A query also reads the tokens after its last whole block. If a
row is one sequence, padded on the right, all its queries have the same blocks. So an index key is a mean over the `m`
tokens that end at a token, and the choice is a mixer (`ops.chosen_keys`).

Importing this module replaces the index's `forward` there if its source is the one that was read for this;
`registration` imports it with the model.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from dta_compile.integrations.models.known_source import is_known
from dta_compile.integrations.tracing import in_our_graphs
from dta_compile.ops.attention import ATTENTION_CALL
from dta_compile.ops.chosen_keys import CHOOSE_KEYS_CALL, CHOSEN, Choosing
from dta_compile.ops.compressed_keys import TOKENS_OF_ROWS
from dta_compile.ops.library import REFUSED

MODULE = sys.modules["transformers.models.qwen4_exp.modeling_qwen4_exp"]
REPLACED, KNOWN = "Qwen4ExpTextQSAIndexer.forward", "ea44ba6acfd8c6d7"


def chosen_tokens(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    cache: Any,
) -> Any:
    """Return which tokens each query may read, `[B, 1, S, S]` bool; arguments as in `Qwen4ExpTextQSAIndexer.forward`.

    `NotImplemented` while the model generates. The call fails unless every row is one sequence, padded on the right.

    Raises:
        RefusalError: there is a cache.
    """
    if cache is not None and not torch.is_grad_enabled():
        return NotImplemented
    if cache is not None:
        hint = "call the model with use_cache=False"
        hidden_states = REFUSED(hidden_states, "Qwen4-Exp's index is handed a cache", "no cache", "a cache", hint)
    (batch, tokens, _), size, width = hidden_states.shape, self.compress_ratio, self.index_head_dim
    (cos, sin), rotate = position_embeddings, MODULE.apply_rotary_pos_emb
    columns, real = torch.arange(tokens, device=hidden_states.device), _segments(attention_mask)
    real = TOKENS_OF_ROWS(columns.expand(batch, -1), real)

    projected = self.index_qk_proj(hidden_states).unflatten(-1, (-1, width)).transpose(1, 2)
    query, key = projected.split([self.index_n_heads, self.index_kv_heads], 1)
    query = rotate(self.q_layernorm(query), cos=cos, sin=sin)
    mean = ATTENTION_CALL(torch.zeros_like(key.float()), key.float(), key.float(), None, True, real, size, 1.0, 0.0)
    first = (columns - (size - 1)).clamp(min=0)  # of the tokens that end at each
    pooled = rotate(self.k_layernorm(mean.to(key.dtype)), cos=cos[:, first], sin=sin[:, first])

    operands = (query.float(), torch.ones_like(query[..., :1].float()), pooled.float())
    how = Choosing(self.block_topk + 1, size, True, False, False, size)
    choice = CHOOSE_KEYS_CALL(*(operand.detach() for operand in operands), None, True, real, 0, 1.0, 0.0, *how, None)
    return CHOSEN(choice, (tokens + size - 1) // size)[..., columns // size]


def _segments(mask: torch.Tensor) -> torch.Tensor:
    """Return 1 at tokens of a row's first sequence, 2 at those of others, 0 at padding; the mask is `[B, 1, S, S]`."""
    read = mask[:, 0] if mask.dtype is torch.bool else mask[:, 0] == 0
    return torch.where(read.diagonal(dim1=-2, dim2=-1), torch.where(read[:, :, 0], 1, 2), 0)


if is_known(MODULE, [REPLACED], KNOWN):
    indexer = MODULE.Qwen4ExpTextQSAIndexer
    indexer.forward = in_our_graphs(chosen_tokens, indexer.forward)
