"""Gradients flow inside of the compiled function as autograd lets them: through no_grad, detach, several results."""

import importlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dta_compile
from dta_compile.errors import RefusalError, RuntimeContractError
from dta_compile.ops.lm_head import operators as head_operators
from tests.support.tiny import SMALL_CHUNKS, VOCABULARY, BareLM, Block, after, assert_same, shared_ids, weighted

IDS = shared_ids()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.fixture
def model():
    return BareLM()


def compiled(function):
    return torch.compile(function, backend="dta", options=SMALL_CHUNKS)


def run(model, function, *inputs):
    def step():
        outputs = function(*inputs)
        sum(weighted(output) for output in outputs if output.requires_grad).backward()
        return [output.detach() for output in outputs], [output.requires_grad for output in outputs]

    return after(model, step)


def assert_as_eager(model, function, *inputs):
    call = compiled(function)
    assert_same(run(model, call, *inputs), run(model, function, *inputs))
    assert dta_compile.last_plan(call).stats.compression > 2


SEVERAL_RESULTS = {
    "max": lambda x: x.max(-1),
    "topk": lambda x: x.topk(3),
    "sort": lambda x: x.sort(-1),
    "kthvalue": lambda x: x.kthvalue(2),
    "mode": lambda x: x.mode(-1),
    "median": lambda x: x.median(-1),
    "chunk": lambda x: x.chunk(3, -1),
    "split": lambda x: x.split([10, 11, 10], -1),
    "unbind": lambda x: x[..., :3].unbind(-1),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "std_mean": lambda x: torch.std_mean(x, -1),
    "aminmax": lambda x: torch.aminmax(x, dim=-1),
    "frexp": torch.frexp,
    "cummax": lambda x: x.cummax(-1),
    "slogdet": lambda x: torch.linalg.slogdet(x[..., :9].unflatten(-1, (3, 3))),
    "nested": lambda x: [*x.max(-1, keepdim=True), x[..., 0], *x.sort(-1)],
}


def total(results):
    """One number a token, of the floating-point results."""
    values = [x for x in results if x.is_floating_point()]
    return sum((x if x.dim() == 2 else x.sum(-1)) * (i + 1) for i, x in enumerate(values))


def test_operators_with_several_results(model):
    """Each scales a value that has gradients: with its own gradient the product's would differ."""

    @torch.no_grad()
    def helper(operator, logits):
        return operator(logits)

    def function(ids):
        logits = model(ids)
        outputs = [total(operator(logits)) for operator in SEVERAL_RESULTS.values()]
        for i, operator in enumerate(SEVERAL_RESULTS.values()):
            if i % 3 == 0:
                with torch.no_grad():
                    found = operator(logits)
            else:
                found = helper(operator, logits) if i % 3 == 1 else operator(logits.detach())
            outputs.append(total(found) * logits.logsumexp(-1))
        return outputs

    assert_as_eager(model, function, IDS)


class Scaled(torch.autograd.Function):
    """Two results and an index; the backward is on purpose three times the derivative."""

    @staticmethod
    def forward(ctx, x):
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        return x.sin(), x.max(-1)[0], index

    @staticmethod
    def backward(ctx, grad, grad_largest, grad_index):
        return grad * 3


@torch.library.custom_op("dta_tests::sin_cos", mutates_args=())
def sin_cos(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin(), x.cos()


@sin_cos.register_fake
def _(x):
    return torch.empty_like(x), torch.empty_like(x)


def test_gradient_modes_views_writes_and_regions(model):
    before = Block(16).double()

    def in_region(x):
        with torch.no_grad():
            largest, _ = x.max(-1, keepdim=True)
        return model.head(x - largest)

    def function(ids, features):
        hidden = model.hidden(ids)
        logits, scale = model.head(hidden), hidden.std(-1)
        with torch.no_grad():
            first, (second, third) = logits[..., 0], logits[..., 1:3].unbind(-1)
            least, _ = logits.min(-1)
            with torch.enable_grad():
                largest, _ = logits.max(-1)
            block = before(model.embedding(ids), None).sum(-1)
            of_function, _, index = Scaled.apply(hidden)
            sine, _ = sin_cos(hidden)
            inside, _ = checkpoint(in_region, hidden, use_reentrant=False).max(-1)
            written = logits.sum(-1)
            copied, multiplied = torch.zeros_like(scale), torch.ones_like(scale)
            copied[:, 1:] = scale[:, 1:]
            torch.mul(scale, first, out=multiplied)
        with torch.inference_mode():
            middle, _ = logits.median(-1)
        torch.set_grad_enabled(False)
        low, high = torch.aminmax(logits, dim=-1)
        torch.set_grad_enabled(True)
        written.mul_(scale)  # seen by autograd, although the value was made without it
        factors = [first * second - third, least, largest, block, of_function.sin().sum(-1), sine.cos().sum(-1)]
        factors += [copied, multiplied, inside, middle.clone(), high - low, features.detach().sum(-1)]
        region = checkpoint(in_region, hidden, use_reentrant=False).logsumexp(-1)
        return [*(scale * factor for factor in factors), written, region, inside, index]

    features = weighted_features()
    assert_as_eager(model, function, IDS, features)
    assert features.grad is None


def weighted_features():
    return torch.linspace(-1, 1, IDS.numel() * 2, dtype=torch.float64).view(*IDS.shape, 2).requires_grad_()


def test_frozen_parts(model):
    """A frozen model with an adapter: what is computed before the adapter has no gradient, whatever reads it."""
    adapter = nn.Linear(16, 16, bias=False).double()
    model.requires_grad_(False)

    def function(ids):
        hidden = model.hidden(ids)
        base, _ = model.head(hidden).max(-1)
        values, _ = model.head(hidden + adapter(hidden)).topk(2)
        with torch.no_grad():
            smallest, _ = model.head(adapter(hidden)).min(-1)
        return [base, values * base[..., None], values[..., 0] * smallest]

    assert_as_eager(adapter, function, IDS)


def test_fused_head(model, monkeypatch):
    monkeypatch.setattr(importlib.import_module("dta_compile.passes.chunk.lm_head"), "LEAST_VOCABULARY", VOCABULARY)
    monkeypatch.setattr(head_operators, "BLOCK_COLUMNS", 7)

    def reductions(logits, labels):
        log = logits.log_softmax(-1)
        with torch.no_grad():
            normaliser, entropy = logits.logsumexp(-1), -(log.exp() * log).sum(-1)
        picked, old = log.gather(-1, labels), logits.detach().log_softmax(-1).gather(-1, labels)
        expected = -(log.exp().detach() * log).sum(-1)
        return [logits.gather(-1, labels)[..., 0] - normaliser, (picked - old).exp()[..., 0] * entropy, expected]

    def with_largest(logits, labels):
        with torch.no_grad():
            largest, _ = logits.max(-1)
        return [logits.logsumexp(-1) - largest]

    for reduce in (reductions, with_largest):
        assert_as_eager(model, lambda ids, reduce=reduce: reduce(model(ids), ids[..., None]), IDS)


def split_alias(model, hidden):
    hidden.detach().chunk(2, -1)[0].mul_(2)


def into_an_alias(model, hidden):
    result = torch.zeros_like(hidden)
    result.data.copy_(hidden)
    return result


def derivative(model, hidden):
    return torch.func.grad(lambda x: x.sin().sum())(hidden)


def branch(model, hidden):
    return torch.cond(hidden.sum() > 0, torch.sin, torch.cos, (hidden,))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("use", "message"),
    [
        (split_alias, "behind autograd's back"),
        (into_an_alias, "behind autograd's back"),
        (derivative, "a derivative is taken inside of the compiled function"),
        (branch, "torch cannot trace this operation"),
    ],
)
def test_refused_by_name(model, use, message):
    def function(ids):
        hidden = model.hidden(ids) * 1.5
        use(model, hidden)
        found = use(model, hidden)
        return (hidden if found is None else found).sin()

    with pytest.raises(RefusalError, match=message) as caught:
        compiled(function)(IDS)
    assert __file__ in str(caught.value)
    compiled(lambda ids: model(ids).logsumexp(-1))(IDS)  # nothing of torch's state is left behind


def test_vmap_inside(model):
    def function(ids):
        hidden = model.hidden(ids)

        def largest(x):
            with torch.no_grad():
                return x.max(-1)[0]

        return [torch.func.vmap(model.head)(hidden).logsumexp(-1) * torch.func.vmap(largest)(hidden)]

    assert_as_eager(model, function, IDS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_call(model, reentrant):
    def log_sums(ids, anchor):
        return model(ids).logsumexp(-1)

    def step(call):
        def run():
            anchor = torch.zeros(1, requires_grad=True)  # what reentrant checkpoints need
            out = checkpoint(call, IDS, anchor, use_reentrant=reentrant)
            weighted(out).backward()
            return out.detach()

        return after(model, run)

    assert_same(step(compiled(log_sums)), step(log_sums))


def test_anomaly_detection_and_batches_of_gradients(model):
    def log_sums(ids):
        return model(ids).logsumexp(-1)

    call = compiled(log_sums)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        actual = run(model, lambda ids: [call(ids)], IDS)
    assert_same(actual, run(model, lambda ids: [log_sums(ids)], IDS))
    out = call(IDS)
    batch = torch.ones(3, *out.shape, dtype=out.dtype)
    with pytest.raises(RuntimeContractError, match="one gradient at a time"):
        torch.autograd.grad(out, model.head.weight, batch, is_grads_batched=True, retain_graph=True)
    with pytest.raises(RuntimeContractError, match="one gradient at a time"):
        torch.func.vmap(lambda grad: torch.autograd.grad(out, model.head.weight, grad)[0])(batch)
