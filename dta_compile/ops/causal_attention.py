"""`dta_compile.attention`: causal attention with arguments instead of a mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dta_compile.errors import OptionError
from dta_compile.ops.attention import ATTENTION_CALL, SINK_ATTENTION_CALL, Masking
from dta_compile.ops.dtypes import autocast
from dta_compile.ops.scoring import Scoring


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    segments: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute causal attention: over the prefix tree in functions compiled with the backend "dta", else densely.

    Neither materialises an `[S, S]` mask, and a compiled program has no mask that must be proven causal.

    Args:
        query: `[B, Hq, S, D]`.
        key, value: `[B, Hkv, S, D]` and `[B, Hkv, S, Dv]`; Hq is a multiple of Hkv.
        segments: `[B, S]` integers or bools, the numbers of the sequences in packed rows. A token attends only to
            tokens with its own number. Number 0 is padding, to which no token attends, so a padding mask works too.
        window: a token attends to itself and the `window - 1` tokens before it; None: to all tokens before it.
        softcap: scaled scores `s` become `softcap * tanh(s / softcap)`.
        sinks: `[Hq]`, for each head the score of an additional key in the softmax, whose value is zero.
        scale: factor of the scores; None: `D ** -0.5`.

    Returns:
        `[B, Hq, S, Dv]`; next to zero where a token attends to nothing.

    Raises:
        OptionError: sizes do not fit, or a window, soft cap or scale is not positive.
    """
    _require_sizes(query, key, value, segments, sinks)
    for name, number in (("window", window), ("softcap", softcap), ("scale", scale)):
        if number is not None and not number > 0:
            raise OptionError(
                f"{name} of attention is not positive", expected="a positive number, or None", got=str(number)
            )
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    query, key, value = autocast(query, key, value)
    if segments is None and window is None and softcap is None and sinks is None:
        enable_gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    masking = Masking(None, True, segments, window or 0, Scoring(scale, float(softcap or 0)))
    return call(query, key, value, sinks, masking)


def call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, masking: Masking
) -> torch.Tensor:
    """Call the operator over a batch, in the widest dtype of queries, keys and values; the result has the query's."""
    if masking.mask is not None and masking.mask.requires_grad and torch.is_grad_enabled():
        raise OptionError(
            "a learned mask of attention gets no gradient here",
            expected="a mask that is not trained",
            got="a mask that requires a gradient, with a soft cap or sinks",
        )
    own = query.dtype
    if not own == key.dtype == value.dtype:  # kernels take one
        wide = torch.promote_types(torch.promote_types(own, key.dtype), value.dtype)
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
    if sinks is None:
        return ATTENTION_CALL(query, key, value, *masking.arguments).to(own)
    return SINK_ATTENTION_CALL(query, key, value, sinks, *masking.arguments).to(own)


def attention_tokens_first(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor | None,
    window: int,
    scale: float | None,
    softcap: float,
) -> torch.Tensor:
    """Call the operator with flash attention's layout `[B, S, H, D]`; with `ends` for packed sequences `[S, H, D]`.

    Args:
        ends: see `segments_by_ends`.
        window: as in `Masking`.
        scale, softcap: as in `Scoring`; a scale of None is `D ** -0.5`.
    """
    segments = None
    if ends is not None:
        segments = segments_by_ends(ends, 1, query.shape[0])
        query, key, value = query[None], key[None], value[None]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    masking = Masking(None, True, segments, window, Scoring(scale, softcap))
    out = call(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, masking)
    out = out.transpose(1, 2).contiguous()
    return out if ends is None else out[0]


def segments_by_ends(ends: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """Return sequence numbers `[B, S]`, from 1 on, for cumulative sequence lengths `ends` `[n + 1]`, from 0 on."""
    positions = torch.arange(batch * tokens, device=ends.device)
    segments = torch.bucketize(positions, ends[1:].to(positions.dtype), right=True) + 1
    return segments.view(batch, tokens)


def _require_sizes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    fits = [len(shape) for shape in shapes] == [4, 4, 4]
    if fits:
        (batch, heads, tokens, width), kv_heads = shapes[0], shapes[1][1]
        fits = shapes[1] == (batch, kv_heads, tokens, width) and shapes[2][:3] == (batch, kv_heads, tokens)
        fits = fits and kv_heads > 0 and heads % kv_heads == 0
    if not fits:
        raise OptionError(
            "the sizes of query, key and value do not fit",
            expected="[B, Hq, S, D], [B, Hkv, S, D] and [B, Hkv, S, Dv], Hq a multiple of Hkv",
            got=f"{shapes[0]}, {shapes[1]} and {shapes[2]}",
        )
    if segments is not None and (tuple(segments.shape) != (batch, tokens) or segments.is_floating_point()):
        raise OptionError(
            "the segments of attention do not fit its tokens",
            expected=f"integers [{batch}, {tokens}]",
            got=f"{segments.dtype} {tuple(segments.shape)}",
        )
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise OptionError("there is not one sink a head", expected=f"[{heads}]", got=f"{tuple(sinks.shape)}")
