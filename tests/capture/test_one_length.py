"""Code that makes the number of tokens a constant runs over the tree, by a program for each length."""

import logging

import pytest
import torch
import torch.nn.functional as F

import dta_compile
from dta_compile.errors import RefusalError
from tests.support.inside import inside
from tests.support.tiny import SMALL_CHUNKS, WIDTH, BareLM, TinyLM, after, assert_same, shared_ids, weighted

OPTIONS = {**SMALL_CHUNKS, "codegen": "eager"}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


def check(model, *lengths, batch=3):
    compiled = torch.compile(model, backend="dta", options=OPTIONS)

    def step(run, ids):
        out = run(ids)
        weighted(out).backward()
        return (out,)

    for tokens in lengths:
        ids = shared_ids(batch, tokens)
        assert_same(after(model, lambda: step(compiled, ids)), after(model, lambda: step(model, ids)))  # noqa: B023
        assert dta_compile.last_plan(compiled)
    return inside(compiled).engines


class Slicing(BareLM):
    def forward(self, ids, mask=None):
        hidden = self.hidden(ids)
        return sum(self.head(hidden[:, i : i + 3]).logsumexp(-1).sum() for i in range(0, hidden.shape[1], 3))


class Looping(BareLM):
    """Positions made token by token, and an output a token shorter, of sizes that are numbers."""

    def hidden(self, ids, mask=None):
        angles = torch.stack([torch.full((WIDTH,), i / 7, dtype=torch.float64).sin() for i in range(ids.shape[1])])
        return self.mix(self.embedding(ids) + angles)

    def forward(self, ids, mask=None):
        batch, tokens = ids.shape
        rows = self.head(self.hidden(ids)[:, : tokens - 1].reshape(batch * (tokens - 1), -1))
        return rows.log_softmax(-1).view(batch, tokens - 1, -1).gather(-1, ids[:, 1:tokens, None])


class Reshaping(BareLM):
    """A table of numbers for the tokens, and keys that are expanded to heads, in a loop's graph of one length."""

    def hidden(self, ids, mask=None):
        batch, tokens = ids.shape
        x = self.embedding(ids) + torch.linspace(0, 1, tokens, dtype=torch.float64).view(1, tokens, 1)
        for _ in range(tokens):
            x = x * 0.9
        heads = x.view(batch, tokens, 1, -1).expand(batch, tokens, 2, x.shape[-1])
        return self.mix(heads.sum(2))


class Caching(TinyLM):
    """A table of the latest length."""

    cached, table = 0, None

    def hidden(self, ids, mask=None):
        if self.cached != ids.shape[1]:
            self.cached = ids.shape[1]
            self.table = torch.arange(self.cached)[:, None].cos().double()
        return self.mix(self.embedding(ids) + self.table)


class Growing(TinyLM):
    """A mask that is made anew for more tokens than it has, and cut to fewer, the first ones or the last ones."""

    def __init__(self, last):
        super().__init__()
        self.last = last
        self.register_buffer("ahead", None, persistent=False)

    def hidden(self, ids, mask=None):
        tokens = ids.shape[1]
        if self.ahead is None or self.ahead.shape[-1] < tokens:
            self.register_buffer("ahead", torch.ones(tokens, tokens, dtype=torch.bool).triu(1), persistent=False)
        x = self.embedding(ids)
        scores = x @ x.mT
        ahead = self.ahead[..., -tokens:, -tokens:] if self.last else self.ahead[:tokens, :tokens]
        scores = scores.masked_fill(ahead, -torch.finfo(scores.dtype).max)
        return x + scores.softmax(-1) @ x


class Masking(BareLM):
    """A mask written row by row."""

    def hidden(self, ids, mask=None):
        tokens = ids.shape[1]
        pairs = torch.zeros(tokens, tokens, dtype=torch.float64)
        for i in range(tokens):
            pairs[i, i + 1 :] = float("-inf")
        return self.mix(self.embedding(ids), pairs)


class Learned(BareLM):
    """Positions for exactly so many tokens as the model is called with."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(1, 12, WIDTH, dtype=torch.float64))

    def hidden(self, ids, mask=None):
        return self.mix(self.embedding(ids) + self.table)


def test_every_length_has_a_program_which_is_said_once_with_the_line(caplog):
    with caplog.at_level(logging.WARNING, "dta_compile"):
        engines = check(Looping(), 7, WIDTH, 7)  # as many tokens as features
    (said,) = [one.getMessage() for one in caplog.records]
    assert "for i in range(ids.shape[1])" in said and "compiled by itself" in said
    assert len(engines) == 2


def test_the_line_is_that_of_a_loop_over_a_loss_mask_of_one_token_less(caplog):
    model = BareLM()

    def loss(ids, mask):
        values = model(ids)[:, :-1].logsumexp(-1) * mask
        return sum(values[:, i] * 0.9**i for i in range(mask.shape[1]))

    with caplog.at_level(logging.WARNING, "dta_compile"):
        torch.compile(loss, backend="dta", options=OPTIONS)(shared_ids(3, 7), torch.ones(3, 6, dtype=torch.float64))
    assert "for i in range(mask.shape[1])" in caplog.text


def test_as_many_rows_as_tokens_and_features():
    check(Looping(), WIDTH, batch=WIDTH)


def test_a_table_of_the_latest_length_serves_later_steps():
    check(Caching(), 9, 9, 12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("last", [False, True])
def test_a_table_of_exactly_the_length_is_cut_to_it(last):
    check(Growing(last), *(9, 9) if last else (9, 9, 7))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "tokens"), [(Slicing, 9), (Masking, 6), (Learned, 12), (Reshaping, 9)])
def test_what_holds_for_one_length_runs_over_the_tree(model, tokens):
    check(model(), tokens)


@pytest.mark.slow
def test_more_lengths_than_are_compiled_are_refused(monkeypatch, caplog):
    monkeypatch.setattr("dta_compile.records.MOST_LENGTHS", 1)
    model, ids = Looping(), shared_ids(3, 8)
    compiled = torch.compile(model, backend="dta", options=OPTIONS)
    compiled(shared_ids(3, 7))
    with pytest.raises(RefusalError, match=r"(?s)a compilation for every number of tokens.*range.*8 tokens.*x\.chunk"):
        compiled(ids)
    torch.compiler.reset()
    dense = torch.compile(model, backend="dta", options={**OPTIONS, "fallback": "dense"})
    dense(shared_ids(3, 7))
    torch.testing.assert_close(dense(ids), model(ids))
    assert "running densely" in caplog.text


def test_tokens_picked_one_by_one_and_joined_again_are_mixed():
    class Picking(BareLM):
        def hidden(self, ids, mask=None):
            x = self.embedding(ids)
            return self.mix(x + torch.stack([F.relu(x[:, i]) for i in range(ids.shape[1])], 1))

    with pytest.raises(RefusalError, match="tokens are mixed before the last attention"):
        torch.compile(Picking(), backend="dta", options=OPTIONS)(shared_ids())
