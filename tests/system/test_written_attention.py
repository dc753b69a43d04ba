"""Attention that a model writes out gives eager's numbers over the tree, or is refused for what it is."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dta_compile
from dta_compile.errors import RefusalError, RuntimeContractError
from tests.support.helpers import EXACT, Batch, distances, ids_only, measure, random_loss
from tests.support.spellings import HEADS, KV_HEADS, LONGEST, OPTIONS, SPELLINGS, WrittenLM, by_heads
from tests.support.tiny import VOCABULARY, WIDTH, TinyLM, after, assert_same, log_probs, shared_ids, weighted


def assert_equals_eager(model, *args, **options):
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dta", options=OPTIONS | options)

    def step(run):
        loss = weighted(log_probs(run(*args), args[0]))
        loss.backward()
        return loss.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    return compiled


def assert_equals_eager_beside_padding(model, ids, real):
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dta", options=OPTIONS)

    def step(run):
        loss = weighted(torch.where(real[:, 1:], log_probs(run(ids, real), ids), 0))
        loss.backward()
        return loss.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    return compiled


@pytest.mark.parametrize("has_mask", [pytest.param(False, marks=pytest.mark.slow), True])
def test_spellings_of_attention(has_mask):
    """With a padding mask, too, which arrives as a tensor of pairs."""

    def way(spelled):
        def attend(model, q, k, v, pairs):
            return spelled(*by_heads(q, k, v), pairs, is_causal=pairs is None).transpose(1, 2)

        return attend

    ids, real = shared_ids(4, 9), None
    spellings = [way(spelled) for spelled in SPELLINGS.values()]
    if has_mask:
        real = torch.ones_like(ids, dtype=torch.bool)
        real[1, -2:] = real[3, -4:] = False
    model = WrittenLM(*spellings)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dta", options=OPTIONS)

    def step(run):
        loss = weighted(torch.where(real[:, 1:], log_probs(run(ids, real), ids), 0) if has_mask else run(ids))
        loss.backward()
        return loss.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    assert dta_compile.last_plan(compiled).stats.compression > 1


def with_a_buffer(model, q, k, v, pairs):  # nanoGPT
    q, k, v = by_heads(q, k, v)
    scores = torch.add(torch.ones((), dtype=q.dtype), q @ k.mT, alpha=1 / math.sqrt(q.shape[-1]))
    scores = scores.masked_fill(model.bias[:, :, : q.shape[2], : q.shape[2]] == 0, float("-inf"))
    return (F.softmax(scores, -1) @ v).transpose(1, 2)


def gated(model, q, k, v, pairs):  # GPT
    q, k, v = by_heads(q, k, v)
    causal = model.bias[:, :, : q.shape[2], : q.shape[2]]
    return ((q @ k.mT * causal - 1e4 * (1 - causal)).softmax(-1) @ v).transpose(1, 2)


def with_sinks(model, q, k, v, pairs):  # GPT-OSS
    q, k, v = by_heads(q, k, v)
    scores = q @ k.mT * 0.5
    hidden = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype)
    scores = scores + hidden.masked_fill(torch.ones_like(hidden, dtype=torch.bool).tril(), 0.0)
    sinks = model.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
    scores = torch.cat([scores, sinks], -1)
    scores = scores - scores.max(-1, keepdim=True).values
    return (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2)


def with_sinks_in_front(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    scores = (q @ k.mT).masked_fill(~torch.ones(q.shape[2], q.shape[2]).tril().bool(), -1e9)
    scores = torch.cat([model.sinks[:, None, None].expand(q.shape[0], HEADS, q.shape[2], 1), scores], -1)
    return (scores.softmax(-1)[..., 1:] @ v).transpose(1, 2)


def with_a_scale_a_head(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    scores = -(q @ k.mT) * model.scale[:, None, None]
    window = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(-3)
    return (torch.where(window, scores, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def with_alibi(model, q, k, v, pairs):  # BLOOM
    (batch, tokens), (q, k, v) = q.shape[:2], (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    slopes = torch.tensor([2.0**-i for i in range(HEADS)], dtype=q.dtype)
    alibi = (slopes[:, None] * torch.arange(tokens))[None].expand(batch, -1, -1).reshape(-1, 1, tokens)
    scores = alibi.baddbmm(q, k.mT, beta=1.0, alpha=0.5).view(batch, HEADS, tokens, tokens)
    scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -1e30)
    weights = scores.softmax(-1).view(batch * HEADS, tokens, tokens)
    return (weights @ v).view(batch, HEADS, tokens, -1).transpose(1, 2)


def divided_after_the_mask(model, q, k, v, pairs):  # GPT-J
    q, k, v = by_heads(q, k, v)
    hidden = ~torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    scores = (q @ k.mT).masked_fill(hidden, torch.finfo(q.dtype).min) / torch.sqrt(torch.tensor(5.0))
    return ((scores * torch.tensor(3).float().rsqrt().pow(0.5)).softmax(-1) @ v).transpose(1, 2)


def without_infinite_scores(model, q, k, v, pairs):  # Differential Transformer, before and after the mask
    q, k, v = by_heads(q, k, v)
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (torch.nan_to_num(q @ k.mT) + torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)) / 2
    return (scores.nan_to_num(nan=7.0, neginf=-1e9).softmax(-1) @ v).transpose(1, 2)


def written_by_a_mask(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = q @ k.mT
    scores[..., hidden] = -torch.inf
    weights = scores.softmax(-1).clone()
    weights[:, :, hidden] = 0
    return (weights @ v).transpose(1, 2)


def by_numbers_of_other_dtypes(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    rounded, cut_off = torch.full((), 0.3, dtype=torch.bfloat16), torch.full((), 2.7).int()
    return (causal(q @ k.mT * rounded * cut_off / torch.tensor(3.9).long()) @ v).transpose(1, 2)


def less_one(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    added = (model.bias[:, :, : q.shape[2], : q.shape[2]] - 1) * 1e30
    weights = (q @ k.mT + added).softmax(-1)
    return (weights @ v + F.scaled_dot_product_attention(k, q, v, added)).transpose(1, 2)


def test_what_is_done_to_scores():
    ways = with_a_buffer, gated, with_sinks, with_sinks_in_front, with_a_scale_a_head, with_alibi
    ways += divided_after_the_mask, less_one, without_infinite_scores, by_numbers_of_other_dtypes
    assert_equals_eager(WrittenLM(*ways), shared_ids(4, 9))
    assert_equals_eager(WrittenLM(written_by_a_mask), shared_ids(4, 9))


def test_weights_that_were_computed_outside_and_ids_called_buffers():
    torch._dynamo.reset()
    model, ids = WrittenLM(with_a_buffer), shared_ids()

    def run(weights, rollout_buffers):
        ids = rollout_buffers["ids"]
        return log_probs(torch.func.functional_call(model, weights, (ids,)), ids)

    def step(run):
        weights = {name: p * 1.5 for name, p in model.named_parameters()}
        return (weighted(run(weights, {"ids": ids})).backward(),)

    compiled = torch.compile(run, backend="dta", options=OPTIONS)
    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(run)))
    assert dta_compile.last_plan(compiled)


def test_operands_taken_of_heads_that_are_merged_with_sequences():
    def unbound(model, q, k, v, pairs):
        batch, tokens = q.shape[:2]
        both = torch.stack([q, k, v], 2).permute(2, 0, 3, 1, 4).reshape(3, batch * HEADS, tokens, -1)
        q, k, v = both.unbind(0)
        return (causal(q @ k.mT) @ v).view(batch, HEADS, tokens, -1).transpose(1, 2)

    def selected(model, q, k, v, pairs):
        both = torch.stack([q, k, v], 3).transpose(1, 2).flatten(0, 1).transpose(1, 2)  # [B * H, 3, S, D]
        q, k, v = both[:, 0], both[:, -2], both[:, 2]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).unflatten(0, (-1, HEADS)).transpose(1, 2)

    def split(model, q, k, v, pairs):
        both = torch.cat([q, k, v], -1).transpose(1, 2).flatten(0, 1)  # [B * H, S, 3 * D]
        q, k, v = both[..., : q.shape[-1]], both.chunk(3, -1)[1], both[..., -v.shape[-1] :]
        return (causal(q @ k.mT) @ v).unflatten(0, (-1, HEADS)).transpose(1, 2)

    assert_equals_eager(WrittenLM(unbound, selected, split), shared_ids(4, 9))


def squared(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    return (
        (q @ k.mT).masked_fill(~model.bias[:, :, : q.shape[2], : q.shape[2]].bool(), -1e9).softmax(-1) ** 2 @ v
    ).transpose(1, 2)


def test_what_was_not_recognised_is_named_beside_attention_that_was():
    with pytest.raises(RefusalError, match="pow"):
        torch.compile(WrittenLM(squared, with_sinks), backend="dta", options=OPTIONS)(shared_ids(4, 9))


def by_key_in_more_digits(model, q, k, v, pairs):  # MPT
    q, k, v = by_heads(*(t.to(model.dtype) for t in (q, k, v)))
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    far = 0.7 ** torch.arange(1, HEADS + 1)[:, None, None] * torch.arange(-2000, q.shape[2] - 2000)
    scores = (q @ k.mT * 0.5 + far).masked_fill(later, -1e30)
    return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).double()


def by_gates_in_more_digits(model, q, k, v, pairs):  # the Forgetting Transformer, far from the first token
    forgotten = -1000 - F.softplus(gates(model, k).to(model.dtype)).double().cumsum(-1)
    q, k, v = by_heads(*(t.to(model.dtype) for t in (q, k, v)))
    far = (forgotten[..., None] - forgotten[:, :, None]).masked_fill(~triangle(q.shape[2]), -torch.inf)
    return ((q @ k.mT * 0.5 + far).softmax(-1).to(v.dtype) @ v).transpose(1, 2).double()


def by_rounded_gates(model, q, k, v, pairs):
    forgotten = -1000 - F.softplus(gates(model, k)).cumsum(-1)
    q, k, v = by_heads(*(t.to(model.dtype) for t in (q, k, v)))
    later = torch.full((q.shape[2], q.shape[2]), -torch.inf, dtype=model.dtype).triu(1)
    bias = (forgotten[..., None] - forgotten[:, :, None]).to(model.dtype) + later
    return ((q @ k.mT * 0.5 + bias).softmax(-1) @ v).transpose(1, 2).double()


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", [by_key_in_more_digits, by_gates_in_more_digits, by_rounded_gates])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_of_keys_is_not_rounded_to_their_digits(way, dtype):
    torch._dynamo.reset()
    model, batch = WrittenLM(way), Batch(shared_ids(4, 9))
    loss, compiled = random_loss(batch, VOCABULARY), torch.compile(model, backend="dta", options=OPTIONS)
    model.dtype = torch.float64
    exact = measure(model, model, batch, loss, ids_only)
    model.dtype = dtype
    eager, ours = (distances(measure(run, model, batch, loss, ids_only), exact) for run in (model, compiled))
    assert not {name: (ours[name], eager[name]) for name in ours if ours[name] > 2 * eager[name] + EXACT}


def causal(scores):
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def by_exponentials(scores):
    powers = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return powers / powers.sum(-1, keepdim=True)


def by_exponentials_of_both(scores):
    scores = scores - scores.amax(-1, keepdim=True).detach()
    return scores.exp() / scores.exp().sum(-1)[..., None]


def by_masked_exponentials(scores):
    powers = (scores - scores.detach().amax()).exp() * torch.ones(scores.shape[-2:]).tril()
    return powers / powers.sum(-1, keepdim=True)


def by_masked_exponentials_and_a_little(scores):
    powers = scores.exp() * torch.ones(scores.shape[-2:]).tril()
    return powers / (powers.sum(-1, keepdim=True) + 1e-6)


def by_filled_exponentials(scores):
    powers = scores.exp().masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), 0.0)
    return powers / powers.sum(-1, keepdim=True)


def by_logarithms(scores):
    return torch.exp(scores - scores.logsumexp(-1, keepdim=True))


def causal_scores(q, k):
    scores = q @ k.mT * 0.5
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


def test_softmaxes_that_are_written_out():
    def way(weights, scores=causal_scores):
        def attend(model, q, k, v, pairs):
            q, k, v = by_heads(q, k, v)
            return (weights(scores(q, k)) @ v).transpose(1, 2)

        return attend

    every = [by_exponentials, by_exponentials_of_both, by_logarithms, lambda scores: scores.log_softmax(-1).exp()]
    ways = [way(one) for one in every]
    masked = by_masked_exponentials, by_filled_exponentials, by_masked_exponentials_and_a_little
    ways += [way(one, lambda q, k: q @ k.mT) for one in masked]
    compiled = assert_equals_eager(WrittenLM(*ways), shared_ids(4, 9))
    assert dta_compile.last_plan(compiled).stats.compression > 1


def through_a_longer_cache(model, q, k, v, pairs):  # DeepSeek-V3
    batch, tokens = q.shape[:2]
    keys, values = (t.new_zeros(batch, LONGEST, *t.shape[2:]) for t in (k, v))
    keys[:batch, 0:tokens], values[:batch, 0:tokens] = k, v
    scores = torch.einsum("bshd,bthd->bsht", q, keys[:batch, :tokens]).transpose(1, 2)
    return torch.einsum("bhst,bthd->bshd", causal(scores), values[:batch, :tokens])


def through_a_copied_index(model, q, k, v, pairs):  # Gemma
    index = torch.arange(q.shape[1])
    keys, values = torch.zeros_like(k), torch.zeros_like(v)
    keys.index_copy_(1, index, k)
    values.index_copy_(1, index, v)
    q, k, v = by_heads(q, keys, values)
    return (causal(q @ k.mT) @ v).transpose(1, 2)


def through_a_written_index(model, q, k, v, pairs):  # gpt-fast
    index = torch.arange(q.shape[1])
    q, k, v = by_heads(q, k, v)
    keys, values = torch.zeros_like(k), torch.zeros_like(v)
    keys[:, :, index], values[:, :, index] = k, v
    return (causal(q @ keys.mT) @ values).transpose(1, 2)


@pytest.mark.slow
def test_caches_that_a_call_fills_itself():
    for ways in (through_a_longer_cache, through_a_written_index), (through_a_copied_index,):
        assert_equals_eager(WrittenLM(*ways), shared_ids(4, 9))


def through_an_index_that_wraps(model, q, k, v, pairs):
    index = torch.arange(q.shape[1], dtype=torch.uint8).long()
    q, k, v = by_heads(q, k, v)
    keys = torch.zeros_like(k)
    keys[:, :, index] = k
    return (causal(q @ keys.mT) @ v).transpose(1, 2)


def test_a_cache_that_is_filled_by_small_integers_is_not_read_as_what_was_written():
    """From 256 tokens on its first entries are written again."""
    torch._dynamo.reset()
    with pytest.raises(RefusalError):
        torch.compile(WrittenLM(through_an_index_that_wraps), backend="dta", options=OPTIONS)(shared_ids(4, 9))


def after_the_first_token(model, q, k, v, pairs):
    keys = torch.zeros_like(k)
    keys[:, 1:] = k[:, :-1] * 2
    q, k, v = by_heads(q, keys, v)
    return (causal(q @ k.mT) @ v).transpose(1, 2)


def test_a_cache_that_is_filled_from_a_later_token_on():
    assert_equals_eager(WrittenLM(after_the_first_token), shared_ids(4, 9))


def of_two_products(model, q, k, v, pairs):  # multi-head latent attention
    scores = torch.einsum("bshd,btd->bsht", q[..., :2], k[:, :, 0, :2]) * 0.7
    scores = (scores - torch.einsum("bshd,bthd->bsht", q[..., 2:], k[..., 2:])).transpose(1, 2)
    return torch.einsum("bhst,bthd->bshd", causal(scores * 0.5), v)


def of_capped_products(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    scores = 2 * torch.tanh((q @ k.mT + 0.5 * (q[..., :2] @ v[..., :2].mT)) / 3)
    return (causal(scores) @ v).transpose(1, 2)


def test_scores_that_are_sums_of_products():
    assert_equals_eager(WrittenLM(of_two_products, of_capped_products), shared_ids(4, 9))


def by_distance(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    index = torch.arange(q.shape[2])
    scores = q @ k.mT - torch.arange(1, HEADS + 1)[:, None, None] * (index[:, None] - index).abs()
    return (causal(scores) @ v).transpose(1, 2)


def by_clamped_distance(model, q, k, v, pairs):
    (q, k, v), tokens = by_heads(q, k, v), q.shape[1]
    last = torch.arange(1 - tokens, 1, dtype=q.dtype)
    bias = (last.view(1, 1, 1, -1) - last.view(1, 1, -1, 1)).clamp(max=0).mul_(0.3)
    bias = bias / (2 ** torch.arange(HEADS).view(1, HEADS, 1, 1)) + 0.1 * last[:, None]
    window = torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(-4)
    return ((q @ k.mT + bias.masked_fill(~window, -1e30)).softmax(-1) @ v).transpose(1, 2)


def by_distance_in_a_mask(model, q, k, v, pairs):  # OLMo
    (q, k, v), tokens = by_heads(q, k, v), q.shape[1]
    later = torch.triu(torch.full((tokens, tokens), torch.finfo(q.dtype).min, dtype=q.dtype), 1).view(1, 1, tokens, -1)
    index = torch.arange(tokens, dtype=q.dtype)
    bias = later + (index - index[:, None]) * torch.tensor([0.5, 0.25, 0.1, 0.0]).view(1, HEADS, 1, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def by_learned_slopes(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    index = torch.arange(q.shape[2])
    scores = q @ k.mT - model.scale[:, None, None] * (index[:, None] - index)
    return (causal(scores + model.sinks[:, None, None] * (index - index[:, None])) @ v).transpose(1, 2)


def by_detached_slopes(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    index = torch.arange(q.shape[2])
    bias = model.sinks[:, None, None] * (index - index[:, None])
    return (causal(q @ k.mT + bias.detach() + model.scale[:, None, None].detach() * index) @ v).transpose(1, 2)


def test_biases_by_distance():
    """`-slope * (q - k)` does to a softmax what `slope * k` does."""
    ways = by_distance, by_clamped_distance, by_distance_in_a_mask, by_learned_slopes, by_detached_slopes
    assert_equals_eager(WrittenLM(*ways), shared_ids(5, 9))


def by_terms_in_fewer_digits(model, q, k, v, pairs):
    (q, k, v), distance = by_heads(q, k, v), steps(q.shape[1])
    small = (100 - 20 * distance).clamp(0, 100).to(torch.int8)
    near = (0.3 * model.scale.detach()[:, None, None] * distance.clamp(0, 7)).to(torch.bfloat16)
    return (causal((q @ k.mT - distance + small + near + small) / 3) @ v).transpose(1, 2)


def by_terms_of_a_mask(model, q, k, v, pairs):
    (q, k, v), distance = by_heads(q, k, v), steps(q.shape[1])
    later = torch.full(distance.shape, -torch.inf, dtype=q.dtype).triu(1)
    small, near = distance.clamp(0, 200).to(torch.uint8), (0.3 * distance.clamp(0, 7)).to(torch.bfloat16)
    bias = later - small + near + model.scale[:, None, None] * (1 + distance.clamp(0)).log()
    return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2)


def test_terms_of_a_bias_are_added_in_the_dtype_of_the_sum():
    assert_equals_eager(WrittenLM(by_terms_in_fewer_digits, by_terms_of_a_mask), shared_ids(4, 9))


def gates(model, k):
    return (k * model.scale[:, None]).sum(-1).transpose(1, 2)  # [B, H, S]


def by_forgetting(model, q, k, v, pairs):  # the Forgetting Transformer
    forgotten = F.logsigmoid(gates(model, k)).cumsum(-1)
    q, k, v = by_heads(q, k, v)
    return (causal(q @ k.mT + forgotten[..., None] - forgotten[:, :, None]) @ v).transpose(1, 2)


def by_forgetting_in_a_mask(model, q, k, v, pairs):
    forgotten = F.logsigmoid(gates(model, k)).cumsum(-1)
    bias = (forgotten.unsqueeze(-1) - forgotten.unsqueeze(-2)).masked_fill(~triangle(q.shape[1]), -torch.inf)
    return F.scaled_dot_product_attention(*by_heads(q, k, v), bias).transpose(1, 2)


def by_salience_beside_padding(model, q, k, v, pairs):
    bias = torch.where(gates(model, k).mean(1, keepdim=True) > 0, gates(model, v)[:, :1], 0.0)[:, :, None]
    bias = bias if pairs is None else bias + (1.0 - pairs[:, :, -1:].double()) * -1e30
    q, k, v = by_heads(q, k, v)
    return (causal((q @ k.mT + bias) / 2) @ v).transpose(1, 2)


def by_learned_numbers_of_keys(model, q, k, v, pairs):
    bias = model.position.weight[: q.shape[1], :HEADS].T[:, None] * 3
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + bias.reshape(1, HEADS, 1, -1)
    return torch.einsum("bhqk,bkhd->bqhd", causal(scores), v)


def by_gates_beside_sinks(model, q, k, v, pairs):
    bias, (q, k, v) = gates(model, k), by_heads(q, k, v)
    scores = (q @ k.mT + bias[:, :, None]).masked_fill(~triangle(q.shape[2]), -torch.inf)
    sinks = model.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
    return (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)


def triangle(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


LEARNED_OF_KEYS = (
    by_forgetting,
    by_forgetting_in_a_mask,
    by_salience_beside_padding,
    by_learned_numbers_of_keys,
    by_gates_beside_sinks,
)


@pytest.mark.slow
def test_learned_biases_of_keys():
    compiled = assert_equals_eager(WrittenLM(*LEARNED_OF_KEYS), shared_ids(5, 9))
    assert dta_compile.last_plan(compiled).stats.compression > 1


@pytest.mark.slow
def test_a_learned_bias_of_keys_beside_padding():
    ids = shared_ids(4, 9)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, -2:] = real[3, -4:] = False
    compiled = assert_equals_eager_beside_padding(WrittenLM(by_salience_beside_padding), ids, real)
    assert dta_compile.last_plan(compiled).stats.tree_tokens < real.sum()


def capped_and_gated(model, q, k, v, pairs):
    bias, (q, k, v) = gates(model, k), by_heads(q, k, v)
    return (causal(torch.tanh(q @ k.mT) + bias[:, :, None]) @ v).transpose(1, 2)


def with_a_bias_that_only_queries_have(model, q, k, v, pairs):
    bias = (v * model.sinks[:, None]).sum(-1).transpose(1, 2)[..., None]
    q, k, v = by_heads(q, k, v)
    return (causal(q @ k.mT + bias) @ v).transpose(1, 2)


def less_a_learned_number(model, q, k, v, pairs):
    (q, k, v), less = by_heads(q, k, v), model.sinks[:, None, None]
    powers = ((q @ k.mT).masked_fill(~triangle(q.shape[2]), -torch.inf) - less).exp()
    return (powers / ((-less).exp() + powers.sum(-1, keepdim=True)) @ v).transpose(1, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("way", "message"),
    [
        (capped_and_gated, "capped"),
        (with_a_bias_that_only_queries_have, "a learned bias that the softmax cancels"),
        (less_a_learned_number, "attention is written out"),
    ],
)
def test_learned_biases_that_are_refused(way, message):
    torch._dynamo.reset()
    with pytest.raises(RefusalError, match=message):
        torch.compile(WrittenLM(way), backend="dta", options=OPTIONS)(shared_ids(4, 9))


def steps(tokens):
    index = torch.arange(tokens)
    return index[:, None] - index


def gathered(model, q, index):
    """Biases by head, query, and entry of `index [S, S]`."""
    return (q * model.scale[:, None, None]).gather(-1, index.expand(*q.shape[:2], -1, -1))


def by_profile(model, q, k, v, pairs):  # Inkling
    q, k, v = by_heads(q, k, v)
    distance, extent = steps(q.shape[2]), q.shape[-1]
    bias = gathered(model, q, distance.clamp(0, extent - 1)).masked_fill((distance < 0) | (distance >= extent), 0.0)
    tau = 1 + 0.1 * torch.arange(1, q.shape[2] + 1, dtype=q.dtype).log().view(-1, 1)
    return (causal(q @ k.mT * 0.5 + bias * tau) @ v).transpose(1, 2)


def by_profile_in_a_mask(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    distance = steps(q.shape[2])
    bias = gathered(model, q, distance.abs().clamp(max=q.shape[-1] - 1))
    window = (distance >= 0) & (distance < 6)
    bias = torch.where(window, torch.where(distance < 2, bias, 0.0), torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def by_profile_of_relative_positions(model, q, k, v, pairs):  # clipped, as Shaw et al. have it
    q, k, v = by_heads(q, k, v)
    last = (q.shape[-1] - 1) // 2
    bias = gathered(model, q, (-steps(q.shape[2])).clamp(-last, last) + last)
    slopes = 0.1 * torch.arange(HEADS, dtype=q.dtype).view(-1, 1, 1) * steps(q.shape[2])
    return (causal(q @ k.mT + 0.5 * bias - slopes) @ v).transpose(1, 2)


@pytest.mark.slow
def test_learned_biases_by_query_and_distance():
    ways = by_profile, by_profile_in_a_mask, by_profile_of_relative_positions
    compiled = assert_equals_eager(WrittenLM(*ways), shared_ids(5, 9))
    assert "attention with a bias by distance" in str(dta_compile.explain(compiled, shared_ids(5, 9)))


def beside_sinks(q, k, v, bias, sinks):
    scores = q @ k.mT + bias
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    sinks = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1) if sinks.dim() == 1 else sinks
    return (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)


def sinks_by_token(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    return beside_sinks(q, k, v, 0.0, q[..., :1] * model.scale[:, None, None])


def sinks_by_token_beside_a_profile(model, q, k, v, pairs):  # Inkling 2
    q, k, v = by_heads(q, k, v)
    distance = steps(q.shape[2])
    bias = gathered(model, q, distance.clamp(0, 3)).masked_fill((distance < 0) | (distance >= 3), 0.0)
    return beside_sinks(q, k, v, bias, (q * model.scale[:, None, None]).sum(-1, keepdim=True))


def sinks_beside_a_profile(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    return beside_sinks(q, k, v, gathered(model, q, steps(q.shape[2]).clamp(0, 2)), model.sinks)


def sinks_beside_a_slope(model, q, k, v, pairs):
    return beside_sinks(*by_heads(q, k, v), -0.1 * steps(q.shape[1]), model.sinks)


def no_weight_beside_learned_slopes(model, q, k, v, pairs):  # softmax1
    q, k, v = by_heads(q, k, v)
    return beside_sinks(q, k, v, -model.scale[:, None, None] * steps(q.shape[2]), torch.zeros(HEADS).double())


@pytest.mark.slow
def test_sinks_by_token_and_beside_biases_by_distance():
    ways = (
        sinks_by_token,
        sinks_by_token_beside_a_profile,
        sinks_beside_a_profile,
        sinks_beside_a_slope,
        no_weight_beside_learned_slopes,
    )
    assert_equals_eager(WrittenLM(*ways), shared_ids(5, 9))


class TabledLM(WrittenLM):
    """The same with a table of buckets, and buffers over pairs of tokens."""

    def __init__(self, *ways):
        super().__init__(*ways)
        index = torch.arange(LONGEST)
        self.buckets, distance = nn.Embedding(8, HEADS).double(), index[:, None] - index
        self.logarithms = nn.Parameter(torch.randn(HEADS, 2 * LONGEST - 1).double())
        self.register_buffer("distance", distance.clamp(-2, 5) + 2)
        alibi = -distance.double() * torch.tensor([0.5, 0.25, 0.1, 0.0])[:, None, None]
        self.register_buffer("alibi", alibi.masked_fill(distance < 0, -torch.inf))
        by_key = index * torch.tensor([0.37, 0.25, 0.1, 0.0]).double()[:, None, None]
        self.register_buffer("by_key", torch.full((LONGEST, LONGEST), -torch.inf).triu(1) + by_key)


def by_buckets(model, q, k, v, pairs):  # T5
    q, k, v = by_heads(q, k, v)
    later = -torch.min(-steps(q.shape[2]), torch.zeros(1, dtype=torch.long))
    large = 4 + (torch.log(later.float() / 4) / math.log(20 / 4) * 4).to(torch.long)
    bucket = torch.where(later < 4, later, torch.min(large, torch.full_like(large, 7)))
    bias = model.buckets(bucket).permute(2, 0, 1).unsqueeze(0)
    scores = (q @ k.mT + bias).masked_fill(~pairs, -1e30)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def by_buckets_in_a_window(model, q, k, v, pairs):
    (q, k, v), distance = by_heads(q, k, v), steps(q.shape[1])
    bias = model.buckets.weight.T[:, distance.clamp(0, 7)] - 0.01 * distance * distance / len(distance)
    bias = torch.where((distance >= 0) & (distance < 5), bias, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(~pairs, -1e30)).transpose(1, 2)


def by_an_index_of_pairs(model, q, k, v, pairs):
    (q, k, v), tokens = by_heads(q, k, v), q.shape[1]
    bias = model.buckets(model.distance[:tokens, :tokens]).permute(2, 0, 1)
    scores = 5 * (q @ k.mT / 5).tanh() + bias * model.scale[:, None, None]
    return (scores.masked_fill(~pairs, -1e30).softmax(-1) @ v).transpose(1, 2)


def by_alibi_of_pairs(model, q, k, v, pairs):  # OLMo's cache
    (q, k, v), tokens = by_heads(q, k, v), q.shape[1]
    bias = model.alibi[None, :, -tokens:, -tokens:].masked_fill(~pairs, -1e30)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def by_keys_of_pairs(model, q, k, v, pairs):  # ALiBi as its authors wrote it
    (q, k, v), tokens = by_heads(q, k, v), q.shape[1]
    scores = q @ k.mT + model.by_key[:, :tokens, :tokens]
    return (scores.masked_fill(~pairs, -1e30).softmax(-1) @ v).transpose(1, 2)


def by_learned_logarithms(model, q, k, v, pairs):  # KERPLE
    q, k, v = by_heads(q, k, v)
    distance = (steps(q.shape[2]) - 1).abs()
    bias = model.scale[:, None, None] * torch.log1p(model.sinks.exp()[:, None, None] * distance)
    scores = q @ k.mT - bias + 0.1 * distance.float()
    return (scores.masked_fill(~pairs, -1e30).softmax(-1) @ v).transpose(1, 2)


def by_a_network_of_a_range(model, q, k, v, pairs):
    (q, k, v), tokens = by_heads(q, k, v), q.shape[1]
    rows = model.buckets(torch.arange(1 - tokens, tokens).clamp(0, 7)).tanh() @ model.qkv[0].weight[:HEADS, :HEADS]
    sliced = model.logarithms[:, LONGEST - tokens : LONGEST - 1 + tokens]
    bias = rows.T[:, steps(tokens) + tokens - 1] + sliced[:, steps(tokens) + tokens - 1]
    return ((q @ k.mT + bias).masked_fill(~pairs, -1e30).softmax(-1) @ v).transpose(1, 2)


def by_parts_of_more(model, q, k, v, pairs):
    (q, k, v), tokens = by_heads(q, k, v), q.shape[1]
    of_all = model.buckets(steps(LONGEST).clamp(0, 7)).permute(2, 0, 1)
    bias = of_all[:, :tokens, :tokens] * model.scale[:, None, None] + of_all.tanh()[:, -tokens:, -tokens:]
    return ((q @ k.mT + bias).masked_fill(~pairs, -1e30).softmax(-1) @ v).transpose(1, 2)


TABLES = (
    by_a_network_of_a_range,
    by_parts_of_more,
    by_buckets,
    by_buckets_in_a_window,
    by_an_index_of_pairs,
    by_alibi_of_pairs,
    by_keys_of_pairs,
    by_learned_logarithms,
)


WHOLE = pytest.param({"chunk_size": 100}, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"memory_budget": 0}, WHOLE])
def test_tables_by_distance(options):
    """Also where a row is padded in front: tables count the tokens of a sequence."""
    model, ids = TabledLM(*TABLES), shared_ids(5, 11)
    real = torch.ones_like(ids, dtype=torch.bool)
    ids[2, 4:], real[2, :4], real[1, -2:] = ids[0, :7].clone(), False, False
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dta", options=OPTIONS | options)

    def step(run):
        is_pair = real[:, 1:] & real[:, :-1]
        loss = weighted(torch.where(is_pair, log_probs(run(ids, real), ids), 0))
        loss.backward()
        return loss.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    assert dta_compile.last_plan(compiled).stats.compression > 1.5


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["alibi", "distance"])
def test_tables_that_are_no_function_of_the_distance(name):
    model, ids = TabledLM(by_alibi_of_pairs if name == "alibi" else by_an_index_of_pairs), shared_ids(4, 9)
    real = torch.ones_like(ids, dtype=torch.bool)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dta", options=OPTIONS)
    compiled(ids, real)
    getattr(model, name)[..., 60 if name == "alibi" else 5, 58 if name == "alibi" else 3] += 1
    with pytest.raises(RefusalError, match="no function of the distance") as error:
        compiled(ids, real)
    assert "another entry for query 5 and key 3 than for query 2 and key 0" in str(error.value)
    assert "by_a" in error.value.where


def beside_by_keys(model, q, k, v, pairs):
    return beside_sinks(*by_heads(q, k, v), model.by_key[:, : q.shape[1], : q.shape[1]], model.sinks)


def by_the_square_of_a_key(model, q, k, v, pairs):
    (q, k, v), tokens = by_heads(q, k, v), q.shape[1]
    table = (model.by_key**2).masked_fill(model.by_key.isinf(), torch.finfo(torch.float64).min)
    return ((q @ k.mT + table[:, :tokens, :tokens]).softmax(-1) @ v).transpose(1, 2)


def by_numbers_on_the_diagonal(model, q, k, v, pairs):
    (q, k, v), tokens = by_heads(q, k, v), q.shape[1]
    table = torch.where(torch.eye(tokens, dtype=torch.bool), model.by_key[:, :tokens, :tokens] ** 2, 0.0)
    return (causal(q @ k.mT + table) @ v).transpose(1, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", [beside_by_keys, by_the_square_of_a_key, by_numbers_on_the_diagonal])
def test_tables_by_keys_that_are_refused(way):
    """Sinks do not get what a softmax ignores; a square is no slope; entries that are equal differ less their own."""
    torch._dynamo.reset()
    with pytest.raises(RefusalError, match="no function of the distance"):
        torch.compile(TabledLM(way), backend="dta", options=OPTIONS)(shared_ids(4, 9))


def test_padding_between_tokens_with_a_learned_bias():
    """Distances count it, and there is none in a tree."""

    def way(model, q, k, v, pairs):
        q, k, v = by_heads(q, k, v)
        scores = q @ k.mT + gathered(model, q, steps(q.shape[2]).clamp(0, 2))
        return (scores.masked_fill(~pairs, -torch.inf).softmax(-1) @ v).transpose(1, 2)

    torch._dynamo.reset()
    compiled, ids = torch.compile(WrittenLM(way), backend="dta", options=OPTIONS), shared_ids(4, 9)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, -2:] = real[2, :3] = False
    compiled(ids, real)
    real[3, 4] = False
    with pytest.raises(RuntimeContractError, match="bias by distance counts padding"):
        compiled(ids, real)


def of_the_key(model, q, k, distance):
    return gathered(model, k, distance.clamp(0, 2)).mT


def of_the_squared_distance(model, q, k, distance):
    return gathered(model, q, (distance * distance).clamp(0, 2))


def of_the_number_of_the_key(model, q, k, distance):
    return gathered(model, q, torch.arange(len(distance)).clamp(max=2)[None].expand(len(distance), -1))


def of_every_second_distance(model, q, k, distance):
    return gathered(model, q, (2 * distance).clamp(0, 2))


def zero_at_one_distance(model, q, k, distance):
    return gathered(model, q, distance.clamp(0, 2)).masked_fill(distance == 1, 0.0)


def another_number_from_some_distance_on(model, q, k, distance):
    return gathered(model, q, distance.clamp(0, 2)).masked_fill(distance > 1, 0.5)


def zero_by_the_number_of_the_query(model, q, k, distance):
    return gathered(model, q, distance.clamp(0, 2)).masked_fill(torch.arange(len(distance))[:, None] < distance, 0.0)


def times_a_factor_of_the_key(model, q, k, distance):
    return gathered(model, q, distance.clamp(0, 2)) * k.sum(-1)[:, :, None]


def two_of_them(model, q, k, distance):
    return gathered(model, q, distance.clamp(0, 2)) + gathered(model, q * 2, distance.clamp(0, 1))


def of_a_distance_in_8_bits(model, q, k, distance):
    return gathered(model, q, distance.to(torch.int8).long().clamp(0, 2))  # negative again from 128 on


NEARLY = (
    of_a_distance_in_8_bits,
    *(of_the_key, of_the_squared_distance, of_the_number_of_the_key, of_every_second_distance, zero_at_one_distance),
    *(another_number_from_some_distance_on, zero_by_the_number_of_the_query, times_a_factor_of_the_key, two_of_them),
)


@pytest.mark.parametrize("bias", NEARLY)
@pytest.mark.sample(1)
def test_other_learned_biases_are_refused(bias):
    def way(model, q, k, v, pairs):
        q, k, v = by_heads(q, k, v)
        return (causal(q @ k.mT + bias(model, q, k, steps(q.shape[2]))) @ v).transpose(1, 2)

    torch._dynamo.reset()
    with pytest.raises(RefusalError, match=r"a bias computed from parameters|several learned biases") as error:
        torch.compile(WrittenLM(way), backend="dta", options=OPTIONS)(shared_ids(5, 9))
    assert "bias" in error.value.hint or "softmax" in error.value.what


@pytest.mark.sample(1)
@pytest.mark.parametrize("beside", ["a soft cap", "a small filler"])
def test_what_a_learned_bias_by_distance_cannot_be_beside(beside):
    def way(model, q, k, v, pairs):
        q, k, v = by_heads(q, k, v)
        scores = q @ k.mT if beside != "a soft cap" else 5 * (q @ k.mT).tanh()
        scores = scores + gathered(model, q, steps(q.shape[2]).clamp(0, 2))
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -1e4 if beside == "a small filler" else -torch.inf)
        return (scores.softmax(-1)[..., : q.shape[2]] @ v).transpose(1, 2)

    torch._dynamo.reset()
    with pytest.raises(RefusalError):
        torch.compile(WrittenLM(way), backend="dta", options=OPTIONS)(shared_ids(5, 9))


def in_8_bits(index):
    index = torch.arange(len(index), dtype=torch.uint8)
    return 0.5 * (index - index[:, None]).double()


def overflowing(index):
    index = torch.arange(len(index), dtype=torch.int8)
    return ((index[:, None] - index) * 40).double()


def beside_a_condition(index):
    return (index[:, None] - index < 3) + -0.5 * (index[:, None] - index).double()


@pytest.mark.sample(1)
@pytest.mark.parametrize("distance", [in_8_bits, overflowing, beside_a_condition])
def test_what_is_no_multiple_of_a_distance_is_refused(distance):
    def way(model, q, k, v, pairs):
        q, k, v = by_heads(q, k, v)
        return (causal(q @ k.mT + distance(torch.arange(q.shape[2]))) @ v).transpose(1, 2)

    torch._dynamo.reset()
    with pytest.raises(RefusalError, match=r"values other than 0 and -inf|ALiBi"):
        torch.compile(WrittenLM(way), backend="dta", options=OPTIONS)(shared_ids(5, 9))


def one_of_every_query(model, scores, index):
    return model.sinks[:, None, None]


def one_of_the_query_number(model, scores, index):
    return model.scale[:, None, None] * (index[:, None] - index) + model.sinks[:, None, None] * index[:, None]


def one_that_scales_the_largest(model, scores, index):
    return scores.amax(-1, keepdim=True) * model.scale[:, None, None]


@pytest.mark.sample(1)
@pytest.mark.parametrize("bias", [one_of_every_query, one_of_the_query_number, one_that_scales_the_largest])
def test_parameters_that_no_weight_depends_on_are_refused(bias):
    """Eager gives them a gradient of zero."""

    def way(model, q, k, v, pairs):
        q, k, v = by_heads(q, k, v)
        scores = q @ k.mT
        return (causal(scores - bias(model, scores, torch.arange(q.shape[2]))) @ v).transpose(1, 2)

    torch._dynamo.reset()
    with pytest.raises(RefusalError, match=r"a learned bias that the softmax cancels|cannot be proven causal"):
        torch.compile(WrittenLM(way), backend="dta", options=OPTIONS)(shared_ids(5, 9))


class ByDistance(nn.Module):
    """Attention alone, whose slopes are no powers of two."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.heads = nn.Embedding(31, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, ids):
        x = self.embedding(ids)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.heads(x).chunk(3, -1))
        index = torch.arange(ids.shape[1], dtype=x.dtype)
        slopes = torch.tensor([0.7, 0.3], dtype=x.dtype)[:, None, None]
        return x + (causal(q @ k.mT - slopes * (index[:, None] - index)) @ v).transpose(1, 2).flatten(2)


def test_biases_by_distance_round_like_eager_far_from_the_first_token():
    ids = shared_ids(2, 700)
    model, exact = ByDistance().float(), ByDistance().double()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dta", options={"verify": "off"})
    weights = torch.randn(2, 700, WIDTH, generator=torch.Generator().manual_seed(0))

    def gradients_of(model, run):
        return after(model, lambda: (run(ids) * weights).sum().backward())[1]

    expected = gradients_of(exact, exact)
    ours, eager = (
        max(float((grads[name].double() - grad).norm() / grad.norm()) for name, grad in expected.items())
        for grads in (gradients_of(model, compiled), gradients_of(model, model))
    )
    assert ours <= 2 * eager < 1e-5


def of_two_halves(model, q, k, v, pairs):  # differential attention
    q, k, v = by_heads(q, k, v)
    (q, r), (k, c) = (one.chunk(2, -1) for one in (q, k))
    return ((causal(q @ k.mT) - (model.scale.prod() + 0.3) * causal(r @ c.mT)) @ v).transpose(1, 2)


def of_heads_by_pairs(model, q, k, v, pairs):  # as its authors wrote it
    q, k, v = by_heads(q, k, v)
    weights = causal(q @ k.mT).unflatten(1, (HEADS // 2, 2))
    weights = (weights[:, :, 0] - model.scale[: HEADS // 2, None, None] * weights[:, :, 1]).type_as(v)
    out = weights @ v.transpose(1, 2).reshape(q.shape[0], q.shape[2], HEADS // 2, -1).transpose(1, 2)
    return out.transpose(1, 2)


def of_chunked_heads(model, q, k, v, pairs):
    factor = (q[..., :2, :1] * model.scale[:2, None]).sigmoid().transpose(1, 2)  # of each query
    q, k, v = by_heads(q, k, v)
    one, other = causal(q @ k.mT).chunk(2, 1)
    out = torch.einsum(
        "bhqk,bkhd->bqhd", one - factor * other + 0.5 * other, v.transpose(1, 2).unflatten(2, (2, 2)).flatten(3)
    )
    return out


def of_three(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    parts = [causal(q[..., i::2] @ k[..., i::2].mT) for i in range(2)]
    return ((-parts[0] * model.scale[:, None, None] + 2 * (parts[1] - causal(q @ k.mT))) @ v).transpose(1, 2)


def with_changed_weights(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    scores = (q @ k.mT).masked_fill(model.bias[:, :, : q.shape[2], : q.shape[2]] == 0, -1e30)
    return (scores.softmax(-1) * model.scale[:, None, None] @ v).transpose(1, 2)


def of_the_last_head(model, q, k, v, pairs):  # the shorter one of two parts
    q, k, v = by_heads(q, k, v)
    return (causal(q @ k.mT).split(HEADS - 1, 1)[1] @ v[:, 1:2]).expand(-1, HEADS, -1, -1).transpose(1, 2)


def times_a_constant_tensor(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    weights = causal(q @ k.mT)
    return ((weights * torch.full_like(weights[0, 0], 0.5) - torch.ones_like(weights) * weights) @ v).transpose(1, 2)


SUMS = (
    *(of_two_halves, of_heads_by_pairs, of_chunked_heads, of_three, with_changed_weights, of_the_last_head),
    times_a_constant_tensor,
)


def test_sums_of_weights():
    torch.manual_seed(0)
    assert_equals_eager(WrittenLM(*SUMS), shared_ids(4, 9))


def hidden_again(model, q, k, v, pairs):  # ESPnet
    q, k, v = by_heads(q, k, v)
    later = model.bias[:, :, : q.shape[2], : q.shape[2]] == 0
    return ((q @ k.mT).masked_fill(later, -1e30).softmax(-1).masked_fill(later, 0.0) @ v).transpose(1, 2)


def multiplied_by_the_mask(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    real = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    weights = torch.where(real, q @ k.mT, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (torch.where(real, weights * real, 0) @ v).transpose(1, 2)


def quietly(model, q, k, v, pairs):  # softmax1 by exponentials
    q, k, v = by_heads(q, k, v)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    powers = (q @ k.mT).masked_fill(later, -torch.inf).exp()
    return (powers / (1 + powers.sum(-1, keepdim=True)) @ v).transpose(1, 2)


def quietly_less_the_largest(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    scores = (q @ k.mT).masked_fill(~triangle(q.shape[2]), -torch.inf)
    largest = scores.amax(-1, keepdim=True).clamp(min=0).detach()
    powers = (scores - largest).exp()
    return (powers / ((-largest).exp() + powers.sum(-1, keepdim=True)) @ v).transpose(1, 2)


def beside_a_padded_zero(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = F.pad((q @ k.mT).masked_fill(later, -torch.inf), (1, 0))
    return (scores.softmax(-1)[..., 1:] @ v).transpose(1, 2)


def beside_a_zero(model, q, k, v, pairs):  # softmax1
    q, k, v = by_heads(q, k, v)
    scores = (q @ k.mT).masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), -torch.inf)
    scores = torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2)


@pytest.mark.slow
def test_weights_that_are_hidden_again():
    quiet = beside_a_zero, quietly, quietly_less_the_largest, beside_a_padded_zero
    assert_equals_eager(WrittenLM(hidden_again, multiplied_by_the_mask, *quiet), shared_ids(4, 9))


def grouped_by_einsum(model, q, k, v, pairs):
    q = q.unflatten(2, (KV_HEADS, -1))
    scores = 5 * torch.tanh(torch.einsum("bqhgd,bkhd->bhgqk", q, k) / 5)
    scores = scores.masked_fill(torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1), -1e30)
    return torch.einsum("bhgqk,bkhd->bqhgd", scores.softmax(-1), v)


def grouped_in_rows(model, q, k, v, pairs):
    batch, tokens = q.shape[:2]
    rows = q.unflatten(2, (KV_HEADS, -1)).permute(0, 2, 3, 1, 4).reshape(batch * KV_HEADS, -1, q.shape[-1])
    k, v = (t.transpose(1, 2).flatten(0, 1) for t in (k, v))
    scores = torch.bmm(rows, k.mT).view(batch, KV_HEADS, -1, tokens, tokens)
    scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -1e30)
    out = torch.bmm(scores.softmax(-1).view(batch * KV_HEADS, -1, tokens), v)
    return out.view(batch, KV_HEADS, -1, tokens, q.shape[-1]).permute(0, 3, 1, 2, 4)


def repeated(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    k, v = k.repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = (q @ k.mT).masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), -1e30)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def tiled(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    k, v = k.repeat(1, HEADS // KV_HEADS, 1, 1), v.repeat(1, HEADS // KV_HEADS, 1, 1)
    scores = (q @ k.mT).masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), -1e30)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def test_groups_of_heads_that_share_keys():
    ways = grouped_by_einsum, grouped_in_rows, repeated, tiled
    assert_equals_eager(WrittenLM(*ways, kv_heads=KV_HEADS), shared_ids(4, 9))


@pytest.mark.parametrize("need_weights", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_modules_of_torch(need_weights):
    """With padding, too, which they repeat for their heads."""

    class Model(TinyLM):
        def __init__(self):
            super().__init__(layers=0)
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, dropout=0.0, batch_first=True)
            self.double()

        def mix(self, x, pairs=None):
            mask, padding = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), ~pairs[:, 0, -1]
            y, _ = self.attention(x, x, x, padding, attn_mask=mask, need_weights=need_weights)
            return self.norm(self.layer(x + y, src_mask=mask, src_key_padding_mask=padding))

    ids, real = shared_ids(4, 9), torch.ones(4, 9, dtype=torch.bool)
    real[1, -2:] = False
    assert_equals_eager_beside_padding(Model(), ids, real)


@pytest.mark.parametrize("is_float", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_an_encoder_of_torch_that_compares_its_mask(is_float):
    """And warns of a mask of numbers beside padding that is boolean."""

    class Model(TinyLM):
        def __init__(self):
            super().__init__(layers=0)
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2).double()

        def mix(self, x, pairs=None):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return self.encoder(x, mask if is_float else mask < 0, src_key_padding_mask=~pairs[:, 0, -1])

    ids, real = shared_ids(4, 9), torch.ones(4, 9, dtype=torch.bool)
    real[1, -2:] = False
    assert_equals_eager_beside_padding(Model(), ids, real)


def scored_in_no_gradient_mode(model, ids):
    with torch.no_grad():
        return log_probs(model(ids), ids)


def test_scores_without_gradients():
    model, ids = WrittenLM(with_a_buffer), shared_ids(4, 9)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dta", options=OPTIONS)
    assert_same(scored_in_no_gradient_mode(compiled, ids), scored_in_no_gradient_mode(model, ids))
    assert dta_compile.last_plan(compiled).stats.compression > 1


def by_a_transposed_table(model, q, k, v, pairs):
    (q, k, v), tokens = by_heads(q, k, v), q.shape[1]
    index = torch.arange(tokens)
    table = (index - index[:, None]).double() * -torch.arange(1, HEADS + 1)[:, None, None]  # of key and query
    hidden = table.masked_fill(index < index[:, None], -torch.inf).mT
    return (causal(q @ k.mT + hidden) @ v).transpose(1, 2)


def by_small_integers(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    index = torch.arange(q.shape[2])
    return (causal(q @ k.mT - (index[:, None] - index).clamp(min=0).to(torch.uint8)) @ v).transpose(1, 2)


def by_an_integer_slope(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    index = torch.arange(q.shape[2])
    return (causal(q @ k.mT - (index[:, None] - index) * torch.full((), 2.7).long()) @ v).transpose(1, 2)


def test_tables_and_numbers_are_read_as_they_are():
    assert_equals_eager(WrittenLM(by_a_transposed_table, by_small_integers, by_an_integer_slope), shared_ids(5, 9))


def by_truth(model, q, k, v, pairs):
    (q, k, v), index = by_heads(q, k, v), torch.arange(q.shape[1])
    return (causal(q @ k.mT + (index[:, None] - index < 3)) @ v).transpose(1, 2)


def capped_at_zero(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    return (causal(torch.tanh(q @ k.mT) * 0.0) @ v).transpose(1, 2)


def cut_by_a_sum_of_truths(model, q, k, v, pairs):
    (q, k, v), distance = by_heads(q, k, v), steps(q.shape[1])
    bias = gathered(model, q, distance.clamp(0, 3)).masked_fill((distance < 0) + (distance >= 3), 0.0)
    return (causal(q @ k.mT + bias) @ v).transpose(1, 2)


def of_near_queries(model, q, k, v, pairs):
    (q, k, v), distance = by_heads(q, k, v), steps(q.shape[1])
    near = (q[..., :1] * model.scale[:, None, None]).expand(-1, -1, -1, q.shape[2]).masked_fill(distance >= 2, 0.0)
    return (causal(q @ k.mT + gathered(model, q, distance.clamp(0, 3)) + near) @ v).transpose(1, 2)


def shifted_to_a_buffer(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return ((q @ k.mT - 9000.0 - 9000.0).masked_fill(later, -1e4 * model.bias[0, 0, 0, 0]).softmax(-1) @ v).transpose(
        1, 2
    )


@pytest.mark.parametrize(
    "way", [by_truth, capped_at_zero, cut_by_a_sum_of_truths, of_near_queries, shifted_to_a_buffer]
)
def test_what_a_softmax_sees_is_not_dropped(way):
    with pytest.raises(
        RefusalError, match=r"cannot be proven causal|does not take apart|soft cap of zero|known only at"
    ):
        torch.compile(WrittenLM(way), backend="dta", options=OPTIONS)(shared_ids(4, 9))


def bidirectional(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2)


def hardly_masked(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    scores = (q @ k.mT).masked_fill(model.bias[:, :, : q.shape[2], : q.shape[2]] == 0, -10.0)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def masked_and_scaled_away(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    scores = (q @ k.mT).masked_fill(model.bias[:, :, : q.shape[2], : q.shape[2]] == 0, -1e4) * 1e-3
    return (scores.softmax(-1) @ v).transpose(1, 2)


def shifted_to_the_filler(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    scores = (q @ k.mT - 9980.0).masked_fill(model.bias[:, :, : q.shape[2], : q.shape[2]] == 0, -1e4)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def filled_by_a_buffer(model, q, k, v, pairs):  # which is zero at the call
    q, k, v = by_heads(q, k, v)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = torch.where(later, model.bias[0, 0, 0, 1], q @ k.mT)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def gated_by_another_mask(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    tokens = q.shape[2]
    wrong = 1e4 * (1 - model.bias[:, :, 1 : tokens + 1, :tokens])
    return ((q @ k.mT * model.bias[:, :, :tokens, :tokens] - wrong).softmax(-1) @ v).transpose(1, 2)


def over_queries(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    scores = (q @ k.mT).masked_fill(model.bias[:, :, : q.shape[2], : q.shape[2]] == 0, -1e30)
    return (scores.softmax(-2) @ v).transpose(1, 2)


def by_query_beside_sinks(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    bias = gathered(model, q, steps(q.shape[2]).clamp(0, 2)) + 0.1 * torch.arange(q.shape[2]).view(-1, 1)
    scores = (q @ k.mT + bias).masked_fill(later, -torch.inf)
    sinks = model.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)


def dropped(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    scores = (q @ k.mT).masked_fill(model.bias[:, :, : q.shape[2], : q.shape[2]] == 0, -1e30)
    return (F.dropout(scores.softmax(-1), 0.1) @ v).transpose(1, 2)


def with_squared_weights(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    return (causal(q @ k.mT).square() @ v).transpose(1, 2)


def with_weights_of_several_factors(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    return (causal(q @ k.mT) * torch.exp(model.bias[0, 0, 0, : q.shape[2]]) @ v).transpose(1, 2)


def with_scores_that_are_added_later(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    scores = torch.tanh(q @ k.mT) + q @ v.mT
    return (causal(scores) @ v).transpose(1, 2)


def hidden_at_other_places(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    window = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(-1)
    return (causal(q @ k.mT) * window @ v).transpose(1, 2)


def by_exponentials_over_less(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    powers = causal_scores(q, k).exp()
    return (powers / (powers.sum(-1, keepdim=True) - 0.5) @ v).transpose(1, 2)


def by_exponentials_over_queries(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    powers = causal_scores(q, k).exp()
    return (powers / powers.sum(-2, keepdim=True) @ v).transpose(1, 2)


def by_scaled_exponentials(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    powers = causal_scores(q, k).exp() * torch.full((q.shape[2], q.shape[2]), 2.0).tril(-2)
    return (powers / powers.sum(-1, keepdim=True) @ v).transpose(1, 2)


def by_exponentials_over_a_number(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    powers = causal_scores(q, k).exp()
    return (powers / powers.sum(-1, keepdim=True).detach() @ v).transpose(1, 2)


def between_numbers(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return ((q @ k.mT).masked_fill(later, -torch.inf).nan_to_num(neginf=-3.0).softmax(-1) @ v).transpose(1, 2)


def with_talking_heads(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    heads = model.scale[:, None] * model.scale
    return (causal(torch.einsum("bhij,hg->bgij", q @ k.mT, heads)) @ v).transpose(1, 2)


def by_sigmoid(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    return ((q @ k.mT).sigmoid().tril() @ v).transpose(1, 2)


def of_weights_as_truth(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    return (causal(q @ k.mT).bool().to(v.dtype) @ v).transpose(1, 2)


def of_a_sum_of_weights_as_integers(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    return ((causal(q @ k.mT) + causal(q @ k.flip(-1).mT)).long().to(v.dtype) @ v).transpose(1, 2)


def shifted_by_query_to_the_filler(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = q @ k.mT - 2e4 * model.bias[:, :, : q.shape[2], :1]
    return (scores.masked_fill(later, -1e4).softmax(-1) @ v).transpose(1, 2)


def by_exponentials_times_a_number(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    powers = causal_scores(q, k).exp() * (model.bias[0, 0, 0, 0] + 2)
    return (powers / powers.sum(-1, keepdim=True) @ v).transpose(1, 2)


def by_exponentials_times_a_number_beside_one(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    powers = causal_scores(q, k).exp()
    powers = powers * torch.full_like(powers, 2.0)
    return (powers / (1 + powers.sum(-1, keepdim=True)) @ v).transpose(1, 2)


def bounded_and_scaled_by_head(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    return (causal((q @ k.mT * 4e4).clamp(min=-1e4) / (1e4 * model.scale[:, None, None])) @ v).transpose(1, 2)


def bounded_and_added(model, q, k, v, pairs):
    q, k, v = by_heads(q, k, v)
    return (causal((q @ k.mT + (q @ v.mT * 4e4).clamp(min=-1e4)) * 1e-4) @ v).transpose(1, 2)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (of_weights_as_truth, "of the weights that a softmax gives|does not take apart"),
        (of_a_sum_of_weights_as_integers, "another function of products|does not take apart"),
        (shifted_by_query_to_the_filler, "a bias by query of scores that -10000 then hides"),
        (by_exponentials_times_a_number, "of the weights that a softmax gives"),
        (by_exponentials_times_a_number_beside_one, "of the weights that a softmax gives"),
        (bounded_and_scaled_by_head, "capped or masked already"),
        (bounded_and_added, "capped or masked already"),
    ],
)
def test_what_changes_weights_that_are_not_hidden_is_refused(way, words):
    with pytest.raises(RefusalError, match=words):
        torch.compile(WrittenLM(way), backend="dta", options=OPTIONS)(shared_ids(4, 9))


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (bidirectional, "bidirectional"),
        (hardly_masked, "scores replaced by -10"),
        (masked_and_scaled_away, "scores replaced by -10,"),
        (shifted_to_the_filler, "scores replaced by -20,"),
        (filled_by_a_buffer, "cannot be proven causal"),
        (gated_by_another_mask, "values other than 0 and -inf"),
        (over_queries, "other queries than keys"),
        (dropped, "attention dropout cannot run"),
        (by_query_beside_sinks, "but not to the sinks"),
        (with_squared_weights, "of the weights that a softmax gives"),
        (with_weights_of_several_factors, "values other than 0 and -inf"),
        (with_scores_that_are_added_later, "capped or masked already"),
        (hidden_at_other_places, "values other than 0 and -inf"),
        (by_exponentials_over_less, "another function of products of activations than a softmax"),
        (by_exponentials_over_queries, "other queries than keys"),
        (by_exponentials_over_a_number, "another function of products of activations than a softmax"),
        (by_scaled_exponentials, "values other than 0 and -inf"),
        (between_numbers, "scores replaced by -3,"),
        (with_talking_heads, "another function of products of activations than a softmax"),
        (by_sigmoid, "another function of products of activations than a softmax"),
    ],
)
@pytest.mark.sample(3)
def test_what_is_no_causal_attention_is_refused_by_name(way, words):
    model, ids = WrittenLM(way), shared_ids(4, 9)
    torch._dynamo.reset()
    with pytest.raises(RefusalError, match=words) as caught:
        torch.compile(model, backend="dta", options=OPTIONS)(ids)
    assert f"in {way.__name__} |" in str(caught.value)


FILLED = {
    "filled": lambda scores, later: scores.masked_fill(later, -1e4),
    "added": lambda scores, later: scores + later.to(scores.dtype) * -1e4,
    "bounded": lambda scores, later: scores.masked_fill(later, -math.inf).clamp(min=-1e4),
}


@pytest.mark.parametrize("options", [{}, {"sweep": "stages"}])
@pytest.mark.parametrize("filled", FILLED.values(), ids=FILLED)
@pytest.mark.sample(1)
def test_a_number_hides_keys_only_if_no_score_comes_near_it(filled, options):
    """The model's `bias` scales the scores, so that one program meets small ones and large ones."""

    def way(model, q, k, v, pairs):
        q, k, v = by_heads(q, k, v)
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return (filled(q * model.scale[0] @ k.mT, later).softmax(-1) @ v).transpose(1, 2)

    model, ids = WrittenLM(way), shared_ids(4, 9)
    compiled = assert_equals_eager(model, ids, **options)
    with torch.no_grad():
        model.scale.fill_(1e6)
    with pytest.raises(RefusalError, match="the number in its mask may not hide keys") as caught:
        compiled(ids)
    assert "in way |" in str(caught.value)
    with torch.no_grad(), pytest.raises(RefusalError, match="may not hide keys"):
        compiled(ids)


def test_attention_that_is_not_recognised_is_refused_after_one_that_is():
    model, ids = WrittenLM(with_a_buffer, with_squared_weights), shared_ids(4, 9)
    torch._dynamo.reset()
    with pytest.raises(RefusalError, match="of the weights that a softmax gives") as caught:
        torch.compile(model, backend="dta", options=OPTIONS)(ids)
    assert "in with_squared_weights |" in str(caught.value)


def test_rows_of_one_token_run_as_captured(caplog):
    """Its softmax has one key; attention that is not recognised is refused at any other length."""
    model, ids = WrittenLM(with_a_buffer), shared_ids(4, 1)

    def step(run):
        loss = weighted(run(ids))
        loss.backward()
        return loss.detach()

    torch._dynamo.reset()
    with caplog.at_level("INFO", logger="dta_compile"):
        compiled = torch.compile(model, backend="dta", options=OPTIONS)
        assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    assert caplog.messages == ["dta: rows of one or two tokens share next to nothing: such calls run as captured"]


def test_layers_behind_tokens_that_are_mixed_last_run_densely_with_a_warning(caplog):
    def summed(model, q, k, v, pairs):
        return v.cumprod(1) + with_a_buffer(model, q, k, v, pairs)

    with caplog.at_level("WARNING", logger="dta_compile"):
        assert_equals_eager(WrittenLM(summed), shared_ids(4, 9))
    assert caplog.text.count("run for all sequences, and share nothing") == 1
    assert "self.head(" in caplog.text
