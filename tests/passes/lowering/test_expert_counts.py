"""A comparison with a range counts the slots of each expert only if the range is 0, 1, 2, ..."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dta_compile.passes.graphs.nodes import First
from dta_compile.passes.lowering.experts.slots import Counts

EXPERTS = 4


@pytest.mark.parametrize(("start", "step", "counted"), [(0, 1, EXPERTS), (0, 2, None), (1, 1, None)])
def test_counts_compare_with_every_expert(start, step, counted):
    def routed(scores):
        experts = scores.topk(2, -1)[1].reshape(-1, 1)
        every = torch.arange(start, start + step * EXPERTS, step)
        return experts.flatten(), (experts == every).sum(0)

    symbolic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        graph = make_fx(routed)(mode.from_tensor(torch.randn(7, EXPERTS), symbolic_context=symbolic)).graph
    experts, counts = next(iter(reversed(graph.nodes))).args[0]
    assert Counts(experts, First(())).of(counts) == counted
