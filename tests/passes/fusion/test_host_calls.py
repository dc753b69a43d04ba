"""Fewer calls for the same: views, copies that may be none, and small additions."""

import types

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from dta_compile.passes.fusion.host_calls import host_calls
from dta_compile.passes.graphs.storage import view_source
from dta_compile.passes.memory.in_place import in_place
from dta_compile.passes.memory.working_memory import peaks_of
from dta_compile.passes.stage_graphs import ChunkStages, StageGraphs, StageOfChunk
from dta_compile.passes.value_bytes import ChunkSizes
from tests.support.chunk_graphs import Run, nodes_of, program_of, targets
from tests.support.families import build

aten = torch.ops.aten
VIEW = torch.randn(2, 3, 4, dtype=torch.float64)


@pytest.fixture(scope="module")
def toy():
    model = build("qwen3")
    return program_of(model, model.config.vocab_size)


def run(module, *passes):
    """Passes over a program with one graph, which all executable graphs are."""
    kind, count = StageGraphs(module, module, module, None), len(module.graph.find_nodes(op="placeholder")) - 1
    stage = StageOfChunk(0, (), tuple(range(count)), ())
    stages = ChunkStages((kind,), (stage,), ChunkSizes(1009, 1013), count, count, frozenset(), (), ())
    program = types.SimpleNamespace(stages=stages)
    for step in passes:
        step.run(program)
    module.graph.lint()
    return module


def rewritten(function, *inputs, passes=(host_calls,)):
    return run(make_fx(function, tracing_mode="fake")(*inputs), *passes)


def is_view(node):
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor) and bool(view_source(node))


@pytest.mark.parametrize("name", ["cache_only", "forward_only", "forward", "backward"])
def test_no_view_is_taken_twice_or_of_a_view_in_the_same_order(toy, name):
    assert any(map(is_view, nodes_of(toy, name)))
    for kind in toy.stages.kinds:
        if name in kind.graphs:
            check_views(kind.graphs[name].graph)


def check_views(graph):
    reshapes = {aten.view.default, aten._unsafe_view.default}
    views = [node for node in graph.nodes if is_view(node)]
    assert len({(node.target, node.args, str(node.kwargs)) for node in views}) == len(views)
    assert not [node for node in views if node.target in reshapes and node.args[0].target in reshapes]


def test_gradients_of_norms_are_added_in_one_call(toy):
    """Of one stage: those of a layer's input, queries and keys; the one before the MLP is in another, alone."""
    found = []
    for _, kind in toy.stages.of_kinds():
        additions = [node for node in kind.backward.graph.nodes if node.target is aten.add_.Tensor]
        together = kind.backward.graph.find_nodes(op="call_function", target=aten._foreach_add_.List)
        calls = [1 for node in additions if node.args[0].op == "placeholder"] + [len(node.args[0]) for node in together]
        assert len(calls) <= 1
        found += calls
    assert sorted(found) == [1, 1, 1, 3, 3]  # of two layers, and that before the head


def test_what_attention_returns_is_copied_only_where_it_lies_otherwise(toy):
    assert targets(nodes_of(toy, "forward"))["aten.contiguous.default"] == 2  # a layer each
    assert not targets(nodes_of(toy, "forward"))["aten.clone.default"]


def test_a_view_back_to_the_same_shape_is_the_value_itself():
    module = rewritten(lambda x: x.exp().view(6, 4).view(2, 3, 4) + 1, VIEW)
    assert set(targets(module)) == {"aten.exp.default", "aten.add.Tensor"}
    torch.testing.assert_close(module(VIEW), VIEW.exp() + 1)


def test_what_a_graph_returns_stays_a_value_of_its_own():
    def function(x):
        y = x.exp()
        return (
            y,
            y.view(2, 3, 4),
            y.view(6, 4),
            y.view(6, 4),
            y.transpose(0, 1).clone(memory_format=torch.contiguous_format),
        )

    module = rewritten(function, VIEW)
    results = module(VIEW)
    assert len({id(result) for result in results}) == 5
    assert results[4].data_ptr() != results[0].data_ptr()


def test_a_reshape_that_copies_is_no_view_of_its_argument():
    module = rewritten(lambda x: torch.ops.aten.reshape(x.transpose(0, 1), [6, 4]).view(3, 8) * 2, VIEW)
    torch.testing.assert_close(module(VIEW), VIEW.transpose(0, 1).reshape(3, 8) * 2)


@pytest.mark.parametrize("laid_out", [True, False])
def test_memory_of_what_may_be_no_copy_is_not_written_over(laid_out):
    """The sum would go into the copy's memory, and with it into what is returned."""

    def function(x):
        y = x.exp()
        copy = (y if laid_out else y.transpose(0, 1)).clone(memory_format=torch.contiguous_format)
        return y, copy + 1

    module = rewritten(function, VIEW, passes=(host_calls, in_place))
    assert targets(module)["aten.contiguous.default"] == 1
    for mine, theirs in zip(module(VIEW), function(VIEW), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_it_is_written_over_once_nobody_reads_either():
    def function(x):
        return (x.exp().transpose(0, 1).clone(memory_format=torch.contiguous_format) + 1) * 2

    module = rewritten(function, VIEW, passes=(host_calls, in_place))
    assert targets(module)["aten.mul_.Tensor"] == targets(module)["aten.add_.Tensor"] == 1
    torch.testing.assert_close(module(VIEW), function(VIEW))


def test_what_may_be_a_copy_counts_as_one():
    module = rewritten(lambda x: x.exp().clone(memory_format=torch.contiguous_format).sum(), VIEW)
    (peak,) = peaks_of(module.graph, ChunkSizes(1009, 1013))
    assert peak.fixed == 2 * VIEW.nbytes + VIEW.itemsize


def accumulation(values, additions):
    """A graph that adds its inputs to one another: `(total, addend)`, each an input's position."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"input_{i}") for i in range(len(values))]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    for total, addend in additions:
        graph.call_function(aten.add_.Tensor, (nodes[total], nodes[addend]))
    graph.output(())
    return run(fx.GraphModule(nn.Module(), graph), host_calls)


def test_only_small_gradients_of_one_kind_wait_for_each_other():
    small = torch.zeros(3), torch.ones(3)
    half = torch.zeros(3), torch.ones(3, dtype=torch.bfloat16)
    repeated = torch.zeros(3), torch.ones(1)
    large = torch.zeros(2**17), torch.ones(2**17)
    pairs = small, half, small, half, half, repeated, repeated, large, large
    found = targets(accumulation([value for pair in pairs for value in pair], [(i, i + 1) for i in range(0, 18, 2)]))
    assert found == {"aten._foreach_add_.List": 2, "aten.add_.Tensor": 4}


def test_a_total_with_two_addends_is_once_in_a_call():
    values = [torch.full((3,), float(i)) for i in range(5)]
    module = accumulation(values, [(0, 2), (0, 3), (1, 4)])
    module(*values)
    assert values[0].tolist() == [5.0] * 3 and values[1].tolist() == [5.0] * 3
    (grouped,) = module.graph.find_nodes(op="call_function", target=aten._foreach_add_.List)
    assert len(set(grouped.args[0])) == len(grouped.args[0]) == 2


def test_weights_are_transposed_once_a_call(toy):
    assert len(toy.joint.transposed) == 15  # seven of each layer, and the head
    for kind in toy.stages.kinds:
        for name in ("cache_only", "forward_only", "forward"):
            inputs = list(kind.graphs[name].graph.find_nodes(op="placeholder"))[1:]
            assert not [i for i in kind.transposed for user in inputs[i].users if user.target is aten.t.default]
    run = Run(toy, 5, 3)
    views = toy.joint.transposes(run.inputs)
    assert [view.data_ptr() for view in views] == [run.inputs[i].data_ptr() for i in toy.joint.transposed]
    assert [view.shape for view in views] == [run.inputs[i].shape[::-1] for i in toy.joint.transposed]
