"""How a call of `scaled_dot_product_attention` becomes the opaque `dta::attention_call`.

The operator's contract, which every provider of attention rests on: query `[B, Hq, S, D]`, key `[B, Hkv, S, D]` and
value `[B, Hkv, S, Dv]` with Hq a multiple of Hkv, and a scale that is positive. What torch accepts besides is brought
into this form here: sizes that broadcast, numbers of heads of their own for keys and values, scales of either sign.
"""

from __future__ import annotations

import math

import torch

from dta_compile.errors import RefusalError
from dta_compile.ops.attention import ATTENTION_CALL, Masking
from dta_compile.ops.dtypes import autocast
from dta_compile.passes.program import where_now

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def capture_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` of these arguments, by the opaque operator.

    `enable_gqa` only permits what is understood without it: fewer heads of keys and values than of queries. Numbers of
    heads that torch does not take are an error before this.

    Raises:
        RefusalError: dropout, or tensors of a rank other than 3 and 4.
    """
    if dropout_p:
        raise RefusalError(
            "attention dropout cannot run over a prefix tree: every rollout would need its own random mask",
            where=where_now(),
            expected="dropout_p=0.0",
            got=f"dropout_p={dropout_p}",
            hint="set the model's attention dropout to 0, or call model.eval()",
        )
    operands = query, key, value
    ranks = [tensor.dim() for tensor in operands]
    if ranks not in ([3] * 3, [4] * 3):
        raise RefusalError(
            "attention over tensors of these ranks is not supported",
            where=where_now(),
            expected="query, key and value of shape [batch, heads, tokens, head_dim]",
            got=f"ranks {ranks[0]}, {ranks[1]} and {ranks[2]}",
        )
    if ranks[0] == 3:
        # A constant in front counts the heads of one sequence; another size counts sequences of one head.
        dim = 0 if all(isinstance(tensor.shape[0], int) for tensor in operands) else 1
        mask = attn_mask.unsqueeze(dim) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        query, key, value = (tensor.unsqueeze(dim) for tensor in operands)
        return capture_attention(query, key, value, mask, 0.0, is_causal, scale, enable_gqa).squeeze(dim)
    query, key, value = _with_common_sizes(*autocast(*operands))
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    query, scale = _with_positive_scale(query, scale)
    return ATTENTION_CALL(query, key, value, *Masking(attn_mask, is_causal, None, 0, scale, 0.0))


def _with_common_sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tensors:
    """The same number of sequences everywhere, and of heads for keys and values, which divides that of queries."""
    heads = _heads(query, key, value)
    kv_heads = math.lcm(heads[1], heads[2])
    batch = _batch(query, key, value)
    query = _expanded(query, batch, max(heads))
    key, value = (_repeated(_expanded(t, batch, t.shape[1]), kv_heads) for t in (key, value))
    return query, key, value


def _heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int, int]:
    numbers = query.shape[1], key.shape[1], value.shape[1]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        raise RefusalError(
            "the number of attention heads depends on the batch, or is zero",
            where=where_now(),
            expected="query, key and value of shape [batch, heads, tokens, head_dim] with a constant number of heads",
            got=f"{numbers[0]}, {numbers[1]} and {numbers[2]} heads",
        )
    return numbers


def _batch(*tensors: torch.Tensor) -> int | torch.SymInt:
    """The number of sequences: some tensors may have one that stands for all."""
    return next((t.shape[0] for t in tensors if not _is_one(t.shape[0])), 1)


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def _expanded(tensor: torch.Tensor, batch: int | torch.SymInt, heads: int) -> torch.Tensor:
    batch_is_there = not _is_one(tensor.shape[0]) or _is_one(batch)
    return tensor if batch_is_there and tensor.shape[1] == heads else tensor.expand(batch, heads, -1, -1)


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """`[B, h, S, D]` with every head `heads // h` times in a row."""
    batch, own, tokens, width = tensor.shape
    if own == heads:
        return tensor
    return tensor[:, :, None].expand(batch, own, heads // own, tokens, width).reshape(batch, heads, tokens, width)


def _with_positive_scale(query: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Fused kernels take the largest score before they scale, or scale what is masked: they are right for these only.

    The sign moves to the query, and so does zero.
    """
    if scale < 0:
        return -query, -scale
    return (query * 0.0, 1.0) if scale == 0 else (query, scale)
