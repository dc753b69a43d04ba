"""Readers of calls: arguments by name, and one reading for operators that spell one thing in several ways."""

import operator

import pytest
import torch
from torch import fx

from dta_compile.passes.graphs.arguments import (
    Slice,
    argument,
    dim_of,
    operand_dims,
    select_of,
    slice_of,
    sum_of,
    where_of,
)
from dta_compile.passes.graphs.nodes import call

aten = torch.ops.aten


@pytest.fixture
def graph():
    return fx.Graph()


def value(graph, *shape, dtype=torch.float32):
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(shape, dtype=dtype)
    return node


def test_an_argument_is_read_by_its_name_wherever_it_stands(graph):
    x = value(graph, 2, 3)
    assert argument(call(graph, aten.topk.default, x, 2), "dim") == -1
    assert argument(call(graph, aten.sort.stable, x, stable=True, dim=0), "dim") == 0
    assert argument(call(graph, aten.neg.default, x), "dim") is None
    assert dim_of(call(graph, aten.cat.default, [x, x], -2)) == 0


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.permute.default, [[2, 0, 1, 3]]),
        (aten.transpose.int, [-1, 0]),
        (aten.unsqueeze.default, [-1]),
        (aten.squeeze.default, []),
        (aten.squeeze.dim, [1]),
        (aten.squeeze.dim, [0]),
        (aten.squeeze.dims, [[-3, 0]]),
        (aten.expand.default, [[5, -1, 7, -1, -1]]),
        (aten.clone.default, []),
    ],
)
def test_a_rearrangement_names_the_dimension_of_its_operand_for_each_of_its_own(graph, target, arguments):
    x = value(graph, 2, 1, 3, 4)
    result = call(graph, target, x, *arguments)
    dims, shape = operand_dims(result), x.meta["val"].shape
    assert len(dims) == result.meta["val"].dim()
    assert all(dim is None or shape[dim] == size for dim, size in zip(dims, result.meta["val"].shape, strict=True))
    x.meta["val"] = torch.arange(24.0).reshape(shape)
    index = [size - 1 for size in result.meta["val"].shape]
    own = [index[dims.index(i)] if i in dims else 0 for i in range(4)]
    assert target(x.meta["val"], *arguments)[tuple(index)] == x.meta["val"][tuple(own)]


def test_a_view_is_no_rearrangement(graph):
    assert operand_dims(call(graph, aten.view.default, value(graph, 2, 3), [3, 2])) is None


def test_selections_sums_and_parts_are_read_alike(graph):
    x, mask = value(graph, 2, 3), value(graph, 2, 3, dtype=torch.bool)
    assert where_of(call(graph, aten.masked_fill.Scalar, x, mask, 1.0)) == (mask, 1.0, x)
    assert where_of(call(graph, aten.where.self, mask, x, x)) == (mask, x, x)
    assert sum_of(call(graph, aten.sub.Tensor, x, 2)) == (x, 2, -1)
    assert sum_of(call(graph, aten.add.Tensor, x, x, alpha=2)) is None
    parts = call(graph, aten.unbind.int, x, -1)
    last = graph.call_function(operator.getitem, (parts, 2))
    assert select_of(last) == select_of(call(graph, aten.select.int, x, 1, 2)) == (x, 1, 2)
    assert slice_of(call(graph, aten.slice.Tensor, x, -1, 1)) == Slice(x, 1, 1)
    assert slice_of(call(graph, aten.slice.Tensor, x, -1, 0, 3, 2)) is None
