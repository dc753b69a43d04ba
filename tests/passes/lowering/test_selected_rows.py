"""What becomes of selected rows in the lowered graph: the same numbers, also at rows that are not selected."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dta_compile.ops.experts.operators import EXPERT_LINEAR
from dta_compile.passes.lowering.experts.selected_rows import spread_selected_rows
from dta_compile.passes.lowering.experts.slots import at_most_one

aten = torch.ops.aten
TOKENS, WIDTH = 7, 4


def traced(function, *values):
    """The function's graph, of operators, with a symbol for the first dimension of the first value."""
    shape_env = ShapeEnv(allow_dynamic_output_shape_ops=True)
    with FakeTensorMode(shape_env=shape_env) as mode:
        fakes = [mode.from_tensor(value, static_shapes=i > 0) for i, value in enumerate(values)]
        return make_fx(function)(*fakes)


def spread(function, *values):
    module = traced(function, *values)
    before = {node.target for node in module.graph.nodes}
    spread_selected_rows(module.graph, [])
    module.recompile()
    return module, before


def example(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)


def by_column(x, w):
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return torch.zeros_like(x).index_add(0, rows, torch.mm(x[rows], w) * x[rows, 1:2], alpha=2)


def by_mask(x, w):
    mask = x[:, 0] > 0
    return x.index_put([mask], torch.log(x[mask].abs()) / torch.mm(x[mask], w))


def by_place(x, w):
    mask = x.view(-1, 2, 2) > 0
    row, left, right = mask.nonzero().unbind(1)
    return torch.zeros_like(x).index_add(0, row, torch.mm(x[row], w) * x.view(-1, 2, 2)[row, left, right, None])


def transposed(x, w):
    rows = (x[:, 0] > 0).nonzero().squeeze(1)
    return x.t().index_add(1, rows, torch.mm(w, x.t().index_select(1, rows)))


@pytest.mark.parametrize("function", [by_column, by_mask, by_place, transposed])
@pytest.mark.parametrize("selected", ["some", "none", "all"])
def test_the_same_numbers(function, selected):
    x, w = example()
    if selected != "some":
        x[:, 0] = x[:, 0].abs() * (1 if selected == "all" else -1)
    x[1] = torch.tensor([-1.0, 0, 0, 0])  # where it is not selected, logarithms and quotients are not finite
    module, before = spread(function, x, w)
    assert aten.nonzero.default in before or aten.index.Tensor in before
    assert not module.graph.find_nodes(op="call_function", target=aten.nonzero.default)
    found = []
    for run in (module, function):
        leaves = [value.clone().requires_grad_() for value in (x, w)]
        result = run(*leaves)
        weights = torch.arange(result.numel(), dtype=torch.float64).view(result.shape)
        found.append(
            [result, *torch.autograd.grad((result * weights).nan_to_num().sum(), leaves, materialize_grads=True)]
        )
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_products_take_selected_rows_only():
    module, _ = spread(by_column, *example())
    assert len(module.graph.find_nodes(op="call_function", target=EXPERT_LINEAR)) == 1
    assert not module.graph.find_nodes(op="call_function", target=aten.mm.default)


def summed(x, w):
    return x[x[:, 0] > 0].sum(0)


def returned(x, w):
    return x[x[:, 0] > 0]


def of_two(x, w):
    first, second = x[:, 0] > 0, x[:, 1] > 0
    return x.index_put([first], x[second][: x[first].shape[0]])


def numbered(x, w):
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return x.index_add(0, rows, x[rows] * rows[:, None])


def moved(x, w):
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return x.index_add(0, rows, x[rows].flip(0))


def folded(x, w):
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return x.index_add(0, rows, x[rows].t().reshape(-1).view(-1, WIDTH))


def folded_in_other_numbers(x, w):
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return x.index_add(0, rows, x[rows].view(-1, 1).expand(-1, 2).reshape(-1).view(-1, 2 * WIDTH)[:, ::2])


@pytest.mark.parametrize("function", [summed, returned, numbered, moved, folded, folded_in_other_numbers])
def test_what_is_not_done_row_by_row_stays(function):
    module, _ = spread(function, *example())
    x, w = example(1)
    torch.testing.assert_close(module(x, w), function(x, w))
    assert any(node.target in (aten.nonzero.default, aten.index.Tensor) for node in module.graph.nodes)


def of_topk(x):
    return x.topk(2, -1).indices == 1


def of_one_hot(x):
    return torch.nn.functional.one_hot(x.sort(-1).indices[:, :2].int().long(), WIDTH).permute(2, 1, 0)[1].t()


def and_more(x):
    return (x.topk(2, -1).indices == 1) & (x[:, :2] > 0)


def of_rounded(x):
    return (x.topk(2, -1).indices // 2) == 1


def of_values(x):
    return x.topk(2, -1).values == 1


def of_other_numbers(x):
    return x.topk(2, -1).indices == torch.arange(2)


def along_tokens(x):
    return x.topk(2, 0).indices[:, :2] == 1


def either(x):
    return (x.topk(2, -1).indices == 1) | (x[:, :2] > 0)


@pytest.mark.parametrize(
    "condition, holds",
    [(of_topk, True), (of_one_hot, True), (and_more, True)]
    + [(one, False) for one in (of_rounded, of_values, of_other_numbers, along_tokens, either)],
)
def test_at_most_one_place(condition, holds):
    graph = traced(condition, example()[0]).graph
    (result,) = next(iter(reversed(graph.nodes))).all_input_nodes
    assert at_most_one(result, [1]) is holds
