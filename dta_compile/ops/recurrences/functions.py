"""Recurrences for modules of one's own: over the prefix tree in what the backend "dta" compiles, else of a dense batch.

All of them run from a state of zero before the first token, without second derivatives. `segments` `[B, S]` are the
numbers of the sequences in packed rows, from 1 on (0: padding): a state starts anew with each of them.
"""

from __future__ import annotations

import torch

from dta_compile.ops.recurrences import operators

assert operators.RECURRENCES, "they have defined the operators that are called here"


def short_convolution(
    value: torch.Tensor, weight: torch.Tensor, *, segments: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal convolution of each channel by itself: `[B, S, D]`.

    Args:
        value: `[B, S, D]`.
        weight: `[D, k]`, of which the last column is for the token itself.
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
    """Gated delta rule (arXiv 2412.06464), or Kimi delta attention (2510.26692): `[B, S, H, V]`.

    Args:
        query, key: `[B, S, G, K]`; each of G serves H // G heads in a row. Keys should have length one.
        value: `[B, S, H, V]`.
        decay: logarithms, at most zero and finite: `[B, S, H]`, or by channel `[B, S, H, K]`.
        beta: `[B, S, H]`.
        scale: of the queries; None: `K ** -0.5`.
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
    """Linear attention with a decay (Mamba-2's scan, arXiv 2405.21060, with a scale of one): `[B, S, H, V]`.

    Args:
        query, key, value, decay, scale: as in `gated_delta_rule`.
    """
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = torch.ops.dta.linear_attention(query, key, value, decay, segments, scale)
    return out


def selective_scan(
    value: torch.Tensor,
    step: torch.Tensor,
    matrix: torch.Tensor,
    entry: torch.Tensor,
    reading: torch.Tensor,
    *,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mamba's scan (arXiv 2312.00752), `h = exp(step * matrix) * h + step * value * entry`, `h @ reading`: `[B, S, D]`.

    Args:
        value, step: `[B, S, D]`, steps positive.
        matrix: `[D, N]`, negative.
        entry, reading: `[B, S, N]`.
    """
    out: torch.Tensor = torch.ops.dta.selective_scan(value, step, matrix, entry, reading, segments)
    return out
