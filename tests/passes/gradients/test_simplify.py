"""Simplified graphs of derivatives: fewer operators, the same numbers."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dta_compile.passes.gradients.simplify import simplify
from tests.support.chunk_graphs import targets


def test_simplifying_is_exact():
    def norm(x, w):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = torch.cat([-y[..., 3:], y[..., :3]], -1)
        return torch.autograd.grad(y, x, w)

    inputs = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    module = make_fx(norm, tracing_mode="fake")(*inputs)
    expected, before = module(*inputs), sum(targets(module).values())
    simplify(module.graph)
    module.recompile()
    assert sum(targets(module).values()) <= before - 8
    names = targets(module)
    assert not names["aten.slice_backward.default"] and not names["aten.detach.default"]
    for mine, theirs in zip(module(*inputs), expected, strict=True):
        assert torch.equal(mine, theirs)
