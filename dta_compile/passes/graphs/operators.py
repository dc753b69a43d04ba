"""Properties of ATen operators that several passes ask for."""

from __future__ import annotations

import torch

aten = torch.ops.aten

# By operator: the one that gives the same, written over its first argument.
IN_PLACE_VARIANTS = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.add.Scalar: aten.add_.Scalar,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.exp.default: aten.exp_.default,
    aten.neg.default: aten.neg_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
}
