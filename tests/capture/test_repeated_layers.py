"""Layers that are copies are traced by Dynamo once, and what is not quite a copy is what it is without that."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import compilation_time_metrics, counters
from torch.nn.modules.module import register_module_forward_hook

from tests.support.tiny import TinyLM

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


class Gated(Block):
    """Layers of which nothing but the metadata of a parameter is read."""

    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) * (2 if self.gate.requires_grad else 3) * len(self.gate)


def test_a_later_change_of_what_one_copy_reads_of_a_parameter_is_seen():
    net, x = Net(), torch.randn(5, 8, dtype=torch.float64)
    net.blocks = nn.ModuleList(Gated(net.config) for _ in range(4))
    compiled = torch.compile(net.double(), backend="dta")
    assert_same(net, compiled, x)
    net.blocks[2].gate.requires_grad_(False)
    assert_same(net, compiled, x)
    net.blocks[3].gate = nn.Parameter(torch.ones(5).double())
    assert_same(net, compiled, x)


def test_floats_of_modules_are_constants_until_they_change():
    net, x = Net(6).double(), torch.randn(5, 8, dtype=torch.float64)
    compiled = torch.compile(net, backend="dta", dynamic=True)
    assert_same(net, compiled, x)
    assert reuses() == 4
    before = counters["stats"]["unique_graphs"]
    for value in (2.0, 3.0, 4.0, 5.0):
        net.blocks[2].factor = value
        assert_same(net, compiled, x)
    assert counters["stats"]["unique_graphs"] == before + 2  # Dynamo looks at the first change of a copy only


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


STATE, WRITTEN, TABLES = {"factor": 1.0}, Config(), [torch.ones(8, dtype=torch.float64), torch.full((8,), 3.0).double()]
PASSED = 0


class Given(nn.Module):
    """Layers that are given more than the hidden states."""

    def __init__(self):
        super().__init__()
        self.linear, self.more = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.settings, self.zero, self.written = {"factor": 1.0}, 0.0, WRITTEN

    def forward(self, x, *others):
        y = self.more(torch.tanh(self.linear(x))) * self.scale
        return x + self.with_others(y, *others)

    def with_others(self, y, *others):
        for number, other in enumerate(others):
            y = y * (number + 0.5) + (other.linear(y) if isinstance(other, nn.Module) else other)
        return y


class OfWrites(Given):
    def with_others(self, y):
        return y * STATE["factor"] * self.written.scale * (1 + PASSED)


class OfNumbers(Given):
    def with_others(self, y, number=1):
        y = y * self.settings["factor"] * math.copysign(1.0, self.zero)
        return y.sigmoid() if number is True else y


class OfDtype(Given):
    def with_others(self, y):
        return y.to(self.linear(y).dtype) * 1.5


def given(kind=Given, number=4):
    torch.manual_seed(0)
    return nn.ModuleList(kind() for _ in range(number)).double()


def first_embeddings(blocks, x):
    """One tensor twice in the first call, two tensors in the others."""
    first = x
    for block in blocks:
        x = block(x, first)
    return x


def tables(blocks, x):
    for number, block in enumerate(blocks):
        x = block(x, TABLES[0], TABLES[number % 2])
    return x


def once_and_twice(blocks, x):
    first = x
    for number, block in enumerate(blocks):
        x = block(x, first if number < 3 else x)
    return x


def another_layer(blocks, x):
    for block in blocks:
        x = block(x, blocks[0])
    return x


def layers_in_pairs(blocks, x):
    for number, block in enumerate(blocks):
        x = block(x, {"other": blocks[number // 2 * 2]}["other"])
    return x


def weight_of_the_first(blocks, x):
    for block in blocks:
        x = block(x, blocks[0].scale)
    return x


def one_after_the_other(blocks, x):
    for block in blocks:
        x = block(x)
    return x


class Calling(nn.Module):
    def __init__(self, blocks, run=one_after_the_other):
        super().__init__()
        self.blocks, self.run, self.start = blocks, run, nn.Parameter(torch.full((8,), 2.0, dtype=torch.float64))

    def forward(self, x):
        return self.run(self.blocks, x * self.start)  # so that all layers take values with a gradient


@pytest.mark.parametrize(
    "run",
    [first_embeddings, tables, once_and_twice, another_layer, layers_in_pairs, weight_of_the_first],
)
def test_what_layers_are_given_is_what_each_of_them_computes_with(run):
    net = Calling(given(), run)
    assert_same(net, torch.compile(net, backend="dta"), torch.randn(5, 8, dtype=torch.float64))


def test_layers_that_are_twice_in_a_list():
    one, other = given(number=2)
    net = Calling(nn.ModuleList([one, one, other, other]))
    assert_same(net, torch.compile(net, backend="dta"), torch.randn(5, 8, dtype=torch.float64))


def test_a_weight_that_is_replaced_for_the_call():
    net = Calling(given())
    weights = {"blocks.1.linear.weight": net.blocks[0].linear.weight.detach() * 2}
    assert_same_function(net, lambda x: torch.func.functional_call(net, weights, (x,)))


def into_a_dict(number):
    STATE["factor"] = 1.0 + number


def into_an_object(number):
    WRITTEN.scale = 1.0 + number


def into_a_global(number):
    global PASSED
    PASSED = number


@pytest.mark.parametrize("write", [into_a_dict, into_an_object, into_a_global])
def test_what_is_written_between_layers_is_read_by_the_next(write):
    blocks = given(OfWrites)

    def run(x):
        for number, block in enumerate(blocks):
            write(number)
            x = block(x)
        return x

    try:
        assert_same_function(blocks, run)
    finally:
        write(0)
        WRITTEN.scale = 1.0


def test_what_was_looked_up_before_the_layer_is_compared():
    blocks = given(OfNumbers)
    for number, block in enumerate(blocks):
        block.settings = {"factor": 1.0 + number // 2}

    def run(x):
        total = sum(block.settings["factor"] for block in blocks)
        for block in blocks:
            x = block(x)
        return x * total

    assert_same_function(blocks, run)


def test_numbers_that_are_equal_and_not_the_same():
    blocks = given(OfNumbers)
    blocks[2].zero = -0.0

    def run(x):
        for number, block in enumerate(blocks):
            x = block(x, number == 1 or 1)
        return x

    assert_same_function(blocks, run)


def test_numbers_that_become_inputs_of_the_graph():
    net = Calling(given(OfNumbers))
    compiled, x = torch.compile(net, backend="dta"), torch.randn(5, 8, dtype=torch.float64)
    for factor in (1.0, 2.0, 3.0):
        for number, block in enumerate(net.blocks):
            block.settings["factor"] = factor + number // 3
        assert_same(net, compiled, x)


def test_layers_under_another_state_of_torch():
    blocks = given(OfDtype).float()
    x = torch.randn(5, 8)

    def run(x):
        for number, block in enumerate(blocks):
            with torch.autocast("cpu", torch.bfloat16, enabled=number > 0), torch.set_grad_enabled(number < 3):
                x = block(x)
        return x

    torch.testing.assert_close(torch.compile(run, backend="dta")(x), run(x), rtol=1e-6, atol=1e-6)


def test_hooks_that_come_later_are_called():
    net, compiled, x = compiled_net()
    assert_same(net, compiled, x)
    hooked(net.blocks[2])
    assert_same(net, compiled, x)
    handle = net.register_forward_hook(lambda module, args, result: result * 2)
    assert_same(net, compiled, x)
    handle.remove()
    assert_same(net, compiled, x)
    handle = register_module_forward_hook(  # of all modules
        lambda module, args, result: result * 2 if isinstance(module, nn.Linear) else None
    )
    assert_same(net, compiled, x)
    handle.remove()
    assert_same(net, compiled, x)


def test_parameters_can_be_swapped_after_a_call():
    """As `torch.utils.swap_tensors` does for averaged weights: nothing of a trace refers to parameters, even weakly."""
    torch._dynamo.reset()
    model, averaged, ids = TinyLM(), TinyLM(), torch.arange(12).view(2, 6)
    compiled = torch.compile(model, backend="dta")
    compiled(ids).sum().backward()
    model.zero_grad()
    for mine, other in zip(model.parameters(), averaged.parameters(), strict=True):
        torch.utils.swap_tensors(mine, other)


def test_masks_of_other_ranks_leave_sizes_apart():
    """A comparison of `[S, S]` with `[B, 1, S, S]` by values would leave a guard that B is not S."""
    model = TinyLM()

    def function(ids, real):
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        x = model.blocks[0](model.embedding(ids), causal)
        return model.head(model.blocks[1](x, causal & real[:, None, None, :]))

    compiled = torch.compile(function, backend="dta", options={"chunk_size": 4})
    for rows, columns in ((3, 7), (4, 9), (5, 5)):
        ids = torch.arange(rows * columns).view(rows, columns) % 5
        torch.testing.assert_close(compiled(ids, ids >= 0), function(ids, ids >= 0), rtol=0, atol=1e-9)


class Offset(Block):
    """A class whose attribute all copies read."""

    offset = 0.5

    def forward(self, x):
        return super().forward(x) + self.offset


class OtherOffset(Offset):
    offset = 0.25


def of_another_class(net):
    net.blocks[2].__class__ = OtherOffset


def an_attribute_of_its_own(net):
    net.blocks[2].offset = 0.75


def the_attribute_of_the_class(net):
    Offset.offset = 1.5


def a_hook_in_a_copy(net):
    net.blocks[2].linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def a_dict_of_hooks_of_its_own(net):
    net.blocks[3].norm._forward_hooks = {0: lambda module, args, result: result * 2}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "change",
    [
        of_another_class,
        an_attribute_of_its_own,
        the_attribute_of_the_class,
        a_hook_in_a_copy,
        a_dict_of_hooks_of_its_own,
    ],
)
def test_later_changes_of_copies_and_of_their_class(change, monkeypatch):
    monkeypatch.setattr(Offset, "offset", 0.5)
    net, x = Net().double(), torch.randn(5, 8, dtype=torch.float64)
    for block in net.blocks:
        block.__class__ = Offset
    compiled = torch.compile(net, backend="dta")
    assert_same(net, compiled, x)
    assert reuses() == 2
    change(net)
    assert_same(net, compiled, x)
