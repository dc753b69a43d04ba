"""Random operators in the compiled function: with the same seed results are eager's, or the program is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import dta_compile
from dta_compile.errors import RefusalError
from tests.support.tiny import SMALL_CHUNKS, BareLM, after, assert_same, shared_ids, weighted

IDS = shared_ids()


@pytest.fixture
def model():
    torch._dynamo.reset()
    return BareLM()


def compiled(function, **options):
    return torch.compile(function, backend="dta", options={**SMALL_CHUNKS, **options})


def step(model, function):
    """Outputs and gradients, and the next random number: as many were drawn as eager draws."""

    def run():
        torch.manual_seed(11)
        outputs = function(model, IDS)
        following = torch.rand(3)
        sum(weighted(output) for output in outputs).backward()
        return [output.detach() for output in outputs], following

    return after(model, run)


class RandomMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def before_and_after(model, ids):
    """Draws of the prologue (chunks read some), draws that nothing uses, then those of the epilogue."""
    noise, labels = torch.rand(ids.shape, dtype=torch.float64), torch.randint(0, 31, ids.shape)
    torch.randn(3)
    order = torch.randperm(len(ids))
    hidden = model.hidden(ids) * torch.rand(1, dtype=torch.float64)
    logits = model.head(hidden)
    torch.rand_like(logits[:, 0])
    F.dropout(logits[:, 0], 0.5)
    sums = logits.logsumexp(-1) * noise
    sampled = torch.multinomial(logits.softmax(-1).flatten(0, 1).detach(), 1).view(ids.shape)
    with torch.no_grad():
        kept = torch.bernoulli(logits[..., 0].sigmoid())
    gumbel = (F.gumbel_softmax(logits, tau=0.7) * logits).sum(-1)
    in_region = checkpoint(lambda x: F.dropout(x.sum(-1), 0.5), sums, use_reentrant=False)
    late = torch.rand(len(ids), dtype=torch.float64)
    normal, uniform = torch.empty_like(logits).normal_(), logits.new_empty(ids.shape).uniform_()
    masked = RandomMask.apply(sums) * torch.rand(ids.shape, dtype=torch.float64)
    masked = masked + model.head(F.dropout(hidden, 0.3)).logsumexp(-1)
    picked = [logits.gather(-1, index[..., None])[..., 0] for index in (labels, sampled)]
    return [*picked, sums[order], kept * sums, gumbel, in_region * late, (logits * normal).sum(-1) * uniform, masked]


def noisy_embeddings(model, ids):
    """Rows with noise of their own share nothing, and say so."""
    x = model.embedding(ids)
    x = x + torch.randn(x.shape, dtype=x.dtype)
    return [model.head(model.mix(x)).logsumexp(-1)]


@pytest.mark.parametrize("function", [before_and_after, noisy_embeddings])
def test_the_same_seed_gives_the_same_numbers(model, function):
    call = compiled(function, verify="first")
    assert_same(step(model, call), step(model, function))
    assert (dta_compile.last_plan(call).stats.compression > 2) == (function is before_and_after)


def reversed_order(model, ids):
    sums = model(ids).logsumexp(-1).sum(-1)
    sums = sums * torch.bernoulli(sums.sigmoid())
    noise = torch.rand(ids.shape, dtype=torch.float64)
    return [sums, (model(ids) * noise[..., None]).logsumexp(-1)]


def dropped_weights(model, ids):
    return [F.linear(model.hidden(ids), F.dropout(model.head.weight, 0.5)).logsumexp(-1)]


def randomised_relu(model, ids):
    return [F.rrelu(model(ids), training=True).logsumexp(-1)]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (reversed_order, "aten.rand.default, needed before aten.bernoulli.default"),
        (dropped_weights, "which every chunk would draw anew"),
        (randomised_relu, "a randomised leaky ReLU"),
    ],
)
def test_refused_by_name(model, function, message):
    with pytest.raises(RefusalError, match="random numbers cannot be drawn here") as caught:
        step(model, compiled(function))
    assert message in str(caught.value)
    assert __file__ in str(caught.value)


def test_regions_of_graphs_without_attention_draw_the_same_again(model):
    def function(x):
        return checkpoint(lambda x: F.dropout(model.head(x), 0.5), x, use_reentrant=False)

    def run(call):
        torch.manual_seed(3)
        return after(model, lambda: weighted(call(torch.ones(4, 16, dtype=torch.float64))).backward())

    assert_same(run(compiled(function)), run(function))


def test_streaming_says_what_draws(model):
    call = compiled(lambda ids: F.dropout(model(ids).logsumexp(-1).sum(-1), 0.5))
    with pytest.raises(RefusalError, match="draws random numbers for all sequences at once"):
        dta_compile.streaming_step(call, lambda row, value: value, IDS)
