"""Multi-token prediction: a further layer that pairs the hidden state of each token with the next token."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dta_compile.errors import RefusalError
from tests.support.tiny import SMALL_CHUNKS, WIDTH, Block, TinyLM, assert_same, log_probs, shared_ids, weighted


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


class Further(nn.Module):
    """Layer over `[B, S, D]` and `[B, S, D]`, as in DeepSeek-V3."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.join, self.block = nn.Linear(2 * WIDTH, WIDTH), Block(WIDTH)
        self.position = nn.Embedding(64, WIDTH)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = self.joined(hidden, embedded)
        return self.block(x + self.position(torch.arange(x.shape[1])), mask)

    def joined(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return self.join(torch.cat([self.norms[0](hidden), self.norms[1](embedded)], -1))


class Scaled(Further):
    """Divides by the number of its tokens, and by the root of it."""

    def joined(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return super().joined(hidden / hidden.shape[1], embedded) * hidden.shape[1] ** -0.5


class Split(Further):
    """Takes the first token apart from the others."""

    def joined(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        first, others = hidden.split([1, hidden.shape[1] - 1], 1)
        return super().joined(torch.cat([first * 2, others], 1), embedded)


class Predicting(TinyLM):
    """Predicts the next token and `depth` tokens after it; `mask`: with a mask over pairs in the further layers."""

    def __init__(self, depth: int = 1, mask: bool = False, further: type[Further] = Further) -> None:
        super().__init__(layers=1)
        self.further, self.mask = nn.ModuleList(further() for _ in range(depth)).double(), mask

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        embedded = self.embedding(ids)
        hidden = self.mix(embedded + self.position(torch.arange(ids.shape[1])))
        results = [log_probs(self.head(hidden), ids)]
        for depth, further in enumerate(self.further, 1):
            count = ids.shape[1] - depth
            mask = torch.ones(count, count, dtype=torch.bool).tril() if self.mask else None
            hidden = further(hidden[:, :-1], embedded[:, depth:], mask)
            results.append(log_probs(self.head(self.norm(hidden)), ids[:, depth:]))
        return tuple(results)


def after(function, model, ids):
    model.zero_grad()
    results = function(ids)
    sum(map(weighted, results)).backward()
    return [result.detach() for result in results], {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("further", [pytest.param(Further, marks=pytest.mark.slow), Scaled])
def test_each_token_with_the_next_one(further):
    model = Predicting(further=further)
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)
    for ids in (shared_ids(), shared_ids(4, 13, seed=2)):
        assert_same(after(compiled, model, ids), after(model, model, ids))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "model", [pytest.param({"depth": 2}, marks=pytest.mark.slow), {"mask": True}, {"further": Split}]
)
def test_other_further_layers_are_refused(model):
    compiled = torch.compile(Predicting(**model), backend="dta", options=SMALL_CHUNKS)
    with pytest.raises(RefusalError) as caught:
        compiled(shared_ids())
    assert "ids[:, 1:]" in caught.value.hint
