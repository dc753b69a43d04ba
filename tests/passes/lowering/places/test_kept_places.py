"""Heads merged with the tokens, `[B * S * H, D]`: the same numbers from values that have a dimension for them."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dta_compile.passes.lowering import decompositions
from dta_compile.passes.lowering.places.kept_places import keep_places
from dta_compile.passes.symbols import sizes

aten = torch.ops.aten
WIDTH = 4


def traced(function, x, weight):
    """The function's graph, of operators, with symbols for the numbers of sequences and tokens."""
    dynamic = [DimDynamic.DYNAMIC] * 2 + [DimDynamic.STATIC] * (x.dim() - 2)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))
        module = make_fx(function)(fake, mode.from_tensor(weight, static_shapes=True))
    decompositions.spell_out_constructors(module.graph)
    return module


def example(heads, shape=(2, 5)):
    generator = torch.Generator().manual_seed(heads)
    return torch.randn(*shape, heads, WIDTH, generator=generator), torch.rand(WIDTH, generator=generator) + 0.5


def kept(function, heads):
    """The graph after the step, which gives the same numbers."""
    module = traced(function, *example(heads))
    keep_places(module.graph)
    module.graph.lint()
    module.recompile()
    for shape in [(2, 5), (3, 7)]:
        torch.testing.assert_close(module(*example(heads, shape)), function(*example(heads, shape)))
    return module


def flat(module):
    """The nodes whose values have heads and tokens in one dimension."""
    heads = next(iter(module.graph.nodes)).meta["val"].shape[2]
    values = [node for node in module.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    return [node for node in values if sizes(node) and sizes(node)[0].as_coeff_Mul()[0] % heads == 0]


def gated_norm(x, gate, weight):
    """As Qwen3-Next has it, on rows."""
    x = x.to(torch.float64)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (weight * x.float()) * F.silu(gate.to(torch.float32))


def split(x, weight):
    out = gated_norm(x.reshape(-1, WIDTH), x.cos().flatten(2).reshape(-1, WIDTH), weight)
    return out.reshape(x.shape).sin()


def together(x, weight):
    out = gated_norm(x.reshape(-1, WIDTH), x.cos().flatten(2).reshape(-1, WIDTH), weight)
    return out.reshape(x.shape[0], x.shape[1], -1)


@pytest.mark.parametrize("function", [split, together])
def test_norm_of_heads(function):
    counts = set()
    for heads in (3, 40):
        module = kept(function, heads)
        assert not flat(module)
        counts.add(len(module.graph.nodes))
    assert len(counts) == 1


def mixed_between(x, weight):
    rows = x.reshape(-1, WIDTH)
    normed = gated_norm(rows, x.cos().flatten(2).reshape(-1, WIDTH), weight)
    totals = normed.cumsum(0)  # of rows
    return normed.reshape(x.shape).cos(), (totals * rows).reshape(x.shape[0], x.shape[1], -1), rows.flip(0)


def test_users_that_mix_rows():
    module = kept(mixed_between, 40)
    assert {aten.cumsum.default, aten.flip.default} <= {node.target for node in flat(module)}
    assert aten.cos.default not in {node.target for node in flat(module)}


def everything(x, weight):
    """Dimensions from the left and from the right."""
    y = x.reshape(-1, WIDTH)
    y = torch.where(y > 0, y, weight[None]) + torch.zeros_like(y)
    y = y.unsqueeze(1).expand(-1, 2, -1).transpose(1, 2) * weight[:2]  # [N * k, D, 2]
    y = torch.cat([y, y.softmax(1)], -1) + torch.stack([y.sum(2), y.amax(-1)] * 2, 2)  # [N * k, D, 4]
    y = F.layer_norm(y, (WIDTH,), weight) * y.var(1, keepdim=True) + y.mean((1, 2), keepdim=True)
    first, second = y.permute(0, 2, 1).split(2, 1)  # [N * k, 2, D]
    y = first.reshape(-1, 2 * WIDTH) + second.reshape(-1, 2 * WIDTH)[:, :1] + y.select(1, 0)[:, 1:2].squeeze(1)[:, None]
    y = y + y.reshape(-1, WIDTH).logsumexp(1).reshape(-1, 2).sum(1, keepdim=True)
    a, b = y.view(-1, 2, WIDTH).unbind(1)
    return (a - b).reshape(x.shape[0] * x.shape[1], -1)


def of_rows(x, weight):
    """The tokens' dimensions are merged already, or not."""
    rows = x.flatten(0, 1).reshape(-1, WIDTH)
    return (rows * x.cos().flatten(2).reshape(-1, WIDTH).sigmoid()).reshape(x.shape[0], x.shape[1], -1)


def groups_of_heads(x, weight):
    rows = x.unflatten(2, (-1, 2)).reshape(-1, WIDTH)
    return (rows.sin() * x.cos().flatten(2).reshape(-1, WIDTH)).reshape(x.shape)


@pytest.mark.parametrize("function", [everything, of_rows, groups_of_heads])
def test_operators_on_rows(function):
    assert not flat(kept(function, 40))


def joined(x, weight):
    return x.reshape(-1, WIDTH).cumsum(0).reshape(x.shape)


def heads_only(x, weight):
    """Pairs of heads as rows, then with other tokens' heads."""
    return x.reshape(-1, WIDTH).sin().reshape(1, -1).cos()


def along_rows(x, weight):
    rows = x.reshape(-1, WIDTH)
    return rows.softmax(0) + rows.amax(-2) + rows.t().sum(1) + rows[1:].sum() + rows.sum() + rows.mean((0, 1))


@pytest.mark.parametrize("function", [joined, heads_only, along_rows])
def test_what_stays(function):
    before = [node.format_node() for node in traced(function, *example(3)).graph.nodes]
    after = [node.format_node() for node in kept(function, 3).graph.nodes]
    assert before == after
