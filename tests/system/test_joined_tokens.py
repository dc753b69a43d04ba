"""Learned prompts, memory tokens and other parts that are put together along the token axis."""

import pytest
import torch
from torch import nn

import dta_compile
from dta_compile.errors import RefusalError
from tests.support.tiny import WIDTH, BareLM, after, assert_same, shared_ids, weighted

PROMPT = 3


class Prompted(BareLM):
    """A language model over the tokens that `front` makes of itself and ids; `cut` takes those of the ids."""

    def __init__(self, front, cut=lambda x: x[:, PROMPT:]):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(1, PROMPT, WIDTH, dtype=torch.float64))
        self.table, self.encoder = nn.Embedding(PROMPT, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        self.register_buffer("places", torch.arange(PROMPT))
        self.front, self.cut = front, cut

    def forward(self, ids, mask=None):
        x = self.front(self, ids)
        if mask is not None:
            mask = torch.cat([mask.new_ones(len(mask), PROMPT), mask], 1).bool()
            mask = mask[:, None, None, :] & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.cut(self.head(self.mix(x, mask)))


def joined(*parts):
    return torch.cat(parts, 1)


def of_all(value, ids):
    return value.expand(len(ids), -1, -1)


def over_two_layers(model, ids):
    """Another prompt takes the place of the first one's tokens in the second layer."""
    x = model.mix(joined(of_all(model.prompt, ids), model.embedding(ids)))
    return joined(of_all(model.table.weight, ids), x[:, PROMPT:])


FRONTS = {
    "a prompt": lambda m, i: joined(of_all(m.prompt, i), m.embedding(i) + m.position(torch.arange(i.shape[1]))),
    "repeated, in front and behind": lambda m, i: joined(
        m.prompt.repeat(len(i), 1, 1), m.embedding(i), of_all(m.encoder(m.prompt), i)
    ),
    "by layer": over_two_layers,
    "in place of the last token": lambda m, i: joined(
        of_all(m.prompt, i), of_all(m.table.weight[:1], i), m.embedding(i[:, :-1])
    ),
}  # fmt: skip


def run(function, model):
    def step():
        out = function()
        weighted(out).backward()
        return out.detach()

    return after(model, step)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FRONTS)
def test_parts_along_the_token_axis(name):
    model, ids = Prompted(FRONTS[name]), shared_ids()
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 4})
    for batch in (ids, ids[:3, :5]):
        assert_same(run(lambda batch=batch: compiled(batch), model), run(lambda batch=batch: model(batch), model))


def test_padded_rows_share_the_prompt():
    def looked_up(model, ids):
        return joined(model.encoder(model.table(model.places[None].expand(len(ids), -1))), model.embedding(ids))

    model, ids = Prompted(looked_up), shared_ids()
    compiled = torch.compile(model, backend="dta")
    mask = torch.ones_like(ids)
    mask[1, :2] = mask[2, -2:] = 0
    read = mask[..., None]
    assert_same(run(lambda: compiled(ids, mask) * read, model), run(lambda: model(ids, mask) * read, model))
    segments = dta_compile.last_plan(compiled).tree.nodes(data="start")
    assert [start for _, start in segments].count(0) == 1


@pytest.mark.parametrize("scale", ["rows", "drawn"])
def test_prompts_that_differ_by_row_are_refused(scale):
    def front(model, ids):
        factor = torch.arange(len(ids))[:, None, None] if scale == "rows" else torch.rand(len(ids), 1, 1)
        return joined(of_all(model.prompt, ids) * factor, model.embedding(ids))

    with pytest.raises(RefusalError, match="a learned prompt stands among the tokens"):
        torch.compile(Prompted(front), backend="dta")(shared_ids())
