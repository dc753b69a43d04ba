"""Check that finite numbers in attention masks hide keys: the scores of a call bound what a hidden key may weigh.

A score is at most `scale * |query| * |key|` (Cauchy-Schwarz), or the soft cap, in either direction, and what a table by
distance adds. A key whose score
a number replaces, or to whose score it is added, has no weight if it is so far below the largest score of the query
that its exponential rounds to zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from dta_compile.errors import RefusalError
from dta_compile.executable.layers import AttentionLayer, MixerLayer
from dta_compile.ops.attention import BIAS

UNDERFLOW = {torch.float64: 746.0}  # exp(-x) is zero; 104 in float32, in which half precision is summed, too
ROUNDINGS = 4  # of scores and of their sums with the mask, in units of the last place
OF_MASK = 2.0**-7  # rounding of the mask, which may have been in bfloat16


def require_hidden(layers: Sequence[MixerLayer], fillers: Mapping[int, float], norms: torch.Tensor) -> None:
    """Raise `RefusalError` unless fillers hide keys, given norms `[layers, 3]` of queries, keys and tables."""
    for number, (of_queries, of_keys, of_tables) in zip(fillers, norms[list(fillers)].tolist(), strict=True):
        layer, filler = layers[number], fillers[number]
        assert isinstance(layer, AttentionLayer)
        is_bounded = BIAS not in layer.mixer.operands
        score = layer.scoring.bound(of_queries * of_keys) + of_tables if is_bounded else math.inf
        rounding = ROUNDINGS * torch.finfo(layer.dtype).eps * (score - filler) - OF_MASK * filler
        if 2 * score + UNDERFLOW.get(layer.dtype, 104.0) + rounding >= -filler:
            raise RefusalError(
                "attention has scores so large that the number in its mask may not hide keys",
                where=layer.where,
                expected=f"scores of less than about {-filler / 2:.3g}, which {filler:g} hides from each other",
                got=f"scores of up to {score:.3g}, by the norms of queries and keys"
                if is_bounded
                else "scores with a learned bias, which no norms bound",
                hint="mask with float('-inf')",
            )
