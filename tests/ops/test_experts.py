"""Products with the weights of experts, against the same written out token by token."""

import pytest
import torch

import dta_compile
from dta_compile.errors import OptionError
from dta_compile.ops import triton_use
from dta_compile.ops.experts.operators import EXPERT_PRODUCTS_

TOKENS, CHOSEN, WIDTH, INNER, EXPERTS = 7, 3, 8, 4, 6
kernels = pytest.mark.skipif(
    not (triton_use.is_interpreted() and triton_use.has_triton()),
    reason="needs the package triton and TRITON_INTERPRET=1",
)


def written_out(rows, expert, weight, bias, transposed):
    """The linear layer of every place; zeros where there is no expert."""
    rows = rows if rows.dim() > expert.dim() else rows.unsqueeze(-2).expand(*expert.shape, -1)
    known = (expert >= 0) & (expert < len(weight))
    chosen = weight[expert.where(known, 0)]
    out = (rows.unsqueeze(-2) @ (chosen if transposed else chosen.mT)).squeeze(-2)
    out = out if bias is None else out + bias[expert.where(known, 0)]
    return out * known[..., None]


def operands(dtype=torch.float64, tokens=(TOKENS,), width=WIDTH, seed=0):
    """Hidden states, routes (some to no expert), router weights, weights and biases of both layers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    expert = torch.randint(-1, EXPERTS + 1, (*tokens, CHOSEN), generator=generator)
    weights = (
        normal(EXPERTS, INNER, width),
        normal(EXPERTS, INNER),
        normal(EXPERTS, width, INNER),
        normal(EXPERTS, width),
    )
    return normal(*tokens, width), expert, normal(*tokens, CHOSEN), *weights


def mixture(linear, summed, hidden, expert, scale, up, up_bias, down, down_bias, transposed):
    if transposed:
        up, down = up.mT.contiguous(), down.mT.contiguous()
    rows = linear(hidden, expert, up, up_bias, transposed).tanh()
    return summed(rows, expert, scale, down, down_bias, transposed)


def ours(*arguments):
    def linear(rows, expert, weight, bias, transposed):
        return dta_compile.expert_linear(rows, expert, weight, bias, transposed=transposed)

    def summed(rows, expert, scale, weight, bias, transposed):
        return dta_compile.expert_sum(rows, expert, scale, weight, bias, transposed=transposed)

    return mixture(linear, summed, *arguments)


def plain(*arguments):
    def summed(rows, expert, scale, weight, bias, transposed):
        return (written_out(rows, expert, weight, bias, transposed) * scale[..., None]).sum(-2)

    return mixture(written_out, summed, *arguments)


def assert_same(given, transposed, tolerance):
    found, expected = ours(*given, transposed), plain(*given, transposed)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    trained = [one for one in given if one.requires_grad]
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view(found.shape)
    gradients = (torch.autograd.grad((out * weights).sum(), trained) for out in (found, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [(TOKENS,), (2, 3), (1,), ()])
def test_mixtures(tokens, transposed):
    assert_same(operands(tokens=tokens), transposed, 1e-12)


@pytest.mark.parametrize("width", [WIDTH, 5])  # torch's grouped product takes the first
def test_float32(width):
    assert_same(operands(torch.float32, width=width), False, 1e-5)


@kernels
@pytest.mark.parametrize("transposed", [False, True])
def test_kernels_on_the_interpreter(transposed, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", None)
    assert_same(operands(torch.float32, tokens=(70,), width=5), transposed, 1e-5)


@pytest.mark.parametrize("expert", [0, EXPERTS - 1, -1, EXPERTS])
def test_all_tokens_to_one_expert_or_to_none(expert):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        hidden, route, *others = operands(dtype)
        assert_same((hidden, torch.full_like(route, expert), *others), False, tolerance)


def test_no_tokens():
    hidden, expert, scale, *others = operands()
    given = (hidden[:0].detach().requires_grad_(), expert[:0], scale[:0].detach().requires_grad_(), *others)
    out = ours(*given, False)
    assert out.shape == (0, WIDTH)
    out.sum().backward()
    assert not given[3].grad.any()


def test_gradients_are_added_to_sums_in_float32():
    left, right = torch.randn(TOKENS, CHOSEN, 4).bfloat16(), torch.randn(TOKENS, 6).bfloat16()
    expert = torch.tensor([[0, 2, 2]] * TOKENS)
    total = torch.ones(4, 4, 6)
    EXPERT_PRODUCTS_(total, left, right, expert)
    expected = torch.ones(4, 4, 6, dtype=torch.float64)
    expected[0] += left[:, 0].double().T @ right.double()
    expected[2] += (left[:, 1] + left[:, 2].double()).T @ right.double()
    torch.testing.assert_close(total.double(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(total[1], torch.ones(4, 6)) and torch.equal(total[3], torch.ones(4, 6))


def test_what_is_compiled_by_others_is_one_operator():
    given = operands()
    compiled = torch.compile(lambda *arguments: ours(*arguments, False), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), plain(*given, False))
    torch.library.opcheck(torch.ops.dta.expert_linear.default, (given[0], given[1], given[3], False))
    scaled = torch.randn(TOKENS, CHOSEN, INNER, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.dta.expert_sum.default, (scaled, given[1], given[2], given[5], False))


def test_sizes_that_do_not_fit_are_named():
    hidden, expert, scale, up, up_bias, down, _ = operands()
    for wrong in ((hidden, expert, down), (hidden, expert.float(), up), (hidden[:-1], expert, up)):
        with pytest.raises(OptionError, match="do not fit"):
            dta_compile.expert_linear(*wrong)
    with pytest.raises(OptionError, match="do not fit"):
        dta_compile.expert_linear(hidden, expert, up, up_bias[:, :-1])
    with pytest.raises(OptionError, match="a weight and a row for every expert"):
        dta_compile.expert_sum(torch.randn(TOKENS, INNER).double(), expert, scale, down)


@pytest.mark.parametrize(("dtype", "experts"), [(torch.int8, 128), (torch.uint8, 256)])
def test_routes_in_bytes(dtype, experts):
    rows, weight = torch.randn(TOKENS, WIDTH).double(), torch.randn(experts, INNER, WIDTH).double()
    bias, expert = torch.randn(experts, INNER).double(), torch.randint(0, 128, (TOKENS, CHOSEN))
    expected = written_out(rows, expert, weight, bias, False)
    torch.testing.assert_close(dta_compile.expert_linear(rows, expert.to(dtype), weight, bias), expected)


def test_weights_in_any_layout():
    rows, expert = torch.randn(TOKENS, WIDTH), torch.randint(0, EXPERTS, (TOKENS, CHOSEN))
    layouts = {
        "a part": torch.randn(EXPERTS, INNER, 2 * WIDTH)[:, :, :WIDTH],
        "every second": torch.randn(EXPERTS, 2 * INNER, 2 * WIDTH)[:, ::2, ::2],
        "experts last": torch.randn(INNER, WIDTH, EXPERTS).permute(2, 0, 1),
        "one for all": torch.randn(1, INNER, WIDTH).expand(EXPERTS, -1, -1),
    }
    for name, weight in layouts.items():
        found = dta_compile.expert_linear(rows, expert, weight)
        torch.testing.assert_close(found, written_out(rows, expert, weight, None, False), msg=name)


def test_second_derivatives():
    hidden, expert, scale, up, _, down, _ = (
        one.detach().requires_grad_() if one.is_floating_point() else one for one in operands()
    )

    def mixed(hidden, scale, up, down):
        return dta_compile.expert_sum(dta_compile.expert_linear(hidden, expert, up).tanh(), expert, scale, down)

    assert torch.autograd.gradgradcheck(mixed, (hidden, scale, up, down))
