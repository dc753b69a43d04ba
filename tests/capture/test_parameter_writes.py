"""Writes to parameters that change nothing when repeated run once before a call, as eager mode has them."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dta_compile.errors import RuntimeContractError
from tests.support.inside import inside
from tests.support.tiny import SMALL_CHUNKS, WIDTH, BareLM, assert_same, gradients, shared_ids


class Writing(BareLM):
    """Clamps weights in training: of a layer that it calls twice, in a checkpoint too, of frozen ones, of the head."""

    def __init__(self):
        super().__init__()
        self.shared, self.frozen = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.frozen.requires_grad_(False)

    def through_shared(self, x):
        if self.training:
            self.shared.weight.data.clamp_(-0.05, max=0.05)
        return x + self.shared(x)

    def mix(self, x, pairs=None):
        x = checkpoint(self.through_shared, self.through_shared(x), use_reentrant=False)
        self.frozen.weight.data.tril_().abs_()
        with torch.no_grad():
            self.head.weight.clamp_min_(-0.1)
            torch.clamp_(self.head.weight.detach(), max=0.1)
        return super().mix(x + self.frozen(x) * self.shared.weight.data.abs().mean(), pairs)


def steps(function, model):
    """Two steps of training with an optimiser, and a call without gradients: outputs, gradients and parameters."""
    optimiser, found = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(2):
        optimiser.zero_grad()
        out = function(shared_ids())
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        found += [out.detach(), *(parameter.detach().clone() for parameter in model.parameters())]
        optimiser.step()
    with torch.no_grad():
        found += [function(shared_ids()), *model.parameters()]
    return found, gradients(model)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"memory_budget": 0, "verify": "always"}, marks=pytest.mark.slow)]
)
def test_weights_are_clamped_before_a_call(options):
    torch._dynamo.reset()
    model, eager = Writing(), Writing()
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS | options)
    assert_same(steps(compiled, model), steps(eager, eager))
    versions = [[parameter._version for parameter in each.parameters()] for each in (model, eager)]
    assert versions[0] == versions[1]
    assert inside(compiled).engines


def test_two_parameters_over_the_same_memory_are_an_error():
    class Tied(Writing):
        def mix(self, x, pairs=None):
            return self.frozen(self.through_shared(x)) + super(Writing, self).mix(x, pairs)

    torch._dynamo.reset()
    model = Tied()
    model.frozen.weight = nn.Parameter(model.shared.weight.data)
    with pytest.raises(RuntimeContractError, match="memory in common with another input"):
        torch.compile(model, backend="dta", options=SMALL_CHUNKS)(shared_ids())
