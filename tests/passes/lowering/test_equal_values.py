"""What every layer computes of data alone is an input of chunks once."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from dta_compile.passes.lowering.repeated_calls import merge_equal_values
from tests.support.inside import inside
from tests.support.tiny import TinyLM, after, assert_same, shared_ids, weighted

aten = torch.ops.aten


class Rotated(nn.Module):
    """A block with angles of its own making, as many hand-written models have."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, pairs):
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / torch.arange(1.0, x.shape[2] + 1)
        return self.block(x * angles.cos() + x.roll(1, -1) * angles.sin(), pairs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layers", [1, 3])
def test_angles_that_layers_compute_are_gathered_once(layers):
    model, ids = TinyLM(layers=layers), shared_ids()
    model.blocks = nn.ModuleList(Rotated(block) for block in model.blocks)
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 3, "codegen": "eager"})
    expected = after(model, lambda: weighted(model(ids)))
    assert_same(after(model, lambda: weighted(compiled(ids))), expected)
    assert len(inside(compiled).only.program.trunk_inputs) == 4  # ids, positions, cosines and sines


def merged(function, *inputs, parameters=0):
    module = make_fx(function)(*inputs)
    merge_equal_values(module.graph, module.graph.find_nodes(op="placeholder")[:parameters])
    module.graph.lint()
    module.recompile()
    return module


def count(module, target):
    return len(module.graph.find_nodes(op="call_function", target=target))


X = torch.linspace(-1, 1, 6).view(2, 3)


def test_equal_values_are_one_and_unequal_ones_are_not():
    def function(x):
        return x.cos()[None] + x.cos()[None] * x.cos()[:, None] + (x * 0.0) * (x * -0.0) + x.sum(0) + x.sum(1)[:, None]

    module = merged(function, X)
    assert (count(module, aten.cos.default), count(module, aten.unsqueeze.default)) == (1, 3)
    assert (count(module, aten.sum.dim_IntList), count(module, aten.mul.Tensor)) == (2, 4)
    torch.testing.assert_close(module(X), function(X))


def test_what_is_drawn_returned_or_made_of_parameters_stays():
    def function(weight, x):
        drawn = torch.rand_like(x) + torch.rand_like(x)
        return x.exp(), x.exp(), weight.sin() + weight.sin() + drawn

    module = merged(function, X, X + 1, parameters=1)
    assert (
        count(module, aten.rand_like.default) == count(module, aten.exp.default) == count(module, aten.sin.default) == 2
    )
