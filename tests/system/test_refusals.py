"""What cannot be proven equivalent is refused: by name, with the user's line and what to do instead."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import associative_scan

import dta_compile
from dta_compile.errors import RefusalError
from tests.support.tiny import Clipped

VOCABULARY, WIDTH, HEADS = 31, 16, 2


class Block(nn.Module):
    """Pre-norm attention and MLP; `change` replaces one step by what a test wants refused."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.bias = nn.Parameter(torch.zeros(HEADS, 64, 64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = (t.view(batch, tokens, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        y = self.change(self, x, q, k, v)
        if y is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if y.dim() == 4:
            y = y.transpose(1, 2).reshape(batch, tokens, WIDTH)
        return x + self.mlp(y)


class Plain(nn.Module):
    """Attention without weights, for there to be one behind what is refused."""

    def forward(self, x):
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, change=lambda *_: None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(change), Plain()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def refusal(change, ids=None, **options):
    """The error of a training call whose first block is changed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = torch.compile(Model(change), backend="dta", options=options)
    with pytest.raises(RefusalError) as caught:
        compiled(torch.randint(0, VOCABULARY, (3, 9)) if ids is None else ids)
    return caught.value


def triangle(x):
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


def dropped_weights(block, x, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)


def dropout(block, x, q, k, v):
    return F.scaled_dot_product_attention(F.dropout(q, 0.1), k, v, is_causal=True)


def by_head(block, x, q, k, v):
    positions = torch.arange(x.shape[1])
    windows = torch.tensor([2, 4])[:, None, None]
    read = triangle(x) & (positions[:, None] - positions < windows)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=read)


def shared_bias(block, x, q, k, v):
    positions = torch.arange(x.shape[1])
    bias = (-0.5 * (positions[:, None] * positions[None]).float()).masked_fill(~triangle(x), float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def learned_bias(block, x, q, k, v):
    tokens = x.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=block.bias[:, :tokens, :tokens])


def bidirectional(block, x, q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def look_ahead(block, x, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones_like(triangle(x)).tril(1))


def every_second(block, x, q, k, v):
    positions = torch.arange(x.shape[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=triangle(x) & (positions[:, None] % 2 == positions % 2))


def prefix_lm(block, x, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=triangle(x) | (torch.arange(x.shape[1]) < 3))


def convolution(block, x, q, k, v):
    return block.conv(x.transpose(1, 2))[..., 1 : x.shape[1] + 1].transpose(1, 2)


def cumulative_product(block, x, q, k, v):
    return x.cumprod(1)


def scan(block, x, q, k, v):
    return associative_scan(lambda one, other: one + other, x, 1, combine_mode="generic")


def mean_of_earlier(block, x, q, k, v):
    weights = triangle(x).float()
    return (weights / weights.sum(-1, keepdim=True)) @ x


def sigmoid_of_scores(block, x, q, k, v):
    return (q @ k.mT).sigmoid().masked_fill(~triangle(x), 0) @ v


def first_token_written(block, x, q, k, v):
    x = x * 1.5
    x[:, 0] = 0
    return x


def batch_norm(block, x, q, k, v):
    return block.batch_norm(x.transpose(1, 2)).transpose(1, 2)


def mean_pool(block, x, q, k, v):
    return x + x.mean(1, keepdim=True)


def batch_mean(block, x, q, k, v):
    return x - x.mean(0, keepdim=True)


def reversed_tokens(block, x, q, k, v):
    return x.flip(1)


def no_grad_write(block, x, q, k, v):
    x = x * 1.5
    with torch.no_grad():
        x.mul_(2)
    return x.sin()


def scale_of_the_tensor(block, x, q, k, v):
    scale = x.detach().abs().max()
    return (x / scale).round() * scale


def detached_write(block, x, q, k, v):
    x = x * 1.5
    x.view(-1).detach()[3:].mul_(2)
    return x.sin()


def detached_write_with_a_gradient(block, x, q, k, v):
    x = x * 1.5
    x.detach().add_(block.mlp.bias)
    return x.sin()


def data_write(block, x, q, k, v):
    x = x * 1.5
    x.data.mul_(2)
    return x.sin()


def parameter_scaled_in_place(block, x, q, k, v):
    block.mlp.weight.data.mul_(0.99)


def parameter_written_after_a_read(block, x, q, k, v):
    x = x + block.mlp(x)
    block.mlp.weight.data.clamp_(-0.1, 0.1)
    return x


def assigned_data(block, x, q, k, v):
    block.mlp.weight.data = block.mlp.weight.data * 2
    return block.mlp(x)


def other_default_dtype(block, x, q, k, v):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    scale = torch.linspace(0, 1, x.shape[-1])
    torch.set_default_dtype(before)
    return x * scale


def hook_on_a_gradient(block, x, q, k, v):
    x = x * 2
    x.register_hook(lambda gradient: gradient * 2)
    return x


def clipped_gradient(block, x, q, k, v):
    return Clipped.apply(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dropped_weights, "attention dropout cannot run over a prefix tree"),
        (dropout, "dropout cannot run over a prefix tree"),
        (by_head, "a mask that differs between heads"),
        (shared_bias, "an additive bias with values other than 0 and -inf"),
        (learned_bias, "a bias computed from parameters"),
        (bidirectional, "this attention is bidirectional"),
        (look_ahead, "lets tokens attend to later ones"),
        (every_second, "hides earlier tokens in another way than padding, a sliding window or chunks"),
        (prefix_lm, "lets tokens attend to later ones"),
        (convolution, "it convolves along the token axis"),
        (cumulative_product, "a recurrence over tokens runs over the tree if it calls dta_compile.linear_recurrence"),
        (scan, "selective_scan or short_convolution in place of a loop or a scan, or x.cumsum(1) for floats"),
        (mean_of_earlier, "x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]"),
        (sigmoid_of_scores, "attention is written out with another function of scores than a softmax"),
        (first_token_written, "torch.where((torch.arange(x.shape[1]) == 0)[:, None], 0, x)"),
        (batch_norm, "batch norm takes its statistics of all tokens"),
        (scale_of_the_tensor, "a largest entry over all tokens, such as the scale of a tensor in float8"),
        (mean_pool, "it sums along the token axis"),
        (batch_mean, "it sums along the batch axis"),
        (reversed_tokens, "it reorders along the token axis"),
        (no_grad_write, "writes to a value with a gradient behind autograd's back"),
        (detached_write, "writes to a value with a gradient behind autograd's back"),
        *(
            pytest.param(write, "writes to a value with a gradient behind autograd's back", marks=pytest.mark.slow)
            for write in (detached_write_with_a_gradient, data_write, parameter_scaled_in_place)
        ),
        (parameter_written_after_a_read, "the model writes to a parameter that it has used before"),
        (assigned_data, "the model assigns to the .data of a tensor"),
        (other_default_dtype, "the compiled function changes a setting of torch"),
        (hook_on_a_gradient, "a hook on the gradient of a value"),
        (clipped_gradient, "not linear in the gradients"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
@pytest.mark.sample(6)
def test_refusals_name_the_cause_and_the_users_line(change, message):
    error = refusal(change)
    assert message in str(error)
    assert "test_refusals.py" in error.where
    assert error.expected or error.hint


def test_what_refusals_advise_runs():
    def advised(block, x, q, k, v):
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return mean + torch.where((torch.arange(x.shape[1]) == 0)[:, None], 0, x)

    torch._dynamo.reset()
    model, ids = Model(advised), torch.randint(0, VOCABULARY, (3, 9))
    torch.testing.assert_close(torch.compile(model, backend="dta")(ids), model(ids))


def test_without_gradients_nothing_is_written_behind_autograds_back():
    def write(block, x, q, k, v):
        buffer = torch.zeros_like(x)
        buffer.add_(block.mlp.bias)
        buffer.detach().mul_(2)
        return x + buffer

    torch._dynamo.reset()
    model, ids = Model(write), torch.randint(0, VOCABULARY, (3, 9))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="dta")(ids), model(ids))


def test_gradients_switched_on_inside_a_call_without_them_are_refused():
    model, ids = Model(), torch.randint(0, VOCABULARY, (3, 9))

    def function(ids):
        with torch.enable_grad():
            return model(ids), model.head.weight

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="dta")
    with torch.no_grad(), pytest.raises(RefusalError, match="switches gradients on") as caught:
        compiled(ids)
    assert "return self.head(x)" in caught.value.where
    assert all(output.requires_grad for output in compiled(ids))


def test_a_graph_break_inside_the_model_names_its_line():
    def breaks(block, x, q, k, v):
        torch._dynamo.graph_break()

    error = refusal(lambda *arguments: breaks(*arguments))
    # The first block's attention comes after the break, and its input needs gradients.
    assert "graph break inside the model" in str(error)
    assert "test_refusals.py" in error.where


def test_a_graph_break_in_a_loop_is_named_where_attention_is_a_function_of_its_own():
    embedding = nn.Embedding(VOCABULARY, 16)

    def attend(heads):
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    def forward(ids):
        x = embedding(ids)
        for _ in range(2):
            heads = attend(x.unflatten(-1, (2, 8)).transpose(1, 2))
            x = x + heads.transpose(1, 2).flatten(2)
            x = x * 2 if x.sum().item() > 1e9 else x
        return x

    torch._dynamo.reset()
    with pytest.raises(RefusalError, match="graph break inside the model") as caught:
        torch.compile(forward, backend="dta")(torch.randint(0, VOCABULARY, (5, 12)))
    assert ".item()" in caught.value.where


class Broken(nn.Module):
    """A module at which torch breaks the graph, before attention."""

    def __init__(self, kind):
        super().__init__()
        self.tokens, self.inner = nn.Embedding(VOCABULARY, 16), kind(16, 16)

    def inputs(self, ids):
        x = self.inner(self.tokens(ids))
        return x if isinstance(x, torch.Tensor) else x[0]

    def forward(self, ids):
        x = self.inputs(ids)
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]


@pytest.mark.parametrize(("kind", "words"), [(nn.GRU, "nn.GRU.*linear_recurrence"), (nn.Linear, "inner .Linear.*hook")])
def test_modules_that_break_the_graph_are_named(kind, words, caplog):
    torch._dynamo.reset()
    model = Broken(kind)
    if kind is nn.Linear:
        model.inner.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RefusalError, match=f"(?s)x = self.inner.*{words}"):
        torch.compile(model, backend="dta")(torch.randint(VOCABULARY, (2, 6)))
    assert "no scaled_dot_product_attention" not in caplog.text


def over_pairs(q, k):
    return q @ k.transpose(-1, -2) / 3


WRITTEN_OUT = {
    "einsum": lambda q, k, v: torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).sigmoid(), v),
    "by hand": lambda q, k, v: (lambda w: w / (w.sum(-1, keepdim=True) + 1))(over_pairs(q, k).relu()) @ v,
    "sums": lambda q, k, v: ((q[:, :, :, None] * k[:, :, None]).sum(-1).softmax(-1)[..., None] * v[:, :, None]).sum(3),
    "operator of torch": lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0],
}


class OneLayer(nn.Module):
    """Embedding, a way to mix tokens, head; no scaled_dot_product_attention."""

    def __init__(self, mix):
        super().__init__()
        self.mix, self.embedding, self.qkv = mix, nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, ids):
        split = self.qkv(self.embedding(ids)).view(*ids.shape, 3, HEADS, -1)
        return self.mix(*split.permute(2, 0, 3, 1, 4))


@pytest.mark.parametrize(
    "mix",
    [
        pytest.param(mix, id=name, marks=[pytest.mark.slow] if name == "einsum" else [])
        for name, mix in WRITTEN_OUT.items()
    ],
)
def test_attention_in_any_other_spelling_is_refused(mix):
    torch._dynamo.reset()
    with pytest.raises(RefusalError, match=r"attention is written out|attention through _scaled") as caught:
        torch.compile(OneLayer(mix), backend="dta")(torch.randint(0, VOCABULARY, (3, 9)))
    assert "test_refusals.py" in caught.value.where
    assert "scaled_dot_product_attention" in caught.value.expected


def scores_of(q, k):
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.mT).masked_fill(later, float("-inf"))


class Special(OneLayer):
    """Attention written out, with one thing that scaled_dot_product_attention does not have."""

    def __init__(self, kind):
        super().__init__(lambda q, k, v: self.attend(q, k, v))
        self.kind = kind
        self.bias = nn.Parameter(torch.ones(HEADS, 1, 1))

    def attend(self, q, k, v):
        scores = scores_of(q, k)
        if self.kind == "soft cap":
            scores = (scores / 5).tanh() * 5
        if self.kind == "learned bias":
            scores = scores + self.bias
        if self.kind == "sparse":
            scores = scores + torch.where(q.sum(-1, keepdim=True) > 0, 0.0, -1e9).mT
        return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    ("kind", "got", "hint"),
    [
        ("soft cap", "masked already", "scaled_dot_product_attention"),
        ("learned bias", "a learned bias that the softmax cancels", "scaled_dot_product_attention"),
        ("sparse", "a bias computed from parameters", "no learned bias"),
    ],
)
def test_what_is_special_about_attention_is_named(kind, got, hint):
    torch._dynamo.reset()
    with pytest.raises(RefusalError) as caught:
        torch.compile(Special(kind), backend="dta")(torch.randint(0, VOCABULARY, (3, 9)))
    assert re.search(got, caught.value.got) and re.search(hint, caught.value.hint)


def test_models_without_attention_say_that_they_share_nothing_and_losses_say_nothing(caplog):
    torch._dynamo.reset()
    recurrent = OneLayer(lambda q, k, v: (q * k).cumsum(2) + torch.einsum("bhsd,bhse->bhsde", k, v).cumsum(2).sum(-1))
    ids, logits = torch.randint(0, VOCABULARY, (3, 9)), torch.randn(3, 9, VOCABULARY, requires_grad=True)
    with caplog.at_level("INFO", logger="dta_compile"):
        loss = torch.compile(lambda x, y: F.cross_entropy((x @ x.mT @ x).flatten(0, 1), y.flatten()), backend="dta")
        loss(logits * 1, ids).backward()
        assert not caplog.text
        compiled = torch.compile(recurrent, backend="dta")
        for _ in range(2):
            torch.testing.assert_close(compiled(ids), recurrent(ids))
        compiled(ids[:, :5])
    assert caplog.text.count("rows share nothing") == 1
    assert "rows share nothing" in str(dta_compile.explain(recurrent, ids))


def test_a_refusal_can_fall_back_to_dense_with_a_warning(caplog):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(cumulative_product)
    ids = torch.randint(0, VOCABULARY, (3, 9))
    compiled = torch.compile(model, backend="dta", options={"fallback": "dense"})
    with caplog.at_level("WARNING", logger="dta_compile"):
        torch.testing.assert_close(compiled(ids), model(ids))
    assert "accumulates along the token axis" in caplog.text


def test_explain_reports_a_refusal_instead_of_raising():
    torch._dynamo.reset()
    report = dta_compile.explain(Model(cumulative_product), torch.randint(0, VOCABULARY, (3, 9)))
    assert report.refusal is not None
    assert "accumulates along the token axis" in str(report)
