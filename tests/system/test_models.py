"""Whole models against the eager model on one sequence at a time: outputs and the gradient of every parameter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from dta_compile.backend import dta
from dta_compile.errors import RefusalError
from tests.support.families import FAMILIES, GQA, ONE, V, build
from tests.support.helpers import (
    EXACT,
    Batch,
    assert_equal,
    assert_within_rounding,
    ids_only,
    logits,
    logits_at_positions,
    make_batch,
    measure,
    random_loss,
    reference,
    rollouts,
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled_with(model, chunk_size):
    return torch.compile(model, backend=dta, options={"chunk_size": chunk_size})


ALIKE = (
    "qwen2",
    "mistral_wide",
    "phi3",
    "llama4",
    "cohere",
    "falcon",
    "gemma3",
    "deepseek_v3",
    "gpt_neox",
    "olmo2",
    "mistral",
    "qwen3",
)  # show what others show, nearly


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in FAMILIES]
)
def test_right_padding(name):
    tolerance, chunk_size = FAMILIES[name][2:]
    model, batch = build(name), make_batch(rollouts(V))
    loss = random_loss(batch, V)
    actual = measure(compiled_with(model, chunk_size), model, batch, loss)
    assert_equal(actual, reference(model, batch, loss), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mistral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gpt2", "llama4"))]
)
def test_left_padding_with_position_ids(name):
    tolerance, chunk_size = FAMILIES[name][2:]
    model, batch = build(name), make_batch(rollouts(V, seed=1), padding="left")
    loss = random_loss(batch, V)
    actual = measure(compiled_with(model, chunk_size), model, batch, loss, logits_at_positions)
    assert_equal(actual, reference(model, batch, loss), tolerance)


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.slow), "mistral"])
def test_a_batch_of_one_padded_sequence(name):
    """Dynamo makes the batch size a constant, and a mask of one row must not pass for position ids, or the reverse."""
    tolerance, chunk_size = FAMILIES[name][2:]
    model = build(name, **ONE)
    compiled = compiled_with(model, chunk_size)
    for mask in ([0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1]):
        batch = Batch(torch.randint(1, V, (1, len(mask))), torch.tensor([mask]))
        loss = random_loss(batch, V)
        actual = measure(compiled, model, batch, loss, logits_at_positions)
        assert_equal(actual, reference(model, batch, loss), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "gpt_neox"])
def test_no_padding(name):
    tolerance = FAMILIES[name][2]
    model = build(name)
    batch = make_batch([s for s in rollouts(V, seed=2) if len(s) > 8], padding="none")
    loss = random_loss(batch, V)
    actual = measure(compiled_with(model, 4), model, batch, loss)
    assert_equal(actual, reference(model, batch, loss), tolerance)


def test_one_compilation_serves_other_batches():
    torch._dynamo.utils.counters.clear()
    model = build("gpt2", **ONE)
    compiled = compiled_with(model, 4)
    for seed, length in ((0, 17), (3, 11), (4, 24)):
        batch = make_batch(rollouts(V, seed, length)[: 8 - seed])
        loss = random_loss(batch, V)
        assert_equal(measure(compiled, model, batch, loss), reference(model, batch, loss), EXACT)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_bfloat16_rounds_no_worse_than_eager():
    model, batch = build("qwen3", torch.bfloat16, **ONE), make_batch(rollouts(V))
    loss = random_loss(batch, V)
    actual = measure(compiled_with(model, 4), model, batch, loss)
    eager = reference(model, batch, loss)
    assert_within_rounding(actual, eager, reference(model.double(), batch, loss))


def test_autocast_rounds_no_worse_than_eager():
    def in_autocast(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return logits(model, batch)

    model, batch = build("qwen3", torch.float32, **ONE), make_batch(rollouts(V))
    loss = random_loss(batch, V)
    actual = measure(compiled_with(model, 4), model, batch, loss, in_autocast)
    eager = reference(model, batch, loss, in_autocast)
    assert_within_rounding(actual, eager, reference(model.double(), batch, loss))


D = 16


class Attention(nn.Module):
    """Causal attention without padding mask, as it is written by hand."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, D // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, D))


class HandWritten(nn.Module):
    """Embedding, operators, attention, tied head; the operators are what a test tries."""

    def __init__(self, operators):
        super().__init__()
        self.operators = operators
        self.embed, self.position = nn.Embedding(V, D), nn.Embedding(64, D)
        self.attention = Attention()
        self.table = nn.Parameter(torch.randn(1, 64, D))
        self.matrix, self.heads = (
            nn.Parameter(0.3 * torch.randn(D, D)),
            nn.Parameter(0.3 * torch.randn(2, D // 2, D // 2)),
        )
        self.gain, self.wide = nn.Parameter(0.5 + torch.rand(D)), nn.Linear(D, 2 * D)
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
        self.groups, self.pointwise = nn.GroupNorm(4, D), nn.Conv1d(D, D, 1)
        self.register_buffer("scale", torch.randn(D))
        self.register_buffer("order", torch.randperm(D))

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for operator in self.operators:
            x = x + operator(self, F.rms_norm(x, (D,)))
        x = x + self.attention(F.rms_norm(x, (D,)))
        return F.linear(x, self.embed.weight)


def _write_parts(m, x):
    x = x.clone()
    x += m.gain
    x[..., :4] = x[..., 4:8] * 2
    x[..., 5] = 1.0
    x[..., 6:8].zero_()
    x[..., ::2] *= 3
    x[..., [1, 3]] = x[..., [2, 4]]
    x[x > 1] = 0.5
    return x


def _write_into_halves(m, x):
    both = x.new_empty(*x.shape[:-1], 2 * D)
    both[..., :D].copy_(x), both[..., D:].copy_(x * x)
    first, second = both[..., :D], both[..., D:]
    return first + second.mul_(m.gain)


def _write_over_temporaries(m, x):
    x = (x * 1.5).pow_(2) + (x * 0.5).square_().add_(m.gain, alpha=3).add_(m.gain.detach().float(), alpha=0.3)
    return (x * 1.5).addcmul_(x.sin(), m.gain) + (x * 2).lerp_(x.sin(), m.gain.sigmoid()).neg_()


def _write_into_filled(module, x):
    """Buffers that were filled where autograd does not look, before they get what requires gradients."""
    like, new = torch.zeros_like(x), x.new_zeros(x.shape)
    with torch.no_grad():
        like.add_(1)
        new[..., 0].fill_(2)
    like[..., ::2], new[..., 1:] = x[..., ::2], x[..., 1:]
    return like * new


def _write_into_new(m, x):
    batch, tokens, _ = x.shape
    both, zeros = x.new_empty(batch, tokens, 2 * D), torch.zeros(batch, tokens, D, dtype=x.dtype)
    both[..., :D], both[..., D:] = x, x * x
    zeros[..., :8] = x[..., 8:]
    zeros[..., 8:] += both[..., 4:12]
    return both[..., ::2] + zeros + torch.cat([x.new_zeros(batch, tokens, 4), x[..., 4:]], -1)


def _complex_rotary(m, x):
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.linspace(0.1, 1, D // 2, dtype=x.dtype)
    rotation = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:2], D // 2, 2))
    return torch.view_as_real(pairs * rotation).flatten(2)


def _log_prob_of_the_first_head(m, x):
    """A gather whose index is smaller than its source in more than the dimension that it works along."""
    log = x.unflatten(-1, (2, D // 2)).log_softmax(-1)
    return log.gather(-1, x[..., None, :4].argmax(-1, keepdim=True)).flatten(2)


def _choose_experts(m, x):
    weight, index = torch.topk(x[..., :4].softmax(-1), 2)
    gates = torch.zeros_like(x[..., :4]).scatter(-1, index, weight)
    return x * gates.repeat(1, 1, 4) + F.one_hot(index[..., 0], 4).to(x.dtype).repeat_interleave(4, -1)


OPERATORS = {
    "positions": [
        lambda m, x: x + m.table[:, : x.shape[1]],
        lambda m, x: x + m.table[0][2 : 2 + x.shape[1]],
        lambda m, x: x + m.position.weight[torch.arange(x.shape[1])],
        lambda m, x: x / x.shape[1] + x * x.shape[1] ** -0.5,
        _complex_rotary,
    ],
    "shapes": [
        lambda m, x: torch.stack([-x[..., ::2], x[..., 1::2]], -1).flatten(-2),
        lambda m, x: torch.stack([x, x * 2], 2).mean(2) + sum(x.chunk(4, -1)).repeat(1, 1, 4),
        lambda m, x: x.unbind(-1)[1][..., None].expand_as(x) + x.narrow(-1, 2, 1),
        lambda m, x: x[..., m.order] + x.index_select(-1, m.order) + x[..., [-1]],
        lambda m, x: x.view(*x.shape[:2], 4, 4)[:, :, [0, 2], [1, 3]].repeat(1, 1, 8),
        lambda m, x: F.pad(x, (1, 0))[..., :-1] + x.flip(-1) + x.roll(1, -1),
    ],
    "products": [
        lambda m, x: torch.einsum("bsd,ed->bse", x, m.matrix),
        lambda m, x: torch.einsum("bshd,hde->bshe", x.unflatten(-1, (2, D // 2)), m.heads).flatten(-2),
        lambda m, x: (x.unflatten(-1, (2, D // 2)).transpose(1, 2) @ m.heads).transpose(1, 2).flatten(2),
        lambda m, x: (x[..., :4, None] * x[..., None, :4]).tril().flatten(2) + (x @ m.gain)[..., None],
        lambda m, x: m.pointwise(x.transpose(1, 2)).transpose(1, 2),
    ],
    "reductions": [
        lambda m, x: F.layer_norm(x, (D,)) + F.normalize(x, dim=-1) + x.cumsum(-1),
        lambda m, x: m.groups(x.reshape(-1, D)).view_as(x) + x.logsumexp(-1, keepdim=True),
        lambda m, x: x.sort(-1).values + x.topk(1, -1).values + x.gather(-1, x.argsort(-1)),
        lambda m, x: x * F.cosine_similarity(x, m.gain, dim=-1)[..., None] / (x.std(-1, keepdim=True) + 1),
        lambda m, x: x / (1 + x.norm(dim=-1, keepdim=True) + x.abs().amax(-1, keepdim=True)),
        _log_prob_of_the_first_head,
        _choose_experts,
    ],
    "pointwise": [
        lambda m, x: F.glu(m.wide(x)) + F.softplus(x) + F.logsigmoid(x) + F.hardswish(x) + F.softshrink(x),
        lambda m, x: torch.where(x > 0, x, m.gain).masked_fill(x > 1, 0.1).clamp(-1, 1),
        lambda m, x: torch.lerp(x, m.gain * x, 0.3) + torch.addcmul(x, x, m.gain) + F.mish(x),
    ],
    "weights": [
        lambda m, x: m.normed(x) + m.up(m.down(x)) + x @ m.matrix.detach() + x * m.scale,
        lambda m, x: x @ torch.linalg.qr(m.matrix)[0],  # its derivative writes in place
        lambda m, x: x @ F.normalize(m.matrix, dim=0) + m.gain.expand(*x.shape[:2], D),
        lambda m, x: x @ m.matrix.transpose(1, -1),  # the same dimension twice
        lambda m, x: x + x.detach() * x.data.abs(),
    ],
    "writes": [_write_parts, _write_into_new, _write_into_halves, _write_over_temporaries, _write_into_filled],
}


ONE_BY_ONE = ("products", "reductions", "pointwise")  # their rules are tried on samples; in the others they meet


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=pytest.mark.slow) if group in ONE_BY_ONE else group for group in OPERATORS]
)
@pytest.mark.sample(1)
def test_hand_written_module(group):
    model = HandWritten(OPERATORS[group]).double()
    sequences = [s for s in rollouts(V, seed=5, length=12) if len(s) > 6]
    batch = make_batch(sequences, padding="none")
    loss = random_loss(batch, V)
    actual = measure(compiled_with(model, 3), model, batch, loss, ids_only)
    assert_equal(actual, reference(model, batch, loss, ids_only), EXACT)


def test_operator_before_symbolic_sizes_are_known():
    """One call in the graph before sizes are read: Dynamo's second trace tries graph breaks at other places."""
    model = HandWritten([]).double()
    forward = nn.Embedding(V, D).double()

    def function(ids):
        x = forward(ids)
        batch, tokens, _ = x.shape
        q = x.view(batch, tokens, 2, D // 2).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return model.attention(y.transpose(1, 2).reshape(batch, tokens, D))

    ids = torch.randint(0, V, (3, 7))
    batch = Batch(ids)
    loss = random_loss(batch, D)
    actual = measure(compiled_with(function, 3), forward, batch, loss, ids_only)
    assert_equal(actual, reference(forward, batch, loss, lambda _, b: function(b.ids)), EXACT)


def _refusal(model, batch):
    with pytest.raises(RefusalError) as caught:
        logits(torch.compile(model, backend=dta), batch)
    return str(caught.value)


@pytest.mark.parametrize("config", ["Gemma2Config", pytest.param("GptOssConfig", marks=pytest.mark.slow)])
def test_attention_written_out_by_transformers(config):
    """Soft-capped scores, and sinks; transformers' own softmax is in float32, whose rounding is the tolerance."""
    more = {"num_local_experts": 2, "num_experts_per_tok": 1} if config == "GptOssConfig" else {}
    config = getattr(transformers, config)(**GQA, head_dim=16, **more)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    model, batch = model.double().train(), make_batch(rollouts(V))
    loss = random_loss(batch, V)
    actual = measure(compiled_with(model, 5), model, batch, loss)
    assert_equal(actual, reference(model, batch, loss), 1e-5)


def test_alibi_is_refused():
    message = _refusal(build("falcon", alibi=True), make_batch(rollouts(V)))
    assert "ALiBi" in message or "additive bias" in message


@pytest.mark.slow
def test_rotary_that_depends_on_the_batch_length_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    message = _refusal(build("llama", rope_parameters=rope), make_batch(rollouts(V)))
    assert "graph break" in message
