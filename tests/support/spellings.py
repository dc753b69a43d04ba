"""Attention written out, in the ways of public models.

Each is a function `(query, key, value, attn_mask, is_causal)` of `[B, H, S, D]`. Some cap the scores, have a sink, or
use the first head of keys and values alone; the others compute the same values as `scaled_dot_product_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.tiny import WIDTH, TinyLM

HEADS, KV_HEADS, LONGEST = 4, 2, 64
OPTIONS = {"chunk_size": 3, "codegen": "eager", "cache_dir": "off"}


class WrittenLM(TinyLM):
    """Model with one layer per function `(layer, query, key, value, pairs)`; operands are `[B, S, heads, D]`."""

    def __init__(self, *ways, kv_heads=HEADS):
        super().__init__(layers=0)
        self.ways, self.kv_heads, width = ways, kv_heads, WIDTH // HEADS
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * width) for _ in ways])
        self.register_buffer("bias", torch.ones(LONGEST, LONGEST).tril().view(1, 1, LONGEST, LONGEST))
        self.sinks, self.scale = nn.Parameter(torch.randn(HEADS)), nn.Parameter(torch.rand(HEADS) + 0.5)
        self.double()

    def mix(self, x, pairs=None):
        for way, project in zip(self.ways, self.qkv, strict=True):
            q, k, v = project(x).unflatten(-1, (-1, WIDTH // HEADS)).split([HEADS, self.kv_heads, self.kv_heads], 2)
            x = x + way(self, q, k, v, pairs).reshape(x.shape)
        return self.norm(x)


def by_heads(*tensors):
    return (tensor.transpose(1, 2) for tensor in tensors)


Tensor = torch.Tensor
Spelling = Callable[..., Tensor]
SPELLINGS: dict[str, Spelling] = {}


Function = Callable[[Tensor, Tensor, Tensor, Callable[..., Tensor]], Tensor]


def biased(bias: Tensor) -> Spelling:
    """Attention with a bias `[H, S, S]`, which it adds before the mask."""
    return _spelled(lambda q, k, v, masked: masked(q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1) @ v)


def spelling(function: Function) -> Spelling:
    SPELLINGS[function.__name__] = spelled = _spelled(function)
    return spelled


def _spelled(function: Function) -> Spelling:
    def spelled(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if is_causal:
            attn_mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()

        def masked(scores: Tensor, way: str = "fill") -> Tensor:
            if attn_mask is None:
                return scores
            if attn_mask.dtype is not torch.bool:
                return scores + attn_mask
            if way == "fill":
                never = (
                    float("-inf") if is_causal else -1e30
                )  # finite, so that padding rows, whose keys are all hidden, give no NaN
                return scores.masked_fill(attn_mask.logical_not(), never)
            if way == "where":
                return torch.where(attn_mask, scores, torch.finfo(scores.dtype).min)
            return scores + torch.zeros_like(scores).masked_fill(~attn_mask, -1e30)

        return function(q, k, v, masked)

    return spelled


@spelling
def plain(q, k, v, masked):
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    return F.softmax(masked(scores), dim=-1) @ v


@spelling
def einsum_by_tokens(q, k, v, masked):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = masked(torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1]), "where")
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v).transpose(1, 2)


@spelling
def flat_heads(q, k, v, masked):
    batch, heads, tokens, width = q.shape
    q, k, v = (t.reshape(batch * heads, tokens, -1) for t in (q, k, v))
    empty = torch.empty(batch * heads, tokens, tokens, dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=width**-0.5)
    scores = masked(scores.view(batch, heads, tokens, tokens), "add")
    weights = F.softmax(scores, -1).view(batch * heads, tokens, tokens)
    return torch.bmm(weights, v).view(batch, heads, tokens, -1)


@spelling
def grouped(q, k, v, masked):
    """Put all heads into one group of a key head of its own: scores `[B, kv, G, S, S]`."""
    scores = q.unsqueeze(2) @ k.unsqueeze(2).mT * q.shape[-1] ** -0.5
    return (masked(scores.flatten(1, 2)).unflatten(1, (-1, 1)).softmax(-1) @ v.unsqueeze(2)).squeeze(2)


@spelling
def head_by_head(q, k, v, masked):
    outputs = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head].mT / q.shape[-1] ** 0.5
        outputs.append(masked(scores[:, None]).squeeze(1).softmax(-1) @ v[:, head])
    return torch.stack(outputs, 1)


@spelling
def keys_first(q, k, v, masked):
    scores = masked(torch.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, k)).transpose(2, 3)
    return torch.einsum("bhkq,bhkd->bhqd", scores.softmax(2), v)


@spelling
def shifted(q, k, v, masked):
    scores = masked(torch.matmul(q, k.mT) / torch.tensor(math.sqrt(q.shape[-1]), dtype=q.dtype))
    scores = scores - scores.amax(-1, keepdim=True).detach()
    return torch.matmul(scores.softmax(-1), v).contiguous()


@spelling
def in_place(q, k, v, masked):
    scores = torch.matmul(q, k.mT)
    scores /= math.sqrt(q.shape[-1])
    scores = masked(scores)
    scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype))
    return torch.matmul(F.dropout(F.softmax(scores, -1), 0.1, training=False), v)


@spelling
def merged_heads(q, k, v, masked):
    """Call `scaled_dot_product_attention` on `[B * H, S, D]`, with the mask made from written-out scores."""
    batch, heads = q.shape[:2]
    scores = masked(torch.zeros(1, 1, q.shape[2], q.shape[2], dtype=q.dtype), "where")
    mask = scores.expand(batch, heads, -1, -1).flatten(0, 1)
    flat = (t.flatten(0, 1) for t in (q, k, v))
    return F.scaled_dot_product_attention(*flat, mask).unflatten(0, (batch, heads))


@spelling
def capped(q, k, v, masked):
    scores = torch.tanh(q @ k.mT / (3 * math.sqrt(q.shape[-1]))) * 3
    return F.softmax(masked(scores, "where"), -1, dtype=torch.float64).to(v.dtype) @ v


@spelling
def sink_cut_off(q, k, v, masked):
    """Append a column of scores to the softmax, which attends to nothing."""
    scores = masked(q @ k.mT * q.shape[-1] ** -0.5)
    sink = torch.linspace(-1, 1, q.shape[1], dtype=q.dtype, device=q.device).view(1, -1, 1, 1)
    scores = torch.cat([scores, sink.expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


@spelling
def repeated_heads(q, k, v, masked):
    k, v = (t[:, :1].repeat_interleave(q.shape[1], 1) for t in (k, v))
    return F.dropout(masked(q @ k.mT / 2, "add").softmax(-1), 0.0) @ v


@spelling
def grouped_heads(q, k, v, masked):
    """Scores of all queries of a key head in one product: `[B, 1, H * S, S]`."""
    batch, heads, tokens, _ = q.shape
    scores = (q.flatten(1, 2) @ k[:, 0].mT).view(batch, heads, tokens, tokens) / 2
    return (masked(scores).softmax(-1).flatten(1, 2) @ v[:, 0]).unflatten(1, (heads, tokens))
