"""Operators over ranks: what fake tensors say of them, and derivatives, on a group of one; see tests/distributed."""

import pytest
import torch
import torch.distributed as dist

from dta_compile.ops import collectives

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield collectives.known_as(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "operator", [*sorted(collectives.COLLECTIVES, key=str)], ids=lambda operator: operator.name().split("::")[1]
)
def test_collectives_of_one_rank(group, operator):
    value = torch.randn(3, 4, dtype=torch.float64).t().requires_grad_()
    torch.library.opcheck(operator, (value, group), test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(operator(value, group), value)
    assert torch.autograd.gradcheck(lambda x: operator(x, group), (value,))


@pytest.mark.parametrize("padding", [-1, 1, 5])
def test_parts_of_an_embedding_add_up(padding):
    whole = torch.nn.Embedding(8, 3, padding_idx=None if padding < 0 else padding, dtype=torch.float64)
    ids = torch.tensor([[0, 5, 1], [7, 1, 4]])
    parts = [whole.weight.detach()[start : start + 4].clone().requires_grad_() for start in (0, 4)]
    results = [collectives.EMBEDDING_PART(part, ids, 4 * i, padding) for i, part in enumerate(parts)]
    weights = torch.randn(2, 3, 3, dtype=torch.float64)
    assert torch.equal(sum(results), whole(ids))
    for result in (*results, whole(ids)):
        (result * weights).sum().backward()
    assert torch.equal(torch.cat([part.grad for part in parts]), whole.weight.grad)
    torch.library.opcheck(
        collectives.EMBEDDING_PART, (parts[1], ids, 4, padding), test_utils=("test_schema", "test_faketensor")
    )
