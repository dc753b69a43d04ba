"""Products with several rows of every token: per head, for each of several streams, or over any dimension."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dta_compile.errors import RefusalError
from tests.support.tiny import SMALL_CHUNKS, TinyLM, after, assert_same, shared_ids, weighted

HEADS, WIDTH = 4, 4
PRODUCTS = {  # of `[B, S, H, D]`
    "linear": lambda x, weight, bias: F.linear(x, weight, bias),
    "heads first": lambda x, weight, bias: F.linear(x.transpose(1, 2), weight, bias).transpose(1, 2),
    "streams first": lambda x, weight, bias: F.linear(x.permute(2, 0, 1, 3), weight, bias).permute(1, 2, 0, 3),
    "einsum of heads": lambda x, weight, bias: torch.einsum("bsnd,nm->bsmd", x, weight) + bias,
    "of a number": lambda x, weight, bias: x * (bias.sum().reshape(1, 1) @ weight[:1]).view(WIDTH),
    "groups": lambda x, weight, bias: (x.unflatten(2, (2, 2)).transpose(1, 2) @ weight).transpose(1, 2).flatten(2, 3),
    "weights of heads": lambda x, weight, bias: (weight.repeat(HEADS, 1, 1)[:, None] @ x.permute(2, 0, 3, 1)).permute(
        1, 3, 0, 2
    ),
    "weights of sequences": lambda x, weight, bias: (
        torch.bmm(x.flatten(1, 2), weight.expand(len(x), -1, -1)).view(x.shape) + bias
    ),
}


class PerHead(TinyLM):
    def __init__(self, product):
        super().__init__()
        self.product, self.of_heads = product, nn.Linear(WIDTH, WIDTH).double()

    def hidden(self, ids, mask=None):
        x = self.embedding(ids)
        x = x + self.product(x.unflatten(-1, (HEADS, WIDTH)), self.of_heads.weight, self.of_heads.bias).flatten(2)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("heads first", "groups", "weights of heads") else pytest.param(name, marks=pytest.mark.slow)
        for name in PRODUCTS
    ],
)
def test_every_row_of_a_token_is_multiplied(name, batch):
    torch.compiler.reset()
    model, ids = PerHead(PRODUCTS[name]), shared_ids()[:batch]
    compiled = torch.compile(model, backend="dta", options={**SMALL_CHUNKS, "codegen": "eager"})

    def step(run):
        logits = run(ids)
        weighted(logits).backward()
        return (logits,)

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))


def test_rows_of_several_tokens_are_refused():
    torch.compiler.reset()
    model = PerHead(lambda x, weight, bias: (x.reshape(-1, 3 * HEADS * WIDTH) @ weight.repeat(12, 12)).view(x.shape))
    with pytest.raises(RefusalError, match="across the token axis"):
        torch.compile(model, backend="dta", options=SMALL_CHUNKS)(shared_ids())
