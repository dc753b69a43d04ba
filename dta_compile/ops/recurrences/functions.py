"""Recurrences as public functions: over the prefix tree in functions compiled with the backend "dta", else densely.

All start from a state of zero before the first token, and have no second derivatives. `segments` `[B, S]` numbers the
sequences in packed rows from 1 on (0: padding); the state restarts with each of them.
"""

from __future__ import annotations

import torch

from dta_compile.ops.recurrences import operators

assert operators.RECURRENCES, "they have defined the operators that are called here"


def short_convolution(
    value: torch.Tensor, weight: torch.Tensor, *, segments: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a causal depthwise convolution: `[B, S, D]`.

    Args:
        value: `[B, S, D]`.
        weight: `[D, k]`; its last column is for the token itself.
        segments: integers `[B, S]`, the sequence of each token from 1 on; 0: padding.
    """
    out: torch.Tensor = torch.ops.dta.short_convolution(value, weight, segments)
    return out


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the gated delta rule (arXiv 2412.06464), or Kimi delta attention (2510.26692): `[B, S, H, V]`.

    Args:
        query, key: `[B, S, G, K]`; each of the G is shared by H // G consecutive heads. Keys should be normalised.
        value: `[B, S, H, V]`.
        decay: log decay, finite and at most zero: `[B, S, H]`, or by channel `[B, S, H, K]`.
        beta: `[B, S, H]`.
        scale: factor of the queries; None: `K ** -0.5`.
    """
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = torch.ops.dta.gated_delta_rule(query, key, value, decay, beta, segments, scale)
    return out


def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    *,
    scale: float | None = None,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute linear attention with decay (with a scale of one Mamba-2's scan, arXiv 2405.21060): `[B, S, H, V]`.

    Args:
        query, key, value, decay, scale: as in `gated_delta_rule`.
    """
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = torch.ops.dta.linear_attention(query, key, value, decay, segments, scale)
    return out


def linear_recurrence(
    value: torch.Tensor, factor: torch.Tensor, *, segments: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a diagonal linear recurrence (RG-LRU, arXiv 2402.19427; minGRU, 2410.01201), of the shape of value.

    `h = factor * h + value`, entry by entry, and the output is every `h`.

    Args:
        value: `[B, S, ...]`.
        factor: broadcast to the shape of value.
    """
    rows = value if value.dim() > 2 else value[..., None]
    factor = factor.expand_as(value).reshape_as(rows).flatten(2)
    out: torch.Tensor = torch.ops.dta.linear_recurrence(rows.flatten(2), factor, segments)
    return out.view_as(value)


def selective_scan(
    value: torch.Tensor,
    step: torch.Tensor,
    matrix: torch.Tensor,
    entry: torch.Tensor,
    reading: torch.Tensor,
    *,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute Mamba's selective scan (arXiv 2312.00752): `[B, S, D]`.

    `h = exp(step * matrix) * h + step * value * entry`, and the output is `h @ reading`.

    Args:
        value, step: `[B, S, D]`, steps positive.
        matrix: `[D, N]`, negative (A in the paper).
        entry, reading: `[B, S, N]` (B and C in the paper).
    """
    out: torch.Tensor = torch.ops.dta.selective_scan(value, step, matrix, entry, reading, segments)
    return out
