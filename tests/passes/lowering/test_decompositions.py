"""Decomposed operators have the values and the derivatives of torch's own, also where these are not smooth."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from dta_compile.passes.lowering.decompositions import TABLE

PROBABILITIES = torch.tensor([0.0, 1.0, 1e-13, 1 - 1e-13, 0.5, 1e-300], dtype=torch.float64)
NUMBERS = torch.tensor([0.0, 0.5, -1.0, 2.0, -3.0, 1e-13, math.inf, -math.inf, math.nan], dtype=torch.float64)
ROWS = torch.tensor([[0.0, 0, 0], [1, 1, 1], [2, 1, 2], [math.inf, 1, 2], [math.nan, 1, 2]], dtype=torch.float64)
SURE, LABELS = (x.reshape(-1) for x in torch.meshgrid(PROBABILITIES, PROBABILITIES[[0, 1, 4]], indexing="ij"))
LEFT, RIGHT = (x.reshape(-1) for x in torch.meshgrid(NUMBERS, NUMBERS, indexing="ij"))
FINITE = (LEFT - RIGHT).isfinite()

OPERATORS = {
    "binary cross entropy": (lambda x: F.binary_cross_entropy(x, LABELS, reduction="none"), SURE),
    "weighted": (lambda x: F.binary_cross_entropy(x, LABELS, LABELS + 1, reduction="sum"), SURE),
    "smooth l1": (lambda x: F.smooth_l1_loss(x, RIGHT, reduction="none", beta=0.5), LEFT),
    "mean of smooth l1": (lambda x: F.smooth_l1_loss(x, RIGHT[FINITE]), LEFT[FINITE]),
    "huber": (lambda x: F.huber_loss(x, RIGHT, reduction="none", delta=2.0), LEFT),
    "mean of huber": (lambda x: F.huber_loss(x, RIGHT[FINITE], delta=0.5), LEFT[FINITE]),
    "deviation and mean": (lambda x: torch.stack(torch.std_mean(x, -1, correction=0)), ROWS),
    "of all": (lambda x: torch.stack(torch.std_mean(x)), torch.zeros(4, dtype=torch.float64)),
}


def differentiated(function, argument):
    x = argument.clone().requires_grad_()
    out = function(x)
    (grad,) = torch.autograd.grad(out, x, torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape))
    return out.detach(), grad


@pytest.mark.parametrize("name", OPERATORS)
def test_derivatives_at_edges_are_those_of_torch(name):
    function, argument = OPERATORS[name]
    traced = make_fx(function, decomposition_table=TABLE)(argument)
    found, expected = differentiated(traced, argument), differentiated(function, argument)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.add(x, x, alpha=3),
        lambda x: torch.sub(x, 2, alpha=3),
        lambda x: torch.rsub(x, 2, alpha=3),
        lambda x: torch.rsub(x, x * x, alpha=3),
        lambda x: torch.ops.aten.add.Scalar(x, 2, 3),
    ],
)
def test_multiples_in_sums_are_products(function):
    x = torch.arange(4)
    traced = make_fx(function, decomposition_table=TABLE)(x)
    assert not any(len(node.args) > 2 or node.kwargs for node in traced.graph.nodes if node.op == "call_function")
    assert torch.equal(traced(x), function(x))
