"""What attention makes of query-key products before the softmax: one object for operators, layers and providers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

SCORING = "float scale, float softcap"  # the fields of `Scoring` as arguments of operators


class Scoring(NamedTuple):
    """How scores come from products.

    Attributes:
        scale: factor of the products, positive, as kernels need it (see `passes.lowering.decompositions`).
        softcap: scaled scores `s` become `softcap * tanh(s / softcap)`; 0: no soft cap.
    """

    scale: Any
    softcap: Any = 0.0

    @property
    def is_linear(self) -> bool:
        """Return whether scores are multiples of the products, as kernels of others have them."""
        return not self.softcap

    def scores(self, products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return scores and their derivative by the products."""
        if self.is_linear:
            return products * self.scale, self.scale
        tanh = (products * (self.scale / self.softcap)).tanh()
        return tanh * self.softcap, (1 - tanh.square()) * self.scale

    def bound(self, scaled: float) -> float:
        """Return the largest score, in either direction, of scaled products up to this one."""
        return min(scaled, self.softcap or math.inf)


UNSCALED = Scoring(1.0)
