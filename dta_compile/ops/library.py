"""The library `dta` of operators, and the one that lowering leaves in a graph for gradients that stop."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("dta", "DEF")
LIBRARY.define("stop_gradient(Tensor value) -> Tensor")
STOP_GRADIENT = torch.ops.dta.stop_gradient.default


@torch.library.register_fake("dta::stop_gradient", lib=LIBRARY)
def _stop_gradient_fake(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
