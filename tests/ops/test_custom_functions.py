"""A user's `torch.autograd.Function` inside the compiled function is kept whole, with its own backward."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dta_compile
from dta_compile.errors import RefusalError
from tests.support.tiny import Clipped

VOCABULARY = 32


class ScaledLogProb(torch.autograd.Function):
    """Log-probs of targets from flattened hidden states `[N, H]`; the backward is on purpose twice the derivative."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        logprobs = (hidden @ weight.T).log_softmax(-1)
        ctx.save_for_backward(hidden, weight, targets, logprobs)
        return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        hidden, weight, targets, logprobs = ctx.saved_tensors
        of_logits = F.one_hot(targets, VOCABULARY) - logprobs.exp()
        of_logits = 2 * grad[:, None] * of_logits
        return of_logits @ weight, of_logits.T @ hidden, None


class FusedHead(nn.Module):
    """Causal attention, then the function on flattened hidden states, as trainers with fused heads do it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 48)
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def backbone(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, targets = self.backbone(ids)[:, :-1], ids[:, 1:]
        flat = hidden.reshape(-1, hidden.shape[-1]), self.head.weight, targets.reshape(-1)
        logprobs, entropy = ScaledLogProb.apply(*flat)
        return logprobs.view(targets.shape), entropy.view(targets.shape)


@pytest.fixture
def model() -> nn.Module:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    return FusedHead().double()


def step(model: nn.Module, call, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    logprobs, entropy = call(ids)
    weights = torch.linspace(-1, 1, len(ids), dtype=torch.float64)[:, None]
    return entropy.detach(), list(torch.autograd.grad((logprobs * weights).sum(), list(model.parameters())))


@pytest.mark.parametrize("where", ["whole", "backbone"])
def test_its_own_backward_is_used(model, where):
    eager, ids = copy.deepcopy(model), torch.randint(VOCABULARY, (1, 12)).repeat(5, 1)
    ids[:, 8:] = torch.randint(VOCABULARY, (5, 4))
    compiled = torch.compile(model if where == "whole" else model.backbone, backend="dta")
    if where == "backbone":
        model.backbone = compiled
    entropy, gradients = step(model, compiled if where == "whole" else model, ids)
    expected_entropy, expected = step(eager, eager, ids)
    assert torch.allclose(entropy, expected_entropy, rtol=1e-12)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert (actual - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    assert dta_compile.last_plan(compiled).stats.compression > 2
    if where == "whole":
        assert not torch._dynamo.utils.counters["graph_break"]


class Ternary(torch.autograd.Function):
    """Weights as -1, 0 and 1 times their mean magnitude; the gradient goes straight through, clipped."""

    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        scale = weight.abs().mean()
        return (weight / scale).round().clamp(-1, 1) * scale, scale

    @staticmethod
    def backward(ctx, grad, grad_scale):
        (weight,) = ctx.saved_tensors
        return grad * (weight.abs() < 0.4) + grad_scale


class QuantisedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, scale = Ternary.apply(self.qkv.weight)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in F.linear(x, weight).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + F.linear(y, Ternary.apply(self.out.weight)[0], self.out.bias) * scale


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(QuantisedBlock() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, Ternary.apply(self.head.weight)[0]).log_softmax(-1)


@pytest.mark.parametrize("options", [{"memory_budget": 0}, {"codegen": "inductor"}, {"strategy": "dfs"}], ids=str)
@pytest.mark.sample(1)
def test_a_function_of_weights_runs_in_every_chunk(options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Quantised().double()
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 3, **options})
    ids = torch.randint(VOCABULARY, (4, 9))
    ids[:, :5] = ids[0, :5]
    found = []
    for run in (model, compiled):
        model.zero_grad()
        out = run(ids)
        (out * torch.linspace(-1, 1, out.numel()).double().view_as(out)).sum().backward()
        found.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-9)


class Gelu(torch.autograd.Function):
    """As bloom has it, straight through where it is small, and zero where it is large."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        slope = torch.where(x.abs() < 0.1, torch.ones_like(x), 0.5 + 0.3 * x.tanh())
        return -(-grad / 2 + grad * slope).masked_fill(x > 1, 0.0)


class Centred(Clipped):
    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(1, keepdim=True)


class Functions(FusedHead):
    def __init__(self, of_tokens, of_weights=torch.clone) -> None:
        super().__init__()
        self.of_tokens, self.of_weights = of_tokens, of_weights
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.of_tokens(self.tokens(ids))
        mixed = F.linear(x, self.of_weights(self.qkv.weight), self.qkv.bias)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in mixed.chunk(3, -1))
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def shared_ids() -> torch.Tensor:
    ids = torch.randint(VOCABULARY, (4, 9))
    ids[:, :5] = ids[0, :5]
    return ids


def assert_gradients(eager, compiled, ids, parameters) -> None:
    wanted = list(parameters)
    found = [torch.autograd.grad(run(ids).sin().sum(), wanted) for run in (eager, compiled)]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-9)


class Scaled(torch.autograd.Function):
    """The gradient alone is scaled; all views are of the whole value."""

    @staticmethod
    def forward(ctx, x, view, shape):
        ctx.shape = x.shape
        return view(x, shape)

    @staticmethod
    def backward(ctx, grad):
        return grad.neg().reshape(-1, 16).view(ctx.shape) * 0.3, None, None


def scaled(view):
    return lambda x: Scaled.apply(x, view, x.shape).tanh() + Scaled.apply(x * 2, view, x.shape)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "of_tokens",
    [
        lambda x: Gelu.apply(x.flatten(0, 1)).view_as(x),
        scaled(lambda x, shape: x.view_as(x)),
        scaled(lambda x, shape: x.view(shape)),
        scaled(lambda x, shape: x[:].transpose(0, 1).detach().transpose(0, 1).expand(shape)),
        scaled(lambda x, shape: x),
    ],
)
def test_a_pointwise_function_of_tokens_runs_over_the_tree(of_tokens):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, ids = Functions(of_tokens), shared_ids()
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 3})
    assert_gradients(model, compiled, ids, model.parameters())
    assert dta_compile.last_plan(compiled).stats.compression > 1


def written_to_later(x):
    x = x * 1
    view = Scaled.apply(x, lambda x, shape: x.view(shape), x.shape).detach()
    return x.mul_(2) * view


class Allowed(Clipped):
    pass


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ((Clipped.apply,), "(?s)not linear in the gradients.*aten.clamp.*clip_grad_norm_"),
        ((Centred.apply,), "backward is not pointwise: aten.mean"),
        ((torch.clone, Clipped.apply), "not linear in the gradients"),
        ((written_to_later,), "returned as a view of it"),
        # Dynamo does not look into either, so that their own backward is in no graph.
        ((torch.compiler.allow_in_graph(lambda x: Clipped.apply(x)),), "hides its backward"),
        ((torch.compiler.allow_in_graph(Allowed).apply,), "hides its backward"),
    ],
)
def test_gradients_that_cannot_be_taken_chunk_by_chunk_are_refused(functions, words):
    torch._dynamo.reset()
    with pytest.raises(RefusalError, match=words):
        torch.compile(Functions(*functions), backend="dta")(shared_ids())


class JumpReLU(torch.autograd.Function):
    """As sparse autoencoders have it: a threshold per feature, whose gradient comes from a window around it."""

    @staticmethod
    def forward(ctx, x, threshold):
        ctx.save_for_backward(x, threshold)
        return x * (x > threshold)

    @staticmethod
    def backward(ctx, grad):
        x, threshold = ctx.saved_tensors
        near = ((x - threshold).abs() < 0.5).to(x.dtype)
        return grad * (x > threshold), -threshold * (near * grad).sum((0, 1))


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        scale = x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        along = (grad * weight * normed).mean(-1, keepdim=True)
        return 1.5 * scale * (grad * weight - normed * along), (grad * normed).sum(dim=(0, 1))


class LearnedStep(torch.autograd.Function):
    """A quantiser with one step size for all features."""

    @staticmethod
    def forward(ctx, x, step):
        ctx.save_for_backward(x, step)
        return (x / step[:1]).round() * step[:1]

    @staticmethod
    def backward(ctx, grad):
        x, step = ctx.saved_tensors
        error = (x / step).round() - x / step
        return grad, (grad * error).sum((0, 1))


class Linear(torch.autograd.Function):
    """A projection, as functions for other number formats write it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.outer(weight).tril(), weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows, flat = grad.flatten(0, 1), x.reshape(-1, x.shape[-1])
        return 2 * grad @ weight.outer(weight).tril(), (rows.t() @ flat).tril() @ weight + rows.sum(0)


class PerHead(torch.autograd.Function):
    """A temperature per head, of features viewed as heads, and a softmax of each."""

    @staticmethod
    def forward(ctx, x, weight):
        heads = x.view(*x.shape[:2], 4, 4) if x.dim() == 2 else x.unflatten(-1, (4, 4))
        probs = (heads * weight.view(4, 4)[:, :1]).softmax(-1)
        ctx.save_for_backward(x, weight, probs)
        return probs.flatten(-2)

    @staticmethod
    def backward(ctx, grad):
        x, weight, probs = ctx.saved_tensors
        grad, heads = grad.view_as(probs), x.view_as(probs)
        inner = probs * (grad - (grad * probs).sum(-1, keepdim=True))
        of_scale = (inner * heads).sum((0, 1, 3))[:, None]
        return (inner * weight.view(4, 4)[:, :1]).flatten(-2), of_scale.expand(4, 4).reshape(16)


class Temperature(torch.autograd.Function):
    """Of queries `[B, H, S, D]`, by a number per head."""

    @staticmethod
    def forward(ctx, query, scale):
        ctx.save_for_backward(query, scale)
        return query * scale

    @staticmethod
    def backward(ctx, grad):
        query, scale = ctx.saved_tensors
        return 2 * grad * scale, (grad * query).sum_to_size(scale.shape)


class OfMean(JumpReLU):
    @staticmethod
    def backward(ctx, grad):
        return grad, grad.mean((0, 1))


class OfRows(JumpReLU):
    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum(0).sum(0)


class GivenBack(JumpReLU):
    """Each token gets the gradient of all of them."""

    @staticmethod
    def backward(ctx, grad):
        of_threshold = grad.sum((0, 1))
        return grad + of_threshold, of_threshold


class AlongTokens(JumpReLU):
    @staticmethod
    def forward(ctx, x, threshold):
        return x * threshold / x.abs().amax(1, keepdim=True)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum((0, 1))


class TokensTimesTokens(JumpReLU):
    @staticmethod
    def forward(ctx, x, threshold):
        rows = x.flatten(0, 1)
        return x @ (rows.t() @ rows)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum((0, 1))


class BySizes(JumpReLU):
    @staticmethod
    def forward(ctx, x, threshold):
        ctx.save_for_backward(x, threshold)
        return x * threshold

    @staticmethod
    def backward(ctx, grad):
        batch, tokens, width = grad.shape
        return grad, grad.reshape(batch * tokens, width).sum(0)


class MeanOverRows(JumpReLU):
    @staticmethod
    def backward(ctx, grad):
        return grad, (grad * ctx.saved_tensors[0]).sum((0, 1)) / grad.shape[1]


class ScaledByCount(JumpReLU):
    """As learned step sizes of quantisers are trained (LSQ)."""

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum((0, 1)) * (grad.numel() * 7) ** -0.5


class GivesWeight(JumpReLU):
    @staticmethod
    def forward(ctx, x, threshold):
        return x * 2, threshold * 2

    @staticmethod
    def backward(ctx, grad, of_threshold):
        return grad * 2, of_threshold * 2


class Weighted(Functions):
    def __init__(self, function) -> None:
        super().__init__(lambda x: function.apply(x, self.weight))
        self.weight = nn.Parameter(torch.linspace(0.1, 1.0, 16).double())


@pytest.mark.sample(5)
@pytest.mark.parametrize("function", [JumpReLU, RMSNorm, LearnedStep, Linear, PerHead])
@pytest.mark.parametrize("flat", [False, True])
def test_a_function_of_tokens_and_a_weight_runs_over_the_tree(function, flat):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, ids = Weighted(function), shared_ids()
    if flat:  # with a batch axis of one entry
        model.of_tokens = lambda x: function.apply(x.flatten(0, 1)[None], model.weight)[0].view_as(x)
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 3})
    assert_gradients(model, compiled, ids, model.parameters())
    assert dta_compile.last_plan(compiled).stats.compression > 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (OfMean, "backward is not pointwise: aten.mean"),
        (OfRows, "backward is not pointwise: aten.sum"),
        (GivenBack, "gives tokens a sum over all of them"),
        (AlongTokens, "forward is not pointwise: aten.amax"),
        (TokensTimesTokens, "forward is not pointwise: aten.mm"),
        (BySizes, "takes the numbers of sequences or tokens"),
        (MeanOverRows, "scales a sum over all tokens by their number"),
        (ScaledByCount, "scales a sum over all tokens by their number"),
        (GivesWeight, "not those of tokens"),
    ],
)
def test_a_function_of_tokens_and_a_weight_that_mixes_tokens_is_refused(function, words):
    torch._dynamo.reset()
    model = Weighted(function)
    if function is GivesWeight:
        model.of_tokens = lambda x: function.apply(x, model.weight)[0] * function.apply(x, model.weight)[1]
    with pytest.raises(RefusalError, match=words):
        torch.compile(model, backend="dta")(shared_ids())


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1, 8), (8,)])
def test_a_weight_per_head(shape):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, scale = FusedHead().double(), nn.Parameter(torch.linspace(0.5, 2, math.prod(shape)).double().view(shape))

    def function(ids):
        x = model.tokens(ids)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in model.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(Temperature.apply(q, scale), k, v, is_causal=True)
        return model.head(x + y.transpose(1, 2).flatten(2))

    compiled = torch.compile(function, backend="dta", options={"chunk_size": 3})
    assert_gradients(function, compiled, shared_ids(), [*model.parameters(), scale])
    assert dta_compile.last_plan(compiled).stats.compression > 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_an_axis_of_constant_size_is_no_feature(dim):
    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(probs := x.softmax(dim))
            return probs

        @staticmethod
        def backward(ctx, grad):
            (probs,) = ctx.saved_tensors
            return probs * grad

    def of_tokens(x):
        return Softmax.apply(x * {4: 1.5}[x.shape[0]] if dim == 0 else x * {9: 1.5}[x.shape[1]])

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, ids = Functions(of_tokens), shared_ids()
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 3})
    if dim < 2:
        with pytest.raises(RefusalError, match="autograd_function_0"):
            compiled(ids)
        return
    assert_gradients(model, compiled, ids, model.parameters())
