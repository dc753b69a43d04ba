"""Layers that are copies are traced by Dynamo once, and what is not quite a copy is what it is without that."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import compilation_time_metrics

REUSED = "invoke_subgraph_reuse_stamp_out"

pytestmark = pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "inline_invoke_subgraph"), reason="this torch has no regions to be inlined"
)


class Config:
    scale = 1.0


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()
        self.more = nn.Linear(8, 8)
        self.function, self.factor, self.listed, self.config = F.silu, 1.0, [1.0], config

    def forward(self, x):
        y = self.function(self.act(self.norm(self.linear(x))))
        y = y * self.factor * self.listed[0] * self.config.scale
        if self.more is not None:
            y = self.more(y)
        if not self.training:
            y = y * 3
        return x + y * (5 if hasattr(self, "extra") else 1)


class Net(nn.Module):
    def __init__(self, number=4):
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(number))

    def forward(self, x):
        x = x * self.config.scale
        for block in self.blocks:
            x = block(x)
        return x


def factor(block):
    block.factor = 2.0


def function(block):
    block.function = torch.sigmoid


def listed(block):
    block.listed = [2.0]


def config(block):
    block.config = Config()
    block.config.scale = 2.0


def extra(block):
    block.extra = True


def evaluation(block):
    block.eval()


def frozen(block):
    block.linear.weight.requires_grad_(False)


def activation(block):
    block.act = nn.Sigmoid()  # Dynamo keeps no guard of the type of torch's own modules


def epsilon(block):
    block.norm = nn.LayerNorm(8, eps=0.5)


def missing(block):
    block.more = None


def hooked(block):
    block.linear.register_forward_hook(lambda module, args, result: result * 2)


def tied(block):
    block.more.weight = block.linear.weight


def own_forward(block):
    block.linear.forward = lambda x: x * 3


def unchanged(block):
    pass


CHANGES = [factor, function, listed, config, extra, evaluation, frozen, activation, epsilon, missing, tied, own_forward]


def results(run, net, x):
    net.zero_grad()
    y = run(x)
    y.square().sum().backward()
    gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in net.parameters()]
    return [y.detach(), *gradients]


def assert_same(net, compiled, x):
    for found, expected in zip(results(compiled, net, x), results(net, net, x), strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def compiled_net(*changes, number=4):
    net = Net(number)
    for change, block in zip(changes, net.blocks[1:], strict=False):
        change(block)
    net.double()
    return net, torch.compile(net, backend="dta"), torch.randn(5, 8, dtype=torch.float64)


def reuses():
    return len(compilation_time_metrics.get(REUSED, ()))


@pytest.fixture(autouse=True)
def _counted_from_zero():
    torch._dynamo.reset()
    compilation_time_metrics.pop(REUSED, None)


def test_copies_are_traced_once():
    net, compiled, x = compiled_net(number=6)
    assert_same(net, compiled, x)
    assert reuses() == 4  # the input of the first requires no gradient, that of the others does


def test_only_what_differs_is_traced_again():
    net, compiled, x = compiled_net(factor, unchanged, listed, number=6)
    assert_same(net, compiled, x)
    assert reuses() == 2


@pytest.mark.parametrize("changes", [CHANGES[:3], CHANGES[3:6], CHANGES[6:9], CHANGES[9:12]])
def test_layers_that_are_nearly_copies(changes):
    net, compiled, x = compiled_net(*changes)
    assert_same(net, compiled, x)


def test_hooks_are_called():
    net, compiled, x = compiled_net(hooked)
    assert_same(net, compiled, x)


def test_a_later_change_of_one_copy_is_seen():
    net, compiled, x = compiled_net()
    assert_same(net, compiled, x)
    for change in (factor, activation, listed, evaluation, epsilon, config):
        before = copy.deepcopy(net.blocks[2].state_dict())
        change(net.blocks[2])
        net.blocks[2].double().load_state_dict(before)
        assert_same(net, compiled, x)


class Recording(Block):
    """Layers that act on something besides what they return."""

    def forward(self, x, log=None):
        if log is not None:
            log.append(x.sum())
        return super().forward(x)


class Breaking(Block):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def test_layers_that_write_to_what_they_are_given():
    net = Net().double()
    net.blocks = nn.ModuleList(Recording(Config()) for _ in range(3)).double()

    def run(x):
        log = []
        for block in net.blocks:
            x = block(x, log)
        return x + torch.stack(log).sum()

    assert_same_function(net, run)


def test_layers_that_break_the_graph():
    net = Net().double()
    net.blocks = nn.ModuleList(Breaking(Config()) for _ in range(3)).double()
    assert_same(net, torch.compile(net, backend="dta"), torch.randn(5, 8, dtype=torch.float64))
    assert reuses() == 0


def assert_same_function(net, run):
    compiled, x = torch.compile(run, backend="dta"), torch.randn(5, 8, dtype=torch.float64)
    for found, expected in zip(results(compiled, net, x), results(run, net, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
