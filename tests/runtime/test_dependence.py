"""What is not marked does not change with what is marked, whatever its numbers; what users mask is not marked."""

import pytest
import torch
import torch.nn.functional as F

from dta_compile.runtime.dependence import Dependence

REAL = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()


def counted(chosen):
    return torch.zeros(2, 4, 3).scatter(-1, chosen[..., None], 1.0)


@torch.library.custom_op("dta_test_dependence::mul", mutates_args=())
def mul_by_name(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return self + other


KEEPS_OUT = {
    "masked, then summed": lambda x, chosen: torch.where(REAL[..., None], x, 0).sum((0, 1)),
    "filled": lambda x, chosen: x.masked_fill(~REAL[..., None], 0).amax((0, 1)),
    "times zero": lambda x, chosen: (x.sigmoid() * REAL[..., None]).mean(1),
    "selected": lambda x, chosen: x[REAL].softmax(-1).sum(0),
    "counts that are masked": lambda x, chosen: (counted(chosen) * REAL[..., None]).sum((0, 1)),
    "a product with the mask": lambda x, chosen: REAL.double().flatten()[None] @ x.flatten(0, 1).sigmoid(),
    "weighed zero": lambda x, chosen: torch.zeros(3).double().index_add(0, chosen.flatten(), REAL.double().flatten()),
    "scattered zeros": lambda x, chosen: torch.zeros(2, 3).scatter_add(1, chosen, REAL.float()),
    "counts of the selected": lambda x, chosen: torch.bincount(chosen[REAL], minlength=3),
    "booleans": lambda x, chosen: (((x > 0).any(-1) & REAL) | ~REAL).all(1),
    "columns of real tokens": lambda x, chosen: torch.cat([x[:, :1], x[:, :1].flip(1)], 1).transpose(1, 2).cumsum(-1),
    "chosen of real tokens": lambda x, chosen: x.masked_fill(~REAL[..., None], -9.0).flatten().topk(2).indices,
    "shapes alone": lambda x, chosen: torch.ones_like(x).sum(),
}
LETS_IN = {
    "a sum": lambda x, chosen: x.sum((0, 1)),
    "rare numbers": lambda x, chosen: (x - 1e4).relu().sum((0, 1)),
    "counts": lambda x, chosen: counted(chosen).sum((0, 1)),
    "a histogram": lambda x, chosen: torch.histc(x, 4, -1, 1),
    "added at chosen places": lambda x, chosen: (
        torch.zeros(3).double().index_add(0, chosen.flatten(), x[..., 0].flatten())
    ),
    "set at chosen places": lambda x, chosen: torch.zeros(2, 3).scatter(1, chosen, 1.0),
    "read at chosen places": lambda x, chosen: torch.arange(3)[chosen],
    "gathered": lambda x, chosen: x.gather(-1, chosen[..., None]),
    "the largest": lambda x, chosen: x.flatten(0, 1).max(0).values,
    "masked by what is let in": lambda x, chosen: torch.where(x > 0, 1.0, 2.0),
    "in place": lambda x, chosen: torch.zeros(2, 4, 3).double().add_(x),
    "a number": lambda x, chosen: torch.full((2,), float(x[0, 3, 0] > 9)),
    "its own mask": lambda x, chosen: x[x > 2.5].sum(),
    "normalised": lambda x, chosen: F.layer_norm(x, (3,)),
    "a product": lambda x, chosen: x @ torch.eye(3).double(),
    "a product by name": lambda x, chosen: mul_by_name(x, torch.zeros(2, 4, 3).double()),
    "bits": lambda x, chosen: x.view(torch.int32),
}


def inputs(seed=None):
    torch.manual_seed(0)
    x, chosen = torch.randn(2, 4, 3).double(), torch.randint(0, 3, (2, 4))
    if seed is not None:
        torch.manual_seed(seed)
        x = torch.where(REAL[..., None], x, 10.0**seed * torch.randn(x.shape))
        chosen = torch.where(REAL, chosen, torch.randint(0, 3, chosen.shape))
    return x, chosen


def followed(function):
    given, dependence = inputs(), Dependence()
    for tensor, padding in zip(given, (~REAL[..., None].expand(2, 4, 3), ~REAL), strict=True):
        dependence.mark(tensor, padding)
    with dependence:
        result = function(*given)
    return result, dependence.of(result)


@pytest.mark.parametrize("name", KEEPS_OUT)
def test_what_is_masked_is_not_marked(name):
    result, marks = followed(KEEPS_OUT[name])
    assert not marks.any()
    assert all(torch.equal(result, KEEPS_OUT[name](*inputs(seed))) for seed in range(4))


def assert_lets_in(function):
    result, marks = followed(function)
    assert marks.any()
    others = [other for seed in range(4) if (other := function(*inputs(seed))).shape == result.shape]
    assert all(torch.equal(result[~marks], other[~marks]) for other in others)


@pytest.mark.parametrize("name", LETS_IN)
def test_what_is_let_in_is_marked(name):
    assert_lets_in(LETS_IN[name])


@pytest.mark.parametrize(
    "read",
    [
        lambda row: row[row],
        lambda row: row.index_select(0, row),
        lambda row: row.gather(0, row),
        lambda row: (other := row != 1)[other],
    ],
)
def test_an_index_that_is_the_tensor_itself(read):
    assert_lets_in(lambda x, chosen: read(chosen[0]))
