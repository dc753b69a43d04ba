"""Operators that work in place, and their twins that make a new value."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dta_compile.passes.graphs.storage import write_to_new_values
from dta_compile.passes.program import writes_in_place


@pytest.mark.parametrize(
    ("function", "undone"),
    [
        (lambda x: x * x.pow(2).mean(-1, keepdim=True).add_(1e-6).rsqrt(), True),
        (lambda x: (x + 1).mul_(x).exp_().div_(2), True),
        (lambda x: (y := x * 2).mul_(y), True),
        (lambda x: (y := x * 2, y.add_(1), y * y), True),  # its result is read
        (lambda x: (y := x * 2, y.exp(), y.add_(1)), False),  # read before
        (lambda x: (y := x * 2, y.view(-1).add_(1), y * y), False),  # by a view
        (lambda x: x.add_(1) * 2, False),  # an input
        (lambda x: (x * 2).half().add_(x), False),  # rounded to half precision
        (lambda x: (x * 2).cumsum_(1), False),  # no operator with a twin
        (lambda x: (x * 2).pow_(2).add_(x, alpha=x.shape[1]), False),
    ],
)
def test_writes_over_what_nothing_else_reads_become_new_values(function, undone):
    x = torch.randn(3, 4)
    module = make_fx(function, tracing_mode="symbolic")(x)
    assert write_to_new_values(module.graph) == undone
    module.recompile()
    assert any(map(writes_in_place, module.graph.nodes)) != undone
    torch.testing.assert_close(module(x.clone()), function(x.clone()), rtol=0, atol=0)
