"""Executable graphs as functions: the same operators, for the same arguments, without the calls in between."""

import gc
import traceback

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from dta_compile.executable.code import BINDINGS, Code

aten = torch.ops.aten
A, B, ROWS = torch.linspace(1, 2, 12).view(3, 4), torch.linspace(-1, 3, 12).view(3, 4), torch.tensor([2, 0, 2])
SAMPLES = {
    aten.add.Tensor: [((A, B), {}), ((A, 1e-6), {}), ((A, B), {"alpha": 3})],
    aten.add_.Tensor: [((A, B), {}), ((A, 2), {}), ((A, B), {"alpha": 3})],
    aten.addmm_.default: [((A @ B.T, A, B.T), {}), ((A @ B.T, A, B.T), {"beta": 2, "alpha": 0.5})],
    aten.bmm.default: [((A[None], B.T[None]), {})],
    aten.cat.default: [(([A, B], -1), {}), (([A, B],), {})],
    aten.div.Tensor: [((A, B), {}), ((A, 3), {})],
    aten.div_.Scalar: [((A, 3), {})],
    aten.div_.Tensor: [((A, B), {})],
    aten.embedding.default: [((A, ROWS), {}), ((A, ROWS, 1, False, False), {})],
    aten.expand.default: [((A[:1], [3, 4]), {}), ((A[:1], [3, -1]), {"implicit": False})],
    aten.index_select.default: [((A, 1, ROWS), {})],
    aten.mean.dim: [((A, [-1], True), {}), ((A, [0]), {"dtype": torch.float64})],
    aten.mm.default: [((A, B.T), {})],
    aten.mul.Scalar: [((A, 2), {})],
    aten.mul.Tensor: [((A, B), {}), ((A, 0.5), {})],
    aten.mul_.Scalar: [((A, 2), {})],
    aten.mul_.Tensor: [((A, B), {})],
    aten.permute.default: [((A, [1, 0]), {})],
    aten.pow.Tensor_Scalar: [((A, 2), {}), ((A, -0.5), {})],
    aten.sub.Tensor: [((A, B), {}), ((A, B), {"alpha": 2})],
    aten.sum.dim_IntList: [((A, [0], True), {}), ((A, [0, 1]), {"dtype": torch.float64})],
    aten.transpose.int: [((A, 0, -1), {})],
    aten.unsqueeze.default: [((A, -1), {})],
    aten.view.default: [((A, [2, -1]), {}), ((A, [12]), {})],
}


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("overload", BINDINGS, ids=str)
def test_a_binding_is_the_operator_for_whatever_it_is_called_with(overload):
    for args, kwargs in SAMPLES.get(overload, [((A,), {})]):
        found = []
        for call in (overload, BINDINGS[overload]):
            given = [x.clone() if overload._schema.is_mutable and isinstance(x, torch.Tensor) else x for x in args]
            with Dispatched() as dispatched:
                result = call(*given, **kwargs)
            found.append((result, given[0], dispatched.found))
        (wanted, target, operators), (got, written, called) = found
        assert torch.equal(wanted, got) and wanted.dtype == got.dtype and wanted.stride() == got.stride()
        assert torch.equal(target, written) if isinstance(target, torch.Tensor) else True
        assert [str(one).replace(".Scalar", ".Tensor") for one in called] == [
            str(one).replace(".Scalar", ".Tensor") for one in operators
        ]


def traced(function, *args):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(*args)


def test_a_graph_runs_as_its_module_does():
    def function(a, b):
        both = torch.cat([a * b, a.softmax(-1)])
        return both.t().contiguous().view(-1)[2:].clamp(min=0.1), (both.sum(0), [a + 1])

    module = traced(function, A, B)
    wanted, got = module(A, B), Code.of(module).function(A, B)
    assert torch.equal(wanted[0], got[0]) and torch.equal(wanted[1][0], got[1][0]) and torch.equal(got[1][1][0], A + 1)


def test_attributes_and_other_callables_stay():
    graph = fx.Graph()
    x = graph.placeholder("x")
    table = graph.get_attr("table")
    graph.output(graph.call_function(max, (graph.call_function(aten.mul.Tensor, (x, table)), x)))
    root = torch.nn.Module()
    root.table = torch.tensor(3.0)
    module = fx.GraphModule(root, graph)
    run = Code.of(module).function
    del module, root
    gc.collect()
    assert run(torch.tensor(2.0)) == 6


def test_errors_show_the_line_of_the_graph():
    run = Code.of(traced(lambda a, b: a.mm(b), A, B.T.contiguous())).function
    try:
        run(A, A)
    except RuntimeError as error:
        assert "_aten_mm_default(" in "".join(traceback.format_exception(error))
    else:
        raise AssertionError("shapes do not fit")
