"""FlexAttention over a tree: masks and functions of scores are taken for what they say."""

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import dta_compile
from dta_compile.errors import RefusalError
from tests.support.spellings import KV_HEADS, OPTIONS, WrittenLM, by_heads
from tests.support.tiny import after, assert_same, log_probs, shared_ids, weighted


@pytest.fixture(autouse=True)
def _gradients_on_cpus(monkeypatch):
    """Which torch refuses, although the function computes them."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()


def causal(batch, head, query, key):
    return query >= key


def soft_capped(score, batch, head, query, key):
    return 5 * torch.tanh(score / 5)


def mask_made_inside(model, q, k, v, pairs):
    mask = create_block_mask(causal, None, None, q.shape[1], q.shape[1], device="cpu")
    return flex_attention(*by_heads(q, k, v), soft_capped, mask, scale=0.3, enable_gqa=True).transpose(1, 2)


def mask_of_documents(model, q, k, v, documents):
    def within(batch, head, query, key):
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    mask = create_block_mask(within, q.shape[0], None, q.shape[1], q.shape[1], device="cpu")
    return flex_attention(*by_heads(q, k, v), block_mask=mask, enable_gqa=True).transpose(1, 2)


def mask_of_scores(model, q, k, v, documents):
    def within(score, batch, head, query, key):
        is_seen = (query >= key) & (documents[batch, query] == documents[batch, key])
        return torch.where(is_seen, score + 0.25 * head * key, -float("inf"))

    return flex_attention(*by_heads(q, k, v), within, enable_gqa=True).transpose(1, 2)


class Documents(WrittenLM):
    """Takes the numbers of documents, not a mask."""

    def hidden(self, ids, mask=None):
        return self.mix(self.embedding(ids), mask)


class Checkpointed(Documents):
    """Its attention is computed again in the backward; torchtitan's layers are like this by default."""

    def hidden(self, ids, mask=None):
        return checkpoint(self.mix, self.embedding(ids), mask, use_reentrant=False)


def assert_equals_eager(model, *args):
    compiled = torch.compile(model, backend="dta", options=OPTIONS)

    def step(run):
        loss = weighted(log_probs(run(*args), args[0]))
        loss.backward()
        return loss.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    assert dta_compile.last_plan(compiled).stats.compression > 1


def test_documents_and_functions_of_scores():
    ids = shared_ids(4, 9)
    documents = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1]).expand(4, -1).contiguous()
    assert_equals_eager(Documents(mask_of_documents, mask_of_scores, kv_heads=KV_HEADS), ids, documents)


@pytest.mark.slow
def test_a_mask_made_inside_and_a_soft_cap():
    assert_equals_eager(WrittenLM(mask_made_inside, kv_heads=KV_HEADS), shared_ids(4, 9))


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [Documents, Checkpointed])
def test_a_mask_that_is_given_is_for_one_length(model, caplog):
    def attend(model, q, k, v, mask):
        out, _ = flex_attention(*by_heads(q, k, v), block_mask=mask, return_aux=flex.AuxRequest())
        return out.transpose(1, 2)

    mask = create_block_mask(causal, None, None, 9, 9, device="cpu")
    assert_equals_eager(model(attend), shared_ids(4, 9), mask)
    assert "a graph holds for one number of tokens because of" in caplog.text


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: flex_attention(q, k, v), "bidirectional|cannot be proven causal"),
        (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s - (i - j).abs() * h), "cannot be proven"),
        (lambda q, k, v: sum(flex_attention(q, k, v, return_lse=True)[i].sum() for i in (0, 1)) + q, "statistics"),
    ],
    ids=["no mask", "a bias by distance", "log-sum-exps"],
)
def test_refused(call, words):
    model = WrittenLM(lambda model, q, k, v, pairs: call(*by_heads(q, k, v)).transpose(1, 2))
    with pytest.raises(RefusalError, match=words):
        torch.compile(model, backend="dta", options=OPTIONS)(shared_ids(4, 9))
